"""Check what CTAs of a cluster need of each other. They must live long enough, and see barriers initialised.

Shared memory belongs to a CTA only until its last warp has exited. What another CTA does to it (loads, stores, atomics,
arrivals) must come before that: the exit is judged like a write of all of it by an agent that no warp hears of, so an
access that nothing orders before the exit is found although it came early enough under the schedule at hand.

A relaxed arrival at the cluster barrier releases no memory, only what was fenced before: after fence.mbarrier_init the
initialisation of mbarriers. Initialisations are agents of their own in the clocks, one a warp, so that they travel with
what synchronisation carries on from there.

Source: PTX ISA, "mapa", "barrier.cluster", "fence.mbarrier_init"; CUDA programming guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, EXECUTED, UNKNOWN, Clocks
from dsv4lib.emulator.checks.report import place_at
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.machine.warp import PC

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cluster, Cta
    from dsv4lib.emulator.machine.warp import Warp

EXIT = "exit"  # kind of the agent that stands for the end of a CTA
_INIT = "mbarrier.init"
KIND = "peer_memory_after_exit"


def reads_own(clocks: Clocks, earlier: int, op: AsyncOp | None, warp: Warp, cta: Cta) -> bool:
    """Tell whether a copy reads the memory of its own CTA after the exit: that is async_read_after_exit, not a peer's.

    Args:
        earlier: entry of the agent that made the earlier access. op: the copy. warp: its issuer. cta: whose memory.
    """
    return clocks.kinds[earlier] == EXIT and op is not None and op.reads is cta and warp.cta is cta


class Peers:
    """Lifetimes and initialised barriers of the clusters of one launch."""

    def __init__(self, machine: Any):
        self.machine = machine
        self._gone: set[Cta] = set()
        # By CTA: what others did last to its mbarriers, by agent: epoch, instruction, lanes.
        self._remote: dict[Cta, dict[int, tuple[int, int, int]]] = {}
        self._fenced: dict[int, np.ndarray] = {}  # by warp: its clock at its last fence.mbarrier_init

    # --- mbarriers --------------------------------------------------------------------------------------------------

    def initialised(self, warp: Warp, clocks: Clocks, barrier: Any) -> None:
        """Record that a warp has initialised an mbarrier. Every other use must be ordered after it."""
        me = warp.agent - clocks.first_agent
        entry = clocks.entry((_INIT, warp.agent), _INIT, f"mbarrier.init of {warp}", warp)
        if entry == UNKNOWN:
            barrier.origin = None
            return
        epoch = clocks.epochs[entry]
        clocks.epochs[entry] = epoch + 1
        clocks.learn(warp, entry, epoch)
        barrier.origin = entry, epoch, warp, {me}

    def fenced(self, warp: Warp, clocks: Clocks) -> None:
        """Record fence.mbarrier_init."""
        self._fenced[warp.agent] = clocks.of(warp).copy()

    def relaxed(self, warp: Warp, clocks: Clocks, released: np.ndarray) -> np.ndarray:
        """Add to what a relaxed arrival releases the initialisations that were fenced."""
        fenced = self._fenced.get(warp.agent)
        if fenced is None:
            return released
        inits = [entry for entry, kind in enumerate(clocks.kinds) if kind == _INIT]
        released[:, inits] = np.maximum(released[:, inits], fenced[:, inits])
        return released

    def used(self, warp: Warp, clocks: Clocks, barrier: Any, where: Callable[[], Place | None]) -> None:
        """Check that a warp may use an mbarrier: that it is initialised, and that its CTA lives."""
        me = warp.agent - clocks.first_agent
        if barrier.cta is not warp.cta:
            if barrier.cta in self._gone:
                self._report(barrier.cta, warp, where())
            self._remote.setdefault(barrier.cta, {})[me] = clocks.epochs[me], warp.words[PC], warp.mask()
        if barrier.origin is None:
            return
        entry, epoch, initialiser, known = barrier.origin
        if me in known:
            return
        known.add(me)
        if clocks.of(warp)[CARRIED, entry] < epoch:
            text = f"{warp} uses {barrier.name}, which {initialiser} has initialised, and is not ordered after that"
            self.machine.report("mbarrier_init_unordered", text, where(), owner=barrier.place)

    # --- the end of a CTA -------------------------------------------------------------------------------------------

    def exited(self, cta: Cta, last: Warp) -> None:
        """Check that what other CTAs did to the memory of one that has exited comes before that."""
        cluster = cta.cluster
        if len(cluster.ctas) == 1:
            return
        state, clocks = cluster.race, cluster.race.clocks
        known = np.maximum.reduce([clocks.of(warp)[EXECUTED] for warp in cta.warps])
        shadow, table = state.shared[cta.rank], state.accesses
        mine = {warp.agent - clocks.first_agent for warp in cta.warps}
        theirs = [entry for entry in range(len(clocks.all_warps)) if entry not in mine]
        found = {int(n) for n in np.unique(shadow.writer) if n and int(table.entry[n]) in theirs}
        for entry in theirs:
            if entry in shadow.readers and shadow.latest[entry] > known[entry]:
                found |= {int(n) for n in np.unique(shadow.readers[entry]) if n}
        for number in sorted(found):
            entry = int(table.entry[number])
            if table.epoch[number] > known[entry]:
                self._late(cta, clocks.all_warps[entry], int(table.pc[number]), int(table.lanes[number]))
        for entry, (epoch, pc, lanes) in self._remote.pop(cta, {}).items():
            if epoch > known[entry]:
                self._late(cta, clocks.all_warps[entry], pc, lanes)
        self._gone.add(cta)
        self._end(cluster, cta, last)
        if self._gone.issuperset(cluster.ctas):  # no warp is left that could use their memory
            self._gone.difference_update(cluster.ctas)

    def _end(self, cluster: Cluster, cta: Cta, last: Warp) -> None:
        """Let the end of a CTA count as a write of its memory that no warp knows of."""
        state, clocks = cluster.race, cluster.race.clocks
        entry = clocks.entry((EXIT, cta.rank), EXIT, f"the exit of {cta}")
        if entry != UNKNOWN:
            state.shared[cta.rank].writer[:] = state.accesses.add(entry, 1, int(last.words[PC]))

    def _late(self, cta: Cta, warp: Warp, pc: int, lanes: int) -> None:
        place = place_at(self.machine.program, pc, warp.cta.ctaid, warp.warp_id, lanes, self.machine.device)
        self._report(cta, warp, place)

    def _report(self, cta: Cta, warp: Warp, place: Place | None) -> None:
        text = f"{warp} uses shared memory of {cta}, and nothing keeps that CTA from having exited"
        self.machine.report(KIND, text, place, cta=cta.ctaid)
