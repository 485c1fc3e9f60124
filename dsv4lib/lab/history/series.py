"""Follow one number over runs: a gated metric, the CPU time of a notebook, a row of a bench.

What a kernel computes in the emulator is the same on every machine, so such metrics are followed over all machines.
What a GPU computes or how long anything takes is followed within one machine label (and GPU) alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4lib.lab.history import store
from dsv4lib.lab.run import manifest
from dsv4lib.lab.verdicts import Verdict

BENCH, METRIC, TIME = "bench", "metric", "time"
OURS = "ours"
NOT_JUDGED = {str(v) for v in (Verdict.SKIPPED, Verdict.INTERRUPTED, Verdict.DISK_FULL, Verdict.BAD_ARGUMENTS)}
OF_MACHINE = {str(v) for v in (Verdict.CRASH, Verdict.OOM, Verdict.TIMEOUT)}  # a busy machine does that, too
LESS, MORE = ("<=", "<"), (">=", ">")


@dataclass(frozen=True)
class At:
    """A run: its name, start, commit ("" where unknown) and whether sources differed from that commit."""

    run_id: str
    started: datetime
    commit: str = ""
    dirty: bool | None = None

    @property
    def shown(self) -> str:
        """Return the commit in ten digits, with a plus where the sources differed; else the run."""
        return self.commit[:10] + "+" * bool(self.dirty) if self.commit else f"run {self.run_id[:15]}"


@dataclass(frozen=True)
class Series:
    """One number over runs, oldest first.

    Attributes:
        kind: `BENCH`, `METRIC` or `TIME`.
        name: what it is, in words that are the same in every run.
        label: of the machine, "" for all of them.
        unit: of the values. worse: +1 where more is worse, -1 where less is.
        at: the runs. values: a number each, finite. spread: largest minus least repetition, NaN where not known.
        bound: the gate's, None without a gate.
    """

    kind: str
    name: str
    label: str
    unit: str
    worse: int
    at: tuple[At, ...]
    values: NDArray[np.float64]
    spread: NDArray[np.float64]
    bound: float | None = None

    def newest(self, count: int) -> Series:
        """Return the last ``count`` runs of it."""
        return replace(self, at=self.at[-count:], values=self.values[-count:], spread=self.spread[-count:])


@dataclass(frozen=True)
class Job:
    """One notebook with its parameters in one set over runs: what became of it, and the gates that were judged.

    ``verdicts`` has (run, verdict, gates) in the order of runs; ``label`` is of the machine where a GPU ran it.
    ``set`` is that of the run's plan; ``check`` is the name without the back end that the machine chose.
    """

    name: str
    set: str
    label: str
    verdicts: tuple[tuple[At, str, frozenset[str]], ...]
    check: str = ""


@dataclass
class History:
    """Everything that trends are judged by.

    Attributes:
        series, jobs: see there.
        whole: of each set, the runs that executed all of it, oldest first, and whether it may be a baseline; a run that
            keeps no plan counts as whole.
    """

    series: list[Series] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    whole: dict[str, list[tuple[At, bool]]] = field(default_factory=dict)


def read(runs: Path, label: str | None = None) -> History:
    """Read the history under ``runs``; with ``label``, what was measured on machines of that label only."""
    rows = [row for row in store.records_table(runs).to_pylist() if label is None or (row["label"] or "") == label]
    rows = sorted((row for row in rows if row["last"]), key=lambda row: (row["run_id"], row["started"]))
    bench = [row for row in store.bench_table(runs).to_pylist() if label is None or (row["label"] or "") == label]
    plans = {plan.run_id: plan for plan in manifest.stored(runs)}
    found = History([*_of_records(rows), *_of_bench(bench)], _jobs(rows))
    for row in rows:
        plan = plans.get(row["run_id"])
        if plan is not None and not (plan.whole and plan.state == "complete"):
            continue
        known = found.whole.setdefault(row["plan"], [])
        if not known or known[-1][0].run_id != row["run_id"]:
            known.append((_at(row), plan is not None and plan.baseline))
    return found


def _at(row: dict[str, Any]) -> At:
    return At(row["run_id"], row["started"], row["commit"] or "", row["dirty"])


def _fields(text: str | None) -> dict[str, Any]:
    return json.loads(text or "{}") or {}


def check_name(row: dict[str, Any]) -> str:
    """Return stage, parameters that its set changes, and the back end that was named: the same on every machine."""
    words = [row["stage"], *(f"{key}={value}" for key, value in sorted(_fields(row["overrides"]).items()))]
    named = _fields(row["parameters"]).get("backend", "auto")
    return " ".join(words if named == "auto" else [*words, f"({named})"])


def job_name(row: dict[str, Any]) -> str:
    """Return stage, parameters that its set changes, and the back end that it ran on: the same words in every run."""
    words = [row["stage"], *(f"{key}={value}" for key, value in sorted(_fields(row["overrides"]).items()))]
    return " ".join([*words, f"({row['backend'] or 'no back end'})"])


def place(row: dict[str, Any]) -> str:
    """Return the machine's label, or how many cores it has, and its GPU: what times are compared within."""
    facts = _fields(row["machine"])
    cores = f"{facts['cores']} cores" if facts.get("cores") else ""
    gpu = facts.get("gpu", "none")
    return ", ".join(word for word in (row["label"] or cores, "" if gpu == "none" else gpu) if word)


