"""Implement st.async and red.async, which signal another CTA's mbarrier.

Also their global variants.

Source: PTX ISA, ``st.async`` and ``red.async``. They belong to the generic proxy. The forms on shared memory require
that destination and mbarrier lie in the same CTA; red.async also that this is not the executing one.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import RANK_SHIFT
from dsv4lib.emulator.ptx.ir import Instr, Operand, Vector
from dsv4lib.emulator.units import mbarrier, shared
from dsv4lib.emulator.units.reduction import reduce

_TX = "mbarrier::complete_tx::bytes"
_NARROW = "b32|u32|s32|f32"
_WIDE = "b64|u64|s64|f64"
_SCALAR = f"b8|u8|s8|b16|u16|s16|{_NARROW}|{_WIDE}"


def _values(warp: Warp, operand: Operand, bits: int, count: int) -> np.ndarray:
    """uint8[32, count * bits / 8]: what every lane stores."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count:
        raise EmulatorError(f"{count} source registers are needed, got {len(items)}", warp.place())
    if bits == 128:
        return np.ascontiguousarray(warp.read(items[0], np.uint64).T).view(np.uint8)
    kind = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return np.stack([warp.read(item, kind) for item in items], 1).view(np.uint8)


@isa.service(
    f"st.async[.<sem:weak>][.<space:shared::cluster>].{_TX}[.<vec:v2|v4>].<type:{_NARROW}>",
    f"st.async[.<sem:weak>][.<space:shared::cluster>].{_TX}[.<vec:v2>].<type:{_WIDE}>",
    f"st.async[.<sem:weak>][.<space:shared::cluster>].{_TX}.<type:b128>",
)
def store(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], b, [mbar]``: store to shared memory of the cluster, then complete_tx."""
    destination, source, barrier = instr.operands
    bits, count = int(form.get("type")[1:]), int(form.get("vec", "v1")[1:])
    data = _values(warp, source, bits, count)
    _to_shared(warp, instr, form, destination, barrier, data, "")


@isa.service(
    f"red.async.relaxed.cluster[.<space:shared::cluster>].{_TX}.<op:inc|dec>.<type:u32>",
    f"red.async.relaxed.cluster[.<space:shared::cluster>].{_TX}.<op:min|max>.<type:u32|s32>",
    f"red.async.relaxed.cluster[.<space:shared::cluster>].{_TX}.<op:and|or|xor>.<type:b32>",
    f"red.async.relaxed.cluster[.<space:shared::cluster>].{_TX}.<op:add>.<type:u32|s32|u64>",
)
def reduction(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], b, [mbar]``: reduce into shared memory of another CTA, then complete_tx."""
    destination, source, barrier = instr.operands
    data = _values(warp, source, int(form.get("type")[1:]), 1)
    _to_shared(warp, instr, form, destination, barrier, data, form.get("op"))


def _to_shared(
    warp: Warp, instr: Instr, form: Form, destination: Operand, barrier: Operand, data: np.ndarray, op: str
) -> None:
    """Queue one operation for all lanes of each destination CTA.

    Raises:
        HazardError: destination and mbarrier in different CTAs, a reduction into the own CTA, or no cluster.
    """
    cluster, size = warp.cta.cluster, data.shape[1]
    to = shared.shared_addresses(warp, destination, form)
    signal = shared.shared_addresses(warp, barrier, form)
    lanes = warp.lanes()
    if (to[lanes] >> np.uint32(RANK_SHIFT) != signal[lanes] >> np.uint32(RANK_SHIFT)).any():
        raise HazardError("destination and mbarrier lie in different CTAs", warp.place())
    for members, (rank, bar) in shared.lane_groups(warp.mask(), to >> np.uint32(RANK_SHIFT), signal):
        if op and rank == warp.cta.rank:
            raise HazardError("red.async into the shared memory of the executing CTA", warp.place())
        if len(cluster.ctas) == 1:
            raise HazardError("st.async in a launch without clusters", warp.place())
        offsets = []
        for lane in members:
            _, offset = shared.locate(cluster, int(to[lane]), size, warp.place, align=size)
            offsets.append(offset)
        mbarrier.find(cluster, bar, warp.place)
        _queue(warp, instr, rank, np.array(offsets), data[members].copy(), bar, (op, form.get("type")))


def _queue(
    warp: Warp, instr: Instr, rank: int, offsets: np.ndarray, data: np.ndarray, bar: int, kind: tuple[str, str]
) -> None:
    op, element = kind
    cta, machine = warp.cta.cluster.ctas[rank], warp.cta.machine
    size = data.shape[1]

    def complete() -> None:
        smem = cta.smem
        for offset, row in zip(offsets.tolist(), data, strict=True):
            where = slice(offset, offset + size)
            if op:
                shared.check_read(cta, offset, size, f"red.async.{op}", pending.where, generic=True)
            smem.data[where] = reduce(op, element, smem.data[where], row) if op else row
            smem.init[where] = 1
            smem.dirty[offset >> 4] = warp.warp_id + 1
        if machine.race is not None:
            machine.race.shared_words(cta, offsets, size, True)
        mbarrier.find(cta.cluster, bar, pending.where).complete_tx(data.size, pending.where)

    label = f"{'red' if op else 'st'}.async of {len(offsets)} x {size} bytes to CTA {rank}, mbarrier {bar:#x}"
    pending = AsyncOp(f"st.async:{warp.agent}", complete, label, warp, instr, writes=cta)
    pending.signals = mbarrier.find(cta.cluster, bar, warp.place)
    machine.units.issue(pending)
    machine.stats["st_async"] += 1


@isa.service(
    f"st.async.release.<scope:gpu|sys>[.<space:global>].<type:{_SCALAR}>",
    f"st.async.<mmio:mmio>.release.<scope:sys>[.<space:global>].<type:{_SCALAR}>",
    "red.async.release.<scope:gpu|sys>[.<space:global>].<op:add>.<type:u32|s32|u64|s64>",
    "red.async.<mmio:mmio>.release.<scope:sys>[.<space:global>].<op:add>.<type:u32|s32|u64|s64>",
)
def to_global(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], b``: release store or addition to global memory. Complete at the latest when the CTA ends."""
    destination, source = instr.operands
    lanes, machine = warp.lanes(), warp.cta.machine
    data = _values(warp, source, int(form.get("type")[1:]), 1)[lanes].copy()
    addresses = warp.address(destination)[lanes].copy()
    if (addresses % np.uint64(data.shape[1])).any():
        raise MemoryFault(f"{form.opcode}: addresses must be multiples of {data.shape[1]}", warp.place())
    if machine.race is not None:
        machine.race.global_release(warp, addresses, instr.opcode)

    def complete() -> None:
        for address, row in zip(addresses.tolist(), data, strict=True):
            target = machine.gmem.view(address, len(row), write=True)
            target[:] = reduce("add", form.get("type"), target, row) if form.has("op") else row

    machine.units.issue(
        AsyncOp(f"st.async:{warp.agent}", complete, f"{form.opcode} of {len(lanes)} lanes", warp, instr)
    )
