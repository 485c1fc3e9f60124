"""Compile a kernel of CUDA C++ once, and launch it as those of the DSL are: natively or in the emulator.

An op with a `kernel.cu` has a module `cpp` beside it, whose functions take what the op's own take:

    from dsv4lib.ops.rmsnorm import cpp
    y = cpp.rmsnorm(x, weight, backend="emulator")

Only a call by that name takes them: no op falls back to them. The back ends are `native` and `emulator`.

In memory a kernel is kept by what it is, as long as its source and headers are as they were; on disk by a hash of its
source, all headers that it may read, NVRTC's options and build. The folder, its limit and its rules are those of
`compile_cache`.

    line 1      magic, format version
    32 bytes    SHA-256 of all that follows
    8 bytes     length of the PTX, little endian; then PTX (UTF-8) and cubin
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends, env, nvrtc
from dsv4lib.dsl.compile import Compiled
from dsv4lib.dsl.cpp import CppKernel, code_of, compile_cpp, headers, pack, tensors
from dsv4lib.errors import ArgumentError
from dsv4lib.folders import cache_root, own_folder
from dsv4lib.ops.common import compile_cache, cpp_native, launching, plans
from dsv4lib.ops.common.overlap import Overlaps

MAGIC = b"DSV4 CUDA C++ 1\n"
BACK_ENDS = ("auto", "native", "emulator")
_LOCK = threading.RLock()
_MEMORY: dict[tuple[CppKernel, str], _Kept] = {}


class _Kept(NamedTuple):
    """A compiled kernel, and its files as they were."""

    code: Compiled
    files: list[Path]
    stamps: list[tuple[int, int]]


class Grid(NamedTuple):
    """CTAs of a launch."""

    x: int
    y: int = 1
    z: int = 1


def resolve(backend: str, name: str, x: Tensor, archs: tuple[str, ...] = launching.ARCHS) -> str:
    """Choose the back end of a kernel in CUDA C++, on whose device ``x`` must be.

    On an emulated device, memory that is said to be on a GPU is the CPU's, as the body of an op sees it.

    Raises:
        ArgumentError: it is not, or ``backend`` is none that runs kernels.
        BackendUnavailable: it cannot run here.
    """
    if backend not in BACK_ENDS:
        raise ArgumentError("backend", backend, "one of " + ", ".join(BACK_ENDS) + ": the oracle is the op's")
    with torch._C.DisableTorchFunction():  # torch leaves its function modes, too, before it calls the body of an op
        return launching.resolve(backend, name, x, archs)


def check_memory(written: Sequence[str], **given: Tensor) -> None:
    """Check tensors of a kernel that no op has as `plans.Op` checks those of a call.

    Args:
        written: names of outputs. given: all tensors, by name.

    Raises:
        ArgumentError: one that wants a gradient or is not strided memory, or an output that overlaps.
    """
    names, values = list(given), list(given.values())
    if torch.is_grad_enabled():
        plans.refuse_grad(names, values)
    plans.refuse_views(names, values)
    Overlaps(names, [names.index(name) for name in written]).check(values)


def launch(backend: str, kernel: CppKernel, grid: Grid, call: Any, archs: tuple[str, ...] = launching.ARCHS) -> None:
    """Queue a kernel on torch's current stream; it may start while its predecessor ends.

    Args:
        backend: `native` or `emulator`, as `resolve` returned it.
        call: the kernel's record of arguments, with a tensor at least.
        archs: those that the source is written for.

    Raises:
        ArgumentError: arguments that the kernel does not take.
        LaunchFailed: the CUDA driver refuses the launch.
        EmulatorError: the emulator stopped the kernel.
    """
    code = compiled(kernel, launching.arch(backend, archs))
    block, memory = pack(kernel, call), tensors(call)
    stream = launching.stream(backend, memory[0])
    if backend == "native" and backends.emulated() is None:
        cpp_native.launch(code, kernel, grid, block, stream, memory[0].device)
        return
    gpu = backends.enqueue_ptx(
        code.ptx, code.name, grid, (kernel.threads, 1, 1), block, memory,
        dynamic_smem=kernel.smem_bytes, programmatic=True, stream=stream,
    )  # fmt: skip
    launching.warn_of_hazards(gpu)


def compiled(kernel: CppKernel, arch: str) -> Compiled:
    """The code of a kernel: from memory, from disk, or compiled.

    Raises:
        CacheError: the folder may not be used.
        BackendUnavailable, CompileError: as `compile_cpp` says.
    """
    with _LOCK:
        kept = _MEMORY.get((kernel, arch))
        if kept is None or _stamps(kept.files) != kept.stamps:
            files = [kernel.source, *headers(kernel)]
            stamps = _stamps(files)  # before they are read: what changes then is seen by the next call
            kept = _MEMORY[kernel, arch] = _Kept(_outside(kernel, arch, cache_root()), files, stamps)
        return kept.code


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    """Size and time of the last change of each file; of one that is gone, zeros."""
    found = []
    for path in files:
        try:
            facts = path.stat()
            found.append((facts.st_size, facts.st_mtime_ns))
        except FileNotFoundError:
            found.append((0, 0))
    return found


def clear() -> None:
    """Forget what is in memory; files stay."""
    with _LOCK:
        _MEMORY.clear()


def key(kernel: CppKernel, arch: str) -> str:
    """Hash all that the code of a kernel depends on."""
    facts = {
        "text": kernel.text(),
        "headers": [hashlib.sha256(path.read_bytes()).hexdigest() for path in headers(kernel)],
        "entry": kernel.entry,
        "arch": arch,
        "options": [*nvrtc.FLAGS, *kernel.options()],
        "nvrtc": _nvrtc(),
        "workspace": str(env.root()),  # line info names its files
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _nvrtc() -> str:
    return nvrtc.build()


def _outside(kernel: CppKernel, arch: str, folder: Path | None) -> Compiled:
    """From disk, or compiled and stored."""
    if folder is None:
        return compile_cpp(kernel, arch)
    path = own_folder(folder) / f"{key(kernel, arch)}.kernel"
    with compile_cache.one_process(path.with_suffix(".lock")):
        with suppress(FileNotFoundError, ArgumentError):  # not there, or damaged: compiled again
            found = code_of(kernel, arch, from_bytes(path.read_bytes()))
            with suppress(OSError):
                os.utime(path)
            return found
        done = compile_cpp(kernel, arch)
        compile_cache.write(path, to_bytes(nvrtc.Output(done.ptx, done.cubin)))
    return done


def to_bytes(output: nvrtc.Output) -> bytes:
    """Write PTX and cubin."""
    text = output.ptx.encode()
    body = len(text).to_bytes(8, "little") + text + output.cubin
    return MAGIC + hashlib.sha256(body).digest() + body


def from_bytes(data: bytes) -> nvrtc.Output:
    """Read what `to_bytes` wrote.

    Raises:
        ArgumentError: ``data`` is damaged or of another format.
    """
    start = len(MAGIC) + 32
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        raise ArgumentError("data", data[: len(MAGIC)], "complete and unchanged bytes of `to_bytes`")
    size = int.from_bytes(data[start : start + 8], "little")
    return nvrtc.Output(data[start + 8 : start + 8 + size].decode(), data[start + 8 + size :])
