"""Order warps by words of memory. There are releases, acquires, and fences around accesses that do neither.

An access that releases leaves the warp's clock at its word, one that acquires takes over what was left. A relaxed,
volatile or atomic access without a semantic does so only with a fence: it leaves what was fenced before it, and takes
over what it found at the next fence. A fence of another warp of the cluster counts for what the warp knows by a
barrier: "all fence, all pass a barrier, one raises the flag" is silent, and so is "one looks at the flag, all pass a
barrier, all fence".

A scope reaches the CTA, the cluster, the device or all devices; an access or a fence whose scope ends before the other
thread orders nothing for it. Between devices both need ``.sys`` scope (launches.py).

Source: PTX ISA, "Memory Consistency Model", release and acquire patterns.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, EXECUTED, Clocks, rows
from dsv4lib.emulator.checks.launches import reaches_devices
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, GENERIC, GLOBAL, READ, STRONG, WRITE

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.global_memory import GlobalRaces
    from dsv4lib.emulator.machine.cta import Cluster
    from dsv4lib.emulator.machine.warp import Warp

_LANES = np.arange(abi.LANES, dtype=np.uint32)
_EARLIER = 4  # epochs of relaxed accesses that are kept apart
CTA, CLUSTER, GPU, SYS = range(4)  # what a scope reaches
NEVER = SYS + 1  # the scope of an access ends before the other thread: no fence makes up for that
_REACH = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": SYS, "volatile": SYS, "mmio": SYS}


@functools.lru_cache(1 << 12)
def reach_of(opcode: str) -> int:
    """Tell how far the scope of an access or a fence reaches; the default of atom and red is the device."""
    return next((_REACH[part] for part in opcode.split(".") if part in _REACH), GPU)


class _Found:
    """What relaxed accesses of a warp have found.

    Attributes:
        all: of them, a clock that keeps its address. epoch: of the warp at the latest; earlier: (epoch, clock) before.
    """

    __slots__ = ("all", "earlier", "epoch")

    def __init__(self, size: int, epoch: int):
        self.all, self.epoch = rows(size), epoch
        self.earlier: list[tuple[int, np.ndarray]] = []

    def at(self, epoch: int) -> np.ndarray:
        """Get the clock to add to."""
        if epoch != self.epoch:
            self.earlier = [*self.earlier[1 - _EARLIER :], (self.epoch, self.all.copy())]
            self.epoch = epoch
        return self.all

    def until(self, epoch: int) -> np.ndarray | None:
        """Get what was found up to an epoch, as far as it is kept."""
        if self.epoch <= epoch:
            return self.all
        return next((clock for since, clock in reversed(self.earlier) if since <= epoch), None)


class Flags:
    """Words that order the warps of a cluster. Those of global memory are kept by `GlobalRaces`, too.

    A scope that ends at the CTA or the cluster leaves nothing for others, so what was left at a word is kept by reach.
    """

    def __init__(self, clocks: Clocks):
        self.clocks = clocks
        # Clocks left at words of shared memory, and of global memory for accesses whose scope ends in the cluster:
        # by (is it global, word, rank of the CTA or -1 for the cluster).
        self._words: dict[tuple[bool, int, int], np.ndarray] = {}
        self._narrow: set[int] = set()  # words of global memory with releases whose scope ends in the cluster
        # By reach of the fence: what any warp has fenced.
        self._fenced = [rows(clocks.size) for _ in range(NEVER + 1)]
        # By warp and the least reach of the fence that it waits for: what its relaxed accesses found.
        self._read: dict[tuple[int, int], _Found] = {}

    def fenced(self, warp: Warp, reach: int) -> None:
        """Record a fence of the warp."""
        clock = self.clocks.of(warp)
        for (agent, least), waiting in list(self._read.items()):
            if agent == warp.agent:
                if least <= reach:
                    np.maximum(clock, waiting.all, out=clock)
                continue
            me = agent - self.clocks.first_agent
            if reach < (least if self.clocks.all_warps[me].cta is warp.cta else max(least, CLUSTER)):
                continue
            for row, known in enumerate(clock[:, me].tolist()):  # each by what it knows of the reader
                found = waiting.until(known)
                if found is not None:
                    np.maximum(clock[row], found[row], out=clock[row])
        if reach == SYS and warp.cta.machine.device is not None:
            warp.cta.machine.race.fenced_global(warp, alias=True)
        for fence in self._fenced[: reach + 1]:
            np.maximum(fence, clock, out=fence)
        self.clocks.tick(warp)

    def released(self, warp: Warp, reach: int) -> np.ndarray:
        """Find what a relaxed arrival or store leaves: of the memory, what a fence that reaches so far has released."""
        own = self.clocks.of(warp)
        left = np.minimum(own, self._fenced[reach])
        left[EXECUTED] = own[EXECUTED]
        return left

    def found(self, warp: Warp, left: np.ndarray, reach: int = CTA) -> None:
        """Keep what a relaxed wait or load found for the warp's next fence that reaches so far."""
        own = self.clocks.of(warp)
        np.maximum(own[EXECUTED], left[EXECUTED], out=own[EXECUTED])
        kept = self._waiting(warp, reach)
        np.maximum(kept, left, out=kept)

    def waited(self, warp: Warp, left: np.ndarray) -> None:
        """Keep what a relaxed wait found; what warps of other CTAs left is for a fence that reaches the cluster."""
        warps, agents = warp.cta.warps, self.clocks.agents()
        away = np.zeros(self.clocks.size, bool)
        away[: len(agents)] = (agents >= 0) & ((agents < warps[0].agent) | (agents > warps[-1].agent))
        if not left[:, away].any():
            self.found(warp, left)
            return
        self.found(warp, np.where(away, 0, left).astype(left.dtype))
        self.found(warp, np.where(away, left, 0).astype(left.dtype), CLUSTER)

    def _waiting(self, warp: Warp, reach: int) -> np.ndarray:
        """The clock that waits for a fence of the warp, or of one that knows of this by a barrier."""
        epoch, key = self.clocks.epochs[warp.agent - self.clocks.first_agent], (warp.agent, reach)
        if key not in self._read:
            self._read[key] = _Found(self.clocks.size, epoch)
        return self._read[key].at(epoch)

    def access(self, cluster: Cluster, warp: Warp, entries: Any, far: GlobalRaces, acquire: bool) -> None:
        """Order by the reading, or the writing, half of strong accesses in the log."""
        for entry in entries:
            opcode = warp.program.instruction(int(entry["pc"])).opcode
            lanes = entry["mask"] >> _LANES & 1 != 0
            for address in np.unique(entry["addresses"][lanes]).tolist():
                if entry["code"] & GLOBAL or entry["code"] & GENERIC and address >> 56 == 0:
                    (self.acquire if acquire else self.release)(cluster, warp, opcode, address >> 2, far)
                    continue
                if entry["code"] & GENERIC and address >> 56 != abi.SHARED_WINDOW >> 56:
                    continue
                (self._take if acquire else self._leave)(warp, opcode, False, (address & 0xFFFFFFFF) >> 2)
        if not acquire and len(entries):
            self.clocks.tick(warp)

    def acquire(self, cluster: Cluster, warp: Warp, opcode: str, word: int, far: GlobalRaces) -> None:
        """Take over what was left at a word of global memory, now or at a fence to come."""
        narrow = reach_of(opcode) < GPU
        if narrow or word in self._narrow:
            self._take(warp, opcode, True, word)
        if narrow:
            return
        wide = reaches_devices(opcode) and warp.cta.machine.device is not None
        if not wide or not _orders(opcode, True):
            far.acquire(cluster, word, self._clock(warp, opcode, True, GPU), False)
        if wide:
            far.acquire(cluster, word, self._clock(warp, opcode, True, SYS), True)

    def release(self, cluster: Cluster, warp: Warp, opcode: str, word: int, far: GlobalRaces) -> None:
        """Leave at a word of global memory what the warp knows, or what was fenced of it."""
        self._leave(warp, opcode, True, word)
        if reach_of(opcode) < GPU:
            self._narrow.add(word)
            return
        wide = reaches_devices(opcode) and warp.cta.machine.device is not None
        if not wide or not _orders(opcode, False):
            far.release(cluster, word, self._clock(warp, opcode, False, GPU)[CARRIED], False)
        if wide:
            if _orders(opcode, False):
                far.fence(cluster, warp, alias=True)
            far.release(cluster, word, self._clock(warp, opcode, False, SYS)[CARRIED], True)

    def _places(self, warp: Warp, opcode: str, far: bool, word: int) -> list[tuple[int, tuple[bool, int, int]]]:
        """Where an access leaves or finds clocks, with the reach that a fence for it needs."""
        places = [(CTA, (far, word, warp.cta.rank))]
        return places if reach_of(opcode) == CTA else [*places, (CLUSTER, (far, word, -1))]

    def _leave(self, warp: Warp, opcode: str, far: bool, word: int) -> None:
        """Release for the warps of the cluster, or of the CTA."""
        for reach, place in self._places(warp, opcode, far, word):
            left = self._words.get(place)
            if left is None:
                left = self._words[place] = rows(self.clocks.size)
            np.maximum(left, self._clock(warp, opcode, False, reach), out=left)

    def _take(self, warp: Warp, opcode: str, far: bool, word: int) -> None:
        """Acquire what warps of the cluster, or of the CTA, have left."""
        for reach, place in self._places(warp, opcode, far, word):
            left = self._words.get(place)
            if left is None:
                continue
            if _orders(opcode, True):
                clock = self.clocks.of(warp)
                np.maximum(clock, left, out=clock)
            else:
                self.found(warp, left, reach)

    def _clock(self, warp: Warp, opcode: str, acquire: bool, reach: int) -> np.ndarray:
        """The warp's clock if the access orders by itself, else what a fence of that reach does with it."""
        own = self.clocks.of(warp)
        if _orders(opcode, acquire):
            return own
        if acquire:
            return self._waiting(warp, reach)
        return self.released(warp, reach)


