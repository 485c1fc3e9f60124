"""Compile a kernel of CUDA C++ by NVRTC, and pack the record of arguments that it is launched with.

    KERNEL = CppKernel(Path(__file__).with_name("kernel.cu"), "rmsnorm", Arguments, threads=256, defines=(("D", 4096),))
    code = compile_cpp(KERNEL, "sm_90a")       # a `Compiled`, as of the DSL: PTX, cubin, registers, local memory
    block = pack(KERNEL, Arguments(x, weight, out, 1e-6))

Kernels to be read beside the DSL's, and for comparison: the same inputs, outputs and oracle, in a language that needs
no tracing. Their host side needs the DSL. A source includes `dsv4.cuh` of `dsl/include`; kernels are ``extern "C"``, so
that names stay readable in hazards and traces. What a kernel takes is said once, by the annotations of its record; the
PTX must agree with them.
"""

from __future__ import annotations

import re
import struct
import time
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from dsv4lib import nvrtc
from dsv4lib.dsl.compile import ARCHS, Compiled
from dsv4lib.dsl.cubin import read_cubin
from dsv4lib.errors import ArgumentError

INCLUDE = Path(__file__).with_name("include")
WARP, MAX_THREADS = 32, 1024

# Annotations of a record's fields: C++'s int, unsigned, long long and float. A tensor is a pointer; None: a null one.
Int32 = Annotated[int, struct.Struct("<i")]
Uint32 = Annotated[int, struct.Struct("<I")]
Int64 = Annotated[int, struct.Struct("<q")]
Float32 = Annotated[float, struct.Struct("<f")]
_POINTER = struct.Struct("<Q")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]\d+)\b[^,\[]*?(?:\[(\d+)\])?\s*$")


class Edit(NamedTuple):
    """Replace a part of a source that occurs once: an injected fault."""

    old: str
    new: str


@dataclass(frozen=True)
class CppKernel:
    """A kernel of a .cu file with all that is static.

    Attributes:
        source: the file. entry: name of its ``extern "C"`` kernel. arguments: record of its parameters, in order.
        threads: of a CTA. smem_bytes: dynamic shared memory. defines: macros, by name.
        edits: faults to inject.
    """

    source: Path
    entry: str
    arguments: type
    threads: int
    smem_bytes: int = 0
    defines: tuple[tuple[str, int], ...] = ()
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.threads <= MAX_THREADS or self.threads % WARP:
            raise ArgumentError("threads", self.threads, f"a multiple of {WARP}, at most {MAX_THREADS}")
        for name, value in self.defines:
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or type(value) is not int:
                raise ArgumentError("defines", (name, value), "an upper-case name and an int")

    def text(self) -> str:
        """Read the source, with its faults.

        Raises:
            ArgumentError: there is no such file, or an edit does not fit exactly once.
        """
        text = nvrtc.read(self.source)
        for edit in self.edits:
            if text.count(edit.old) != 1:
                raise ArgumentError("edits", edit.old, f"a text that {self.source.name} has once")
            text = text.replace(edit.old, edit.new)
        return text

    def options(self) -> list[str]:
        """Return the options of NVRTC that are its own."""
        return [f"-DTHREADS={self.threads}", *(f"-D{name}={value}" for name, value in self.defines)]


def headers(kernel: CppKernel) -> list[Path]:
    """List the headers that a kernel may read: the lab's, those beside its source, CUDA's.

    Raises:
        ArgumentError: there is no such source.
        BackendUnavailable: NVRTC is not installed.
    """
    return nvrtc.included(kernel.text(), kernel.source, nvrtc.include_folders(kernel.source, [INCLUDE]))


def compile_cpp(kernel: CppKernel, arch: str = "sm_100a") -> Compiled:
    """Compile ``kernel`` for ``arch``; no GPU, driver or CUDA toolkit is needed.

    Returns:
        what `compile_for` returns of a kernel of the DSL; it has no ``function``, since no host code is compiled.

    Raises:
        ArgumentError: unknown ``arch``, or a record that is not what the kernel takes.
        BackendUnavailable: NVRTC is not installed.
        CompileError: NVRTC refuses the source.
    """
    if arch not in ARCHS:
        raise ArgumentError("arch", arch, "one of " + ", ".join(ARCHS))
    start = time.thread_time()
    done = nvrtc.compile_text(kernel.text(), kernel.source, arch, kernel.options(), [INCLUDE], cubin=True)
    return code_of(kernel, arch, done, time.thread_time() - start)


def code_of(kernel: CppKernel, arch: str, output: nvrtc.Output, seconds: float = 0.0) -> Compiled:
    """Make the record of a compiled kernel.

    Raises:
        ArgumentError: its record of arguments is not what the kernel takes, or ``output`` is of another kernel.
    """
    wanted = [format.size for _, format in _formats(kernel.arguments)]
    taken = _parameters(output.ptx, kernel.entry)
    if wanted != taken:
        raise ArgumentError(kernel.arguments.__name__, wanted, f"bytes of the parameters of {kernel.entry}: {taken}")
    info = read_cubin(output.cubin)
    return Compiled(
        name=info.name,
        arch=arch,
        ptx=output.ptx,
        cubin=output.cubin,
        seconds=seconds,
        registers=info.registers,
        local_bytes=info.local_bytes,
        threads=kernel.threads,
        smem_bytes=kernel.smem_bytes,
        arguments=(),
        function=None,
    )


def pack(kernel: CppKernel, call: Any) -> bytes:
    """Lay out the parameter block of a launch.

    Args:
        call: the kernel's record.

    Raises:
        ArgumentError: another record, a tensor for a number, or a number that its type does not hold.
    """
    if type(call) is not kernel.arguments:
        raise ArgumentError("call", type(call).__name__, f"a {kernel.arguments.__name__}, as {kernel.entry} takes")
    block = bytearray()
    for place, (name, format), value in zip(places(kernel), _formats(kernel.arguments), call, strict=True):
        block += bytes(place - len(block))
        if format is _POINTER:
            if not isinstance(value, torch.Tensor | None):
                raise ArgumentError(name, type(value).__name__, "a tensor or None")
            value = 0 if value is None else value.data_ptr()
        elif isinstance(value, torch.Tensor):
            raise ArgumentError(name, "a tensor", "a number")
        try:
            block += format.pack(value)
        except (struct.error, OverflowError):
            raise ArgumentError(name, value, f"what {format.size} bytes of format {format.format} hold") from None
    return bytes(block)


def places(kernel: CppKernel) -> list[int]:
    """Return the offset of each parameter in the parameter block."""
    found, end = [], 0
    for _, format in _formats(kernel.arguments):
        found.append(end + -end % format.size)
        end = found[-1] + format.size
    return found


def tensors(call: Any) -> list[torch.Tensor]:
    """List the tensors of a record."""
    return [one for one in call if isinstance(one, torch.Tensor)]


def _formats(record: type) -> Iterator[tuple[str, struct.Struct]]:
    """Name and format of each field."""
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        found = getattr(hint, "__metadata__", (None,))[0]
        if found is None and hint not in (torch.Tensor, torch.Tensor | None):
            raise ArgumentError(name, hint, "Tensor, Tensor | None, Int32, Uint32, Int64 or Float32")
        yield name, found or _POINTER


def _parameters(ptx: str, entry: str) -> list[int]:
    """Bytes of each parameter of a kernel.

    Raises:
        ArgumentError: there is no such kernel.
    """
    found = re.search(rf"\.entry {re.escape(entry)}\((.*?)\)", ptx, re.DOTALL)
    if found is None:
        raise ArgumentError("entry", entry, 'a kernel of the source, extern "C"')
    lines = [line for line in (one.strip() for one in found[1].split(",")) if line]
    return [_bytes(line) for line in lines]


def _bytes(param: str) -> int:
    """Size of ``.param .u64 .ptr .align 1 name`` or ``.param .align 64 .b8 name[128]``."""
    match = _PARAM.search(param)
    if match is None:
        raise ArgumentError("ptx", param, "a parameter of a kernel")
    return int(match[1][1:]) // 8 * int(match[2] or 1)
