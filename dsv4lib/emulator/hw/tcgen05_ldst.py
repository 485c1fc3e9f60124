"""tcgen05.ld and tcgen05.st: tensor memory from and to registers, in five shapes.

Both are asynchronous. A load's registers hold POISON until the load completes, at ``tcgen05.wait::ld`` at the latest; a
store takes its registers at issue. CuTeDSL emits loads without any wait (fp16_gemm_0 and most of NVIDIA's examples) and
leaves it to the assembler, whose scoreboard makes the first use of a register wait for its load. Such a load is
recognised in the code (`has_wait`) and completes at issue, the earliest of the times that the hardware may choose.

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

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.hw.registers import read_rows, write_rows
from dsv4lib.emulator.hw.tcgen05_issue import issue, tmem_addresses, warp_unit
from dsv4lib.emulator.hw.tmem import COLUMNS, QUARTER, check_span, tmem_of
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native.abi import FULL_MASK, LANES
from dsv4lib.emulator.program import leaves
from dsv4lib.emulator.ptx.ir import Imm, Instr, Operand, Reg, Vector
from dsv4lib.emulator.warp import Warp

POISON = 0x7FFFDEAD  # a NaN as float, odd as anything else
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
_NUM = "<num:x1|x2|x4|x8|x16|x32|x64|x128>"
_SHAPE = "<shape:32x32b|16x64b|16x128b|16x256b|16x32bx2>"
_MAX_REGISTERS = 128


@functools.cache
def fragment(shape: str, registers: int, packed: bool, split: int) -> tuple[np.ndarray, int]:
    """Cells of a fragment.

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