def segments(strong: np.ndarray) -> list[slice]:
    """Cut a log where accesses that may synchronise follow others, or the other way round: each part has one kind."""
    cuts = [0, *(np.flatnonzero(strong[1:] != strong[:-1]) + 1).tolist(), len(strong)]
    return [slice(start, end) for start, end in itertools.pairwise(cuts)]


def hidden_reads(code: np.ndarray) -> np.ndarray:
    """List the weak reads of shared memory that come after strong writes, such as atomics, in a log.

    Of one log all reads are noted before all writes. A write that conflicts with no strong one of another warp would
    hide such a read of its word from that.
    """
    near = code & GLOBAL == 0
    writes = near & (code & (STRONG | WRITE) == STRONG | WRITE)
    return np.flatnonzero(np.logical_or.accumulate(writes) & near & (code & (READ | STRONG) == READ))


def trace_far(warp: Warp, entries: Any) -> None:
    """Show the trace the accesses in the log that go to global memory."""
    for entry in entries[entries["code"] & (GLOBAL | GENERIC) != 0]:
        code = int(entry["code"])
        addresses = entry["addresses"][entry["mask"] >> _LANES & 1 != 0]
        far = addresses[addresses >> np.uint64(56) == 0]  # a generic address may be of shared memory
        if len(far):
            what = "atomic" if code & READ and code & WRITE else "load" if code & READ else "store"
            instr = warp.program.instruction(int(entry["pc"]))
            warp.cta.machine.trace.far(warp, instr, what, far, code & BYTES)


def _orders(opcode: str, acquire: bool) -> bool:
    """Does an instruction acquire, or release, by itself?"""
    return (".acquire" if acquire else ".release") in opcode or ".acq_rel" in opcode
