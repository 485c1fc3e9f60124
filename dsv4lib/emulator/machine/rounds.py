"""Follow the warps of a cluster around loops in which they wait for each other at barriers.

A loop with bar.sync makes arrivals for ever, so a launch that only spins seems to get on, and no warp comes around it
alone. Here all warps of a cluster are stepped side by side, an instruction each, until all of them stand where they
stood; then what leads them there is compared as for a single warp (loops.py). A slice goes on from a word that it loads
to the stores that write that word. Triton's atomics are such loops: one thread asks, the others read its answer from
shared memory after a barrier.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from dsv4lib.emulator.machine.loops import WRITES, Loop, Slices, groups_of, state_of, step
from dsv4lib.emulator.machine.warp import PC, Warp

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cluster

_STEPS = 40_000  # instructions of all warps together
_TURNS = 4  # until the slices come back


class Rounds:
    """Follows one cluster. The point that its warps come back to is chosen anew after 1, 2, 4, ... steps of each."""

    def __init__(self, cluster: Cluster, slices: Slices):
        self._cluster, self._slices = cluster, slices
        self._warps = [w for cta in cluster.ctas for w in cta.warps if not w.exited]
        self._scheduler = cluster.ctas[0].machine.scheduler
        self._begin()

    def _begin(self) -> None:
        """Choose the point that the warps have to come back to."""
        self._place = self._position()
        self._pcs: dict[Warp, set[int]] = {w: set() for w in self._warps}
        self._loaded: dict[Warp, dict[int, set]] = {w: {} for w in self._warps}
        self._turns: list[dict[Warp, Loop]] = [self._turn()]
        self._states: dict[Hashable, int] = {}
        self._registers: tuple[frozenset[int], ...] = ()
        self._stores: frozenset[int] = frozenset()

    def _turn(self) -> dict[Warp, Loop]:
        return {w: Loop([]) for w in self._warps}

    def follow(self) -> dict[Warp, Loop] | None:
        """Run until the slices come back to what they were. None: they do not, or something else happens."""
        following, steps = 1, 0
        for passed in range(1, _STEPS):
            taken = self._pass()
            steps += taken
            if not taken or steps > _STEPS:
                return None
            if self._position() == self._place:
                state = self._state()
                if state in self._states:
                    return self._loops(self._states[state])
                if len(self._turns) > _TURNS:
                    return None
                self._states[state] = len(self._turns)
                self._turns.append(self._turn())
            elif passed == following:
                following *= 2
                self._begin()
        return None

    def _pass(self) -> int:
        """Step every warp that can run. 0 if none can, or one does what is not judged."""
        taken = 0
        try:
            for warp in self._warps:
                if warp not in self._scheduler.ready:
                    continue
                pc = warp.words[PC]
                self._pcs[warp].add(pc)
                loaded = self._loaded[warp].setdefault(pc, set())
                if not step(warp, warp.program.instruction(pc), self._turns[-1][warp].changed, loaded, waits=True):
                    return 0
                taken += 1
        finally:
            self._scheduler.wake()  # also those that the warps before one that is not judged let go on
        return taken

    def _position(self) -> Hashable:
        """Where the warps are, and what has arrived at their barriers."""
        places = tuple((groups_of(w), w in self._scheduler.ready, len(w.parked)) for w in self._warps)
        named = tuple((cta.rank, key, b.arrived) for cta in self._cluster.ctas for key, b in cta.barriers.items())
        barrier = self._cluster.barrier
        if barrier is None:
            return places, named
        ahead = tuple((key, count - barrier.waits.get(key, 0)) for key, count in barrier.arrivals.items())
        return places, named, ahead, tuple(barrier.lanes.items())

    def _state(self) -> Hashable:
        """What decides where the warps go from here."""
        self._find_stores()
        registers = tuple(self._slice(w)[0] for w in self._warps)
        if registers != self._registers:
            self._states, self._registers = {}, registers
        return tuple(state_of(w, some) for w, some in zip(self._warps, registers, strict=True))

    def _slice(self, warp: Warp) -> tuple[frozenset[int], tuple[int, ...]]:
        return self._slices.of(frozenset(self._pcs[warp]), self._stores)

    def _read(self, warp: Warp) -> set:
        """Words that the slice of a warp loads."""
        return set().union(*(self._loaded[warp].get(pc, set()) for pc in self._slice(warp)[1]))

    def _find_stores(self) -> None:
        """Find the stores whose words some slice loads; with each the slices grow."""
        while True:
            reads = set().union(*(self._read(warp) for warp in self._warps))
            found = {pc for loaded in self._loaded.values() for pc, words in loaded.items() if words & reads}
            program = self._warps[0].program
            found = {pc for pc in found if program.instruction(pc).opcode.split(".")[0] in WRITES}
            if found <= self._stores:
                return
            self._stores |= found

    def _loops(self, since: int) -> dict[Warp, Loop]:
        """What each warp has repeated since a turn."""
        found = {}
        for warp, pcs in self._pcs.items():
            reads, (_, loads) = self._read(warp), self._slice(warp)
            changed = set().union(*(turn[warp].changed for turn in self._turns[since:]))
            code, polls = ([warp.program.instruction(i) for i in sorted(some)] for some in (pcs, loads))
            found[warp] = Loop(code, polls, reads, changed)
        return found
