"""Detect races in global memory. Between warps, CTAs and clusters, and with asynchronous copies.

One shadow for the whole launch, allocation by allocation, made when the allocation is first touched: for every 4-byte
word the last write, the value it left, and the first and the latest read since. Reads of asynchronous units wait in
lists until the allocation is written for the first time, which for inputs is never.

Within a cluster the vector clocks of race.py decide. Clusters know of each other only through *words*: an access that
releases leaves the clock of its warp at the word, one that acquires takes over what was left (flags.py).
What a warp learns of other clusters is numbered, and the number travels in its clock (`Clocks.OUTSIDE`), so barriers
hand it on like everything else.

Launches that run at the same time, on several devices, share the shadows (launches.py). Between devices only accesses
and fences of ``.sys`` scope order, and a word that two devices use, one of them without that scope, is reported as
such: `scope_between_devices` if it is a flag to one of them, else `race_between_devices`. What multimem wrote through a
multicast address is read through an ordinary one after fence.proxy.alias or a release or fence of ``.sys`` scope.

In doubt this is silent: a word that only synchronises counts as ordering everything before it; of many readers two are
remembered; the knowledge of a cluster only grows. What is reported is therefore unordered in the PTX memory model; if
all bytes that both wrote are equal, it is a lint.

Source: PTX ISA, "Memory Consistency Model" (moral strength, observation, causality order).
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks, address_of
from dsv4lib.emulator.checks.launches import Known, Launches, Member, Word, merge, reaches_devices
from dsv4lib.emulator.checks.report import place_at
from dsv4lib.emulator.checks.shadow import ALL_BYTES, Actor, Fields, by_instruction
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.native.race_log import SYNC, Area

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cluster
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.memory.gmem import Allocation, GlobalMemory

_SYS = 2 * SYNC  # bit of a strong access to shared memory of a group of devices: its scope reaches all of them
_ALIAS = 4 * SYNC  # bit of an access through a multicast address
_LARGE = 1 << 28  # words of an allocation whose shadow might be refused, although little of it will be touched
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux
RANGES = 1 << 14  # ranges that wait for the first write; more go into the shadow


class Region:
    """Shadow of one allocation.

    Attributes:
        allocation: what it is of.
        base: number of its first word (address / 4); words: how many; memory: the words themselves.
        writer, first, latest: numbers of accesses (0 = none): last write, first and latest read since.
        values: what the last write left. under: a weak write that strong ones have hidden, as of `Shadow`.
        written: has anything been written; read_from: has anything been read.
        ranges: reads of asynchronous units before the first write, not yet in the shadow (starts, bytes each, access).
        block: the shadow for native code (`race_log.Area`).
    """

    def __init__(self, allocation: Allocation):
        self.allocation = allocation
        self.base = allocation.start >> 2
        self.words = (allocation.end + 3 >> 2) - self.base
        self.memory = np.frombuffer((ctypes.c_uint8 * (4 * self.words)).from_address(4 * self.base), np.uint32)
        self.writer, self.first, self.latest, self.values, self.under = (_zeros(self.words) for _ in range(5))
        self.ranges: list[tuple[np.ndarray, int, int]] = []
        self.block = Fields(Area)
        arrays = (self.writer, self.first, self.latest, self.values, self.under)
        self.block.set(allocation.start, allocation.end, self.base, *(array.ctypes.data for array in arrays))

    @property
    def written(self) -> bool:
        """Tell whether anything has been written."""
        return self.block.values[Area.WRITTEN] != 0

    @property
    def read_from(self) -> bool:
        """Tell whether anything has been read."""
        return self.block.values[Area.READ_FROM] != 0

    def split(
        self, addresses: np.ndarray, pcs: np.ndarray, lanes: np.ndarray, nbytes: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
        """Split accesses of lanes into words: (words, instructions, lanes, bytes of word)."""
        offsets = addresses.astype(np.int64)
        words = (offsets >> 2) - self.base
        if nbytes >= 4:
            if nbytes > 4:
                words = (words[:, None] + np.arange(nbytes // 4)).reshape(-1)
                pcs, lanes = np.repeat(pcs, nbytes // 4), np.repeat(lanes, nbytes // 4)
                if not (known := words < self.words).all():  # a load past the end
                    words, pcs, lanes = words[known], pcs[known], lanes[known]
            yield words, pcs, lanes, ALL_BYTES
            return
        part = offsets & 3
        many = 4 // nbytes
        if len(words) % many == 0:  # neighbours that fill words together
            rows = words.reshape(-1, many)
            if (rows == rows[:, :1]).all() and (part.reshape(-1, many) == nbytes * np.arange(many)).all():
                yield rows[:, 0], pcs[::many], lanes[::many], ALL_BYTES
                return
        for start in np.unique(part).tolist():
            chosen = part == start
            yield words[chosen], pcs[chosen], lanes[chosen], ((1 << nbytes) - 1) << start

    def read(self, words: np.ndarray, ids: Any) -> None:
        """Note reads. Of those since the last write the first one stays."""
        self.block.values[Area.READ_FROM] = 1
        first = self.first[words]
        fresh = first <= self.writer[words]
        if fresh.all():
            self.first[words] = ids
        elif fresh.any():
            self.first[words] = np.where(fresh, ids, first)
        self.latest[words] = ids


class GlobalRaces:
    """Races in the global memory of one launch.

    Args:
        machine: of the launch.
        launches: what it shares with those that run at the same time; None: nothing runs beside it.
        before: what it knows of them when it begins.
    """

    def __init__(self, machine: Any, launches: Launches | None = None, before: Known | None = None):
        self.machine = machine
        shared = self.shared = launches or Launches()
        self.accesses, self.words, self.fenced = shared.accesses, shared.words, shared.fenced
        self.regions: dict[int, Region] = shared.regions
        self._members, self._bases = shared.members, shared.bases
        self._before = before or Known()
        self._mine: list[int] = []  # numbers of its clusters
        self.known: list[Region] = []  # of live allocations
        self.listed = np.zeros(0, np.int64)  # the blocks of those that native code may look at
        self._version = -1
        self._found: dict[tuple[str, int, int], Any] = {}

    @property
    def gmem(self) -> GlobalMemory:
        """Get the global memory of the launch."""
        return self.machine.gmem

    def started(self, cluster: Cluster, clocks: Clocks) -> None:
        """Begin a cluster."""
        member = Member(self.shared.count, cluster, clocks, self.machine, self._before.partial)
        cluster.race.member, cluster.race.base = self.shared.add(member, clocks.size), member.base
        self._mine.append(cluster.race.member)

    def join(self, member: Member, agents: int) -> None:
        """Know a cluster that ran elsewhere."""
        self._mine.append(self.shared.add(member, agents))

    def fences(self) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Get what proxy fences have covered, by cluster: generic writes, and writes through multicast addresses."""
        return self.fenced, self.shared.aliased

    def ended(self) -> Known:
        """End the launch: what one knows that begins after it."""
        known = self._before.copy()
        known.whole.update(self._mine)
        for number in self._mine:
            for other, row in self._members[number].ended().items():
                merge(known.partial, other, row)
        return known

    def forget(self, start: int) -> None:
        """Drop the shadow of an allocation that this launch gives back."""
        self.regions.pop(start, None)

    def recycled(self, address: int, nbytes: int) -> None:
        """Drop what is known of a piece of an allocation: the allocator's own order stands before its next use."""
        region = self.region_of(address)
        if region is not None:
            self.fold(region)
            first = (address >> 2) - region.base
            for array in (region.writer, region.first, region.latest, region.under):
                array[first : first + (nbytes + 3 >> 2)] = 0

    # --- order ------------------------------------------------------------------------------------------------------

    def acquire(self, cluster: Cluster, word: int, clock: np.ndarray, wide: bool) -> None:
        """Acquire at a word the clocks that others may have left there.

        Args:
            cluster: that acquires.
            word: address / 4.
            clock: takes over what they left, the warp's own or what waits for a fence of it.
            wide: with a scope that includes threads of other devices.
        """
        left = self.words.get(word)
        if left is None:
            return
        number = cluster.race.member
        member = self._members[number]
        key = address_of(clock), word, wide
        if member.seen.get(key) == left.version:
            return
        member.seen[key] = left.version
        latest = member.learned[-1]
        new = dict(latest)
        found = [left.near.get(member.device, {})]
        if wide:
            found += [rows for device, rows in left.far.items() if device != member.device]
        for rows in found:
            for other, row in rows.items():
                if other == number:
                    np.maximum(clock, row, out=clock)
                else:
                    merge(new, other, row)
        if any(new[other] is not latest.get(other) for other in new):
            member.learned.append(new)
        clock[:, Clocks.OUTSIDE] = len(member.learned) - 1

    def release(self, cluster: Cluster, word: int, row: np.ndarray, wide: bool) -> None:
        """Release a row of a clock at a word; the caller advances the warp's clock. ``wide`` as of `acquire`."""
        number = cluster.race.member
        member = self._members[number]
        left = self.words.setdefault(word, Word())
        for rows in (left.near, left.far) if wide and member.device is not None else (left.near,):
            into = rows.setdefault(member.device, {})
            merge(into, number, row.copy())
            for other, known in member.learned[row[Clocks.OUTSIDE]].items():
                merge(into, other, known)
        left.version += 1

    def fence(self, cluster: Cluster, warp: Warp, alias: bool = False) -> None:
        """Publish all writes before this fence to the async proxy, or else to accesses by other addresses."""
        into = self.shared.aliased if alias else self.fenced
        number = cluster.race.member
        member = self._members[number]
        row = cluster.race.clocks.of(warp)[CARRIED]
        merge(into, number, row.copy())
        for other, known in member.learned[row[Clocks.OUTSIDE]].items():
            merge(into, other, known)

    # --- accesses ---------------------------------------------------------------------------------------------------

    def region_of(self, address: int) -> Region | None:
        """Find the shadow of the allocation that holds an address."""
        allocation = self.gmem.find(address)
        if allocation is None:
            return None
        region = self.regions.get(allocation.start)
        if region is None or region.words != (allocation.end + 3 >> 2) - region.base:
            region = self.regions[allocation.start] = Region(allocation)
        if region not in self.known:
            self.known.append(region)
            if not allocation.shared:
                self.listed = np.append(self.listed, region.block.address)
        return region

    def current(self) -> bool:
        """Tell whether `listed` is current; empty it if allocations have changed."""
        if self._version == self.gmem.version:
            return True
        self._version = self.gmem.version
        self.known, self.listed = [], np.zeros(0, np.int64)
        return False

    def lanes(
        self,
        warp: Warp,
        actor: Actor,
        addresses: np.ndarray,
        pcs: np.ndarray,
        lanes: np.ndarray,
        nbytes: int,
        write: bool,
        strong: bool,
        alias: bool = False,
    ) -> None:
        """Check accesses of single lanes: addresses (uint64), instructions, lane numbers.

        ``alias``: through a multicast address.
        """
        low, high = int(addresses.min()), int(addresses.max())
        region = self.region_of(low)
        if region is None:
            return
        if high >> 2 >= region.base + region.words:  # several allocations
            inside = addresses < np.uint64(4 * (region.base + region.words))
            for part in (inside, ~inside):
                self.lanes(warp, actor, addresses[part], pcs[part], lanes[part], nbytes, write, strong, alias)
            return
        parts: list[tuple[Any, int]] = [(slice(None), SYNC if strong else 0)]
        if region.allocation.shared:  # instruction by instruction, because each has a scope
            parts = [(pcs == pc, self._sync(warp, pc) if strong else 0) for pc in np.unique(pcs).tolist()]
        for chosen, sync in parts:
            for words, at, active_lanes, mask in region.split(addresses[chosen], pcs[chosen], lanes[chosen], nbytes):
                self._touch(region, warp, actor, words, at, active_lanes, mask | sync | _ALIAS * alias, write)

    def _sync(self, warp: Warp, pc: int) -> int:
        """Bits of a strong access."""
        return SYNC | (_SYS if reaches_devices(warp.program.instruction(pc).opcode) else 0)

    def fold(self, region: Region) -> None:
        """Enter the reads that wait into the shadow."""
        for starts, nbytes, number in region.ranges:
            region.read(words_of(starts, nbytes) - region.base, number)
        region.ranges = []

    def ranges(self, op: AsyncOp, actor: Actor, starts: np.ndarray, nbytes: int, write: bool, strong: bool) -> None:
        """Check ranges of an asynchronous operation. ``nbytes`` (4 n) at addresses (int64)."""
        if not len(starts) or nbytes <= 0:
            return
        region = self.region_of(int(starts.min()))
        if region is None:
            return
        if int(starts.max()) + nbytes > 4 * (region.base + region.words):
            return  # it leaves the allocation: for other checks
        # Reductions of copies have no scope in PTX: two of them do not conflict.
        mask = ALL_BYTES | (SYNC | _SYS if strong else 0)
        if not write and not region.written:
            number = self._number(op.warp, actor, op.instr.index, mask, op.lanes)
            region.ranges.append((starts, nbytes, number))
            if len(region.ranges) > RANGES:
                self.fold(region)
            return
        words = words_of(starts, nbytes) - region.base
        self._touch(region, op.warp, actor, words, None, None, mask, write, op)

    def _number(self, warp: Warp, actor: Actor, pcs: Any, mask: int, lanes: Any = 0) -> int:
        base = self._members[warp.cta.cluster.race.member].base
        return self.accesses.add(base + actor.entry, actor.epoch, pcs, mask, lanes)

    def _touch(
        self,
        region: Region,
        warp: Warp,
        actor: Actor,
        words: np.ndarray,
        pcs: np.ndarray | None,
        lanes: np.ndarray | None,
        mask: int,
        write: bool,
        op: AsyncOp | None = None,
    ) -> None:
        """Judge accesses to words of a region and note them. ``mask``: bytes of a word, SYNC, _SYS."""
        if write and not region.written:
            self.fold(region)
            region.block.values[Area.WRITTEN] = 1
        if pcs is None:
            ids: Any = self._number(warp, actor, op.instr.index, mask, op.lanes)
        else:
            distinct, which, active = by_instruction(pcs, lanes)
            number = self._number(warp, actor, distinct, mask, active)
            ids = number if len(distinct) == 1 else number + which
        found = None
        if region.written:
            found = self._judge(region, warp, actor, words, mask, write)
            if not write and op is not None:
                self._proxy(region, words, op)
            if not write and region.allocation.shared and not mask & (_ALIAS | SYNC):
                self._aliases(region, words, warp, op, pcs)
        if write:
            same = found is not None and found[2] == "write after write" and self._same(region, words, found[0], mask)
            if mask & SYNC:
                self._hide(region, words)
            region.writer[words] = ids
            region.values[words] = region.memory[words]
        else:
            same = False
            region.read(words, ids)
        if found is not None:
            earlier, position, what = found
            pc = op.instr.index if op is not None else int(pcs[position])
            lane = None if lanes is None else int(lanes[position])
            address = 4 * (region.base + int(words[position]))
            self._report(warp, op, pc, lane, actor, earlier, what, address, same, bool(mask & SYNC))

    def _judge(
        self, region: Region, warp: Warp, actor: Actor, words: np.ndarray, mask: int, write: bool
    ) -> tuple[int, int, str] | None:
        """(earlier access, position, what) of a conflict."""
        old = region.writer[words]
        late = self._late(warp, actor, old, mask)
        if late is not None:
            return *late, "write after write" if write else "read after write"
        if mask & SYNC:
            late = self._late(warp, actor, np.where(self.accesses.mask[old] & SYNC, region.under[words], 0), mask)
            if late is not None:
                return *late, "write after write" if write else "read after write"
        if not write:
            return None
        for reads in (region.first, region.latest) if region.read_from else ():
            ids = reads[words]
            late = self._late(warp, actor, np.where(ids > old, ids, 0), mask)
            if late is not None:
                return *late, "write after read"
        return None

    def _hide(self, region: Region, words: np.ndarray) -> None:
        """Keep the weak writes of some words that a strong one is about to hide."""
        old = region.writer[words]
        weak = (old != 0) & (self.accesses.mask[old] & SYNC == 0)
        region.under[words[weak]] = old[weak]

    def _late(self, warp: Warp, actor: Actor, ids: np.ndarray, mask: int) -> tuple[int, int] | None:
        """(number, position) of the first access that the actor is not ordered after."""
        low, high = int(ids.min()), int(ids.max())
        if high == 0:
            return None
        for number in [low] if low == high else np.unique(ids).tolist():
            if number and not self._ordered(warp, actor, number, mask):
                return number, int((ids == number).argmax())
        return None

    def _ordered(self, warp: Warp, actor: Actor, number: int, mask: int) -> bool:
        """Is the actor ordered after an access, or does it not conflict with it?"""
        table = self.accesses
        theirs = int(table.mask[number])
        if not theirs & mask & ALL_BYTES:
            return True
        if theirs & mask & SYNC and (theirs & mask & _SYS or self._device(number) == self.machine.device):
            return True
        return self.covers(warp, actor.clock[CARRIED], int(table.entry[number]), int(table.epoch[number]))

    def _device(self, number: int) -> int | None:
        """The device of an access."""
        return self._members[bisect.bisect_right(self._bases, int(self.accesses.entry[number])) - 1].device

    def covers(self, warp: Warp, row: np.ndarray, agent: int, epoch: int) -> bool:
        """Tell whether a clock of the warp's cluster covers an agent's epoch."""
        number = warp.cta.cluster.race.member
        owner = bisect.bisect_right(self._bases, agent) - 1
        if owner in self._before.whole:
            return True
        if owner != number:
            known = self._members[number].learned[row[Clocks.OUTSIDE]].get(owner)
            if known is None:
                return False
            row = known
        return bool(row[agent - self._bases[owner]] >= epoch)

    def _same(self, region: Region, words: np.ndarray, earlier: int, mask: int) -> bool:
        """Do the bytes that this write has just left equal those that an earlier one left?"""
        common = mask & int(self.accesses.mask[earlier])
        bits = np.uint32(sum(0xFF << 8 * i for i in range(4) if common >> i & 1))
        different = (region.values[words] ^ region.memory[words]) & bits != 0
        last = region.writer[words] == earlier
        return bool(last.any()) and not (different & last).any()

    def _proxy(self, region: Region, words: np.ndarray, op: AsyncOp) -> None:
        """An asynchronous read of what threads have written needs a proxy fence in between."""
        table = self.accesses
        for number in np.unique(region.writer[words]).tolist():
            if not number:
                continue
            agent = int(table.entry[number])
            owner = bisect.bisect_right(self._bases, agent) - 1
            entry = agent - self._bases[owner]
            known = self.fenced.get(owner)
            if self._members[owner].kinds[entry] != "warp" or owner in self._before.whole:
                continue
            if known is None or known[entry] < table.epoch[number]:
                text = f"{op.label} reads global memory that {self._members[owner].name(entry)} wrote in this launch"
                place, by = op.where(), self.place_of(number)
                self.machine.report("missing_proxy_fence_global", text, place, owner=by)

    def _aliases(self, region: Region, words: np.ndarray, warp: Warp, op: AsyncOp | None, pcs: Any) -> None:
        """A weak read of what was written through a multicast address needs more than an order."""
        table = self.accesses
        for number in np.unique(region.writer[words]).tolist():
            agent = int(table.entry[number])
            owner = bisect.bisect_right(self._bases, agent) - 1
            if not number or not int(table.mask[number]) & _ALIAS or owner in self._before.whole:
                continue
            known = self.shared.aliased.get(owner)
            if known is None or known[agent - self._bases[owner]] < table.epoch[number]:
                place = op.where() if op is not None else warp.place(warp.program.instruction(int(pcs[0])))
                text = f"{warp} reads memory that was written through a multicast address, without fence.proxy.alias"
                self.machine.report("missing_alias_fence", text, place, owner=self.place_of(number))

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(
        self,
        warp: Warp,
        op: AsyncOp | None,
        pc: int,
        lane: int | None,
        actor: Actor,
        earlier: int,
        what: str,
        address: int,
        same: bool,
        strong: bool,
    ) -> None:
        device = self._device(earlier)
        if device != self.machine.device:
            flag = strong or int(self.accesses.mask[earlier]) & SYNC
            kind = "scope_between_devices" if flag else "race_between_devices"
        else:
            kind = "race_global_same_value" if same else "race_global"
        key = kind, pc, int(self.accesses.pc[earlier])
        if key in self._found:
            self._found[key].count += 1
            return
        place = op.where() if op is not None else warp.place(warp.program.instruction(pc))
        if lane is not None:
            place = dataclasses.replace(place, lanes=1 << lane)
        mine = self._members[warp.cta.cluster.race.member].name(actor.entry)
        agent = int(self.accesses.entry[earlier])
        owner = bisect.bisect_right(self._bases, agent) - 1
        theirs = self._members[owner].name(agent - self._bases[owner])
        if device != self.machine.device:
            mine, theirs = f"{mine} of device {self.machine.device}", f"{theirs} of device {device}"
        allocation = self.gmem.find(address)
        where = f"{address - allocation.start:#x} of {allocation.label}" if allocation else f"{address:#x}"
        text = f"{what} in global memory at {where}: {mine} is not ordered after {theirs}"
        if kind == "scope_between_devices":
            text += f" and does not synchronise with it: {self._scopes(place, self.place_of(earlier))}"
        found = self.machine.report(
            kind, text, place, owner=self.place_of(earlier), address=address, order=what, same_value=same
        )
        if found is not None:
            self._found[key] = found

    def place_of(self, number: int) -> Place:
        """Make the place of an access."""
        table = self.accesses
        agent = int(table.entry[number])
        owner = bisect.bisect_right(self._bases, agent) - 1
        member = self._members[owner]
        ctaid, warp = member.warp(agent - self._bases[owner])
        return place_at(member.program, int(table.pc[number]), ctaid, warp, int(table.lanes[number]), member.device)

    @staticmethod
    def _scopes(*places: Place) -> str:
        """Which of two instructions is weak, or has a scope that ends at its device."""
        wrong = [p.ptx for p in places if not reaches_devices(opcode_of(p.ptx))]
        return " and ".join(f"`{text}` is weak or narrower than .sys" for text in wrong)


def opcode_of(ptx: str) -> str:
    """Get the opcode of an instruction's text, without its predicate."""
    return next(word for word in ptx.split() if not word.startswith(("@", "{"))).rstrip(";")


def _zeros(words: int) -> np.ndarray:
    """uint32[words]."""
    if words < _LARGE:
        return np.zeros(words, np.uint32)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return np.frombuffer(mmap.mmap(-1, 4 * words, flags=flags), np.uint32)


def words_of(starts: np.ndarray, nbytes: int) -> np.ndarray:
    """Number the whole words of ranges of equal length that begin at words, int64."""
    return ((starts >> 2)[:, None] + np.arange(nbytes // 4)).reshape(-1)
