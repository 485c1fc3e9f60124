"""Judge the history: what got worse or better, since which commit, on which machine.

    step       a number moved to another level and stayed there (`noise` says how far is far)
    drift      a gated metric moves towards its bound in several steps, none of which is the whole way
    machine    all rows of a bench on one machine moved together: its clocks or driver, not one kernel
    failed     a notebook passed and now fails
    vanished   a whole run executed a notebook or a gate, and the next whole runs do not
    skipped    likewise, but it is still there and says that nothing was checked
    flaky      one commit, different verdicts
    watch      the newest run alone is off, by too little to tell a change from an outlier: the next run decides

A finding names the last run before and the first run after; where both are of one commit it says so, for then the
sources did not change. A change that later runs took back is no finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dsv4lib.lab.history import noise
from dsv4lib.lab.history.noise import Values
from dsv4lib.lab.history.series import BENCH, METRIC, NOT_JUDGED, OF_MACHINE, TIME, At, History, Job, Series
from dsv4lib.lab.verdicts import Verdict

WINDOW = 60  # runs that are looked at
LEAST_CHANGE = {BENCH: 0.03, TIME: 0.25}  # of the value before
OF_MARGIN = 0.1  # of the way to the bound: a step of a gated metric
DRIFTED = 0.25  # of the way to the bound: a drift
SLOPE_Z = 4.0  # of Kendall's correlation with time
ONE_STEP = 0.75  # of the whole way in one step is a step, no drift
CONFIRMED = {TIME: 2}  # runs after a change that confirm it; elsewhere one is enough
ALONE = 8  # rows of a bench that tell a machine's shift from a kernel's


@dataclass(frozen=True)
class Finding:
    """One thing that changed.

    Attributes:
        kind: see the module. what: which number or notebook. label: of the machine, "" for all.
        worse: False for what got better.
        before, after: levels, None where it is no number. unit: theirs.
        last: newest run before. first: first run after. runs: how many runs have it since.
    """

    kind: str
    what: str
    label: str
    worse: bool
    last: At
    first: At
    runs: int
    before: float | None = None
    after: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def of_sources(self) -> bool:
        """Tell whether sources differ between the two runs, as far as their commits say."""
        return self.last.shown != self.first.shown or not self.first.commit or bool(self.first.dirty)

    @property
    def counts(self) -> bool:
        """Tell whether it makes `dsv4 trends` end with its own code: it got worse, and not at one commit by chance."""
        return self.worse and (self.of_sources or self.kind in ("flaky", "vanished"))

    @property
    def since(self) -> str:
        """Return the commits between which it came."""
        if self.kind == "flaky":
            return f"at {self.first.shown}"
        if not self.of_sources:
            return f"at {self.first.shown}, which did not change"
        return f"after {self.last.shown}, up to {self.first.shown}"

    @property
    def size(self) -> str:
        """Return by how much, in words."""
        if self.before is None or self.after is None:
            return self.note
        relative = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        return (
            f"{self.before:.4g} -> {self.after:.4g} {self.unit}".rstrip()
            + relative
            + (f"; {self.note}" if self.note else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        plain = asdict(self) | {"since": self.since, "of_sources": self.of_sources}
        for name in ("last", "first"):
            plain[name]["started"] = plain[name]["started"].isoformat()
        return plain


def judge(history: History, window: int = WINDOW) -> list[Finding]:
    """Return all findings of the newest ``window`` runs, what got worse first."""
    series = [one.newest(window) for one in history.series if len(one.at) > 1]
    found = [*_machines(series)]
    series = [_without(one, found) for one in series]
    found += _numbers(series)
    for job in history.jobs:
        found += _verdicts(job, window)
    found += _vanished(history, window)
    order = {
        kind: i
        for i, kind in enumerate(("failed", "vanished", "step", "drift", "machine", "skipped", "flaky", "watch"))
    }
    return sorted(found, key=lambda one: (not one.worse, not one.of_sources, order[one.kind], one.what))


# ------------------------------------------------------------------- numbers


def _numbers(series: Sequence[Series]) -> Iterator[Finding]:
    places = sum(len(one.values) - 1 for one in series)
    for one, (width, told_by) in zip(series, noise.of(series), strict=True):
        z = noise.z_score(places, told_by)
        drift = _drift(one, width * z) if one.kind == METRIC else None
        if drift is not None:
            yield drift
            continue
        yield from _steps(one, width, z)


def _steps(one: Series, width: float, z: float) -> Iterator[Finding]:
    """The changes of level that no later run took back."""
    parts, watched = noise.stretches(noise.scaled(one), width, z)
    level = [float(np.median(one.values[list(part.runs)])) for part in parts]
    for i in range(1, len(parts)):
        last, first = parts[i - 1].runs[-1], parts[i].runs[0]
        runs = sum(len(part.runs) for part in parts[i:])
        if runs < CONFIRMED.get(one.kind, 1) or not _matters(one, level[i - 1], level[i]):
            continue
        note = "" if told_by_itself(one, width) else "noise is assumed"
        worse = (level[i] - level[i - 1]) * one.worse > 0
        ends = one.at[last], one.at[first]
        yield Finding("step", one.name, one.label, worse, *ends, runs, level[i - 1], level[i], one.unit, note)
    if watched is not None and watched and _matters(one, level[-1], one.values[watched]):
        ends = one.at[watched - 1], one.at[watched]
        yield Finding("watch", one.name, one.label, False, *ends, 1, level[-1], float(one.values[watched]), one.unit)


def told_by_itself(one: Series, width: float) -> bool:
    """Tell whether the noise is measured, not assumed for want of runs."""
    return width != noise.ASSUMED[one.kind] or one.kind == METRIC


def _matters(one: Series, before: float, after: float) -> bool:
    """Tell whether a change is large enough for anybody: a part of the time, or of the way to a gate's bound."""
    if one.kind != METRIC:
        return abs(after / before - 1) >= LEAST_CHANGE[one.kind]
    margin = abs(one.bound - before) if one.bound is not None else abs(before)
    return abs(after - before) >= OF_MARGIN * margin and after != before


