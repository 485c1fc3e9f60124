"""Implement one-dimensional bulk copies and reductions, and their groups.

Tensor stores complete in these groups, too.

Copies into shared memory signal an mbarrier when they complete. Copies to global memory read shared memory in one step
and write later; ``wait_group.read`` waits for the first, ``wait_group`` for both. Bytes that ``.ignore_oob`` lets lie
outside an allocation arrive as 0xFF (the ISA leaves them indeterminate).

Source: PTX ISA, ``cp.async.bulk``, ``cp.reduce.async.bulk``, ``cp.async.bulk.prefetch``, ``cp.async.bulk.commit_group``
and ``wait_group``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT, shared_address
from dsv4lib.emulator.ptx.ir import Instr, Operand
from dsv4lib.emulator.units import groups, mbarrier, shared
from dsv4lib.emulator.units.reduction import reduce

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

ALIGN = 16
INDETERMINATE = 0xFF
_SEM = "[.<sem:weak>]"
_STRONG = ".<sem:relaxed>.<scope:cta|cluster|gpu|sys>"
_MULTICAST = ".<dst:shared::cluster>.global.mbarrier::complete_tx::bytes.<multicast:multicast::cluster>"
_HINT = "[.<hint:L2::cache_hint>]"
_TX = "mbarrier::complete_tx::bytes"
_REDUCE_PEER = f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster>].<dst:shared::cluster>.shared::cta.{_TX}"


def _operand(warp: Warp, rest: list[Operand], dtype: type) -> np.ndarray:
    if not rest:
        raise EmulatorError("operands do not match the modifiers", warp.place())
    return warp.read(rest.pop(0), dtype)


def _no_more(warp: Warp, rest: list[Operand], hint: bool) -> None:
    if len(rest) != int(hint):
        raise EmulatorError("operands do not match the modifiers", warp.place())


def _check(warp: Warp, size: int, *addresses: int) -> None:
    """Sizes and addresses are multiples of 16.

    Raises:
        HazardError: one is not.
    """
    if size % ALIGN or any(a % ALIGN for a in addresses):
        listed = ", ".join(f"{a:#x}" for a in addresses)
        raise HazardError(
            f"bulk copy of {size} bytes, addresses {listed}: multiples of {ALIGN} are needed", warp.place()
        )


# --- global to shared -------------------------------------------------------------------------------------------------


@isa.service(
    f"cp.async.bulk{_SEM}.<dst:shared::cta|shared::cluster>.global.{_TX}{_HINT}",
    f"cp.async.bulk{_SEM}{_MULTICAST}{_HINT}",
    f"cp.async.bulk{_SEM}.<dst:shared::cta>.global.{_TX}{_HINT}.<ignore:ignore_oob>",
    f"cp.async.bulk{_STRONG}.<dst:shared::cta|shared::cluster>.global.{_TX}{_HINT}.b128",
    f"cp.async.bulk{_STRONG}{_MULTICAST}{_HINT}.b128",
)
def load(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue a bulk load.

    ``[dstMem], [srcMem], size {, ignoreLeft, ignoreRight}, [mbar] {, ctaMask} {, cache_policy}``.
    """
    destination, source, amount, *rest = instr.operands
    to = shared.addresses_in(warp, destination, form.get("dst"))
    start, sizes = warp.address(source), warp.read(amount, np.uint32)
    ignored = [_operand(warp, rest, np.uint32) for _ in range(2)] if form.has("ignore") else []
    signal = shared.addresses_in(warp, rest.pop(0), form.get("dst"))
    mask = _operand(warp, rest, np.uint16) if form.has("multicast") else None
    _no_more(warp, rest, form.has("hint"))
    for lane in shared.lane_list(warp.mask()):
        size, left, right = int(sizes[lane]), *([int(i[lane]) for i in ignored] or [0, 0])
        if left > 15 or right > 15:
            raise HazardError(f"ignoreBytesLeft {left}, ignoreBytesRight {right}: 0 to 15 are allowed", warp.place())
        _check(warp, size, int(to[lane]) & OFFSET_MASK, int(start[lane]))
        lane_mask = None if mask is None else int(mask[lane])
        for target, bar in _targets(warp, int(to[lane]), int(signal[lane]), lane_mask):
            _Load(warp, instr, int(start[lane]), size, left, right, target, bar).issue()


