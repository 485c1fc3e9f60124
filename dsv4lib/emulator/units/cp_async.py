"""Implement cp.async. Copies of 4, 8 or 16 bytes per thread from global to shared memory, and their groups.

All copies of one warp instruction complete together, at a time that the scheduler chooses. cp.async belongs to the
generic proxy: what it wrote needs ``fence.proxy.async`` before TMA or tensor cores read it. A zero-filling copy does
not touch the ignored source bytes.

Source: PTX ISA, ``cp.async``, ``cp.async.commit_group``, ``cp.async.wait_group`` / ``wait_all``,
``cp.async.mbarrier.arrive``.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT, is_local, is_shared
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Imm, Instr, Operand, Reg
from dsv4lib.emulator.units import groups, mbarrier, shared

# A type of each copy size, and a chunk of it that is written.
_CHUNKS = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64), 16: shared.CHUNK_TYPE}
_WRITTEN = {size: np.ones(size, np.uint8).view(kind)[0] for size, kind in _CHUNKS.items()}
_TAIL = "[.<hint:L2::cache_hint>][.<prefetch:L2::64B|L2::128B|L2::256B>]"


def _valid_bytes(warp: Warp, rest: list[Operand], size: int) -> np.ndarray:
    """int64[32] bytes to copy, from the optional src-size or ignore-src operand.

    Raises:
        HazardError: more than the copy size.
    """
    if not rest:
        return np.full(LANES, size, np.int64)
    operand = rest[0]
    if isinstance(operand, Reg) and warp.program.bits[operand.index] == 1:
        return np.where(warp.read(operand, bool), 0, size)
    valid = warp.read(operand, np.uint32).astype(np.int64)
    if (valid[warp.lanes()] > size).any():
        raise HazardError(f"cp.async with a src-size above the copy size {size}", warp.place())
    return valid


@isa.service(
    f"cp.async.<cop:ca>.<dst:shared|shared::cta>.global{_TAIL}",
    f"cp.async.<cop:cg>.<dst:shared|shared::cta>.global{_TAIL}",
)
def copy(warp: Warp, instr: Instr, form: Form) -> None:
    """``[dst], [src], cp-size {, src-size or ignore-src} {, cache_policy}``."""
    destination, source, amount, *rest = instr.operands
    size = amount.bits if isinstance(amount, Imm) else warp.uniform(amount, np.uint32)
    allowed = (4, 8, 16) if form.get("cop") == "ca" else (16,)
    if size not in allowed:
        raise HazardError(f"cp.async.{form.get('cop')} of {size} bytes: {allowed} are allowed", warp.place())
    if form.has("hint"):
        if not rest:
            raise EmulatorError("cp.async with L2::cache_hint needs a cache policy operand", warp.place())
        rest.pop()
    if len(rest) > 1:
        raise EmulatorError("cp.async has too many operands", warp.place())
    lanes = warp.lanes()
    valid = _valid_bytes(warp, rest, size)[lanes]
    start = warp.address(source)[lanes]
    if (is_shared(start) | is_local(start)).any():
        raise MemoryFault("cp.async from an address that is not global", warp.place())
    to = (shared.addresses_in(warp, destination, form.get("dst"))[lanes] & np.uint32(OFFSET_MASK)).astype(np.int64)
    if (to % size).any() or (start[valid > 0] % np.uint64(size)).any():
        raise MemoryFault(f"cp.async of {size} bytes: both addresses must be multiples of {size}", warp.place())
    if (to + size > warp.cta.smem.nbytes).any():
        raise MemoryFault(f"cp.async writes past the end of shared memory, at {int(to.max()):#x}", warp.place())
    _queue(warp, instr, lanes, to, start, valid, size)


def _queue(
    warp: Warp, instr: Instr, lanes: np.ndarray, to: np.ndarray, start: np.ndarray, valid: np.ndarray, size: int
) -> None:
    """One operation for all lanes."""
    cta, machine = warp.cta, warp.cta.machine
    label = f"cp.async of {len(lanes)} x {size} bytes -> shared {int(to.min()):#x}"
    own = to.astype(np.uint32) | np.uint32(cta.rank << RANK_SHIFT)
    tracked = groups.Tracked(label, groups.Written(instr.index, lanes, own, size))
    groups.add(warp, "cp.async", lanes, tracked)

    chunk = _CHUNKS[size]
    places = to // size
    partial = bool((valid != size).any())

    def complete() -> None:
        smem = cta.smem
        whole = len(smem.data) // size * size
        if partial:
            data = _zero_filled(machine.gmem, start, valid, size)
        else:
            data = _gather(machine.gmem, start, size)
        smem.data[:whole].view(chunk)[places] = data
        smem.init[:whole].view(chunk)[places] = _WRITTEN[size]
        smem.dirty[to >> 4] = shared.CP_ASYNC | warp.warp_id + 1
        if machine.race is not None:
            machine.race.shared_words(cta, to, size, True)
            machine.race.global_ranges(start[valid == size], size, False)
        if partial and machine.marks is not None:
            machine.marks.ranges(start[valid > 0], size, False)
        tracked.read = tracked.done = True
        if machine.trace is not None:
            machine.trace.cp_async(warp, instr, to, start, size)

    machine.units.issue(AsyncOp(f"cp.async:{warp.agent}", complete, label, warp, instr, writes=cta))
    machine.stats["cp_async"] += 1
    machine.stats["cp_async_bytes"] += len(lanes) * size


def _gather(gmem: GlobalMemory, start: np.ndarray, size: int) -> np.ndarray:
    """Chunks of ``size`` bytes at aligned addresses: at once if they lie in one allocation."""
    low, high = int(start.min()), int(start.max())
    found = gmem.find(low, size)
    if found is None or high + size > found.end:
        return np.ascontiguousarray(gmem.gather(start, size)).view(_CHUNKS[size])[:, 0]
    window = gmem.view(low, high + size - low).view(_CHUNKS[size])
    return window[(start - np.uint64(low)).astype(np.int64) // size]


def _zero_filled(gmem: GlobalMemory, start: np.ndarray, valid: np.ndarray, size: int) -> np.ndarray:
    """The first ``valid`` bytes of every chunk, then zeros."""
    data = np.zeros((len(start), size), np.uint8)
    for count in np.unique(valid):
        rows = np.nonzero(valid == count)[0]
        if count:
            data[rows, : int(count)] = gmem.gather(start[rows], int(count))
    return data.view(_CHUNKS[size])[:, 0]


@isa.service("cp.async.commit_group")
def commit_group(warp: Warp, instr: Instr, form: Form) -> None:
    """Commit this thread's copies since the last commit as a group."""
    groups.commit(warp, "cp.async", warp.lanes())


