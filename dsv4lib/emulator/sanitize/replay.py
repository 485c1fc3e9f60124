"""Look for the schedule under which a finding changes a result, and say how to run it again.

Each finding names two instructions that nothing orders. Holding either of them as long as anything else can happen
(`machine.directed`) turns their order round, which the built-in policies may never do; those are tried as well.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dsv4lib.emulator.checks import Hazard
from dsv4lib.emulator.errors import EmulatorError, LimitExceeded
from dsv4lib.emulator.machine.directed import PREFIX
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.sanitize import launching
from dsv4lib.emulator.sanitize.description import Description
from dsv4lib.emulator.sanitize.findings import clean, stop
from dsv4lib.emulator.sanitize.launching import Outcome

MOST_DIRECTED = 16  # of the first findings; a kernel with more has few causes
SEEDS = {"random": (0, 1, 2), "adversarial": (0, 1, 2)}


@dataclass
class Trial:
    """One run under another schedule.

    Attributes:
        schedule, seed: as the options of the command take them.
        stopped: kind and first line of what stopped it, "" if it ended.
        unfinished: why there is no result to compare, "" if there is: a limit, or what could not be run.
        wrong: what is not as expected, as in a report.
        changed: tensors of which nothing is expected and that differ from those of the first run.
    """

    schedule: str
    seed: int
    stopped: str = ""
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unfinished: str = ""

    @property
    def differs(self) -> bool:
        """Tell whether it ended otherwise than the first run, or is wrong."""
        return bool(self.stopped or self.wrong or self.changed)

    @property
    def options(self) -> str:
        """Write the options that run it again."""
        return f"--schedule {self.schedule}" + (f" --seed {self.seed}" if self.schedule in SEEDS else "")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def directed(hazards: Iterable[Hazard]) -> list[str]:
    """List schedules that hold one of the two instructions of each hazard, errors first."""
    found: dict[str, None] = {}
    for hazard in sorted(hazards, key=lambda one: one.severity != "error"):
        for place in (hazard.place, hazard.owner):
            if place is not None and place.ptx_line:
                warp = "" if place.warp is None else f"@{place.warp}"
                found[f"{PREFIX}{place.ptx_line}{warp}"] = None
    return list(found)[:MOST_DIRECTED]


def trials(wanted: Description, ptx: str, arch: str | None, first: Outcome, **settings: Any) -> list[Trial]:
    """Run a description again under directed schedules and every built-in one.

    Args:
        first: what the first run left, with its hazards. settings: of the device, as that run had them.
    """
    given = (settings.get("schedule", "round_robin"), settings.get("seed", 0))
    planned = [(name, given[1]) for name in directed(first.hazards)]
    planned += [(name, seed) for name in POLICIES for seed in SEEDS.get(name, (given[1],))]
    free = [name for name, tensor in wanted.tensors.items() if tensor.expect is None]
    out = [_trial(*given, first, first, free)]
    for schedule, seed in dict.fromkeys(planned):
        if (schedule, seed) != given:
            try:
                again = launching.run(wanted, ptx, arch, None, **{**settings, "schedule": schedule, "seed": seed})
            except EmulatorError as error:
                out.append(Trial(schedule, seed, unfinished=_line(f"{type(error).__name__}: {error}")))
            else:
                out.append(_trial(schedule, seed, again, first, free))
    return out


def _trial(schedule: str, seed: int, outcome: Outcome, first: Outcome, free: list[str]) -> Trial:
    stopped = ""
    if isinstance(outcome.stopped, LimitExceeded):
        return Trial(schedule, seed, unfinished=_line(f"not finished within the limit: {outcome.stopped}"))
    if outcome.stopped is not None:
        found = stop(outcome.stopped)
        message = _line(found.message)
        stopped = message if message.startswith(found.kind) else clean(f"{found.kind}: {message}")
    wrong = {name: asdict(one) for name, one in outcome.wrong.items()}
    changed = []
    if outcome.stopped is None and first.stopped is None:
        changed = [name for name in free if _bits(outcome, name) != _bits(first, name)]
    return Trial(schedule, seed, stopped, wrong, changed)


def _line(message: str) -> str:
    """First line of a message."""
    return clean(message.partition("\n")[0])


def _bits(outcome: Outcome, name: str) -> str:
    """Digest of a tensor, "" if the launches left it as it was."""
    facts = outcome.tensors.get(name, {})
    return facts["sha256"] if facts.get("changed") else ""


def sentences(found: list[Trial], command: str, target: str, options: str = "") -> list[tuple[str, str]]:
    """Say in lines, each with its style, what the schedules changed.

    Args:
        options: that the first run had beside schedule and seed, as a shell takes them.
    """
    differ = [one for one in found if one.differs]
    unfinished = [one for one in found if one.unfinished]
    width = max((len(one.options) for one in differ + unfinished), default=0)
    ended = len(found) - len(unfinished)
    if differ:
        out = [("error", f"{command}: replay: {len(differ)} of {ended} schedules change the result or are wrong")]
    elif ended:
        out = [("good", f"{command}: replay: the results are the same under {ended} schedules")]
    else:
        out = [("lint", f"{command}: replay: no schedule gave a result")]
    for one in differ:
        parts = [one.stopped] if one.stopped else []
        parts += [
            f"{name} is not as expected in {facts['wrong']:,} elements, first at {facts['index']}: {facts['got']} "
            f"instead of {facts['want']}"
            for name, facts in one.wrong.items()
        ]
        parts += [f"{name} differs from the first run" for name in one.changed]
        out.append(("", f"  {one.options:{width}}  {'; '.join(parts)}"))
    out += [("lint", f"  {one.options:{width}}  {one.unfinished}") for one in unfinished]
    if differ:
        again = [command, differ[0].options, *([options] if options else []), clean(shlex.quote(target))]
        out.append(("fix", f"  again   {' '.join(again)}"))
    return out
