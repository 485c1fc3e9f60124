"""Implement tcgen05.ld and tcgen05.st. Tensor memory from and to registers, in five shapes.

Both are asynchronous. A load's registers hold POISON until the load completes, at ``tcgen05.wait::ld`` at the latest; a
store takes its registers at issue. CuTeDSL emits loads without any wait (fp16_gemm_0 and most of NVIDIA's examples) and
leaves it to the assembler, whose scoreboard makes the first use of a register wait for its load. Such a load is
recognised in the code (`has_wait`) and completes at issue, the earliest of the times that the hardware may choose:
after this warp's own earlier stores. The ISA orders those by ``tcgen05.wait::st`` alone, so the race detector reports
its absence. But the assembler puts nothing between the two (LDTM follows STTM of the same address in the SASS of
FlashInfer's NVFP4 mega kernel, which transposes its accumulators so), and a warp's accesses then come in order.

A warp reaches lanes 32 * (warp % 4) to + 31. Kernels in use pass addresses that name another quarter and still get
their own, so only the low five bits of the lane count; the rest is a lint.

Source: PTX ISA, "Data Movement Shape" (fragments), "Access restrictions", "Packing and Unpacking", "tcgen05.ld" and
"tcgen05.st". Fragments of thread t, register i (columns of 32 bits):

| shape | lane | column |
| --- | --- | --- |
| 32x32b | t | i |
| 16x64b | t / 4 + 8 (t % 2) | 2 i + t / 2 % 2 |
| 16x128b | t / 4 + 8 (i % 2) | 4 (i / 2) + t % 4 |
| 16x256b | t / 4 + 8 (i / 2 % 2) | 8 (i / 4) + 2 (t % 4) + i % 2 |
| 16x32bx2 | t % 16 | i, plus the half-split offset for t >= 16 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.checks.shadow import Cells, Words, block_of
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.program import leaves
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.native.abi import FULL_MASK, LANES
from dsv4lib.emulator.ptx.ir import Imm, Instr, Memory, Operand, Reg, Vector
from dsv4lib.emulator.units.registers import Rows
from dsv4lib.emulator.units.tcgen05_issue import issue, uniform_tmem_address, warp_unit
from dsv4lib.emulator.units.tmem import COLUMNS, QUARTER, check_span, tmem_of

POISON = 0x7FFFDEAD  # a NaN as float, odd as anything else
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
_MANY = "x2|x4|x8|x16|x32|x64|x128"
_SHAPES = (
    f"<shape:32x32b|16x64b|16x32bx2>.<num:x1|{_MANY}>",
    "<shape:16x128b>.<num:x1|x2|x4|x8|x16|x32|x64>",
    "<shape:16x256b>.<num:x1|x2|x4|x8|x16|x32>",
)
_MAX_REGISTERS = 128
_SOURCE = "fragments and packing as in the compiler's copy atoms"
_ENDS = ("bra", "brx", "exit", "ret", "call", "trap")  # the end of straight code


@functools.cache
def fragment(shape: str, registers: int, packed: bool, split: int) -> tuple[np.ndarray, int]:
    """List the cells of a fragment.

    Args:
        shape: data movement shape; registers: per thread.
        packed: two 16-bit cells per register, in adjacent columns.
        split: half-split offset in columns (16x32bx2).

    Returns:
        int64[registers, 32] of lane * 512 + column relative to the address (of the first cell if packed); columns
        spanned.
    """
    t, i = np.arange(LANES)[None, :], np.arange(registers)[:, None]
    lane, column = {
        "32x32b": (t + 0 * i, i + 0 * t),
        "16x64b": (t // 4 + 8 * (t % 2) + 0 * i, 2 * i + t // 2 % 2),
        "16x128b": (t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4),
        "16x256b": (t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2),
        "16x32bx2": (t % 16 + 0 * i, i + 0 * t),
    }[shape]
    if packed:
        column = 2 * column
    column = column + np.where(shape == "16x32bx2", t // 16 * split, 0)
    cells = lane * COLUMNS + column
    cells.setflags(write=False)
    return cells, int(column.max()) + 1 + packed


@dataclass(frozen=True)
class _Plan:
    """What is the same at every execution of a load or store.

    Attributes:
        instr: the instruction; what: its name for messages; shape: data movement shape.
        items: registers (the reduction's result last); registers: how many hold the fragment.
        cells, columns: see `fragment`; packed: two 16-bit cells per register.
        waits: a wait follows before the registers are used (loads).
        label: of the operation.
    """

    instr: Instr
    what: str
    shape: str
    items: tuple[Operand, ...]
    registers: int
    cells: np.ndarray
    columns: int
    packed: bool
    waits: bool
    label: str


_KEPT = "tcgen05.ld and .st"  # what a program keeps: plans by the identity of the instruction


def _plan(
    warp: Warp,
    instr: Instr,
    form: Form,
    target: Operand,
    split: list[Operand],
    what: str,
    result: Operand | None = None,
) -> _Plan:
    """The plan of an instruction, made once.

    Raises:
        EmulatorError: registers, repetition or half-split offset do not fit the shape.
    """
    plans: dict[int, _Plan] = warp.program.kept.setdefault(_KEPT, {})
    known = plans.get(id(instr))
    if known is not None and known.instr is instr:
        return known
    shape, num, what = form.get("shape"), form.get("num"), f"tcgen05.{what}"
    registers = int(num[1:]) * _REGISTERS[shape]
    if registers > _MAX_REGISTERS:
        raise EmulatorError(f"{what}.{shape} has no .{num}")
    if bool(split) != (shape == "16x32bx2"):
        raise EmulatorError(f"{what}.{shape} {'takes no' if split else 'needs a'} half-split offset")
    if split and not isinstance(split[0], Imm):
        raise EmulatorError("the half-split offset must be an immediate")
    items = target.items if isinstance(target, Vector) else (target,)
    if len(items) != registers:
        raise EmulatorError(f"{len(items)} registers given, {what}.{shape}.{num} has {registers}")
    cells, columns = fragment(shape, registers, form.has("pack"), split[0].bits if split else 0)
    items = items if result is None else (*items, result)
    label = f"{what.removeprefix('tcgen05.')} {shape}"
    waits = what != "tcgen05.st" and has_wait(warp, instr, items)
    plan = _Plan(instr, what, shape, items, registers, cells, columns, form.has("pack"), waits, label)
    plans[id(instr)] = plan
    return plan


class _Access:
    """A load or store of a warp at one address, after all checks that do not depend on when it happens.

    Attributes:
        tmem: tensor memory; block: (lane, lanes, column, columns) of a plain 32x32b fragment, else None.
        data, init: its cells, register-major as the fragment; None without ``block``.
        cells: the same for the race detector, None without one.
        rows: its registers.
        raw: the 32 addresses it was made for, as bytes; b"" if it must be made anew each time.
    """

    __slots__ = ("block", "cells", "column", "data", "flat", "init", "lane", "plan", "raw", "rows", "tmem", "warp")

    def __init__(self, warp: Warp, plan: _Plan, address: Memory, raw: bytes = b""):
        if warp.mask() != FULL_MASK:
            raise EmulatorError(f"{plan.what} needs all 32 lanes, active: {warp.mask():#010x}")
        self.warp, self.plan, self.raw = warp, plan, raw
        taddr, agreed = uniform_tmem_address(warp, address)
        lane, self.column = taddr >> 16, taddr & 0xFFFF
        quarter = QUARTER * (warp.warp_id % 4)
        low = lane % QUARTER
        if lane - low != quarter or not agreed:
            self.raw = b""  # to be reported each time
            text = f"names lane {lane}, warp {warp.warp_id} reaches lanes {quarter} to {quarter + 31}"
            text = text if agreed else "is given addresses that differ between the lanes of the warp"
            warp.cta.machine.report("tmem_lane_quarter", f"{plan.what} {text}", warp.place(plan.instr))
        step = QUARTER if plan.shape == "32x32b" else 16
        if low % step:
            raise EmulatorError(f"{plan.what}.{plan.shape} at lane {lane}: must be a multiple of {step}")
        self.lane = quarter + low
        self.flat = self.lane * COLUMNS + self.column
        self.tmem = tmem_of(warp.cta)
        self.block: tuple[int, ...] | None = None
        if plan.shape == "32x32b" and not plan.packed:
            self.block = self.lane, QUARTER, self.column, plan.columns
            where = slice(self.lane, self.lane + QUARTER), slice(self.column, self.column + plan.columns)
            self.data, self.init = self.tmem.data[where].T, self.tmem.init[where].T
        self.rows = Rows(warp, plan.instr, plan.items)
        race = warp.cta.machine.race
        self.cells = self._cells() if race is not None and race.full else None

    def _cells(self) -> Cells:
        if self.block is not None:
            return block_of(*self.block)
        index = (self.plan.cells + self.flat).reshape(-1)
        return Words(np.concatenate([index, index + 1]) if self.plan.packed else index)

    def check(self) -> bool:
        """Report columns that are not allocated; False if they do not exist."""
        cta, plan = self.warp.cta, self.plan
        if self.tmem.fault(self.column, plan.columns) is None:
            return True
        return check_span(cta, self.column, plan.columns, plan.what, self.warp.place(plan.instr))

    def trace(self, kind: str) -> None:
        """Count, and report to race detector and trace."""
        machine, plan = self.warp.cta.machine, self.plan
        if self.cells is not None:
            machine.race.tensor(self.warp.cta, self.cells, kind == "st")
        machine.stats["tcgen05_ld_bytes" if kind == "ld" else "tcgen05_st_bytes"] += 4 * plan.registers * LANES
        if machine.trace is not None:
            lanes = self.lane + np.unique(plan.cells // COLUMNS)
            span = (self.column, self.column + plan.columns)
            machine.trace.tmem_access(kind, self.warp.cta, self.warp, plan.instr, lanes, span)

    def load(self) -> np.ndarray:
        """uint32[registers, 32], perhaps a view; reports uninitialised cells."""
        tmem, plan = self.tmem, self.plan
        if not self.check():
            raise EmulatorError(f"{plan.what} reads columns {self.column} to {self.column + plan.columns - 1}")
        if self.block is not None:
            values, ready = self.data, tmem.written(self.block, self.init)
        else:
            where = plan.cells + self.flat
            data, init = tmem.data.reshape(-1), tmem.init.reshape(-1)
            values, ready = data.take(where), init.take(where).all()
            if plan.packed:
                values = values & np.uint32(0xFFFF) | data.take(where + 1) << np.uint32(16)
                ready = ready and init.take(where + 1).all()
        if not ready:
            self.warp.cta.machine.report(
                "uninitialised_tmem",
                f"{plan.what} reads uninitialised tensor memory (columns {self.column} to "
                f"{self.column + plan.columns - 1}, lanes from {self.lane})",
                self.warp.place(plan.instr),
            )
        self.trace("ld")
        return values

    def fetch(self) -> None:
        """Load into the registers."""
        self.rows.write(self.load())

    def store(self, values: np.ndarray) -> None:
        """Write uint32[registers, 32]."""
        tmem, plan = self.tmem, self.plan
        if not self.check():
            return
        if self.block is not None:
            self.data[...] = values
            tmem.write(self.block, self.init)
        else:
            where = plan.cells + self.flat
            data, init = tmem.data.reshape(-1), tmem.init.reshape(-1)
            if plan.packed:  # the upper halves of the cells keep their content
                halves = data.view(np.uint16)
                halves[2 * where] = values.astype(np.uint16)
                halves[2 * where + 2] = (values >> np.uint32(16)).astype(np.uint16)
                init[where + 1] = True
            else:
                data[where] = values
            init[where] = True
        self.trace("st")


def _known(warp: Warp, instr: Instr, address: Memory) -> tuple[_Access | None, bytes]:
    """The access that this warp made at this instruction and these addresses, and the addresses as bytes."""
    if type(address.base) is not Reg or warp.mask() != FULL_MASK:
        return None, b""
    at = warp.program.offset[address.base.index]
    raw = warp.memory[at : at + 4 * LANES].tobytes()
    access = warp.kept.get(instr.index)
    return (access if access is not None and access.raw == raw else None), raw


def has_wait(warp: Warp, instr: Instr, items: tuple[Operand, ...]) -> bool:
    """Tell whether ``tcgen05.wait::ld`` precedes any use of the loaded registers. Only straight code is followed."""
    registers = {item.index for item in items if isinstance(item, Reg)}
    for later in warp.program.kernel.instructions[instr.index + 1 :]:
        if later.opcode.startswith("tcgen05.wait::ld"):
            return True
        used = [later.guard, *leaves(later.operands)]
        if later.opcode.startswith(_ENDS) or any(isinstance(x, Reg) and x.index in registers for x in used):
            return False
    return False


def _complete_stores(warp: Warp) -> None:
    """Complete the stores that this warp has issued, in their order."""
    units = warp.cta.machine.units
    for op in units.pending(warp_unit(warp)):
        if op.label.startswith("st"):
            units.complete(op)


def _issue_load(access: _Access, complete: Callable[[], None]) -> None:
    """Queue a load, or do it at once if nothing in the code waits for it."""
    warp, plan = access.warp, access.plan
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.executed(warp, plan.instr)
    if not plan.waits:
        _complete_stores(warp)
        complete()
        return
    access.rows.write(np.uint32(POISON))
    issue(warp, plan.instr, warp_unit(warp), plan.label, complete)


@isa.service(*(f"tcgen05.ld.sync.aligned.{shape}[.<pack:pack::16b>].b32" for shape in _SHAPES), note=_SOURCE)
def ld(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.ld r, [taddr]{, half-split}``."""
    target, address, *split = instr.operands
    access, raw = _known(warp, instr, address)
    if access is None:
        access = _Access(warp, _plan(warp, instr, form, target, split, "ld"), address, raw)
        warp.kept[instr.index] = access
    _issue_load(access, access.fetch)


@isa.service(*(f"tcgen05.st.sync.aligned.{shape}[.<pack:unpack::16b>].b32" for shape in _SHAPES), note=_SOURCE)
def st(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.st [taddr]{, half-split}, r``."""
    address, *split, source = instr.operands
    access, raw = _known(warp, instr, address)
    if access is None:
        access = _Access(warp, _plan(warp, instr, form, source, split, "st"), address, raw)
        warp.kept[instr.index] = access
    values = access.rows.read()
    issue(warp, instr, warp_unit(warp), access.plan.label, lambda: access.store(values))


@isa.service(
    f"tcgen05.ld.red.sync.aligned.<shape:32x32b|16x32bx2>.<num:{_MANY}>.<op:min|max>[.<abs:abs>][.<nan:NaN>].<type:f32>",
    f"tcgen05.ld.red.sync.aligned.<shape:32x32b|16x32bx2>.<num:{_MANY}>.<op:min|max>.<type:u32|s32>",
    note="sm_101a, sm_103a, sm_110a and their families; no kernel has confirmed it",
)
def ld_red(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.ld.red r, redval, [taddr]{, half-split}``: also reduces each thread's registers."""
    if not str(warp.cta.machine.arch).startswith(("sm_101", "sm_103", "sm_110")):
        raise EmulatorError(f"{warp.cta.machine.arch} has no tcgen05.ld.red")
    target, result, address, *split = instr.operands
    plan = _plan(warp, instr, form, target, split, "ld.red", result)
    access = _Access(warp, plan, address)

    def complete() -> None:
        values = access.load()
        access.rows.write(np.concatenate([values, reduce_columns(values, form)[None]]))

    _issue_load(access, complete)


def reduce_columns(values: np.ndarray, form: Form) -> np.ndarray:
    """Reduce to the minimum or maximum of each thread's registers, uint32[32]."""
    if form.get("type") != "f32":
        typed = values.view(np.int32 if form.get("type") == "s32" else np.uint32)
        return (typed.min(0) if form.get("op") == "min" else typed.max(0)).view(np.uint32)
    floats = values.view(np.float32)
    if form.has("abs"):
        floats = np.abs(floats)
    nan_wins = {"min": np.minimum, "max": np.maximum}[form.get("op")]
    number_wins = {"min": np.fmin, "max": np.fmax}[form.get("op")]
    result = (nan_wins if form.has("nan") else number_wins).reduce(floats, 0)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))