def _targets(warp: Warp, to: int, signal: int, mask: int | None) -> list[tuple[int, int]]:
    """(destination, barrier) per destination CTA.

    Raises:
        HazardError: the barrier lies in another CTA, or the mask names no CTA of the cluster.
    """
    if mask is None:
        if to >> RANK_SHIFT != signal >> RANK_SHIFT:
            raise HazardError("bulk copy with an mbarrier in another CTA than its destination", warp.place())
        return [(to, signal)]
    size = len(warp.cta.cluster.ctas)
    if mask == 0 or mask >> size:
        raise HazardError(f"multicast mask {mask:#06x} for a cluster of {size} CTAs", warp.place())
    ranks = [rank for rank in range(size) if mask >> rank & 1]
    return [(shared_address(r, to & OFFSET_MASK), shared_address(r, signal & OFFSET_MASK)) for r in ranks]


@dataclass(frozen=True)
class _Load:
    """One copy from global memory into one CTA."""

    warp: Warp
    instr: Instr
    start: int
    size: int
    left: int
    right: int
    target: int
    bar: int

    def issue(self) -> None:
        """Queue it."""
        warp = self.warp
        cluster = warp.cta.cluster
        cta, offset = shared.locate(cluster, self.target, self.size, warp.place)
        barrier = mbarrier.find(cluster, self.bar, warp.place)
        label = f"bulk load of {self.size} bytes -> shared {self.target:#x}, mbarrier {self.bar:#x}"
        op = AsyncOp("tma", lambda: self.complete(op, cta, offset), label, warp, self.instr, writes=cta)
        op.signals = barrier
        cluster.machine.units.issue(op)
        cluster.machine.stats["bulk_loads"] += 1
        cluster.machine.stats["bulk_load_bytes"] += self.size

    def complete(self, op: AsyncOp, cta: Cta, offset: int) -> None:
        """Copy and signal."""
        machine = cta.machine
        valid = machine.gmem.view(self.start + self.left, self.size - self.left - self.right)
        if self.left or self.right:
            data = np.full(self.size, INDETERMINATE, np.uint8)
            data[self.left : self.size - self.right] = valid
        else:
            data = valid
        shared.write(cta, offset, data)
        if machine.race is not None:
            machine.race.global_ranges([self.start + self.left], len(valid), False)
        if machine.trace is not None:
            machine.trace.bulk("load", self.start, cta, offset, self.size, op)
        mbarrier.find(cta.cluster, self.bar, op.where).complete_tx(self.size, op.where)


# --- shared to shared of another CTA ----------------------------------------------------------------------------------


@isa.service(
    f"cp.async.bulk{_SEM}.<dst:shared::cluster>.shared::cta.{_TX}",
    f"cp.async.bulk.<sem:relaxed>.<scope:cta|cluster>.<dst:shared::cluster>.shared::cta.{_TX}.b128",
    f"{_REDUCE_PEER}.<op:and|or|xor>.<type:b32>",
    f"{_REDUCE_PEER}.<op:inc|dec>.<type:u32>",
    f"{_REDUCE_PEER}.<op:min|max>.<type:u32|s32>",
    f"{_REDUCE_PEER}.<op:add>.<type:u32|s32|u64>",
)
def to_peer(warp: Warp, instr: Instr, form: Form) -> None:
    """``[dstMem], [srcMem], size, [mbar]``: to the shared memory of another CTA of the cluster."""
    destination, source, amount, barrier = instr.operands
    to = shared.addresses_in(warp, destination, "shared::cluster")
    start = shared.addresses_in(warp, source, "shared::cta")
    signal = shared.addresses_in(warp, barrier, "shared::cluster")
    sizes = warp.read(amount, np.uint32)
    op, kind = form.get("op"), form.get("type")
    cluster, machine = warp.cta.cluster, warp.cta.machine
    for lane in shared.lane_list(warp.mask()):
        size, target, bar = int(sizes[lane]), int(to[lane]), int(signal[lane])
        _check(warp, size, target & OFFSET_MASK, int(start[lane]) & OFFSET_MASK)
        cta, offset = shared.locate(cluster, target, size, warp.place)
        _, at = shared.locate(cluster, int(start[lane]), size, warp.place)
        if cta is warp.cta:
            raise HazardError(
                "bulk copy from shared::cta to the same CTA: the destination must be another", warp.place()
            )
        mbarrier.find(cluster, bar, warp.place)
        _queue_to_peer(warp, instr, cta, offset, at, size, bar, (op, kind))
        machine.stats["bulk_peer_copies"] += 1


