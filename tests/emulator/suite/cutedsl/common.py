"""What the faulty kernels in CuTeDSL share: how they are listed, compiled and launched, and copies by one thread.

A kernel takes ``x`` and ``out``, 1024 words each (x[i] = i + 1, but x[100] = 0: a flag), and ``fixed``: False compiles
the fault, True the twin. ``#!`` marks the lines that a report must name.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl.compile import OPTIONS
from dsv4lib.emulator import devices
from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.driver import host
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError
from tests.emulator.suite.harness import LIMIT, Outcome

WORDS, FLAG = 1024, 100
LISTED: dict[str, Fault] = {}


@dataclass(frozen=True)
class Fault:
    """A faulty kernel in CuTeDSL.

    Attributes:
        kind: what is reported, or the error that stops the launch; with ``|`` other names under other schedules.
        kernel: compiled with ``fixed`` False and True. after: launched after it, programmatically. other: runs on the
            second of two devices. tma: "load" or "store": the kernel also takes an atom and a tensor, boxes of 8 x 8.
        columns: of the tensor that it describes, in rows of 16 words. at_end: what is reported is the kernel's end.
    """

    kind: str
    kernel: Any
    name: str
    path: Path
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    arch: str = "sm_100a"
    tma: str = ""
    columns: int = 16
    after: Any = None
    other: Any = None
    at_end: bool = False
    schedules: tuple[str, ...] = ("round_robin", "adversarial")
    names: tuple[str, ...] = field(default=())

    @property
    def file(self) -> str:
        """Name of the file that a report must name."""
        return Path(__file__).name if self.at_end else self.path.name

    @functools.cached_property
    def marked(self) -> frozenset[int]:
        """Lines of the file that a report must name."""
        if self.at_end:  # the DSL gives it the line of the host function
            lines = Path(__file__).read_text().splitlines()
            return frozenset(i for i, line in enumerate(lines, 1) if line.endswith("the end of a kernel has this line"))
        return frozenset(number for number, line in self._numbered() if "#!" in line)

    def source(self) -> str:
        """Return the text of its kernels."""
        return "\n".join(line for _, line in self._numbered())

    def _numbered(self) -> list[tuple[int, str]]:
        """List the lines of its kernels with their numbers."""
        lines = self.path.read_text().splitlines()
        found: list[tuple[int, str]] = []
        for name in self.names:
            start = next(i for i, line in enumerate(lines) if line.startswith(f"def {name}("))
            end = next((i for i in range(start + 1, len(lines)) if re.match(r"[^\s)]", lines[i])), len(lines))
            found += [(i + 1, lines[i]) for i in range(start, end)]
        return found


def fault(kind: str, **options: Any) -> Callable[[Any], Any]:
    """List a kernel; options are those of `Fault`."""

    def add(kernel: Any) -> Any:
        function = _function(kernel)
        path = Path(function.__code__.co_filename)
        others = [_function(one).__name__ for one in (options.get("after"), options.get("other")) if one is not None]
        names = (function.__name__, *others)
        name = f"{path.stem}: {function.__name__.replace('_', ' ')}"
        LISTED[name] = Fault(kind, kernel, function.__name__, path, names=names, **options)
        return kernel

    return add


def _function(kernel: Any) -> Any:
    return getattr(kernel, "__wrapped__", kernel)


def _grid(case: Fault) -> dict[str, Any]:
    shape = {"grid": [case.grid, 1, 1], "block": [case.threads, 1, 1]}
    return shape | ({"cluster": [case.cluster, 1, 1]} if case.cluster > 1 else {})


def _host(case: Fault, fixed: bool, number: int) -> Any:
    """The host function: of both launches of a pair that depends on each other, or of one of two devices."""
    kernel, after, shape = (case.kernel, case.other)[number], case.after, _grid(case)
    columns = case.columns

    @cute.jit  # the end of a kernel has this line
    def plain(x: cute.Pointer, out: cute.Pointer):
        mX, mOut = cute.make_tensor(x, cute.make_layout(WORDS)), cute.make_tensor(out, cute.make_layout(WORDS))
        kernel(mX, mOut, fixed).launch(**shape)
        if cutlass.const_expr(after is not None):
            after(mX, mOut, fixed).launch(**shape, use_pdl=True)

    @cute.jit
    def with_map(x: cute.Pointer, out: cute.Pointer):
        mX, mOut = cute.make_tensor(x, cute.make_layout(WORDS)), cute.make_tensor(out, cute.make_layout(WORDS))
        box = cute.make_layout((8, 8), stride=(1, 8))
        stores = cutlass.const_expr(case.tma == "store")
        operation = cpasync.CopyBulkTensorTileS2GOp() if stores else cpasync.CopyBulkTensorTileG2SOp()
        source = cute.make_tensor(out if stores else x, cute.make_layout((columns, 8), stride=(1, 16)))
        atom, tensor = cpasync.make_tiled_tma_atom(operation, source, box, (8, 8))
        kernel(mX, mOut, fixed, atom, tensor).launch(**shape)

    return with_map if case.tma else plain


@functools.cache
def compiled(name: str, fixed: bool, number: int = 0) -> Any:
    """Compile a kernel, or (``number`` 1) that of the second device."""
    case, pointer = LISTED[name], make_ptr(Int32, 4096, cute.AddressSpace.gmem, assumed_align=128)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {case.arch} {OPTIONS} --dump-dir={folder}"
        return cute.compile(_host(case, fixed, number), pointer, pointer, options=options)


def run(name: str, fixed: bool, schedule: str = "round_robin", seed: int = 0) -> Outcome:
    """Run a kernel with the checks that ``sanitize`` has by default."""
    case = LISTED[name]
    options = {"checks": "sanitize", "schedule": schedule, "seed": seed, "instruction_limit": LIMIT}
    try:
        return Outcome((_devices if case.other is not None else _launch)(case, name, fixed, options))
    except EmulatorError as error:
        return Outcome(list(getattr(error, "hazards", [])), error)


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(1, WORDS + 1, dtype=np.int32)
    x[FLAG] = 0
    return x, np.zeros(WORDS, np.int32)


def _pointers(*arrays: np.ndarray) -> list[Any]:
    return [make_ptr(Int32, int(a.ctypes.data), cute.AddressSpace.gmem, assumed_align=128) for a in arrays]


def _launch(case: Fault, name: str, fixed: bool, options: dict[str, Any]) -> list[Hazard]:
    gpu = make(case.arch, **options)
    x, out = (gpu.copy(array, label) for array, label in zip(_arrays(), ("x", "out"), strict=True))
    host.launch(compiled(name, fixed), *_pointers(x, out), gpu=gpu)
    return gpu.hazards


def _devices(case: Fault, name: str, fixed: bool, options: dict[str, Any]) -> list[Hazard]:
    """Both devices have the arrays of device 1."""
    with devices(2, case.arch, shims=False, **options) as gpus:
        x, out = (gpus.symmetric(WORDS, np.int32, label) for label in ("x", "out"))
        for mine, values in zip((x, out), _arrays(), strict=True):
            mine[1][:] = values
        for i in range(2):
            host.launch(compiled(name, fixed, i), *_pointers(x[1], out[1]), gpu=gpus[i])
        gpus.synchronize()
        return gpus.hazards


# --- inside of kernels


def shared(*shape: int, kind: Any = Int32, align: int = 128) -> cute.Tensor:
    """Allocate shared memory."""
    return cutlass.memory.SmemAllocator().allocate_tensor(kind, cute.make_layout(shape), byte_alignment=align)


def barriers(count: int) -> cute.Pointer:
    """Allocate mbarriers."""
    return cutlass.memory.SmemAllocator().allocate_array(Int64, count)


# The DSL's own atomics and ordered stores have the line of the host function, ordered loads that of the loop around.


@dsl_user_op
def raise_flag(place: Any, sem: str, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """Exchange a word for 1."""
    cute.arch.atomic_exch(place, Int32(1), sem=sem, scope=scope, loc=loc, ip=ip)


@dsl_user_op
def look(place: Any, sem: str, scope: str, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a flag."""
    return cute.arch.load(place, Int32, sem=sem, scope=scope, loc=loc, ip=ip)