class _Access:
    """One load or store: its cells, after all checks that do not depend on when it happens."""

    def __init__(self, warp: Warp, instr: Instr, form: Form, address: Operand, split: Operand | None, what: str):
        shape, count = form.get("shape"), int(form.get("num")[1:])
        self.warp, self.instr, self.what = warp, instr, f"tcgen05.{what}"
        self.registers = count * _REGISTERS[shape]
        if self.registers > _MAX_REGISTERS:
            raise EmulatorError(f"{self.what}.{shape} has no .{form.get('num')}")
        if (split is not None) != (shape == "16x32bx2"):
            raise EmulatorError(
                f"{self.what}.{shape} {'takes no' if split is not None else 'needs a'} half-split offset"
            )
        if split is not None and not isinstance(split, Imm):
            raise EmulatorError("the half-split offset must be an immediate")
        if warp.mask() != FULL_MASK:
            raise EmulatorError(f"{self.what} needs all 32 lanes, active: {warp.mask():#010x}")
        self.packed = form.has("pack")
        offset = split.bits if split is not None else 0
        self.cells, self.columns = fragment(shape, self.registers, self.packed, offset)
        taddr = int(tmem_addresses(warp, address)[0])
        if (tmem_addresses(warp, address) != np.uint32(taddr)).any():
            raise EmulatorError(f"{self.what}: the address differs between lanes")
        lane, self.column = taddr >> 16, taddr & 0xFFFF
        quarter = QUARTER * (warp.warp_id % 4)
        if lane // QUARTER != quarter // QUARTER:
            warp.cta.machine.report(
                "tmem_lane_quarter",
                f"{self.what} names lane {lane}, warp {warp.warp_id} reaches lanes {quarter} to {quarter + 31}",
                warp.place(instr),
            )
        low = lane % QUARTER
        if low and (shape == "32x32b" or low != 16):
            raise EmulatorError(
                f"{self.what}.{shape} at lane {lane}: must be a multiple of {32 if shape == '32x32b' else 16}"
            )
        self.lane = quarter + low
        self.flat = self.lane * COLUMNS + self.column

    def check(self) -> bool:
        """Report columns that are not allocated; False if they do not exist."""
        cta = self.warp.cta
        if tmem_of(cta).fault(self.column, self.columns) is None:
            return True
        return check_span(cta, self.column, self.columns, self.what, self.warp.place(self.instr))

    def trace(self, kind: str) -> None:
        """Tell the trace."""
        machine = self.warp.cta.machine
        machine.stats[f"tcgen05_{kind}_bytes"] += 4 * self.registers * LANES
        if machine.trace is not None:
            lanes = self.lane + np.unique(self.cells // COLUMNS)
            span = (self.column, self.column + self.columns)
            machine.trace.tmem_access(kind, self.warp.cta, self.warp, self.instr, lanes, span)

    def load(self) -> np.ndarray:
        """uint32[registers, 32]; reports uninitialised cells."""
        tmem = tmem_of(self.warp.cta)
        if not self.check():
            raise EmulatorError(f"{self.what} reads columns {self.column} to {self.column + self.columns - 1}")
        where = self.cells + self.flat
        data, init = tmem.data.reshape(-1), tmem.init.reshape(-1)
        values, ready = data.take(where), init.take(where).all()
        if self.packed:
            values = values & np.uint32(0xFFFF) | data.take(where + 1) << np.uint32(16)
            ready = ready and init.take(where + 1).all()
        if not ready:
            self.warp.cta.machine.report(
                "uninitialised_tmem",
                f"{self.what} reads uninitialised tensor memory (columns {self.column} to "
                f"{self.column + self.columns - 1}, lanes from {self.lane})",
                self.warp.place(self.instr),
            )
        self.trace("ld")
        return values

    def store(self, values: np.ndarray) -> None:
        """Write uint32[registers, 32]."""
        tmem = tmem_of(self.warp.cta)
        if not self.check():
            return
        where = self.cells + self.flat
        data, init = tmem.data.reshape(-1), tmem.init.reshape(-1)
        if self.packed:  # the upper halves of the cells keep their content
            halves = data.view(np.uint16)
            halves[2 * where] = values.astype(np.uint16)
            halves[2 * where + 2] = (values >> np.uint32(16)).astype(np.uint16)
            init[where + 1] = True
        else:
            data[where] = values
        init[where] = True
        self.trace("st")


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise EmulatorError(f"{len(items)} registers given, the shape has {count}")
    return items


_waits: dict[int, tuple[Instr, bool]] = {}
_ENDS = ("bra", "brx", "exit", "ret", "call", "trap")


def has_wait(warp: Warp, instr: Instr, items: tuple[Operand, ...]) -> bool:
    """Does ``tcgen05.wait::ld`` follow in straight code before the loaded registers are used?"""
    known = _waits.get(id(instr))
    if known is not None and known[0] is instr:
        return known[1]
    registers = {item.index for item in items if isinstance(item, Reg)}
    found = False
    for later in warp.program.kernel.instructions[instr.index + 1 :]:
        if later.opcode.startswith("tcgen05.wait::ld"):
            found = True
            break
        used = [later.guard, *leaves(later.operands)]
        if later.opcode.startswith(_ENDS) or any(isinstance(x, Reg) and x.index in registers for x in used):
            break
    if len(_waits) > 1 << 14:
        _waits.clear()
    _waits[id(instr)] = (instr, found)
    return found


def _issue_load(warp: Warp, instr: Instr, form: Form, items: tuple[Operand, ...], complete: Callable[[], None]) -> None:
    """Queue a load, or do it at once if nothing in the code waits for it."""
    if not has_wait(warp, instr, items):
        complete()
        return
    write_rows(warp, instr, items, np.uint32(POISON))
    issue(warp, instr, warp_unit(warp), f"ld {form.get('shape')}.{form.get('num')}", complete)


@isa.service(f"tcgen05.ld.sync.aligned.{_SHAPE}.{_NUM}[.<pack:pack::16b>].b32")
def ld(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.ld r, [taddr]{, half-split}``."""
    target, address, *split = instr.operands
    access = _Access(warp, instr, form, address, split[0] if split else None, "ld")
    items = _items(target, access.registers)

    def complete() -> None:
        write_rows(warp, instr, items, access.load())

    _issue_load(warp, instr, form, items, complete)


@isa.service(f"tcgen05.st.sync.aligned.{_SHAPE}.{_NUM}[.<pack:unpack::16b>].b32")
def st(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.st [taddr]{, half-split}, r``."""
    address, *split, source = instr.operands
    access = _Access(warp, instr, form, address, split[0] if split else None, "st")
    values = read_rows(warp, instr, _items(source, access.registers))

    def complete() -> None:
        access.store(values)

    issue(warp, instr, warp_unit(warp), f"st {form.get('shape')}.{form.get('num')}", complete)


@isa.service(
    f"tcgen05.ld.red.sync.aligned.<shape:32x32b|16x32bx2>.{_NUM}.<op:min|max>[.<abs:abs>][.<nan:NaN>].<type:f32>",
    f"tcgen05.ld.red.sync.aligned.<shape:32x32b|16x32bx2>.{_NUM}.<op:min|max>.<type:u32|s32>",
    note="sm_101a, sm_103a, sm_110a and their families",
)
def ld_red(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.ld.red r, redval, [taddr]{, half-split}``: also reduces each thread's registers."""
    if not str(warp.cta.machine.arch).startswith(("sm_101", "sm_103", "sm_110")):
        raise EmulatorError(f"{warp.cta.machine.arch} has no tcgen05.ld.red")
    if form.get("num") == "x1":
        raise EmulatorError("tcgen05.ld.red needs at least .x2")
    target, result, address, *split = instr.operands
    access = _Access(warp, instr, form, address, split[0] if split else None, "ld.red")
    items = (*_items(target, access.registers), result)

    def complete() -> None:
        values = access.load()
        write_rows(warp, instr, items, np.concatenate([values, reduce_columns(values, form)[None]]))

    _issue_load(warp, instr, form, items, complete)


def reduce_columns(values: np.ndarray, form: Form) -> np.ndarray:
    """uint32[32]: minimum or maximum over the registers of each thread."""
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
