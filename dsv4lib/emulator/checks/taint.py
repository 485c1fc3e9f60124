"""Tell apart what a kernel reads in vain. A value that should not have been read may never matter.

Kernels load past the end of a tensor, or from shared memory that nothing wrote, for rows that they do not store. Such a
read is an error once a store, a branch, an address or a unit depends on it in a lane that read it, and a note if that
has not happened by the end of the launch. What depends on it is read from the code; whether it is executed, by which
lanes, from the log of accesses. Selections are not followed: a value that ``selp`` discards counts as used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.code import Flow, directions
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.native.abi import FULL_MASK

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.warp import Warp

UNUSED = "_unused"  # ending of the kind of a read whose value did not matter
_LOGGED = ("st", "ld")  # plain accesses: the log says which lanes execute them
_CROSSING = ("shfl", "redux", "match", "vote", "ldmatrix", "movmatrix", "mma")


@dataclass
class Suspect:
    """A read whose value may not matter. ``sinks``: instructions that would make it matter; ``lanes``: that read it."""

    kind: str
    message: str
    place: Place
    facts: dict[str, Any]
    sinks: frozenset[int]
    lanes: dict[int, int] = field(default_factory=dict)  # by warp
    count: int = 0


class Taint:
    """Reads in vain of one launch. ``logs``: accesses are logged, so reads can wait for what becomes of them."""

    def __init__(self, machine: Any, logs: bool):
        self.machine = machine
        self._logs = logs
        self._flow: Flow | None = None
        self._known: dict[int, tuple[frozenset[int], bool, bool]] = {}
        self._suspects: dict[tuple[str, int], Suspect] = {}

    def read(self, kind: str, message: str, place: Place, warp: Warp, pc: int, lanes: int, **facts: Any) -> None:
        """Report a read, or remember it until its value matters."""
        sinks, certain, crosses = self._of(pc)
        at_once = self.machine.settings.fatal & {kind, "error", "all"}
        if at_once or certain or sinks and not self._logs:
            self.machine.report(kind, message, place, **facts)
            return
        suspect = self._suspects.setdefault((kind, pc), Suspect(kind, message, place, facts, sinks))
        suspect.count += 1
        suspect.lanes[warp.agent] = suspect.lanes.get(warp.agent, 0) | (FULL_MASK if crosses else lanes)

    @property
    def amount(self) -> tuple[int, int]:
        """Count the instructions with reads that may not matter, and those reads."""
        return len(self._suspects), sum(suspect.count for suspect in self._suspects.values())

    def _of(self, pc: int) -> tuple[frozenset[int], bool, bool]:
        """Sinks of a load's value; must it be taken to reach one; does it go from lane to lane?"""
        found = self._known.get(pc)
        if found is None:
            program = self.machine.program
            if self._flow is None:
                self._flow = Flow(program, *directions(program))
            sinks, passed = self._flow.sinks(pc)
            opcodes = {i: program.instruction(i).opcode.partition(".")[0] for i in sinks | passed | {pc}}
            certain = any(i in program.services or opcodes[i] not in _LOGGED for i in sinks)
            found = frozenset(sinks), certain, any(opcodes[i] in _CROSSING for i in passed | {pc})
            self._known[pc] = found
        return found

    def logged(self, warp: Warp, log: np.ndarray) -> None:
        """Look for sinks among the accesses of a warp."""
        if not self._suspects:
            return
        for key, suspect in list(self._suspects.items()):
            lanes = suspect.lanes.get(warp.agent, 0)
            if lanes and any(int(e["pc"]) in suspect.sinks and int(e["mask"]) & lanes for e in log):
                del self._suspects[key]
                self.machine.report(suspect.kind, suspect.message, suspect.place, **suspect.facts)

    def end(self) -> None:
        """Note the reads whose values did not matter."""
        for suspect in self._suspects.values():
            found = self.machine.report(suspect.kind + UNUSED, suspect.message, suspect.place, **suspect.facts)
            if found is not None:
                found.count = suspect.count
        self._suspects.clear()
