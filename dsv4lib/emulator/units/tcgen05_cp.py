"""Implement tcgen05.cp (shared to tensor memory) and tcgen05.shift.

| shape | source rows x bytes | lanes |
| --- | --- | --- |
| 128x256b, 128x128b | 128 x 32, 128 x 16 | row i to lane i |
| 64x128b.warpx2::02_13 | 64 x 16 | row i to lanes i and 64 + i |
| 64x128b.warpx2::01_23 | 64 x 16 | rows 0-31 to the first and second lane quarter, rows 32-63 to the third and fourth |
| 32x128b.warpx4 | 32 x 16 | row i to lane i of every quarter |
| 4x256b | 4 x 32 | row i to the addressed lane of quarter i |

With cta_group::2 each CTA copies from its own shared memory, at the same offset. Decompression turns 16 packed 6-bit
or 4-bit values, padded to 16 bytes, into 16 bytes; a 4-bit value lands in the middle of its byte.

Source: PTX ISA, "tcgen05.cp", "Optional Decompression" and "tcgen05.shift"; the lanes of 4x256b and the order of the
warp pairs from the layouts of CUTLASS's copy atoms (the ISA shows neither in words).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.checks.shadow import Words, columns_of
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.ptx.ir import Instr
from dsv4lib.emulator.units import shared
from dsv4lib.emulator.units.descriptor import SmemDescriptor, smem_descriptor
from dsv4lib.emulator.units.numeric import unpack_4bit, unpack_6bit
from dsv4lib.emulator.units.operand import k_major
from dsv4lib.emulator.units.tcgen05_issue import (
    each_lane,
    group_ctas,
    group_of,
    issue,
    lane_value,
    tensor_unit,
    tmem_address,
)
from dsv4lib.emulator.units.tmem import COLUMNS, QUARTER, check_span, tmem_of

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cta

_GROUP = "<group:cta_group::1|cta_group::2>"
_FORMAT = "[.b8x16.<format:b6x16_p32|b4x16_p64>]"
_ROWS = {"128x256b": 128, "128x128b": 128, "64x128b": 64, "32x128b": 32, "4x256b": 4}
_Q = np.arange(QUARTER)
# Destination lanes and source rows.
_TARGETS = {
    "128x256b": (np.arange(128), np.arange(128)),
    "128x128b": (np.arange(128), np.arange(128)),
    "64x128b.warpx2::02_13": (np.arange(128), np.tile(np.arange(64), 2)),
    "64x128b.warpx2::01_23": (np.arange(128), np.concatenate([_Q, _Q, 32 + _Q, 32 + _Q])),
    "32x128b.warpx4": (np.arange(128), np.tile(_Q, 4)),
    "4x256b": (np.arange(0, 128, QUARTER), np.arange(4)),
}
SHIFT_COLUMNS = 8


@isa.service(
    f"tcgen05.cp.{_GROUP}.<shape:128x256b|128x128b|4x256b>{_FORMAT}",
    f"tcgen05.cp.{_GROUP}.<shape:64x128b>.<multicast:warpx2::02_13|warpx2::01_23>{_FORMAT}",
    f"tcgen05.cp.{_GROUP}.<shape:32x128b>.<multicast:warpx4>{_FORMAT}",
    note="cells as in the compiler's copy atoms (4x256b: CUTLASS C++); decompression by the PTX ISA alone",
)
def cp(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.cp [taddr], s-desc``."""
    target, source = instr.operands
    group = group_of(form)
    ctas = group_ctas(warp, group)
    for lane in each_lane(warp):
        address = tmem_address(warp, target, lane)
        descriptor = smem_descriptor(lane_value(warp, source, np.uint64, lane))
        if descriptor.further >= 0:
            raise EmulatorError("tcgen05.cp: a descriptor with an absolute leading address")
        limit = QUARTER if form.get("shape") == "4x256b" else 1
        if address >> 16 >= limit:
            raise EmulatorError(f"tcgen05.cp.{form.get('shape')} to lane {address >> 16}, must be below {limit}")
        op: list[AsyncOp] = []

        def complete(op: list = op, address: int = address, descriptor: SmemDescriptor = descriptor) -> None:
            for cta in ctas:
                copy(cta, address, descriptor, form, op[0])

        label = f"cp {form.get('shape')} smem {descriptor.start:#x} -> tmem column {address & 0xFFFF}"
        op.append(issue(warp, instr, tensor_unit(warp, group), label, complete))