def _queue_to_peer(
    warp: Warp, instr: Instr, cta: Cta, offset: int, at: int, size: int, bar: int, reduction: tuple[str, str]
) -> None:
    op, kind = reduction
    what = f"bulk {op or 'copy'} of {size} bytes"

    def complete() -> None:
        shared.check_read(warp.cta, at, size, what, pending.where)
        data = warp.cta.smem.data[at : at + size]
        if op:
            shared.check_read(cta, offset, size, what, pending.where)
            data = reduce(op, kind, cta.smem.data[offset : offset + size], data)
        shared.write(cta, offset, data)
        mbarrier.find(cta.cluster, bar, pending.where).complete_tx(size, pending.where)

    label = f"{what} -> shared {shared_address(cta.rank, offset):#x}, mbarrier {bar:#x}"
    pending = AsyncOp("tma", complete, label, warp, instr, reads=warp.cta, writes=cta)
    pending.signals = mbarrier.find(cta.cluster, bar, warp.place)
    warp.cta.machine.units.issue(pending)


# --- shared to global -------------------------------------------------------------------------------------------------


@isa.service(
    f"cp.async.bulk{_SEM}.global.shared::cta.bulk_group{_HINT}[.<mask:cp_mask>]",
    f"cp.async.bulk{_STRONG}.global.shared::cta.bulk_group{_HINT}[.<mask:cp_mask>].b128",
    note="a store of several lanes with the same operands is done once",
)
def store(warp: Warp, instr: Instr, form: Form) -> None:
    """``[dstMem], [srcMem], size {, cache_policy} {, byteMask}``."""
    destination, source, amount, *rest = instr.operands
    if form.has("hint"):
        _operand(warp, rest, np.uint64)
    mask = _operand(warp, rest, np.uint16) if form.has("mask") else np.full(32, 0xFFFF, np.uint16)
    _no_more(warp, rest, False)
    to, sizes = warp.address(destination), warp.read(amount, np.uint32)
    start = shared.addresses_in(warp, source, "shared::cta")
    for members, (target, at, size, chosen) in shared.lane_groups(warp.mask(), to, start, sizes, mask):
        _queue_store(warp, instr, members, target, at, size, _masked(chosen), chosen == 0xFFFF)


@isa.service(
    f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster|gpu|sys>].global.shared::cta.bulk_group{_HINT}"
    ".<op:and|or|xor>.<type:b32|b64>",
    f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster|gpu|sys>].global.shared::cta.bulk_group{_HINT}"
    ".<op:inc|dec>.<type:u32>",
    f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster|gpu|sys>].global.shared::cta.bulk_group{_HINT}"
    ".<op:min|max>.<type:u32|s32|u64|s64|f16|bf16>",
    f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster|gpu|sys>].global.shared::cta.bulk_group{_HINT}"
    ".<op:add>.<type:u32|s32|u64|f32|f64>",
    f"cp.reduce.async.bulk[.<sem:relaxed>.<scope:cta|cluster|gpu|sys>].global.shared::cta.bulk_group{_HINT}"
    ".<op:add>.noftz.<type:f16|bf16>",
    note="every lane reduces; add.f32 flushes subnormals",
)
def reduce_global(warp: Warp, instr: Instr, form: Form) -> None:
    """``[dstMem], [srcMem], size {, cache_policy}``."""
    destination, source, amount, *rest = instr.operands
    _no_more(warp, rest, form.has("hint"))
    to, sizes = warp.address(destination), warp.read(amount, np.uint32)
    start = shared.addresses_in(warp, source, "shared::cta")
    kind = "f32.ftz" if form.get("type") == "f32" else form.get("type")
    for lane in shared.lane_list(warp.mask()):
        members = np.array([lane])
        apply = _reducing(form.get("op"), kind)
        _queue_store(warp, instr, members, int(to[lane]), int(start[lane]), int(sizes[lane]), apply)


# What a store does to the destination's bytes: (destination, data) -> None.
_Apply = Callable[[np.ndarray, np.ndarray], None]


def _masked(mask: int) -> _Apply:
    """Copy the bytes of every 16 that ``mask`` names."""
    chosen = (mask >> np.arange(ALIGN)) & 1 == 1

    def apply(target: np.ndarray, data: np.ndarray) -> None:
        if chosen.all():
            target[:] = data
        else:
            target.reshape(-1, ALIGN)[:, chosen] = data.reshape(-1, ALIGN)[:, chosen]

    return apply


def _reducing(op: str, kind: str) -> _Apply:
    def apply(target: np.ndarray, data: np.ndarray) -> None:
        target[:] = reduce(op, kind, target, data)

    return apply


