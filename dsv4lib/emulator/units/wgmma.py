"""Implement wgmma.mma_async and its fence, commit_group and wait_group (SM90).

Each of the four warps of a warpgroup multiplies its own 16 rows. The instruction is asynchronous: its accumulator
registers hold POISON from issue until it completes, so that a read without ``wait_group`` shows (not by a plain copy:
`_copied_early`); operations of a warp complete in issue order and hand the accumulator on. A in registers and both
matrices in shared memory are read at completion, which is when hardware may still read them.

A wgmma-group is one of the warpgroup ("creates a new wgmma-group per warpgroup"), although each warp commits and waits
for itself: a wait lasts until the parts of all four warps are complete. CUTLASS's mainloops depend on it: in a cluster
one thread per warpgroup hands a stage of A and B back to the producer, after the wait of its own warp alone
(include/cutlass/pipeline/sm90_pipeline.hpp, ``num_consumer_warpgroups_per_cluster``). No part begins before all four
warps have issued theirs: cuDNN's block-sparse backward stores dS by all four warps and multiplies it after each warp's
own proxy fence, with no barrier between (the race is reported), and on an H200 all four read what a late one left.

Results are bit-equal to an H200 (tests/emulator/units/test_mma_h200.py); the arithmetic is in hopper_sums.py.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.program import Program
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.native.abi import FULL_MASK
from dsv4lib.emulator.ptx.ir import Imm, Instr, Operand, Vector
from dsv4lib.emulator.ptx.wgmma_registers import findings
from dsv4lib.emulator.units import shared
from dsv4lib.emulator.units.descriptor import SWIZZLE_128B_ATOM_32B, SmemDescriptor, smem_descriptor_sm90
from dsv4lib.emulator.units.fragments import accumulator, registers_of, rows_of_a, unpack_bits
from dsv4lib.emulator.units.hopper_sums import fused_sum
from dsv4lib.emulator.units.numeric import accumulate_int32, decode
from dsv4lib.emulator.units.operand import Operand as Matrix
from dsv4lib.emulator.units.operand import k_major, mn_major, part
from dsv4lib.emulator.units.registers import read_rows, write_rows
from dsv4lib.emulator.units.sparse import codes_of, expand_bytes
from dsv4lib.emulator.units.tcgen05_issue import issue
from dsv4lib.emulator.units.tcgen05_ldst import POISON

ROWS = 16  # of a warp
_N = "|".join(str(n) for n in range(8, 257, 8))
_N_INT = "|".join(str(n) for n in (8, 16, 24, 32, *range(48, 257, 16)))
_HEAD = "wgmma.mma_async.sync.aligned."
_SPARSE = "wgmma.mma_async.<sp:sp>.sync.aligned."
_EARLY = "wgmma copied early"


@dataclass
class Accumulator:
    """Registers that pending operations accumulate into.

    It has what they will hold, and how many operations are pending.
    """

    values: np.ndarray
    pending: int = 0


@dataclass
class State:
    """Hold a warp's pending wgmma operations.

    Oldest first; those not committed yet; committed groups that may be pending.

    issued, committed: operations and groups so far.
    others: the other warps of the warpgroup, with theirs.
    """

    order: deque[AsyncOp] = field(default_factory=deque)
    open: list[AsyncOp] = field(default_factory=list)
    groups: deque[list[AsyncOp]] = field(default_factory=deque)
    issued: int = 0
    others: tuple[tuple[Warp, State], ...] = ()
    committed: int = 0

    def first_groups(self, count: int) -> Iterator[AsyncOp]:
        """Take the groups up to the ``count``-th ever committed off the list.

        Returns their operations that are pending.
        """
        while len(self.groups) > max(self.committed - count, 0):
            for op in self.groups.popleft():
                if op.pending:  # otherwise the scheduler has completed it already
                    yield op

    accumulators: dict[tuple[int, int, int], Accumulator] = field(default_factory=dict)


def state_of(warp: Warp) -> State:
    """The warp's wgmma state."""
    if warp.wgmma is None:
        warp.wgmma = State()
    return warp.wgmma