def _of_records(rows: Iterable[dict[str, Any]]) -> list[Series]:
    """The gated metrics and the CPU times of all jobs that ran to a verdict, injected faults left out."""
    points: dict[tuple[str, str, str], list[tuple[At, float, float]]] = defaultdict(list)
    facts: dict[tuple[str, str, str], tuple[str, int, float | None]] = {}
    for row in rows:
        if row["kind"] != "run" or row["verdict"] in NOT_JUDGED | OF_MACHINE:
            continue
        name, at = f"{job_name(row)} in {row['plan']}", _at(row)
        label = place(row)
        seconds = row["counted_s"] or row["cpu_s"]
        if seconds and row["verdict"] == str(Verdict.PASSED):
            key = TIME, f"{name}: CPU time", label
            points[key].append((at, seconds, np.nan))
            facts[key] = "s", 1, None
        for gate in row["gates"] or []:
            value = gate["value"]
            if value is None or not np.isfinite(value) or gate["op"] not in (*LESS, *MORE):
                continue
            key = METRIC, f"{name}: {gate['metric']}", label if row["backend"] == "native" else ""
            points[key].append((at, value, np.nan))
            facts[key] = "", 1 if gate["op"] in LESS else -1, gate["bound"]
    return [_series(key, points[key], *facts[key]) for key in points]


def _of_bench(rows: Iterable[dict[str, Any]]) -> list[Series]:
    points: dict[tuple[str, str, str], list[tuple[At, float, float]]] = defaultdict(list)
    facts: dict[tuple[str, str, str], tuple[str, int, None]] = {}
    for row in sorted(rows, key=lambda row: row["run_id"]):
        value = row["value"]
        ours = (row["provider"] or "").startswith(OURS)  # other people's kernels are peers of a table, no checks
        if value is None or not np.isfinite(value) or value <= 0 or not ours:
            continue
        machine = ", ".join(word for word in (row["label"], row["gpu"]) if word)
        key = BENCH, f"{row['suite']} {row['row']}: {row['provider']}, {row['what']}", machine
        known = row["low"] is not None and row["high"] is not None
        points[key].append((_at(row), value, row["high"] - row["low"] if known else np.nan))
        facts[key] = row["unit"] or "", -1 if row["more_is_better"] else 1, None
    return [_series(key, points[key], *facts[key]) for key in points]


def _series(
    key: tuple[str, str, str], points: list[tuple[At, float, float]], unit: str, worse: int, bound: float | None
) -> Series:
    at, values, spread = zip(*points, strict=True)
    return Series(*key, unit, worse, at, np.array(values, float), np.array(spread, float), bound)


def _jobs(rows: Iterable[dict[str, Any]]) -> list[Job]:
    found: dict[tuple[str, str, str], list[tuple[At, str, frozenset[str]]]] = defaultdict(list)
    checks: dict[tuple[str, str, str], str] = {}
    for row in rows:
        if row["kind"] != "run":
            continue
        key = job_name(row), row["plan"], place(row) if row["backend"] == "native" else ""
        if not row["backend"]:  # skipped for want of one: the job is the one that had it before
            same = [one for one in found if checks[one] == check_name(row) and one[1] == row["plan"]]
            key = ([one for one in same if one[2] in ("", place(row))] or [key])[-1]
        judged = frozenset(g["metric"] for g in row["gates"] or [] if g["state"] in ("passed", "failed"))
        found[key].append((_at(row), row["verdict"], judged))
        checks[key] = check_name(row)
    return [Job(*key, tuple(verdicts), checks[key]) for key, verdicts in found.items()]