@isa.service("cp.async.wait_group", "cp.async.wait_all")
def wait_group(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Wait until at most N of the latest groups are pending. ``wait_all`` commits first and waits for all."""
    wait = warp.pending
    if wait is None:
        everything = form.opcode.endswith("wait_all")
        if everything:
            groups.commit(warp, "cp.async", warp.lanes())
        allowed = 0 if everything else warp.uniform(instr.operands[0], np.uint32)
        wait = groups.GroupWait(warp, "cp.async", warp.lanes(), allowed, False)
    if not wait.ready():
        warp.pending = wait
        return Block("cp.async wait_group", wait.ready, wait.detail)
    wait.prune()
    warp.pending = None
    return None


@isa.service("cp.async.mbarrier.arrive[.<noinc:noinc>][.<space:shared|shared::cta>].b64")
def arrive(warp: Warp, instr: Instr, form: Form) -> None:
    """``[addr]``: arrive when this thread's copies so far are complete. Without noinc the count pays for it."""
    addresses = shared.shared_addresses(warp, instr.operands[0], form)
    cluster, units = warp.cta.cluster, warp.cta.machine.units
    before = units.pending(f"cp.async:{warp.agent}")
    for members, (address,) in shared.lane_groups(warp.mask(), addresses):
        barrier = mbarrier.find(cluster, address, warp.place)
        if not form.has("noinc"):
            barrier.add_pending(len(members), warp.place)
        mask = sum(1 << int(lane) for lane in members)
        _queue_arrival(warp, instr, address, len(members), [op for op in before if op.lanes & mask and op.writes])


def _queue_arrival(warp: Warp, instr: Instr, address: int, count: int, after: list[AsyncOp]) -> None:
    """Arrive ``count`` times once all of ``after`` are complete."""
    units = warp.cta.machine.units

    def complete() -> None:
        mbarrier.find(warp.cta.cluster, address, pending.where).arrive(count, pending.where)

    def ready() -> bool:
        return not any(op.pending for op in after)

    label = f"arrival of {count} threads after cp.async on mbarrier {address:#x}"
    pending = AsyncOp(f"cp.async:{warp.agent}", complete, label, warp, instr, ready=ready)
    units.issue(pending)