def _drift(one: Series, least_step: float) -> Finding | None:
    """A gated metric that goes towards its bound, not in one step: by steps beyond noise, or all along within it."""
    if one.bound is None or len(one.values) < 3:
        return None
    size = max(abs(one.bound), float(np.abs(one.values).max())) or 1.0
    towards = one.values * one.worse / size
    ends = _several_steps(towards, least_step) or _slope(towards)
    if ends is None:
        return None
    first, last, way = ends
    start = float(one.values[first])
    margin = abs(one.bound - start) / size
    if way < DRIFTED * margin:
        return None
    inside = (one.bound - one.values[-1]) * one.worse >= 0
    note = f"{way / margin:.0%} of the way to its bound {one.bound:.4g}" if inside and margin else "past its bound"
    return Finding(
        "drift", one.name, one.label, True, one.at[first], one.at[first + 1], len(one.at) - first - 1, start,
        float(one.values[last]), one.unit, note,
    )  # fmt: skip


def _several_steps(values: Values, least: float) -> tuple[int, int, float] | None:
    """(run before the first step, run after the last, the way): two steps up or more, none down, none nearly all."""
    moved = np.diff(values)
    steps = np.flatnonzero(np.abs(moved) > least)
    if len(steps) < 2 or (moved[steps] < 0).any():
        return None
    first, last = int(steps[0]), int(steps[-1]) + 1
    way = float(values[last] - values[first])
    return (first, last, way) if way > 0 and moved.max() <= ONE_STEP * way else None


def _slope(values: Values) -> tuple[int, int, float] | None:
    """Likewise for steps within noise: Kendall's rank correlation with time, and a line fits better than one step."""
    count = len(values)
    if count < 10:
        return None
    pairs = np.sign(values[None, :] - values[:, None])
    kendall = float(np.triu(pairs, 1).sum()) / np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    if kendall < SLOPE_Z:
        return None
    slope, start = np.polyfit(np.arange(count), values, 1)
    line = float(((values - start - slope * np.arange(count)) ** 2).sum())
    step = min(i * values[:i].var() + (count - i) * values[i:].var() for i in range(1, count))
    return (0, count - 1, float(slope) * (count - 1)) if line < step else None


def _machines(series: Sequence[Series]) -> Iterator[Finding]:
    """Bench rows of one machine that moved together, between two runs that have most of the rows."""
    by_label: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        if one.kind == BENCH:
            by_label[one.label].append(one)
    for label, rows in by_label.items():
        if len(rows) < ALONE:
            continue
        moved: dict[str, list[float]] = defaultdict(list)
        at: dict[str, tuple[At, At]] = {}
        for one in rows:
            change = np.diff(noise.scaled(one)) * one.worse
            for i, value in enumerate(change):
                moved[one.at[i + 1].run_id].append(float(value))
                at[one.at[i + 1].run_id] = one.at[i], one.at[i + 1]
        for run_id, changes in sorted(moved.items()):
            middle = float(np.median(changes))
            agree = np.mean(np.sign(changes) == np.sign(middle))
            if len(changes) >= max(ALONE, len(rows) / 2) and abs(middle) >= LEAST_CHANGE[BENCH] and agree >= 0.8:
                runs = len({a.run_id for one in rows for a in one.at if a.run_id >= run_id})
                yield Finding(
                    "machine", "all rows of a bench", label, middle > 0, *at[run_id], runs, 1.0, float(np.exp(middle)),
                    "times", f"in the middle of {len(changes)} rows",
                )  # fmt: skip


