"""Inject faults of a whole device: one that enters late, one that has nothing to do, one that stops on the way.

    gpus.inject(1, "late")                  # its launches begin when the others can go no further
    gpus.inject(1, "empty")                 # its launches end at once and do nothing, as if it had been given no work
    gpus.inject(1, "dropped", after=200)    # its launches stop after 200 warp-instructions, and never end

A protocol must give the same result with a late device. Without the launches of an empty device the others wait for
ever, unless the protocol knows that it is empty: a rank without tokens must still take part in the barriers. With a
dropped one they wait, too, and the report names it.
"""

from __future__ import annotations

from dataclasses import dataclass

LATE, EMPTY, DROPPED = "late", "empty", "dropped"
KINDS = (LATE, EMPTY, DROPPED)


@dataclass(frozen=True)
class RankFault:
    """A fault of one device.

    Attributes:
        kind: one of `KINDS`.
        after: warp-instructions. ``late``: of the others, after which its launches begin at the latest (None: when they
            can go no further). ``dropped``: of each of its own launches, after which that stops.
    """

    kind: str
    after: int | None = None

    def describe(self, device: int) -> str:
        """Say what the fault did, for the report of a deadlock."""
        if self.kind == DROPPED:
            return f"device {device}: stopped after {self.after} warp-instructions, an injected fault"
        if self.kind == EMPTY:
            return f"device {device}: its launches did nothing, an injected fault"
        return f"device {device}: its launches began late, an injected fault"
