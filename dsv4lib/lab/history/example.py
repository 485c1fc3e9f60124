"""Write an example history in which every change is known. Its records are synthetic: nothing in them was measured.

A run a night, two of three on one machine and the third on another, at commits of which a night skips some. Files are
those of real runs, so what reads and judges them is under test as a whole. `quiet` makes histories without any change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from dsv4lib.bench import history as bench
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import records
from dsv4lib.lab.commands.benches import BENCHES
from dsv4lib.lab.history.series import BENCH, METRIC, TIME, At, History, Series
from dsv4lib.lab.verdicts import GateResult, Verdict

LEAST_RUNS, MOST_RUNS = 30, 120
RACKS = "rack 1", "rack 2"
SET = "nightly"
START = datetime(2026, 1, 5, 2, tzinfo=UTC)
BENCH_NOISE, TIME_NOISE = 0.006, 0.04
SLOWED, FASTER, BLIP = "topk k 1024", "mhc T 4096", "linear wo_b T 128"
ROWS = {  # us on the first machine
    "rmsnorm T 4096": 31.2, "inv_rope_quant T 4096": 191.0, "indexer_q T 4096": 27.8, SLOWED: 53.9,
    "router T 32": 4.93, BLIP: 17.2, "fmha CSA T 128": 43.1, FASTER: 143.0, "moe_gemm T 4096": 2200.0,
    "compressor CSA T 4096": 13.0, "swiglu_quant T 4096": 22.4, "embedding T 4096": 8.6,
}  # fmt: skip
PLACES = {  # where in the history each change comes, as a part of its runs
    "attention": 0.3, BLIP: 0.35, "norms": 0.45, SLOWED: 0.5, "cache": 0.55, "indexer": 0.6, FASTER: 0.65,
    "hopper": 0.75, "machine": 0.8, "drafts": 0.88, "router": 0.94,
}  # fmt: skip
DRIFT = 0.4, 0.5, 0.6, 0.7, 0.8


@dataclass(frozen=True)
class Notebook:
    """A synthetic notebook: its gate, the level of the gated metric, and its CPU time on the first machine."""

    metric: str
    op: str
    bound: float
    level: float
    cpu_s: float
    backend: str = "emulator"


NOTEBOOKS = {
    "attention": Notebook("error_over_torch", "<=", 2.0, 1.31, 60.0),
    "experts": Notebook("expand_db", ">=", 33.0, 34.4, 95.0),
    "indexer": Notebook("recall", ">=", 0.95, 0.979, 31.0),
    "cache": Notebook("bytes_over_floor", "<=", 1.1, 1.072, 12.0),
    "norms": Notebook("rel_l2", "<=", 3e-7, 1.03e-7, 5.0),
    "router": Notebook("recall", ">=", 0.98, 0.994, 4.0),
    "drafts": Notebook("divergence", "<=", 0.01, 0.0043, 40.0),
    "hopper": Notebook("over_floor", "<=", 1.6, 1.458, 9.0, "native"),
}


@dataclass(frozen=True)
class Injected:
    """A change that was put in, or its absence.

    Attributes:
        kind, what, label, worse: as a finding of `trends` has them.
        last, first: names of the newest run before and of the first run after.
    """

    kind: str
    what: str
    label: str
    worse: bool
    last: str
    first: str


@dataclass(frozen=True)
class Example:
    """What was written: all changes, and all commits, oldest first, also those that no night ran."""

    injected: tuple[Injected, ...]
    commits: tuple[str, ...]


def nights(runs: int, seed: int) -> tuple[list[At], list[str]]:
    """Return the runs and all commits of the example. Two nights in a row, where `cache` is flaky, run one commit."""
    if not LEAST_RUNS <= runs <= MOST_RUNS:
        raise ArgumentError("runs", runs, f"{LEAST_RUNS} to {MOST_RUNS}")
    steps = np.random.default_rng([seed, 1]).integers(1, 5, runs)
    steps[int(PLACES["cache"] * runs) + 1] = 0
    places = np.cumsum(steps) - steps[0]
    commits = [hashlib.sha1(f"{seed} {i}".encode(), usedforsecurity=False).hexdigest() for i in range(places[-1] + 1)]
    found = []
    for i, place in enumerate(places):
        started = START + timedelta(days=i)
        found.append(At(f"{started:%Y%m%dT%H%M%S.%f}Z-{i:04x}", started, commits[place], False))
    return found, commits


def rack(night: int) -> int:
    """Return which machine a night runs on."""
    return int(night % 3 == 2)


def write(folder: Path, runs: int = 42, seed: int = 0, slowdown: float = 0.08) -> Example:
    """Write records and bench files of the example under ``folder``, which must be empty or missing.

    Args:
        folder: takes the place of data/runs.
        runs: nights. seed: of noise and commits.
        slowdown: of the row `SLOWED`, as a part of its time.

    Raises:
        ArgumentError: runs out of range, or a folder that is not empty.
    """
    ats, commits = nights(runs, seed)
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError("folder", folder.name, "an empty folder")
    noise = np.random.default_rng([seed, 2])
    for night, at in enumerate(ats):
        for name, notebook in NOTEBOOKS.items():
            if name == "router" and night >= int(PLACES[name] * runs):
                continue
            record = _record(name, notebook, night, at, runs, noise)
            records.write(record, folder / at.run_id)
        _write_bench(folder / BENCHES, night, at, runs, slowdown, noise)
    return Example(tuple(_injected(ats, runs)), tuple(commits))


def level(name: str, night: int, runs: int) -> float:
    """Return the gated metric of a notebook on a night: what the emulator computes has no noise."""
    base = NOTEBOOKS[name].level
    if name == "experts":
        return base - 0.24 * sum(night >= int(place * runs) for place in DRIFT)
    after = {"attention": 1.58, "norms": 0.7e-7, "drafts": 0.0131}.get(name, base)
    return after if name in PLACES and night >= int(PLACES[name] * runs) else base


def _record(name: str, notebook: Notebook, night: int, at: At, runs: int, noise: np.random.Generator) -> records.Record:
    late = name in PLACES and night >= int(PLACES[name] * runs)
    value = level(name, night, runs)
    passed = value <= notebook.bound if notebook.op == "<=" else value >= notebook.bound
    verdict = Verdict.PASSED if passed else Verdict.GATE_FAILED
    if name == "cache" and night == int(PLACES[name] * runs):
        verdict = Verdict.ERROR
    if name == "hopper" and late and rack(night):
        verdict = Verdict.SKIPPED
    seconds = notebook.cpu_s * (1.0, 1.4)[rack(night)] * (1.7 if name == "indexer" and late else 1.0)
    seconds *= np.exp(TIME_NOISE * noise.standard_normal()) * (1.15 if noise.random() < 0.03 else 1.0)
    judged = verdict in (Verdict.PASSED, Verdict.GATE_FAILED)
    state = "passed" if passed else "failed"
    gate = GateResult(notebook.metric, notebook.op, notebook.bound, notebook.level, "an example", value, state)
    return records.Record(
        run_id=at.run_id, job=f"{name}-00", attempt=0, stage=name, title=f"Example: {name}", set=SET, kind="run",
        negative="", expect_fail="", overrides={}, parameters={}, backend=notebook.backend, arch="sm_100a",
        fingerprint=at.commit[:12], stage_fingerprint="", versions={}, machine={}, verdict=verdict,
        reason="synthetic record of an example history", started=at.started, seconds=seconds, time_limit_s=600.0,
        cpu_s=seconds, counted_s=seconds, commit=at.commit, dirty=False, label=RACKS[rack(night)],
        metrics={notebook.metric: value} if judged else {}, gates=[gate] if judged else [],
    )  # fmt: skip


def _write_bench(folder: Path, night: int, at: At, runs: int, slowdown: float, noise: np.random.Generator) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    shared = {"run_id": at.run_id, "started": at.started, "commit": at.commit, "dirty": False, "gpu": "an example"}
    shared |= {"label": RACKS[rack(night)], "driver": "", "fingerprint": at.commit[:12]}
    rows = []
    for row, us in ROWS.items():
        late = row in PLACES and night >= int(PLACES[row] * runs)
        us *= (1.0, 1.25)[rack(night)] * np.exp(BENCH_NOISE * noise.standard_normal())
        us *= {SLOWED: 1 + slowdown, FASTER: 0.91}.get(row, 1.0) if late else 1.0
        us *= 1.15 if row == BLIP and night == int(PLACES[row] * runs) else 1.0
        us *= 1.07 if rack(night) and night >= int(PLACES["machine"] * runs) else 1.0
        known = {"suite": "ops", "row": row, "provider": "ours", "what": "cold", "unit": "us"}
        rows.append(shared | known | {"value": us, "low": 0.995 * us, "high": 1.01 * us, "more_is_better": False})
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=bench.schema()), folder / f"{at.run_id}.parquet")


def _injected(ats: list[At], runs: int) -> list[Injected]:
    """All changes, with the runs between which they came on each machine, or on all of them (label "")."""

    def ends(where: str | float, label: str = "") -> tuple[str, str]:
        start = int((PLACES[where] if isinstance(where, str) else where) * runs)
        own = [i for i in range(runs) if not label or RACKS[rack(i)] == label]
        return ats[max(i for i in own if i < start)].run_id, ats[min(i for i in own if i >= start)].run_id

    def notebook(name: str) -> str:
        return f"{name} ({NOTEBOOKS[name].backend}) in {SET}"

    found = [
        Injected("step", f"{notebook(name)}: {NOTEBOOKS[name].metric}", "", name != "norms", *ends(name))
        for name in ("attention", "norms", "drafts")
    ]
    found.append(Injected("drift", f"{notebook('experts')}: {NOTEBOOKS['experts'].metric}", "", True, *ends(DRIFT[0])))
    found += [
        Injected("step", f"{notebook('indexer')}: CPU time", label, True, *ends("indexer", label)) for label in RACKS
    ]
    for label in RACKS:
        machine = f"{label}, an example"
        for row in (SLOWED, FASTER):
            found.append(Injected("step", f"ops {row}: ours, cold", machine, row == SLOWED, *ends(row, label)))
    found.append(
        Injected("machine", "all rows of a bench", f"{RACKS[1]}, an example", True, *ends("machine", RACKS[1]))
    )
    found.append(Injected("failed", notebook("drafts"), "", True, *ends("drafts")))
    found.append(Injected("vanished", notebook("router"), "", True, *ends("router")))
    found.append(Injected("skipped", notebook("hopper"), RACKS[1], True, *ends("hopper", RACKS[1])))
    flaky = int(PLACES["cache"] * runs)
    found.append(Injected("flaky", notebook("cache"), "", True, ats[flaky].run_id, ats[flaky + 1].run_id))
    return found


# ------------------------------------------------------------------- without any change

PROFILES: Mapping[str, str] = {
    "normal": "normal noise",
    "long tails": "Student's t, three degrees of freedom",
    "blips": "normal, and 3 of 100 values 10 to 30 % too long",
    "rounded": "normal, times rounded to 0.1 us",
    "six runs": "normal, six runs only",
    "one row": "normal, one row and no other",
}


def quiet(profile: str, seed: int, runs: int = 42, slowdown: float = 0.0, since: int = 1) -> History:
    """Return a history in memory in which nothing changed, or, with a slowdown, one row of a bench.

    Args:
        profile: of `PROFILES`. seed: of the noise. runs: nights.
        slowdown: of the first row, as a part of its time. since: in how many of the newest runs.

    Raises:
        ArgumentError: an unknown profile.
    """
    if profile not in PROFILES:
        raise ArgumentError("profile", profile, ", ".join(PROFILES))
    noise = np.random.default_rng([seed, 3, list(PROFILES).index(profile)])
    runs = 6 if profile == "six runs" else runs
    ats = nights(max(runs, LEAST_RUNS), seed)[0][:runs]
    rows = dict(list(ROWS.items())[:1]) if profile == "one row" else ROWS
    found = []
    for place, (row, us) in enumerate(rows.items()):
        values = us * np.exp(BENCH_NOISE * _noise(profile, noise, runs))
        values[runs - since :] *= 1 + slowdown * (place == 0)
        values = np.round(values, 1) if profile == "rounded" else values
        found.append(_series(BENCH, f"ops {row}: ours, cold", RACKS[0], "us", ats, values))
    for name, notebook in NOTEBOOKS.items():
        job = f"{name} ({notebook.backend}) in {SET}"
        values = notebook.cpu_s * np.exp(TIME_NOISE * _noise(profile, noise, runs))
        found.append(_series(TIME, f"{job}: CPU time", RACKS[0], "s", ats, values))
        constant = np.full(runs, notebook.level)
        found.append(_series(METRIC, f"{job}: {notebook.metric}", "", "", ats, constant, notebook))
    return History(found)


def _noise(profile: str, noise: np.random.Generator, runs: int) -> np.ndarray:
    """Values of one row in units of its noise."""
    if profile == "long tails":
        return noise.standard_t(3, runs)
    values = noise.standard_normal(runs)
    if profile == "blips":
        values += np.where(noise.random(runs) < 0.03, noise.uniform(0.1, 0.3, runs) / BENCH_NOISE, 0)
    return values


def _series(
    kind: str, name: str, label: str, unit: str, ats: list[At], values: np.ndarray, gate: Notebook | None = None
) -> Series:
    worse = -1 if gate is not None and gate.op == ">=" else 1
    bound = None if gate is None else gate.bound
    return Series(kind, name, label, unit, worse, tuple(ats), values, np.full(len(ats), np.nan), bound)
