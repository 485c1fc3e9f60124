"""Track async groups. Which copies a thread has issued, committed and not yet seen complete.

Bulk copies and cp.async have groups of their own. A group belongs to a thread; the groups of a thread count as complete
in the order of their commits, the operations within a group complete in any order.
Source: PTX ISA, "Async-group mechanism".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from dsv4lib.emulator.machine.warp import Warp


class Written(NamedTuple):
    """Words of shared memory that lanes (int64) have had copied: addresses (uint32), bytes each, by an instruction."""

    instr: int
    lanes: np.ndarray
    addresses: np.ndarray
    nbytes: int


class Tracked:
    """One operation in a group. Has it read its sources, has it written its destinations?

    ``written``: the destinations, if they belong to the lanes that wait.
    """

    __slots__ = ("done", "label", "read", "written")

    def __init__(self, label: object = "", written: Written | None = None):
        self.label, self.written = label, written  # a label is anything printable
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

    def prune(self) -> list[Tracked]:
        """Forget the oldest groups that are complete; return what was in them."""
        forgotten: list[Tracked] = []
        while self.groups and all(op.done for op in self.groups[0]):
            forgotten += self.groups.pop(0)
        return forgotten


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
        self.lanes = {lane: by_lane[lane] for lane in lanes.tolist() if lane in by_lane}
        self.allowed, self.read = allowed, read
        self.warp, self.kind = warp, kind

    def ready(self) -> bool:
        """Tell whether all lanes may go on."""
        return all(lane.complete(self.allowed, self.read) for lane in self.lanes.values())

    def prune(self) -> None:
        """Forget complete groups after the wait."""
        race = self.warp.cta.machine.race
        if race is not None:
            race.waited(self.warp, self.kind, self.allowed)
            if self.kind == "bulk" and not self.read:
                race.waited(self.warp, "bulk write", self.allowed)
        copied: dict[Tracked, int] = {}
        for lane, own in self.lanes.items():
            for op in own.prune():
                if op.written is not None:
                    copied[op] = copied.get(op, 0) | 1 << lane
        if race is not None:
            for op, lanes in copied.items():
                race.copied(self.warp, op.written, lanes)

    def detail(self) -> str:
        """Say what is missing, for the deadlock report."""
        missing = {
            str(op.label) for lane in self.lanes.values() for group in lane.groups for op in group if not op.done
        }
        return "waits for " + "; ".join(sorted(missing)[:4])
