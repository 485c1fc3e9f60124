"""Compile a kernel for a GPU that this machine does not have. It keeps what the compiler said about it.

`compile_for` traces a kernel with fake tensors (shapes and strides, no memory), runs the DSL's compiler and its
embedded ptxas for the target, and returns PTX, cubin, time and resources as one value. Line info is always on: PTX
lines point at the Python lines they came from. Nothing stays on disk: the DSL hands its results over through files,
which live in a private folder (mode 0700) for as long as the call takes.

What is read where: registers, local memory and threads from the cubin (`dsv4lib.dsl.cubin`); dynamic shared memory
from the launch in the generated host code, because a cubin does not hold it.
"""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4lib.dsl import source_lines
from dsv4lib.dsl.cubin import read_cubin
from dsv4lib.errors import ArgumentError, DSV4Error

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_100f", "sm_103a")
OPTIONS = "--keep-ptx --keep-cubin --generate-line-info"
# A kernel of ours with more PTX has unrolled something it should not. A cold compile takes the time of its instructions
# (about 1,100 a second on a desktop core), and unlike CPU time their number is the same on every machine.
MAX_INSTRUCTIONS = 5000

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_INSTRUCTION = re.compile(r"^[ \t{]*(?:@!?%\w+[ \t]+)?[a-z][\w.:]*[^\n]*;", re.MULTILINE)  # directives start with .
_PLACE = re.compile(r'(?:--> |")([^"\s]+\.py)"?:(\d+)')  # a Python line in the DSL's messages
_ASSEMBLER = re.compile(r"ptxas [^\n]*; (?:error|fatal) *: ([^\n]+)")  # in the message of the DSL's cause
# cudaLaunchConfig_t in the host IR; field 2 is dynamicSmemBytes.
_CONFIG = r"\(!llvm\.ptr\) -> !llvm\.ptr, !llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"


class CompileError(DSV4Error, RuntimeError):
    """The DSL is missing, or it refused the kernel for this architecture. The message says which and why."""


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        name: symbol of the kernel in PTX and cubin.
        arch: the target, for example ``sm_100a``.
        ptx: PTX text with line info.
        cubin: the ELF file that a driver would load.
        seconds: CPU time of this thread, tracing and compiling; what else the machine does is no fault of the kernel.
        registers: registers a thread.
        local_bytes: local memory a thread; 0 proves that nothing was spilled.
        threads: threads a CTA.
        smem_bytes: dynamic shared memory the launch asks for; None if the host code could not be read.
        arguments: what it was compiled with, fake tensors among them.
        function: the DSL's own executable, called with CuTe tensors (or DLPack tensors turned into them).
    """

    name: str
    arch: str
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    seconds: float
    registers: int
    local_bytes: int
    threads: int
    smem_bytes: int | None
    arguments: tuple[Any, ...] = field(repr=False, compare=False)
    function: Any = field(repr=False, compare=False)

    @property
    def instructions(self) -> int:
        """Return the lines of its PTX that hold an instruction."""
        return sum(1 for _ in _INSTRUCTION.finditer(self.ptx))

    @property
    def spills(self) -> int | None:
        """Return the bytes of spilled registers a thread. 0 where there is no local memory, else None (not readable).

        A cubin gives the size of local memory, which holds spills and local arrays together.
        """
        return 0 if self.local_bytes == 0 else None


def compile_for(kernel: Any, args: tuple[Any, ...], arch: str = "sm_100a") -> Compiled:
    """Compile ``kernel`` for ``arch``; no GPU, driver or CUDA toolkit is needed.

    Args:
        kernel: a callable whose call is a ``@cute.jit`` host function that launches exactly one kernel.
        args: its arguments, fake tensors among them (a kernel class of the lab makes them with ``fake_args()``).
        arch: one of `ARCHS`.

    Raises:
        ArgumentError: unknown ``arch``.
        CompileError: the DSL is not installed, or it refuses this kernel for this architecture.
    """
    if arch not in ARCHS:
        raise ArgumentError("arch", arch, "one of " + ", ".join(ARCHS))
    cute = _dsl()
    with tempfile.TemporaryDirectory(prefix="dsv4-compile-") as folder:  # created with mode 0700
        options = f"--gpu-arch {arch} {OPTIONS} --dump-dir={folder}"
        start = time.thread_time()
        try:
            with source_lines.remembered():
                function = cute.compile(kernel, *args, options=options)
        except Exception as error:
            raise CompileError(f"{kernel!r} does not compile for {arch}: {_reason(error)}") from error
        seconds = time.thread_time() - start
    ptx, cubin = function.__ptx__.rstrip("\0"), function.__cubin__
    info = read_cubin(cubin)
    return Compiled(
        name=info.name,
        arch=arch,
        ptx=ptx,
        cubin=cubin,
        seconds=seconds,
        registers=info.registers,
        local_bytes=info.local_bytes,
        threads=info.threads,
        smem_bytes=_launch_smem(str(function.ir_module)),
        arguments=args,
        function=function,
    )


def _dsl() -> Any:
    try:
        import cutlass.cute as cute
    except ImportError as error:
        fix = "run ./dsv4 doctor, or pip install 'nvidia-cutlass-dsl[cu13]' at the version in requirements.lock"
        raise CompileError(f"the CuTe DSL cannot be imported ({error}); {fix}") from error
    return cute


def _reason(error: Exception) -> str:
    """Return the DSL's message without colours, source excerpt or folders, and the Python line that it names."""
    text = _ANSI.sub("", str(error))
    if error.__cause__ is not None and not _PLACE.search(text):
        text += "\n" + _ANSI.sub("", str(error.__cause__))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if first.endswith(":") and len(lines) > 1:  # a heading; the next line says what it is
        first = lines[1]
    reason = re.sub(r'^(error(\[\w+\])?: *)?("[^"]*"\("[^"]*":\d+:\d+\): *)?', "", first)
    said = _ASSEMBLER.search(str(error.__cause__))
    if said:
        reason += f": {said[1].strip()}"
    place = _PLACE.search(text)
    own = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    if place is None and own[1:]:  # the first is the call of the compiler
        return f"{reason} ({Path(own[-1].filename).name}:{own[-1].lineno})"
    return f"{reason} ({Path(place[1]).name}:{place[2]})" if place else reason


def _launch_smem(host_ir: str) -> int | None:
    """Dynamic shared memory the only launch in ``host_ir`` (LLVM dialect) asks for; None if that is not a constant."""
    fields = re.findall(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : {_CONFIG}", host_ir)
    if len(fields) != 1:
        return None
    stored = re.search(rf"llvm\.store (%\w+), {fields[0]} : i64", host_ir)
    constant = stored and re.search(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", host_ir)
    return int(constant[1]) if constant else None
