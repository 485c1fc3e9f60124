"""Direct a schedule at named lines: what stands there happens as late as possible.

``hold:31@1,40`` holds warp 1 of every CTA before PTX line 31, and every warp before line 40, as long as anything else
can happen; asynchronous operations issued there complete as late. ``hold:kernel.py:376@0`` names a source line.
Source: K. Sen, "Race Directed Random Testing of Concurrent Programs", PLDI 2008.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.machine.policies import POLICIES, Policy
from dsv4lib.emulator.machine.warp import PC
from dsv4lib.errors import ArgumentError

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp, AsyncUnits
    from dsv4lib.emulator.machine.program import Program
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Instr

PREFIX = "hold:"
FORM = "hold:LINE[@WARP][,...] with LINE a PTX line or FILE:LINE"
_ITEM = re.compile(r"(?:(?P<file>[^@,]+):)?(?P<line>[0-9]{1,8})(?:@(?P<warp>[0-9]{1,4}))?")
# Warp-instructions of others, without a pause, after which a held warp goes on: they may spin until it does.
_PATIENCE = 30_000


@dataclass(frozen=True)
class Hold:
    """One held line: of the PTX, or of the source ``file``; ``warp`` None holds every warp."""

    line: int
    file: str = ""
    warp: int | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else str(self.line)
        return where if self.warp is None else f"{where}@{self.warp}"

    def covers(self, program: Program, instr: Instr, warp: int) -> bool:
        """Tell whether ``instr``, executed or issued by a warp, is held."""
        if self.warp is not None and self.warp != warp:
            return False
        if not self.file:
            return instr.line == self.line
        file, _, line = program.python_line(instr).rpartition(":")
        return (
            line == str(self.line)
            and PurePath(file).parts[-len(PurePath(self.file).parts) :] == PurePath(self.file).parts
        )


def parse(text: str) -> tuple[Hold, ...]:
    """Read what stands after ``hold:``.

    Raises:
        ArgumentError: it is no list of lines.
    """
    found = []
    for item in text.removeprefix(PREFIX).split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or not text.startswith(PREFIX):
            raise ArgumentError("schedule", text, FORM)
        warp = match["warp"]
        found.append(Hold(int(match["line"]), match["file"] or "", None if warp is None else int(warp)))
    return tuple(found)


class Directed(Policy):
    """Run everything but what is held, one instruction at a time; release held things one by one when nothing else can.

    Among warps that are held the one that was released least goes first, then the lowest; operations go last.
    """

    services = 1
    clusters = 4

    def __init__(self, rng: np.random.Generator, holds: tuple[Hold, ...]):
        super().__init__(rng)
        self.holds = holds
        self._known: dict[tuple[int, int, int], bool] = {}
        self._released: dict[Warp, int] = {}
        self._exhausted, self._ran = False, 0
        self._reached: set[Hold] = set()

    def counts(self) -> dict[str, int]:
        """Count which of the held lines a warp came to, or an operation was issued at."""
        return {f"{PREFIX}{one}": int(one in self._reached) for one in self.holds}

    def held(self, warp: Warp) -> bool:
        """Tell whether a ready warp stands at a held line."""
        pc = warp.words[PC]
        return self._covered(warp, warp.program.instruction(pc), pc)

    def _covered(self, warp: Warp, instr: Instr, key: int) -> bool:
        found = (id(warp.program), key, warp.warp_id)
        if found not in self._known:
            covering = {one for one in self.holds if one.covers(warp.program, instr, warp.warp_id)}
            self._known[found] = bool(covering)
            self._reached |= covering
        return self._known[found]

    def slices(self, ready: list[Warp]) -> list[tuple[Warp, int]]:
        """Choose all warps that are not held; one that is if nothing else is left."""
        free = [warp for warp in ready if not self.held(warp)]
        self._ran = self._ran + len(free) if free else 0
        if self._ran <= _PATIENCE and (free or not self._exhausted):
            self._exhausted = not free  # unless an operation completes in between
            return [(warp, 1) for warp in free]
        self._ran, self._exhausted = 0, False
        waiting = [warp for warp in ready if warp not in free]
        if not waiting:
            return [(warp, 1) for warp in free]
        chosen = min(waiting, key=lambda warp: (self._released.get(warp, 0), warp.agent))
        self._released[chosen] = self._released.get(chosen, 0) + 1
        return [(chosen, 1)]

    def completions(self, units: AsyncUnits, can_run: bool) -> list[AsyncOp]:
        """Choose the oldest operation that is not held; one that is if no warp can run either."""
        candidates = units.candidates()
        for op in candidates:
            if op.warp is None or op.instr is None or not self._covered(op.warp, op.instr, -1 - op.instr.line):
                self._exhausted = False
                return [op]
        return [] if can_run else candidates[:1]


def idle(schedule: str, stats: Iterable[Mapping[str, int]]) -> list[str]:
    """List what a schedule holds and no launch came to, by the counts of the launches."""
    if not schedule.startswith(PREFIX):
        return []
    total: Counter[str] = Counter()
    for one in stats:
        total.update(one)
    return [str(hold) for hold in parse(schedule) if not total[f"{PREFIX}{hold}"]]


def check(name: str) -> str:
    """Check the name of a schedule.

    Raises:
        ArgumentError: it names no policy, or holds what is no line.
    """
    if isinstance(name, str) and name.startswith(PREFIX):
        parse(name)
    elif not isinstance(name, str) or name not in POLICIES:
        raise ArgumentError("schedule", name, "one of " + ", ".join([*POLICIES, FORM]))
    return name


def make_policy(name: str, rng: np.random.Generator) -> Policy:
    """Make the policy called ``name``.

    Raises:
        ArgumentError: there is none.
    """
    if check(name).startswith(PREFIX):
        return Directed(rng, parse(name))
    return POLICIES[name](rng)
