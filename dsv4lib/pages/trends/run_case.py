"""Compare what was found in a history with what was put in, and rules with each other on quiet histories.

What judges a history is an argument: this module knows findings and series by their fields alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsv4lib.errors import ArgumentError


class Run(Protocol):
    """A run of a history, named by its start."""

    run_id: str
    started: datetime
    commit: str


class Series(Protocol):
    """One number over runs; kind is bench, metric or time, worse is +1 where more is worse."""

    kind: str
    name: str
    label: str
    worse: int
    at: tuple[Any, ...]
    values: NDArray[np.float64]
    bound: float | None


class Finding(Protocol):
    """One thing that changed between two runs."""

    kind: str
    what: str
    label: str
    worse: bool
    last: Any
    first: Any
    before: Any
    after: Any


class Injected(Protocol):
    """One thing that was put in, between two runs by name."""

    kind: str
    what: str
    label: str
    worse: bool
    last: str
    first: str


class History(Protocol):
    """All series and verdicts of some runs."""

    series: list[Any]
    jobs: list[Any]


Judge = Callable[[Any], Sequence[Any]]
NUMBERS, VERDICTS = ("step", "machine"), ("failed", "vanished", "skipped", "flaky")
BENCH, METRIC, TIME = "bench", "metric", "time"
WATCH = "watch"  # of a finding: the newest run alone is off, the next one decides
ENOUGH_RUNS = 5  # of the reader's own, to be shown instead of the example

# ------------------------------------------------------------------- faults

FAULTS = {
    "stale": "the newest third of the runs is not read, as of a cache that is not renewed",
    "bounds_lost": "gates lose their bounds on the way",
    "machines_mixed": "times of all machines are followed as one",
    "commit_late": "a run is named by the commit of the next one, as if it were looked up at its end",
    "smoothed": "values are averages of five runs, which only looks like less noise",
    "first_verdict": "of a commit that ran twice only the first verdict is kept",
}


def apply(fault: str, history: History) -> Any:
    """Return the history as a reader with this fault would hand it on; "none" changes nothing.

    Raises:
        ArgumentError: an unknown fault.
    """
    if fault not in ("none", *FAULTS):
        raise ArgumentError("fault", fault, ", ".join(("none", *FAULTS)))
    change = _OF_SERIES.get(fault)
    if change is not None:
        return dataclasses.replace(history, series=[change(one) for one in history.series])
    if fault == "machines_mixed":
        return dataclasses.replace(history, series=_mixed(history.series))
    if fault == "first_verdict":
        jobs = [dataclasses.replace(job, verdicts=_first_of_commit(job.verdicts)) for job in history.jobs]
        return dataclasses.replace(history, jobs=jobs)
    return history


def _stale(one: Any) -> Any:
    kept = max(2, 2 * len(one.at) // 3)
    return dataclasses.replace(one, at=one.at[:kept], values=one.values[:kept], spread=one.spread[:kept])


def _smoothed(one: Any) -> Any:
    values = one.values
    means = np.array([values[max(0, i - 4) : i + 1].mean() for i in range(len(values))])
    return dataclasses.replace(one, values=means)


_OF_SERIES: Mapping[str, Callable[[Any], Any]] = {
    "stale": _stale,
    "bounds_lost": lambda one: dataclasses.replace(one, bound=None),
    "commit_late": lambda one: dataclasses.replace(one, at=(*one.at[1:], one.at[-1])),
    "smoothed": _smoothed,
}


def _mixed(all_series: Iterable[Any]) -> list[Any]:
    by_name: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for one in all_series:
        by_name[one.kind, one.name].append(one)
    mixed = []
    for parts in by_name.values():
        points = sorted(
            (at.run_id, at, value, spread)
            for one in parts
            for at, value, spread in zip(one.at, one.values, one.spread, strict=True)
        )
        _, at, values, spread = zip(*points, strict=True)
        mixed.append(dataclasses.replace(parts[0], label="", at=at, values=np.array(values), spread=np.array(spread)))
    return mixed


def _first_of_commit(verdicts: Sequence[Any]) -> tuple[Any, ...]:
    seen: set[str] = set()
    kept = []
    for entry in verdicts:
        if entry[0].commit not in seen or not entry[0].commit:
            kept.append(entry)
        seen.add(entry[0].commit)
    return tuple(kept)


# ------------------------------------------------------------------- found and injected


@dataclass(frozen=True)
class Score:
    """What was put in, held against what was found.

    Attributes:
        found: pairs of what was put in and its finding. missed: without a finding. false: findings of nothing, but
            for those that wait for the next run.
    """

    found: tuple[tuple[Any, Any], ...]
    missed: tuple[Any, ...]
    false: tuple[Any, ...]

    def missed_of(self, kinds: Collection[str]) -> int:
        """Count what was put in of these kinds and not found."""
        return sum(one.kind in kinds for one in self.missed)

    @property
    def elsewhere(self) -> list[tuple[Any, Any]]:
        """Return what was found between two runs that do not hold the two that it was put in between."""
        return [pair for pair in self.found if not _holds(*pair)]

    @property
    def wider(self) -> list[tuple[Any, Any]]:
        """Return what was found between runs further apart than needed: one between them is an outlier."""
        return [pair for pair in self.found if _holds(*pair) and _ends(pair[1]) != (pair[0].last, pair[0].first)]


def _holds(injected: Injected, finding: Finding) -> bool:
    """Tell whether the change lies between the runs of the finding. Names of runs sort by age."""
    last, first = _ends(finding)
    return last <= injected.last and injected.first <= first


def _ends(finding: Finding) -> tuple[str, str]:
    return finding.last.run_id, finding.first.run_id


def score(injected: Iterable[Injected], found: Iterable[Finding]) -> Score:
    """Match findings with what was put in: kind, number or notebook, machine and direction must agree."""
    left = list(found)
    pairs, missed = [], []
    for one in injected:
        key = one.kind, one.what, one.label, one.worse
        match = next((f for f in left if (f.kind, f.what, f.label, f.worse) == key), None)
        if match is None:
            missed.append(one)
        else:
            pairs.append((one, match))
            left.remove(match)
    return Score(tuple(pairs), tuple(missed), tuple(one for one in left if one.kind != WATCH))


# ------------------------------------------------------------------- rules


def newest_over_last(series: Series, part: float = 0.05) -> bool:
    """Tell whether the newest value is worse than the one before by more than ``part``."""
    return _worse_by(series, float(series.values[-2])) > part


def newest_over_median(series: Series, part: float = 0.05) -> bool:
    """Tell whether the newest value is worse than the median of all earlier ones by more than ``part``."""
    return _worse_by(series, float(np.median(series.values[:-1]))) > part


def three_sigma(series: Series) -> bool:
    """Tell whether the newest value is worse than the mean of the earlier ones by three standard deviations."""
    before = series.values[:-1]
    return bool((series.values[-1] - before.mean()) * series.worse > 3 * before.std(ddof=1))


def _worse_by(series: Series, before: float) -> float:
    return series.worse * (float(series.values[-1]) / before - 1)


RULES: Mapping[str, Callable[[Series], bool]] = {
    "5 % over the run before": newest_over_last,
    "5 % over the median": newest_over_median,
    "3 standard deviations": three_sigma,
}
OURS, WATCHED = "change points", "these and watched"
ALL_RULES = (OURS, WATCHED, *RULES)


def alarmed(rule: str, history: History, judge: Judge) -> set[str]:
    """Return the names of the numbers that a rule calls worse. The plain rules look at rows of a bench alone."""
    return alarms_of(history, judge, (rule,))[rule]


def alarms_of(history: History, judge: Judge, rules: Sequence[str] = ALL_RULES) -> dict[str, set[str]]:
    """Return, by rule, the names of the numbers that it calls worse; the history is judged once."""
    found = judge(history) if {OURS, WATCHED} & set(rules) else ()
    worse = {one.name: one.worse for one in history.series}
    ours = {one.what for one in found if one.worse}
    watched = {one.what for one in found if one.kind == WATCH and (one.after - one.before) * worse[one.what] > 0}
    by_rule = {OURS: ours, WATCHED: ours | watched}
    for rule in rules:
        if rule in RULES:
            by_rule[rule] = {one.name for one in history.series if one.kind == BENCH and RULES[rule](one)}
    return {rule: by_rule[rule] for rule in rules}


@dataclass(frozen=True)
class Alarms:
    """How many quiet histories of a kind a rule alarmed in, and how many of their numbers it named."""

    rule: str
    profile: str
    histories: int
    alarmed: int
    names: int


def false_alarms(make: Callable[[str, int], Any], profiles: Iterable[str], judge: Judge, count: int) -> list[Alarms]:
    """Judge ``count`` quiet histories of each profile by every rule.

    Args:
        make: (profile, seed) -> a history in which nothing changed.
        profiles: of noise. judge: a history -> findings. count: seeds 0 to count - 1.
    """
    table = []
    for profile in profiles:
        histories = [make(profile, seed) for seed in range(count)]
        named = [alarms_of(one, judge) for one in histories]
        for rule in ALL_RULES:
            names = [one[rule] for one in named]
            table.append(Alarms(rule, profile, count, sum(map(bool, names)), sum(map(len, names))))
    return table


def alarms_pct(table: Iterable[Alarms], rule: str = OURS) -> float:
    """Return in how many per cent of all quiet histories a rule alarmed."""
    own = [one for one in table if one.rule == rule]
    return 100 * sum(one.alarmed for one in own) / sum(one.histories for one in own)


@dataclass(frozen=True)
class Caught:
    """In how many of some histories a rule found a row slower by ``slowdown`` in the ``since`` newest runs."""

    rule: str
    slowdown: float
    since: int
    histories: int
    caught: int


def caught(
    make: Callable[[int, float, int], Any], slowdowns: Sequence[float], judge: Judge, count: int, since: Sequence[int]
) -> list[Caught]:
    """Put one slowed row into ``count`` histories for each size and age, and count where each rule names it.

    Args:
        make: (seed, slowdown, since) -> a history whose first row is slower.
        slowdowns: parts of its time. judge: a history -> findings. since: in how many of the newest runs.
    """
    table = []
    for age in since:
        for slowdown in slowdowns:
            histories = [make(seed, slowdown, age) for seed in range(count)]
            named = [(one.series[0].name, alarms_of(one, judge)) for one in histories]
            for rule in ALL_RULES:
                hits = sum(name in by_rule[rule] for name, by_rule in named)
                table.append(Caught(rule, slowdown, age, count, hits))
    return table


def least_caught(table: Iterable[Caught], since: int) -> float:
    """Return the smallest slowdown from which on change points find all, in per cent; infinity for none."""
    own = sorted((one for one in table if one.rule == OURS and one.since == since), key=lambda one: -one.slowdown)
    least = float("inf")
    for one in own:
        if one.caught < one.histories:
            break
        least = 100 * one.slowdown
    return least


# ------------------------------------------------------------------- notebooks


@dataclass(frozen=True)
class Slow:
    """CPU time of a notebook on one machine: the median of its newest runs, and what it was at first."""

    name: str
    label: str
    seconds: float
    before: float
    runs: int


def slowest(history: History, count: int = 5) -> list[Slow]:
    """Return CPU times of notebooks, longest first: medians of the newest and of the first ``count`` runs."""
    found = []
    for one in history.series:
        if one.kind == TIME:
            newest, first = (float(np.median(part)) for part in (one.values[-count:], one.values[:count]))
            found.append(Slow(one.name.removesuffix(": CPU time"), one.label, newest, first, len(one.at)))
    return sorted(found, key=lambda one: -one.seconds)


def margins(history: History) -> dict[str, tuple[tuple[Any, ...], NDArray[np.float64]]]:
    """Return, by gated metric, its runs and how much of the way from its first value to its bound is used up.

    1 is the bound. Metrics whose first value is at or past their bound are left out.
    """
    found = {}
    for one in history.series:
        if one.kind != METRIC or one.bound is None:
            continue
        way = (one.bound - float(one.values[0])) * one.worse
        if way > 0:
            found[one.name] = one.at, (one.values - one.values[0]) * one.worse / way
    return found


# ------------------------------------------------------------------- the exercise


def suspects(commits: Sequence[str], last: str, first: str) -> list[str]:
    """Return the commits that can have made a change: after ``last``, up to and with ``first``, oldest first."""
    return list(commits[commits.index(last) + 1 : commits.index(first) + 1])


def bisections(count: int) -> int:
    """Return how many runs a bisection of so many suspects needs at most, the newest of which is known to be bad."""
    return max(count - 1, 0).bit_length()
