"""Order warps by words of memory. There are releases, acquires, and fences around accesses that do neither.

An access that releases leaves the warp's clock at its word, one that acquires takes over what was left. A relaxed,
volatile or atomic access without a semantic does so only with a fence: it leaves what was fenced before it, and takes
over what it found at the next fence. A fence of another warp of the cluster counts for what the warp knows by a
barrier: "all fence, all pass a barrier, one raises the flag" is silent.

Between devices both the access and the fence need ``.sys`` scope (launches.py).

Source: PTX ISA, "Memory Consistency Model", release and acquire patterns.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks
from dsv4lib.emulator.checks.launches import reaches_devices
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, GENERIC, GLOBAL, READ, WRITE

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.global_memory import GlobalRaces
    from dsv4lib.emulator.machine.cta import Cluster
    from dsv4lib.emulator.machine.warp import Warp

_LANES = np.arange(abi.LANES, dtype=np.uint32)


class Flags:
    """Words that order the warps of a cluster. Those of global memory are kept by `GlobalRaces`."""

    def __init__(self, clocks: Clocks):
        self.clocks = clocks
        self._words: dict[int, np.ndarray] = {}  # of shared memory: clocks left there
        # By reach of the fence, the device or all: what any warp has fenced.
        self._fenced = {wide: np.zeros((2, clocks.size), np.uint32) for wide in (False, True)}
        # By warp and reach of the access: what its relaxed accesses found, until a fence.
        self._read: dict[tuple[int, bool], np.ndarray] = {}

    def fenced(self, warp: Warp, wide: bool) -> None:
        """Record a fence of the warp. ``wide``: its scope includes threads of other devices."""
        clock = self.clocks.of(warp)
        for reach in (False, True) if wide else (False,):
            found = self._read.get((warp.agent, reach))
            if found is not None:
                np.maximum(clock, found, out=clock)
        if wide:
            warp.cta.machine.race.fenced_global(warp, alias=True)
        for reach in (False, True) if wide else (False,):
            np.maximum(self._fenced[reach], clock, out=self._fenced[reach])
        self.clocks.tick(warp)

    def access(self, cluster: Cluster, warp: Warp, entries: Any, far: GlobalRaces, acquire: bool) -> None:
        """Order by the reading, or the writing, half of strong accesses in the log."""
        for entry in entries:
            opcode = warp.program.instruction(int(entry["pc"])).opcode
            lanes = entry["mask"] >> _LANES & 1 != 0
            for address in np.unique(entry["addresses"][lanes]).tolist():
                if entry["code"] & GLOBAL or entry["code"] & GENERIC and address >> 56 == 0:
                    (self.acquire if acquire else self.release)(cluster, warp, opcode, address >> 2, far)
                    continue
                word = (address & 0xFFFFFFFF) >> 2
                if entry["code"] & GENERIC and address >> 56 != abi.SHARED_WINDOW >> 56:
                    continue
                left = self._words.setdefault(word, np.zeros((2, self.clocks.size), np.uint32))
                clock = self._clock(warp, opcode, acquire, False)
                into, source = (clock, left) if acquire else (left, clock)
                np.maximum(into, source, out=into)
        if not acquire and len(entries):
            self.clocks.tick(warp)

    def acquire(self, cluster: Cluster, warp: Warp, opcode: str, word: int, far: GlobalRaces) -> None:
        """Take over what was left at a word of global memory, now or at a fence to come."""
        wide = reaches_devices(opcode) and warp.cta.machine.device is not None
        if not wide or not _orders(opcode, True):
            far.acquire(cluster, word, self._clock(warp, opcode, True, False), False)
        if wide:
            far.acquire(cluster, word, self._clock(warp, opcode, True, True), True)

    def release(self, cluster: Cluster, warp: Warp, opcode: str, word: int, far: GlobalRaces) -> None:
        """Leave at a word of global memory what the warp knows, or what was fenced of it."""
        wide = reaches_devices(opcode) and warp.cta.machine.device is not None
        if not wide or not _orders(opcode, False):
            far.release(cluster, word, self._clock(warp, opcode, False, False)[CARRIED], False)
        if wide:
            if _orders(opcode, False):
                far.fence(cluster, warp, alias=True)
            far.release(cluster, word, self._clock(warp, opcode, False, True)[CARRIED], True)

    def _clock(self, warp: Warp, opcode: str, acquire: bool, wide: bool) -> np.ndarray:
        """The warp's clock if the access orders by itself, else what a fence of that reach does with it."""
        own = self.clocks.of(warp)
        if _orders(opcode, acquire):
            return own
        if acquire:
            return self._read.setdefault((warp.agent, wide), np.zeros_like(own))
        return np.minimum(own, self._fenced[wide])


def segments(strong: np.ndarray) -> list[slice]:
    """Cut a log where accesses that may synchronise follow others, or the other way round: each part has one kind."""
    cuts = [0, *(np.flatnonzero(strong[1:] != strong[:-1]) + 1).tolist(), len(strong)]
    return [slice(start, end) for start, end in itertools.pairwise(cuts)]


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