@dataclass
class Wgmma:
    """What one wgmma.mma_async has captured at issue.

    ``k_bytes`` are those of a row of B; ``codes`` is None of a dense A, else where its elements stand (sparse.py).
    """

    warp: Warp
    instr: Instr
    n: int
    k_bytes: int
    a_format: str
    b_format: str
    d_format: str
    a: SmemDescriptor | tuple[Operand, ...]
    b: SmemDescriptor
    accumulate: bool
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    saturate: bool = False
    codes: np.ndarray | None = None

    def __str__(self) -> str:
        return f"wgmma m64n{self.n} {self.a_format} x {self.b_format}"

    @property
    def k(self) -> int:
        """Elements of K."""
        return self.k_bytes * 8 // _BITS[self.a_format]

    def run(self, accumulators: Accumulator) -> None:
        """Multiply and accumulate into the shadow of the registers."""
        a, b = self._a(), self._b()
        a = -a if self.negate_a != self.negate_b else a
        old = accumulator(accumulators.values, self.d_format, ROWS) if self.accumulate else None
        if self.d_format == "s32":
            result = accumulate_int32(a @ b.T, old, self.saturate)
        else:
            result = fused_sum(a, b, old, self.a_format, self.b_format, self.d_format)
        accumulators.values = registers_of(result, self.d_format)
        machine = self.warp.cta.machine
        machine.stats["wgmma"] += 1
        machine.stats["mma_flops"] += 2 * ROWS * self.n * self.k
        if machine.trace is not None:
            machine.trace.mma(self)

    def _a(self) -> np.ndarray:
        if not isinstance(self.a, SmemDescriptor):
            return self._full(rows_of_a(read_rows(self.warp, self.instr, self.a)))
        matrix, quarter = self._matrix(self.a, 64, 32, self.transpose_a), self.warp.warp_id % 4
        size = 2 if self.transpose_a else ROWS  # 16 rows of 2-byte elements are two chunks
        matrix = part(matrix, size * quarter, size * (quarter + 1))
        return self._values(matrix, self.a_format, "A")

    def _b(self) -> np.ndarray:
        return self._values(self._matrix(self.b, self.n, self.k_bytes, self.transpose_b), self.b_format, "B")

    def _full(self, raw: np.ndarray) -> np.ndarray:
        """A's values, with its zeros, of the bytes of its rows."""
        return self._decode(
            raw if self.codes is None else expand_bytes(raw, self.codes, self.a_format, False), self.a_format
        )

    def _matrix(self, descriptor: SmemDescriptor, rows: int, k_bytes: int, transposed: bool) -> Matrix:
        smem = self.warp.cta.smem
        if transposed:
            return mn_major(smem, descriptor, rows, k_bytes // 2, 2)
        return k_major(smem, descriptor, rows, k_bytes)

    def _values(self, matrix: Matrix, fmt: str, what: str) -> np.ndarray:
        machine = self.warp.cta.machine
        if machine.trace is not None:
            machine.trace.smem_operand(self.warp.cta, self.warp, self.instr, f"wgmma {what}", matrix)
        if machine.race is not None:
            machine.race.shared_chunks(self.warp.cta, matrix.first + matrix.chunks, False)
        if not matrix.initialised():
            low, high = matrix.span()
            text = f"wgmma reads uninitialised shared memory for {what}, {low:#x}-{high:#x}"
            machine.report("uninitialised_smem", text, self.warp.place(self.instr))
        if found := matrix.unfenced():
            kind, how, writers = found
            text = f"wgmma reads shared memory for {what} that {how}"
            owner = shared.writer_of(self.warp.cta, matrix.first + matrix.chunks)
            machine.report(kind, text, self.warp.place(self.instr), warps=writers, owner=owner)
        raw = matrix.read()
        if what == "A" and self.codes is not None:
            return self._full(np.ascontiguousarray(raw.view(np.uint16).T).view(np.uint8) if matrix.mn_major else raw)
        values = self._decode(raw, fmt)
        return values.T if matrix.mn_major else values

    @staticmethod
    def _decode(raw: np.ndarray, fmt: str) -> np.ndarray:
        return unpack_bits(raw) if fmt == "b1" else decode(raw, fmt)


_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "b1": 1}