@dsl_user_op
def count(tensor: cute.Tensor, *, loc: Any = None, ip: Any = None) -> Any:
    """Add 1 to the first word and return what was there."""
    return cute.arch.atomic_add(tensor.iterator, tensor.element_type(1), loc=loc, ip=ip)


def _in_peer(tensor: cute.Tensor, i: Int32, rank: Int32, loc: Any, ip: Any) -> Int32:
    return cute.arch.map_dsmem_ptr(tensor.iterator + i, rank, loc=loc, ip=ip).toint(loc=loc, ip=ip)


@dsl_user_op
def put(tensor: cute.Tensor, i: Int32, rank: Int32, value: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Store a word of a tensor in shared memory of another CTA of the cluster."""
    args = [_in_peer(tensor, i, rank, loc, ip), value]
    cute.arch.inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def take(tensor: cute.Tensor, i: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Load a word of a tensor in shared memory of another CTA of the cluster."""
    args = [_in_peer(tensor, i, rank, loc, ip)]
    text = "ld.shared::cluster.b32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def fetch(
    to: cute.Tensor, source: cute.Tensor, first: int, words: int, barrier: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Copy words to the start of a tensor in shared memory; the mbarrier counts their bytes. One thread."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
    start = (source.iterator + first).toint(loc=loc, ip=ip)
    args = [to.iterator.toint(loc=loc, ip=ip), start, Int32(4 * words), barrier.toint(loc=loc, ip=ip)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def send(
    to: cute.Tensor, source: cute.Tensor, first: int, words: int, add: bool = False, *, loc: Any = None, ip: Any = None
) -> None:
    """Copy words of shared memory, or add them, to the same place of a tensor: a group of its own. One thread."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"
    if add:
        text = text.replace("cp.async.", "cp.reduce.async.").replace("bulk_group", "bulk_group.add.u32")
    args = [(one.iterator + first).toint(loc=loc, ip=ip) for one in (to, source)]
    cute.arch.inline_ptx(text, read_only_args=[*args, Int32(4 * words)], loc=loc, ip=ip)
    cute.arch.cp_async_bulk_commit_group(loc=loc, ip=ip)