def _without(one: Series, found: Sequence[Finding]) -> Series:
    """The series with shifts of its whole machine taken back, so that only what a row did alone is left."""
    if one.kind != BENCH:
        return one
    values = one.values.copy()
    for finding in found:
        if finding.label == one.label:
            later = np.array([at.run_id >= finding.first.run_id for at in one.at])
            values[later] /= finding.after**one.worse
    return Series(**{**one.__dict__, "values": values})


# ------------------------------------------------------------------- notebooks


def _verdicts(job: Job, window: int) -> Iterator[Finding]:
    rows = job.verdicts[-window:]
    judged = [(at, verdict) for at, verdict, _ in rows if verdict not in NOT_JUDGED]
    if len(judged) > 1 and judged[-1][1] in OF_MACHINE and judged[-2][1] == Verdict.PASSED:
        judged.pop()  # a busy machine does that once; twice in a row it counts
    of_commit: dict[str, dict[str, At]] = defaultdict(dict)
    for at, verdict in judged:
        if at.commit and not at.dirty and verdict not in OF_MACHINE:
            of_commit[at.commit][verdict] = at
    flaky = {commit: verdicts for commit, verdicts in of_commit.items() if len(verdicts) > 1}
    for verdicts in flaky.values():
        ends = sorted(verdicts.values(), key=lambda at: at.run_id)
        note = " and ".join(sorted(verdicts))
        yield Finding("flaky", f"{job.name} in {job.set}", job.label, True, ends[0], ends[-1], len(ends), note=note)
    passed = [i for i, (_, verdict) in enumerate(judged) if verdict == Verdict.PASSED]
    if passed and passed[-1] < len(judged) - 1:
        last, first = judged[passed[-1]][0], judged[passed[-1] + 1][0]
        if not (first.commit in flaky and last.commit == first.commit == judged[-1][0].commit):
            note, runs = f"passed before, now {judged[-1][1]}", len(judged) - passed[-1] - 1
            yield Finding("failed", f"{job.name} in {job.set}", job.label, True, last, first, runs, note=note)
    ran = [i for i, (_, verdict, _) in enumerate(rows) if verdict not in NOT_JUDGED]
    if ran and rows[-1][1] == Verdict.SKIPPED and ran[-1] < len(rows) - 1:
        last, first = rows[ran[-1]][0], rows[ran[-1] + 1][0]
        note = "was checked before, is skipped now"
        yield Finding(
            "skipped", f"{job.name} in {job.set}", job.label, True, last, first, len(rows) - ran[-1] - 1, note=note
        )


def _vanished(history: History, window: int) -> Iterator[Finding]:
    """Notebooks and gates of whole runs that newer whole runs of the set lack, unless a baseline accepted that."""
    for set_name, known in history.whole.items():
        whole = known[-window:]
        order = {at.run_id: i for i, (at, _) in enumerate(whole)}
        seen: dict[tuple[str, str], set[int]] = defaultdict(set)  # (check, gate or "") -> runs
        names: dict[str, str] = {}
        passed: set[str] = set()  # in the newest whole run
        for job in history.jobs:
            for at, verdict, gates in job.verdicts if job.set == set_name else ():
                if at.run_id not in order:
                    continue
                check = job.check or job.name
                names[check] = job.name
                seen[check, ""].add(order[at.run_id])
                if verdict == Verdict.PASSED:
                    for gate in gates:
                        seen[check, gate].add(order[at.run_id])
                    if order[at.run_id] == len(whole) - 1:
                        passed.add(check)
        for (check, gate), runs in sorted(seen.items()):
            last = max(runs)
            if last == len(whole) - 1 or whole[last + 1][1]:
                continue
            if gate and check not in passed:
                continue  # its notebook is gone, skipped or red, which has a finding of its own
            what = f"{names[check]}: gate {gate}" if gate else names[check]
            note = "is no longer " + ("judged" if gate else "run")
            ends, since = (whole[last][0], whole[last + 1][0]), len(whole) - last - 1
            yield Finding("vanished", f"{what} in {set_name}", "", True, *ends, since, note=note)