@isa.service(
    f"{_HEAD}m64n<n:{_N}>k16.<d:f16|f32>.<a:f16>.<b:f16>",
    f"{_HEAD}m64n<n:{_N}>k16.<d:f32>.<a:bf16>.<b:bf16>",
    f"{_HEAD}m64n<n:{_N}>k8.<d:f32>.<a:tf32>.<b:tf32>",
    f"{_HEAD}m64n<n:{_N}>k32.<d:f16|f32>.<a:e4m3|e5m2>.<b:e4m3|e5m2>",
    f"{_HEAD}m64n<n:{_N_INT}>k32.<d:s32>.<a:s8|u8>.<b:s8|u8>[.<sat:satfinite>]",
    f"{_HEAD}m64n<n:{_N_INT}>k256.<d:s32>.<a:b1>.<b:b1>.and.popc",
    f"{_SPARSE}m64n<n:{_N}>k32.<d:f16|f32>.<a:f16>.<b:f16>",
    f"{_SPARSE}m64n<n:{_N}>k32.<d:f32>.<a:bf16>.<b:bf16>",
    f"{_SPARSE}m64n<n:{_N}>k16.<d:f32>.<a:tf32>.<b:tf32>",
    f"{_SPARSE}m64n<n:{_N}>k64.<d:f16|f32>.<a:e4m3|e5m2>.<b:e4m3|e5m2>",
    f"{_SPARSE}m64n<n:{_N_INT}>k64.<d:s32>.<a:s8|u8>.<b:s8|u8>[.<sat:satfinite>]",
    note="bit-equal to an H200",
)
def mma_async(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue wgmma.mma_async.

    ``wgmma.mma_async d, a, b-desc{, metadata, selector}, scale-d{, scale-a, scale-b{, trans-a}{, trans-b}}``.
    """
    if not str(warp.cta.machine.arch).startswith("sm_90"):
        raise EmulatorError(f"{warp.cta.machine.arch} has no wgmma")
    if warp.mask() != FULL_MASK:
        raise EmulatorError(f"wgmma.mma_async needs all 32 lanes, active: {warp.mask():#010x}")
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.executed(warp, instr)
    d, a, b, *rest = instr.operands
    metadata = (rest.pop(0), rest.pop(0)) if form.has("sp") else None
    k_bytes = 32 if metadata is None else 64
    scale_d, *immediates = rest
    n, d_format = int(form.get("n")), form.get("d")
    items = d.items if isinstance(d, Vector) else (d,)
    count = n // (4 if d_format == "f16" else 2)
    if len(items) != count:
        raise EmulatorError(f"wgmma.mma_async: {len(items)} accumulator registers, the shape has {count}")
    op = Wgmma(
        warp=warp,
        instr=instr,
        n=n,
        k_bytes=k_bytes,
        a_format=form.get("a"),
        b_format=form.get("b"),
        d_format=d_format,
        a=_a_operand(warp, a),
        b=_descriptor(warp, b),
        accumulate=bool(warp.uniform(scale_d, bool)),
        saturate=form.has("sat"),
        codes=None if metadata is None else _codes(warp, metadata, form.get("a"), k_bytes),
    )
    _immediates(op, immediates)
    _issue(warp, instr, op, items)


def _codes(warp: Warp, metadata: tuple[Operand, Operand], fmt: str, k_bytes: int) -> np.ndarray:
    words, selector = metadata
    return codes_of(warp.read(words, np.uint32), warp.uniform(selector, np.uint32), fmt, k_bytes)


def _descriptor(warp: Warp, operand: Operand) -> SmemDescriptor:
    descriptor = smem_descriptor_sm90(warp.uniform(operand, np.uint64))
    assert descriptor.swizzle is not SWIZZLE_128B_ATOM_32B
    return descriptor


def _a_operand(warp: Warp, operand: Operand) -> SmemDescriptor | tuple[Operand, ...]:
    if not isinstance(operand, Vector):
        return _descriptor(warp, operand)
    if len(operand.items) != 4:
        raise EmulatorError(f"wgmma.mma_async: A has {len(operand.items)} registers, must be 4")
    return operand.items


def _immediates(op: Wgmma, operands: list[Operand]) -> None:
    """imm-scale-a, imm-scale-b, imm-trans-a (A in shared memory), imm-trans-b."""
    values = []
    for operand in operands:
        if not isinstance(operand, Imm):
            raise EmulatorError("wgmma.mma_async: scale and transpose operands must be immediates")
        values.append(operand.bits - (1 << 64) if operand.bits >> 63 else operand.bits)
    in_smem = isinstance(op.a, SmemDescriptor)
    floats, halves = op.d_format != "s32", op.a_format in ("f16", "bf16")
    expected = 0 if not floats else 2 if not halves else 4 if in_smem else 3
    if len(values) != expected:
        raise EmulatorError(f"wgmma.mma_async: {len(values)} scale and transpose immediates, must be {expected}")
    if not floats:
        return
    signs, transposes = values[:2], values[2:]
    if any(v not in (1, -1) for v in signs) or any(v not in (0, 1) for v in transposes):
        raise EmulatorError(f"wgmma.mma_async: scales {signs} must be 1 or -1, transposes {transposes} 0 or 1")
    op.negate_a, op.negate_b = (v == -1 for v in signs)
    if halves:
        op.transpose_b = bool(transposes[-1])
        op.transpose_a = in_smem and bool(transposes[0])


def _issue(warp: Warp, instr: Instr, op: Wgmma, items: tuple[Operand, ...]) -> None:
    """Poison the registers, keep their value aside and queue the operation."""
    state = state_of(warp)
    key = (getattr(items[0], "index", -1), getattr(items[-1], "index", -1), len(items))
    target = state.accumulators.get(key)
    if target is None:
        target = state.accumulators[key] = Accumulator(read_rows(warp, instr, items))
        write_rows(warp, instr, items, np.uint32(POISON))
    target.pending += 1

    def complete() -> None:
        state.order.popleft()
        op.run(target)
        target.pending -= 1
        if not target.pending:
            write_rows(warp, instr, items, target.values)
            del state.accumulators[key]

    queued = issue(warp, instr, f"wgmma:{warp.agent}", str(op), complete)
    state.order.append(queued)
    state.open.append(queued)
    state.issued = number = state.issued + 1
    if not state.others:
        state.others = tuple((other, state_of(other)) for other in _warpgroup(warp) if other is not warp)
    queued.ready = lambda: (
        state.order[0] is queued and all(s.issued >= number or other.exited for other, s in state.others)
    )
    if instr.index in _copied_early(warp.program):
        while queued.pending:
            warp.cta.machine.units.complete(state.order[0])


def _copied_early(program: Program) -> frozenset[int]:
    """The operations of which a ``mov`` copies registers before the wait; found once.

    ptxas puts a wait after such a wgmma ("instructions are serialized"), so the copy gets the result. The report of
    `missing_wgmma_wait` stays.
    """
    if _EARLY not in program.kept:
        code = program.kernel.instructions
        early = (f.mma for f in findings(program.kernel) if not f.waited and code[f.other].opcode.startswith("mov."))
        program.kept[_EARLY] = frozenset(early)
    return program.kept[_EARLY]


@isa.service("wgmma.fence.sync.aligned")
def fence(warp: Warp, instr: Instr, form: Form) -> None:
    """``wgmma.fence``: orders register accesses around wgmma; nothing to do where registers are read in order."""


@isa.service("wgmma.commit_group.sync.aligned")
def commit_group(warp: Warp, instr: Instr, form: Form) -> None:
    """``wgmma.commit_group``: the operations since the last commit become a group."""
    state = state_of(warp)
    state.groups.append(state.open)
    state.open = []
    state.committed += 1
    warp.cta.machine.changed()  # the rest of the warpgroup may be waiting for this
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.committed(warp, "wgmma")


@isa.service("wgmma.wait_group.sync.aligned")
def wait_group(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """``wgmma.wait_group n``: complete all but the n most recent groups of the warpgroup."""
    (operand,) = instr.operands
    if not isinstance(operand, Imm):
        raise EmulatorError("wgmma.wait_group takes an immediate")
    count = state_of(warp).committed - operand.bits
    warpgroup = _warpgroup(warp)

    def missing() -> list[Warp]:
        return [other for other in warpgroup if not other.exited and state_of(other).committed < count]

    if missing():
        return Block("wgmma.wait_group", lambda: not missing(), lambda: _behind(missing(), count))
    machine = warp.cta.machine
    for other in warpgroup:
        for op in state_of(other).first_groups(count):
            machine.units.complete(op)
        if machine.race is not None:
            machine.race.waited(warp, "wgmma", operand.bits, of=other)
    return None


def _warpgroup(warp: Warp) -> list[Warp]:
    first = warp.warp_id // 4 * 4
    return warp.cta.warps[first : first + 4]


def _behind(warps: list[Warp], count: int) -> str:
    return f"{', '.join(map(str, warps))} of its warpgroup committed fewer than {count} groups"
