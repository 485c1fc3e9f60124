"""Find phases of barriers that can mix. They have arrivals and waits that nothing keeps in their phase.

A barrier only counts. What makes the third arrival belong to the second phase is that it is ordered after the first
phase; what makes a parity mean one phase is that the next one cannot complete before every waiter has looked. Both are
judged by happens-before, so a wrong count is found although the schedule at hand paired the arrivals as intended:

* an arrival that is not ordered after those of the phase before could have been counted there (too low a count, a
  barrier shared by warps that do not know of each other, a named barrier used by other warps than its count says);
* a phase that completes without regard to a warp that has waited for the one before could have completed before that
  wait, which would then have waited for a phase that never comes, or gone through one phase too early.

Source: PTX ISA, "mbarrier: Phase of the mbarrier object", "barrier{.cta}"; happens-before as in race.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import EXECUTED, Clocks, SyncPoint
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.machine.warp import PC

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.warp import Warp


class Phases:
    """The two checks of one launch."""

    def __init__(self, machine: Any):
        self.machine = machine

    def point(self, barrier: Any, clocks: Clocks) -> SyncPoint:
        """Get the clocks of a barrier, made at the first use."""
        if barrier.sync is None:
            barrier.sync = SyncPoint(clocks.size)
        if barrier.sync.completing is None:
            barrier.sync.completing = lambda: self._complete(barrier, clocks)
        return barrier.sync

    def arrives(
        self, barrier: Any, clocks: Clocks, entry: int, epoch: int, clock: np.ndarray, where: Callable[[], Place | None]
    ) -> None:
        """Record an arrival, made under ``clock`` (uint32[rows, entries])."""
        point = self.point(barrier, clocks)
        if point.arrivals.get(entry, 0) < epoch:
            point.arrivals[entry] = epoch
        if not point.before:
            return
        known = memoryview(clock[EXECUTED])
        other = next((agent for agent, since in point.before if since > known[agent]), None)
        if other is None:
            return
        text = (
            f"{clocks.name(entry)} arrives at {_name(barrier)}, and nothing orders that after the arrival of "
            f"{clocks.name(other)} at the phase before: it could have been counted there"
        )
        self._report("barrier_phase_mixed", text, where(), getattr(barrier, "place", None))

    def looked(self, barrier: Any, clocks: Clocks, warp: Warp) -> None:
        """Record that a warp has seen the phase before complete."""
        me = warp.agent - clocks.first_agent
        point = self.point(barrier, clocks)
        point.looked[me] = max(int(clocks.epoch[me]), point.looked.get(me, (0, 0))[0]), warp.words[PC]

    def _complete(self, barrier: Any, clocks: Clocks) -> None:
        """End the phase, and check that it is ordered after all waiters of the phase before."""
        point = barrier.sync
        gathered = memoryview(point.gathering[EXECUTED])
        for entry, (epoch, pc) in point.looked.items():
            if gathered[entry] >= epoch or point.blind:
                continue
            warp = clocks.all_warps[entry]
            text = (
                f"{_name(barrier)} completes its phase {barrier.phase - 1} without anything that follows the wait of "
                f"{warp} for the phase before: that wait could have come too late"
            )
            place = warp.place(warp.program.instruction(pc))
            self._report("mbarrier_phase_unordered", text, place, getattr(barrier, "place", None))
        point.looked.clear()
        point.before = [] if point.blind else list(point.arrivals.items())
        point.arrivals = {}
        point.blind = False

    def _report(self, kind: str, text: str, place: Place | None, owner: Place | None) -> None:
        self.machine.report(kind, text, place, owner=owner)


def _name(barrier: Any) -> str:
    return getattr(barrier, "name", None) or f"named barrier {barrier.number}"