def copy(cta: Cta, address: int, descriptor: SmemDescriptor, form: Form, op: AsyncOp) -> None:
    """Do the copy of one CTA."""
    machine, shape = cta.machine, form.get("shape")
    nbytes = 32 if shape.endswith("256b") else 16
    operand = k_major(cta.smem, descriptor, _ROWS[shape], nbytes)
    if not operand.initialised():
        low, high = operand.span()
        text = f"tcgen05.cp reads uninitialised shared memory {low:#x}-{high:#x}"
        machine.report("uninitialised_smem", text, op.place)
    if found := operand.unfenced():
        kind, how, writers = found
        owner = shared.writer_of(cta, operand.first + operand.chunks)
        machine.report(kind, f"tcgen05.cp reads shared memory that {how}", op.place, warps=writers, owner=owner)
    if machine.trace is not None:
        machine.trace.smem_operand(cta, op.warp, op.instr, "tcgen05.cp", operand)
    if machine.race is not None:
        machine.race.shared_chunks(cta, operand.first + operand.chunks, False)
    raw = operand.read().reshape(_ROWS[shape], nbytes)
    if form.get("format") == "b6x16_p32":
        raw = unpack_6bit(raw)
    elif form.get("format") == "b4x16_p64":
        raw = unpack_4bit(raw) << np.uint8(2)
    lanes, rows = _TARGETS[f"{shape}.{form.get('multicast')}" if form.has("multicast") else shape]
    lane, column, count = address >> 16, address & 0xFFFF, nbytes // 4
    if tmem_of(cta).fault(column, count) and not check_span(cta, column, count, "tcgen05.cp", op.place):
        return
    tmem = tmem_of(cta)
    tmem.data[lane + lanes, column : column + count] = np.ascontiguousarray(raw).view(np.uint32)[rows]
    tmem.init[lane + lanes, column : column + count] = True
    if machine.race is not None:
        cells = Words(((lane + lanes)[:, None] * COLUMNS + column + np.arange(count)).reshape(-1))
        machine.race.tensor(cta, cells, True)
    machine.stats["tcgen05_cp_bytes"] += raw.size
    if machine.trace is not None:
        machine.trace.tmem_access("cp", cta, op.warp, op.instr, lane + lanes, (column, column + count))


@isa.service(
    f"tcgen05.shift.{_GROUP}.down",
    note="31 lanes of the addressed quarter, towards lane 0: the ISA gives the direction only as 'down'; unverified",
)
def shift(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.shift.down [taddr]``: lane r takes the eight columns of lane r + 1, the last lane keeps its own."""
    group = group_of(form)
    ctas = group_ctas(warp, group)
    for lane in each_lane(warp):
        address = tmem_address(warp, instr.operands[0], lane)
        first, column = address >> 16, address & 0xFFFF
        if first % QUARTER or first >= 128:
            raise EmulatorError(f"tcgen05.shift at lane {first}, must be 0, 32, 64 or 96")

        def complete(first: int = first, column: int = column) -> None:
            for cta in ctas:
                tmem = tmem_of(cta)
                if tmem.fault(column, SHIFT_COLUMNS):
                    place = warp.place(instr)
                    if not check_span(cta, column, SHIFT_COLUMNS, "tcgen05.shift", place):
                        return
                if cta.machine.race is not None:
                    cells = columns_of(column, SHIFT_COLUMNS, first, first + QUARTER)
                    cta.machine.race.tensor(cta, cells, True)
                for array in (tmem.data, tmem.init):
                    block = array[first : first + QUARTER, column : column + SHIFT_COLUMNS]
                    block[:-1] = block[1:].copy()
                tmem.changed()

        issue(warp, instr, tensor_unit(warp, group), f"shift tmem column {column}", complete)