def _queue_store(
    warp: Warp, instr: Instr, lanes: np.ndarray, target: int, start: int, size: int, apply: _Apply, whole: bool = True
) -> None:
    """Queue reading half and, when that completes, the writing half. ``whole``: of every byte."""
    _check(warp, size, start & OFFSET_MASK, target)
    _, at = shared.locate(warp.cta.cluster, start, size, warp.place)
    label = f"bulk store of {size} bytes from shared {start:#x} -> {target:#x}"
    tracked = groups.Tracked(label)
    groups.add(warp, "bulk", lanes, tracked)
    cta, machine = warp.cta, warp.cta.machine
    unit = f"bulk:{warp.agent}"

    def read() -> None:
        shared.check_read(cta, at, size, "a bulk store", reading.where)
        data = cta.smem.data[at : at + size].copy()
        tracked.read = True

        def write() -> None:
            apply(machine.gmem.view(target, size, write=True), data)
            if machine.race is not None and whole:
                machine.race.global_ranges([target], size, True, instr.opcode.startswith("cp.reduce"))
            elif machine.marks is not None:
                machine.marks.ranges([target], size, True)
            tracked.done = True
            if machine.trace is not None:
                machine.trace.bulk("store", target, cta, at, size, writing)

        writing = AsyncOp(unit, write, label, warp, instr, order=reading.order, lanes=reading.lanes)
        machine.units.issue(writing)

    reading = AsyncOp(unit, read, label, warp, instr, reads=cta)
    machine.units.issue(reading)
    machine.stats["bulk_stores"] += 1
    machine.stats["bulk_store_bytes"] += size


@isa.service(f"cp.async.bulk.prefetch.L2.global{_HINT}", note="checked, no effect")
def prefetch(warp: Warp, instr: Instr, form: Form) -> None:
    """``[srcMem], size {, cache_policy}``."""
    source, amount, *rest = instr.operands
    _no_more(warp, rest, form.has("hint"))
    start, sizes = warp.address(source), warp.read(amount, np.uint32)
    for lane in shared.lane_list(warp.mask()):
        _check(warp, int(sizes[lane]), int(start[lane]))


# --- zeros ------------------------------------------------------------------------------------------------------------


@isa.service("st.bulk[.<weak:weak>][.<space:shared::cta>]", note="no kernel has confirmed it")
def clear(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], size, 0``: write zeros to a range of this CTA's shared memory, as ordinary stores do.

    Raises:
        HazardError: another value than 0, or a size that is no multiple of 8. MemoryFault: outside of the CTA's memory.
    """
    memory, amount, value = instr.operands
    to = shared.addresses_in(warp, memory, form.get("space"))
    sizes, values = warp.read(amount, np.uint64), warp.read(value, np.uint64)
    cta, smem = warp.cta, warp.cta.smem
    for lane in shared.lane_list(warp.mask()):
        size = int(sizes[lane])
        if size % 8 or values[lane]:
            raise HazardError(f"st.bulk of {size} bytes of value {values[lane]}: multiples of 8, of 0", warp.place())
        owner, offset = shared.locate(cta.cluster, int(to[lane]), size, warp.place, align=8)
        if owner is not cta:
            raise MemoryFault(f"st.bulk to {owner}: only the own CTA's memory can be cleared", warp.place())
        smem.data[offset : offset + size], smem.init[offset : offset + size] = 0, 1
        smem.dirty[offset >> 4 : offset + size + 15 >> 4] = warp.warp_id + 1
        if cta.machine.race is not None:
            cta.machine.race.shared_bytes(cta, offset, size, True)


# --- groups -----------------------------------------------------------------------------------------------------------


@isa.service("cp.async.bulk.commit_group")
def commit_group(warp: Warp, instr: Instr, form: Form) -> None:
    """Commit this thread's bulk stores since the last commit as a group."""
    groups.commit(warp, "bulk", warp.lanes())


@isa.service("cp.async.bulk.wait_group[.<read:read>]")
def wait_group(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Wait until at most N of the latest groups are pending."""
    wait = warp.pending
    if wait is None:
        allowed = warp.uniform(instr.operands[0], np.uint32)
        wait = groups.GroupWait(warp, "bulk", warp.lanes(), allowed, form.has("read"))
    if not wait.ready():
        warp.pending = wait
        return Block("bulk wait_group", wait.ready, wait.detail)
    wait.prune()
    warp.pending = None
    return None
