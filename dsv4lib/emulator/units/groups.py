"""Track async groups. Which copies a thread has issued, committed and not yet seen complete.

Bulk copies and cp.async have groups of their own. A group belongs to a thread; the groups of a thread count as complete
in the order of their commits, the operations within a group complete in any order.
Source: PTX ISA, "Async-group mechanism".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dsv4lib.emulator.machine.warp import Warp


class Tracked:
    """One operation in a group. Has it read its sources, has it written its destinations?"""

    __slots__ = ("done", "label", "read")

    def __init__(self, label: object = ""):
        self.label = label  # anything printable
        self.read = self.done = False


class LaneGroups:
    """Groups of one thread.

    Attributes:
        open: operations not committed yet; groups: committed ones, oldest first.
    """

    __slots__ = ("groups", "open")

    def __init__(self) -> None:
        self.open: list[Tracked] = []
        self.groups: list[list[Tracked]] = []

    def commit(self) -> None:
        """Make a group of everything issued since the last commit."""
        self.groups.append(self.open)
        self.open = []

    def complete(self, allowed: int, read: bool) -> bool:
        """Tell whether at most ``allowed`` of the latest groups are incomplete. ``read``: sources read."""
        older = self.groups[: max(len(self.groups) - allowed, 0)]
        return all(op.read if read else op.done for group in older for op in group)

    def prune(self) -> None:
        """Forget the oldest groups that are complete."""
        while self.groups and all(op.done for op in self.groups[0]):
            del self.groups[0]


def of(warp: Warp, kind: str) -> dict[int, LaneGroups]:
    """Get the groups of a warp by lane; ``kind`` is "bulk" or "cp.async"."""
    return warp.cta.machine.units.groups.setdefault((warp.agent, kind), {})


def add(warp: Warp, kind: str, lanes: np.ndarray, op: Tracked) -> None:
    """Add an operation that the lanes have issued."""
    by_lane = of(warp, kind)
    for lane in lanes.tolist():
        by_lane.setdefault(lane, LaneGroups()).open.append(op)


def commit(warp: Warp, kind: str, lanes: np.ndarray) -> None:
    """Commit for the lanes; an empty group counts too."""
    by_lane = of(warp, kind)
    for lane in lanes.tolist():
        by_lane.setdefault(lane, LaneGroups()).commit()
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.committed(warp, kind)


class GroupWait:
    """A wait of some lanes for their groups."""

    def __init__(self, warp: Warp, kind: str, lanes: np.ndarray, allowed: int, read: bool):
        by_lane = of(warp, kind)
        self.lanes = [by_lane[lane] for lane in lanes.tolist() if lane in by_lane]
        self.allowed, self.read = allowed, read
        self.warp, self.kind = warp, kind

    def ready(self) -> bool:
        """Tell whether all lanes may go on."""
        return all(lane.complete(self.allowed, self.read) for lane in self.lanes)

    def prune(self) -> None:
        """Forget complete groups after the wait."""
        race = self.warp.cta.machine.race
        if race is not None:
            race.waited(self.warp, self.kind, self.allowed)
            if self.kind == "bulk" and not self.read:
                race.waited(self.warp, "bulk write", self.allowed)
        for lane in self.lanes:
            lane.prune()

    def detail(self) -> str:
        """Say what is missing, for the deadlock report."""
        missing = {str(op.label) for lane in self.lanes for group in lane.groups for op in group if not op.done}
        return "waits for " + "; ".join(sorted(missing)[:4])
