"""Set the processor's floating-point mode during a launch. IEEE rounding, subnormals kept.

``torch.set_flush_denormal(True)``, libraries built with fast-math and C code may change them for a thread; a GPU does
not know. Both native code and numpy follow them. The word is MXCSR on x86, FPCR on ARM.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dsv4lib.emulator.native import library
from dsv4lib.errors import BackendUnavailable

_X86 = (
    """
define i64 @NAME() {
  %at = alloca i32, align 4
  call void @llvm.x86.sse.stmxcsr(ptr %at)
  %word = load i32, ptr %at, align 4
  %wide = zext i32 %word to i64
  ret i64 %wide
}""",
    """
define void @NAME(i64 %wide) {
  %at = alloca i32, align 4
  %word = trunc i64 %wide to i32
  store i32 %word, ptr %at, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %at)
  ret void
}""",
    ("declare void @llvm.x86.sse.stmxcsr(ptr)", "declare void @llvm.x86.sse.ldmxcsr(ptr)"),
    0x1F80,  # all exceptions masked, to nearest even
)
_ARM = (
    "define i64 @NAME() {\n  %word = call i64 @llvm.aarch64.get.fpcr()\n  ret i64 %word\n}",
    "define void @NAME(i64 %word) {\n  call void @llvm.aarch64.set.fpcr(i64 %word)\n  ret void\n}",
    ("declare i64 @llvm.aarch64.get.fpcr()", "declare void @llvm.aarch64.set.fpcr(i64)"),
    0,
)
_BY_MACHINE = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}


@functools.cache
def _access() -> tuple[Callable[[], int], Callable[[int], None], int]:
    """(read the word, write it, what it should be)."""
    name = platform.machine()
    if name not in _BY_MACHINE:
        raise BackendUnavailable(f"the emulator runs on {', '.join(_BY_MACHINE)}, this is {name}")
    read, write, standard = _BY_MACHINE[name][:2] + _BY_MACHINE[name][3:]
    declarations = _BY_MACHINE[name][2]
    native = library.default()
    return (
        ctypes.CFUNCTYPE(ctypes.c_uint64)(native.function(read, declarations=declarations[:1])),
        ctypes.CFUNCTYPE(None, ctypes.c_uint64)(native.function(write, declarations=declarations[1:])),
        standard,
    )


@contextmanager
def ieee() -> Iterator[None]:
    """Compute as IEEE 754 says inside, in this thread; its settings come back."""
    read, write, standard = _access()
    before = read()
    write(standard)
    try:
        yield
    finally:
        write(before)
