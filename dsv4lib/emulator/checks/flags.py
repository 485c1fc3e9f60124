"""Order warps by words of memory. There are releases, acquires, and fences around accesses that do neither.

An access that releases leaves the warp's clock at its word, one that acquires takes over what was left. A relaxed,
volatile or atomic access without a semantic does so only with a fence: it leaves what was fenced before it, and takes
over what it found at the next fence. A fence of another warp of the cluster counts for what the warp knows by a
barrier: "all fence, all pass a barrier, one raises the flag" is silent.

Source: PTX ISA, "Memory Consistency Model", release and acquire patterns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import GENERIC, GLOBAL

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
        self._fenced = np.zeros((2, clocks.size), np.uint32)  # what any warp has fenced
        self._read: dict[int, np.ndarray] = {}  # by warp: what its relaxed accesses found, until a fence

    def fenced(self, warp: Warp) -> None:
        """Record a fence of the warp."""
        clock, found = self.clocks.of(warp), self._read.get(warp.agent)
        if found is not None:
            np.maximum(clock, found, out=clock)
        np.maximum(self._fenced, clock, out=self._fenced)
        self.clocks.tick(warp)

    def access(self, cluster: Cluster, warp: Warp, entries: Any, far: GlobalRaces, acquire: bool) -> None:
        """Order by the reading, or the writing, half of strong accesses in the log."""
        own = self.clocks.of(warp)
        for entry in entries:
            clock = own
            if not _orders(warp.program.instruction(int(entry["pc"])).opcode, acquire):
                if acquire:
                    clock = self._read.setdefault(warp.agent, np.zeros_like(own))
                else:
                    clock = np.minimum(own, self._fenced)
            lanes = entry["mask"] >> _LANES & 1 != 0
            for address in np.unique(entry["addresses"][lanes]).tolist():
                if entry["code"] & GLOBAL or entry["code"] & GENERIC and address >> 56 == 0:
                    if acquire:
                        far.acquire(cluster, address >> 2, clock)
                    else:
                        far.release(cluster, address >> 2, clock[CARRIED])
                    continue
                word = (address & 0xFFFFFFFF) >> 2
                if entry["code"] & GENERIC and address >> 56 != abi.SHARED_WINDOW >> 56:
                    continue
                left = self._words.setdefault(word, np.zeros((2, self.clocks.size), np.uint32))
                into, source = (clock, left) if acquire else (left, clock)
                np.maximum(into, source, out=into)
        if not acquire and len(entries):
            self.clocks.tick(warp)


def _orders(opcode: str, acquire: bool) -> bool:
    """Does an instruction acquire, or release, by itself?"""
    return (".acquire" if acquire else ".release") in opcode or ".acq_rel" in opcode
