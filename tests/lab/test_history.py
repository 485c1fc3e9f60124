"""History, trends and comparison: what is injected is named with its commits, a quiet history stays quiet."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dsv4lib.bench import history as bench
from dsv4lib.errors import ArgumentError
from dsv4lib.lab import records
from dsv4lib.lab.history import command, compare, noise, series, store, trends
from dsv4lib.lab.records import Record
from dsv4lib.lab.verdicts import GOT_WORSE, GateResult, Verdict

pytest.importorskip("duckdb", reason="the history is read with duckdb (extra lab)")

STAGES, ROWS = 12, 30
RECORD = Record(
    run_id="", job="", attempt=0, stage="", title="", set="nightly", kind="run", negative="", expect_fail="",
    overrides={}, parameters={}, backend="emulator", arch="sm_100a", fingerprint="0" * 12, stage_fingerprint="1" * 12,
    versions={}, machine={}, verdict=Verdict.PASSED, reason="", started=datetime(2026, 1, 1, tzinfo=UTC), seconds=9.0,
    time_limit_s=60.0, label="lab-1",
)  # fmt: skip


def commit(night: int) -> str:
    return f"{night:x}" * 40


def nightly(runs: Path, night: int, rng: np.random.Generator, **made: Any) -> str:
    """Write one night: 12 notebooks with a gate each, 30 rows of a bench. ``made`` says what is wrong with it."""
    started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=night)
    run_id = f"{started:%Y%m%dT%H%M%S.%f}Z-{night:04x}"
    (runs / run_id / "records").mkdir(parents=True)
    of_commit = made.get("commit", commit(night))
    for number in range(STAGES):
        if number in made.get("without", ()):
            continue
        value = 1e-3 * (number + 1) * made.get("error", {}).get(number, 1.0)
        bound = 2.5e-3 * (number + 1)
        state = "passed" if value <= bound else "failed"
        one = replace(
            RECORD, run_id=run_id, job=f"s{number}-00", stage=f"s{number}", started=started, commit=of_commit,
            dirty=False, cpu_s=(5 + number) * float(np.exp(0.08 * rng.standard_normal())), metrics={"error": value},
            gates=[GateResult("error", "<=", bound, value, "", value, state)],
            verdict=made.get("verdict", {}).get(number, Verdict.PASSED),
        )  # fmt: skip
        records.write(one, runs / run_id)
    measured = []
    for number in range(ROWS):
        us = 2.0 * 1.2**number * float(np.exp(0.004 * rng.standard_normal())) * made.get("slow", {}).get(number, 1.0)
        measured.append(bench.Measured("ops", f"op{number} T 8", "ours", "cold", us, us * 0.99, us * 1.01))
    patched = _as_of(started, run_id, of_commit)
    with patched:
        assert bench.append(measured, runs / "bench", {"gpu": "a GPU"}) is not None
    return run_id


def _as_of(started: datetime, run_id: str, of_commit: str) -> pytest.MonkeyPatch.context:
    context = pytest.MonkeyPatch.context()

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return started

    class Both:
        def __enter__(self) -> None:
            patch = context.__enter__()
            patch.setattr(bench, "datetime", Then)
            patch.setattr(bench.env, "revision", lambda: (of_commit, False))
            patch.setattr(bench.env, "machine_label", lambda: "lab-1")

        def __exit__(self, *given: Any) -> None:
            context.__exit__(*given)

    return Both()  # type: ignore[return-value]


def told(runs: Path) -> list[trends.Finding]:
    return [one for one in trends.judge(series.read(runs)) if one.kind != "watch"]


def test_three_injected_faults_are_named_with_their_commits_and_nothing_else(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    nightly(tmp_path, 1, rng)
    nightly(tmp_path, 2, rng, error={3: 1.3}, slow={7: 1.1})
    nightly(tmp_path, 3, rng, error={3: 1.6}, slow={7: 1.1}, without=(5,))
    found = {one.kind: one for one in told(tmp_path)}
    assert set(found) == {"step", "drift", "vanished"} and len(told(tmp_path)) == 3
    assert found["step"].what == "ops op7 T 8: ours, cold" and found["step"].label == "lab-1, a GPU"
    assert (found["step"].last.commit, found["step"].first.commit) == (commit(1), commit(2))
    assert found["step"].after / found["step"].before == pytest.approx(1.1, rel=0.03)
    assert found["drift"].what == "s3 (emulator) in nightly: error" and "40% of the way" in found["drift"].note
    assert (found["drift"].last.commit, found["drift"].first.commit) == (commit(1), commit(2))
    assert found["vanished"].what == "s5 (emulator) in nightly"
    assert (found["vanished"].last.commit, found["vanished"].first.commit) == (commit(2), commit(3))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
def test_twenty_quiet_nights_show_nothing(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for night in range(20):
        nightly(tmp_path, night, rng, commit=commit(night // 5))
        if night in (1, 2, 9, 19):
            assert told(tmp_path) == [], night


def numbers(values: Any, kind: str = series.BENCH, bound: float | None = None, worse: int = 1) -> series.Series:
    values = np.asarray(values, float)
    at = tuple(
        series.At(f"{i:04d}", datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=i), f"{i:040x}", False)
        for i in range(len(values))
    )
    return series.Series(kind, "it", "m", "us", worse, at, values, np.full(len(values), np.nan), bound)


def judged(*given: series.Series) -> list[trends.Finding]:
    return trends.judge(series.History(list(given)))


def noisy(rng: np.random.Generator, runs: int, width: float = 0.003) -> np.ndarray:
    return 100 * np.exp(width * rng.standard_normal(runs))


@pytest.mark.parametrize("runs", [2, 3, 10, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("tails", ["normal", "long"])
def test_false_alarms_are_rare(runs: int, tails: str) -> None:
    alarms = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(40):
            draw = rng.standard_normal(runs) if tails == "normal" else rng.standard_t(4, runs)
            rows.append(numbers(100 * np.exp(0.004 * rng.uniform(0.3, 2) * draw)))
        alarms += any(one.kind != "watch" for one in judged(*rows))
    assert alarms <= (0 if tails == "normal" else 2)


def test_three_percent_are_found_where_noise_allows_and_not_where_it_does_not() -> None:
    rng = np.random.default_rng(3)
    quiet = [numbers(noisy(rng, 12, 0.002)) for _ in range(30)]
    slower = noisy(rng, 12, 0.002) * np.where(np.arange(12) < 8, 1.0, 1.035)
    found = [one for one in judged(*quiet, replace(numbers(slower), name="slower")) if one.kind == "step"]
    assert [one.what for one in found] == ["slower"] and found[0].first.run_id == "0008" and found[0].runs == 4
    loud = [numbers(noisy(rng, 12, 0.03)) for _ in range(30)]
    slower = noisy(rng, 12, 0.03) * np.where(np.arange(12) < 8, 1.0, 1.035)
    assert [one for one in judged(*loud, numbers(slower)) if one.kind == "step"] == []


def test_one_run_off_is_watched_and_a_change_that_is_taken_back_is_none() -> None:
    rng = np.random.default_rng(4)
    others = [numbers(noisy(rng, 10, 0.0045)) for _ in range(30)]
    values = noisy(rng, 10, 0.0045)
    spike = values * np.where(np.arange(10) == 5, 1.5, 1)
    back = values * np.where((np.arange(10) > 3) & (np.arange(10) < 7), 1.2, 1)
    assert judged(*others, numbers(spike), numbers(back)) == []
    late = replace(numbers(values * np.where(np.arange(10) == 9, 1.035, 1)), name="late")
    assert [(one.kind, one.what, one.worse) for one in judged(*others, late)] == [("watch", "late", False)]


def test_what_got_faster_is_better_and_less_throughput_is_worse() -> None:
    rng = np.random.default_rng(5)
    others = [numbers(noisy(rng, 10)) for _ in range(30)]
    faster = noisy(rng, 10) * np.where(np.arange(10) < 5, 1, 0.8)
    assert [one.worse for one in judged(*others, numbers(faster))] == [False]
    assert [one.worse for one in judged(*others, numbers(faster, worse=-1))] == [True]


def test_a_machine_that_shifts_is_one_finding_and_the_row_that_shifts_more_another() -> None:
    rng = np.random.default_rng(6)
    shift = np.where(np.arange(8) < 5, 1, 1.08)
    rows = [replace(numbers(noisy(rng, 8) * shift), name=f"row {i}") for i in range(20)]
    rows.append(replace(numbers(noisy(rng, 8) * shift * np.where(np.arange(8) < 6, 1, 1.3)), name="alone"))
    found = judged(*rows)
    assert [(one.kind, one.what) for one in found] == [("step", "alone"), ("machine", "all rows of a bench")]
    assert found[0].first.run_id == "0006" and found[1].first.run_id == "0005"


def test_a_gate_that_drifts_in_many_small_steps_and_one_that_steps_once() -> None:
    drift = numbers(np.linspace(1.0, 1.5, 12), series.METRIC, bound=2.0)
    step = numbers([1.0] * 6 + [1.5] * 6, series.METRIC, bound=2.0)
    away = numbers(np.linspace(1.5, 1.0, 12), series.METRIC, bound=2.0)
    assert [one.kind for one in judged(drift)] == ["drift"]
    assert [one.kind for one in judged(step)] == ["step"]
    assert not any(one.worse for one in judged(away))
    mostly_one = numbers([1.0, 1.4, 1.42, 1.42], series.METRIC, bound=2.0)
    back_and_forth = numbers([1.0, 1.25, 1.15, 1.45], series.METRIC, bound=2.0)
    assert "drift" not in {one.kind for one in judged(mostly_one)} | {one.kind for one in judged(back_and_forth)}
    rng = np.random.default_rng(14)
    noisy_drift = np.linspace(1.0, 1.5, 30) + 0.03 * rng.standard_normal(30)
    assert [one.kind for one in judged(numbers(noisy_drift, series.METRIC, bound=2.0))] == ["drift"]
    flat = 1.0 + 0.03 * rng.standard_normal(30)
    assert judged(numbers(flat, series.METRIC, bound=2.0)) == []


def test_one_commit_with_two_speeds_is_said_and_is_no_regression(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    for night in range(4):
        nightly(tmp_path, night, rng, commit=commit(1), slow={7: 1.0 if night < 2 else 1.2})
    (found,) = told(tmp_path)
    assert found.worse and not found.of_sources and "did not change" in found.since
    assert command.trend(tmp_path, None, 60, False, None, Console(quiet=True)) == 0


def test_failed_skipped_and_flaky_notebooks(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    bad = {2: Verdict.GATE_FAILED, 4: Verdict.SKIPPED}
    nightly(tmp_path, 1, rng)
    nightly(tmp_path, 2, rng, verdict=bad | {6: Verdict.ERROR})
    nightly(tmp_path, 3, rng, commit=commit(2), verdict=bad)
    found = {one.kind: one for one in told(tmp_path)}
    assert {kind: one.what.split()[0] for kind, one in found.items()} == {
        "failed": "s2",
        "skipped": "s4",
        "flaky": "s6",
    }
    assert found["failed"].runs == 2 and found["failed"].first.commit == commit(2)
    assert found["flaky"].since == f"at {commit(2)[:10]}"


def test_trends_prints_one_screen_and_notifies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(9)
    runs, seen = tmp_path / "runs", tmp_path / "seen.json"
    nightly(runs, 1, rng)
    nightly(runs, 2, rng, slow={i: 1.5 for i in range(0, 12)})
    code = f"import sys, pathlib; pathlib.Path({str(seen)!r}).write_text(sys.stdin.read())"
    told_by = f'{sys.executable} -c "{code}"'
    assert command.trend(runs, None, 60, False, told_by, Console()) == GOT_WORSE
    out = capfd.readouterr().out
    assert "12 worse, 0 better" in out and "step: ops op3 T 8: ours, cold on lab-1, a GPU" in out
    assert len(out.splitlines()) <= command.LINES + 4
    assert json.loads(seen.read_text())["worse"] == 12
    assert command.trend(runs, None, 60, False, "/no/such/command", Console(quiet=True)) == GOT_WORSE
    assert "--notify could not run" in capfd.readouterr().err
    assert command.trend(runs, "another machine", 60, True, None, Console(quiet=True)) == 0


def test_history_answers_sql_and_reads_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(10)
    for night in (1, 2):
        nightly(tmp_path, night, rng, verdict={1: Verdict.ERROR})
    names, rows = store.query(tmp_path, "SELECT stage, max(value) AS most FROM metrics GROUP BY stage ORDER BY most")
    assert names == ["stage", "most"] and len(rows) == STAGES and rows[0] == ("s0", 1e-3)
    assert store.query(tmp_path, "SELECT jobs, passed, failed FROM runs")[1] == [(12, 11, 1)] * 2
    assert store.query(tmp_path, "SELECT count(*), count(DISTINCT run_id) FROM bench")[1] == [(60, 2)]
    for text in ("SELECT nothing", "COPY runs TO '/tmp/x.csv'", "SELECT * FROM read_csv('/etc/passwd')", ""):
        if text:
            with pytest.raises(ArgumentError, match="sql="):
                store.query(tmp_path, text)
    assert command.history(tmp_path, 20, {"set": None, "stage": "s3", "label": None}, None, Console(width=200)) == 0
    assert capsys.readouterr().out.count("2026-01-0") == 2
    assert command.history(tmp_path / "none", 20, {"set": None}, None, Console()) == 0
    assert "no run yet" in capsys.readouterr().out


def test_foreign_and_cut_files_are_left_out_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(11)
    run_id = nightly(tmp_path, 1, rng)
    good = next((tmp_path / "bench").glob("*.parquet"))
    (tmp_path / "bench" / "cut.parquet").write_bytes(good.read_bytes()[:100])
    (tmp_path / run_id / "records" / "cut.parquet").write_bytes(b"PAR1")
    assert len(series.read(tmp_path).series) == 2 * STAGES + ROWS
    said = capsys.readouterr().err
    assert "cut.parquet is no bench and is left out" in said and "records/cut.parquet is no record" in said


def test_records_of_a_complete_run_are_joined_and_a_later_one_is_seen(tmp_path: Path) -> None:
    run_id = nightly(tmp_path, 1, np.random.default_rng(12))
    whole = tmp_path / run_id / store.WHOLE
    assert len(store.records_table(tmp_path)) == STAGES and not whole.exists()
    (tmp_path / run_id / "plan.json").write_text('{"state": "complete"}')
    assert len(store.records_table(tmp_path)) == STAGES and whole.exists()
    again = replace(records.load(tmp_path / run_id)[0], attempt=1)
    records.write(again, tmp_path / run_id)
    table = store.records_table(tmp_path)
    assert len(table) == STAGES + 1 and sum(table["last"].to_pylist()) == STAGES


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    a, b = nightly(tmp_path, 1, rng), nightly(tmp_path, 2, rng, error={3: 2.4}, without=(5,))
    notebook = {"cells": [{"outputs": [{"data": {"image/png": "aGk="}}]}]}
    for run_id, image in ((a, "aGk="), (b, "aG8=")):
        for record in records.load(tmp_path / run_id)[:1]:
            folder = tmp_path / run_id / record.job
            folder.mkdir()
            notebook["cells"][0]["outputs"][0]["data"]["image/png"] = image
            (folder / "notebook.ipynb").write_text(json.dumps(notebook))
    lines = {one.name: one for one in compare.lines(tmp_path, a, b) if one.differs}
    assert set(lines) == {
        "s3 (emulator) in nightly: error", "s5 (emulator) in nightly", "s5 (emulator) in nightly: error"
    }  # fmt: skip
    moved = lines["s3 (emulator) in nightly: error"]
    assert moved.change == pytest.approx(1.4) and moved.left == pytest.approx(1 - 2.4 / 2.5)
    assert lines["s5 (emulator) in nightly"].b == ""
    page = compare.page(tmp_path, a, b)
    assert page.count("<tr>") == 4 and "http" not in page
    assert compare.find(tmp_path, "last") == b and compare.find(tmp_path, "previous") == a
    assert compare.find(tmp_path, commit(1)[:7]) == a and compare.find(tmp_path, b[:12]) == b
    for wrong in ("", "2026", "nothing"):
        with pytest.raises(ArgumentError, match="run="):
            compare.find(tmp_path, wrong)


def test_levels_of_plain_values() -> None:
    found, watched = noise.stretches(np.array([0.0, 0, 0, 1, 1, 1]), 0.01, 5.0)
    assert [one.runs for one in found] == [(0, 1, 2), (3, 4, 5)] and watched is None
    found, watched = noise.stretches(np.array([0.0, 0, 0, 0, 0.07]), 0.01, 5.0)
    assert len(found) == 1 and watched == 4
    assert noise.stretches(np.array([3.0]), 0.01, 5.0) == ([noise.Stretch((0,), 3.0)], None)


@pytest.mark.parametrize("seed", range(6))
def test_stretches_are_the_best_of_all_ways_to_cut(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.repeat(rng.standard_normal(3) * 4, 3) + rng.standard_normal(9)

    def price(cuts: tuple[int, ...]) -> float:
        parts = [values[a:b] for a, b in pairwise((0, *cuts, len(values)))]
        return sum(((part - part.mean()) ** 2).sum() for part in parts) + len(cuts) * 2.0**2

    ways = [cuts for count in range(9) for cuts in combinations(range(1, 9), count)]
    best = min(ways, key=price)
    assert noise._segments(values, 1.0, 2.0) == list(pairwise((0, *best, len(values))))


def nights(runs: Path, count: int, **made: dict[int, Any]) -> None:
    """``made``: name -> {night: value} of `nightly`'s own names."""
    rng = np.random.default_rng(20)
    for night in range(1, count + 1):
        nightly(runs, night, rng, **{name: by_night[night] for name, by_night in made.items() if night in by_night})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("end", [Verdict.CRASH, Verdict.OOM, Verdict.TIMEOUT])
def test_a_notebook_that_ends_badly_twice_is_told_and_once_is_not(tmp_path: Path, end: Verdict) -> None:
    nights(tmp_path, 4, verdict={4: {2: end}})
    assert told(tmp_path) == []
    nights(tmp_path / "again", 4, verdict={3: {2: end}, 4: {2: end}})
    (found,) = told(tmp_path / "again")
    assert (found.kind, found.last.commit, found.first.commit) == ("failed", commit(2), commit(3))


def test_an_old_flaky_commit_hides_no_later_failure(tmp_path: Path) -> None:
    bad = {3: {2: Verdict.ERROR}, 5: {2: Verdict.GATE_FAILED}, 6: {2: Verdict.GATE_FAILED}}
    nights(tmp_path, 6, verdict=bad, commit={3: commit(2)})
    found = {one.kind: one for one in told(tmp_path)}
    assert set(found) == {"flaky", "failed"} and found["failed"].first.commit == commit(5)
    assert all(one.counts for one in found.values())


def plan(runs: Path, run_id: str, **facts: Any) -> None:
    fields = {"set": "nightly", "fingerprint": "", "whole": True, "state": "complete", "jobs": [], "executed": []}
    (runs / run_id).mkdir(exist_ok=True)
    (runs / run_id / "plan.json").write_text(json.dumps({**fields, "baseline": False, **facts}))


def rewrite(runs: Path, run_id: str, **changes: Any) -> None:
    for record in records.load(runs / run_id):
        records.path(runs / run_id, record.job, record.attempt).unlink()
        records.write(replace(record, **changes), runs / run_id)


def test_a_run_of_injected_faults_is_no_whole_run_of_the_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(21)
    for night in (1, 2, 3, 4):
        run_id = nightly(tmp_path, night, rng, without=(5,) if night == 4 else ())
        plan(tmp_path, run_id, set="negatives" if night == 3 else "nightly", baseline=night == 3)
        if night == 3:
            rewrite(tmp_path, run_id, kind="negative", negative="wrong")
    (found,) = told(tmp_path)
    assert found.what == "s5 (emulator) in nightly" and found.last.commit == commit(2)


def test_machines_with_and_without_a_gpu_take_turns_and_a_lost_gpu_is_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(22)
    for night in range(1, 7):
        run_id = nightly(tmp_path, night, rng)
        if night % 2:
            rewrite(tmp_path, run_id, backend="native", label="gpu box", machine={"cores": "16", "gpu": "B200"})
    assert told(tmp_path) == []
    run_id = nightly(tmp_path, 7, rng)
    rewrite(tmp_path, run_id, backend="", verdict=Verdict.SKIPPED, label="gpu box", machine={"gpu": "B200"}, gates=[])
    assert {one.kind for one in told(tmp_path)} == {"skipped"}


def test_times_of_machines_without_a_name_are_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(23)
    for night in range(1, 7):
        run_id = nightly(tmp_path, night, rng)
        rewrite(tmp_path, run_id, label="", machine={"cores": "2" if night > 3 else "64"})
        (one,) = [record for record in records.load(tmp_path / run_id) if record.stage == "s2"]
        records.path(tmp_path / run_id, one.job, 0).unlink()
        records.write(replace(one, cpu_s=40.0 if night > 3 else 9.0), tmp_path / run_id)
    assert told(tmp_path) == []


def test_shards_of_a_night_are_one_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(24)
    for night in (1, 2, 3):
        gone = (5,) if night == 3 else ()
        a = nightly(tmp_path, night, rng, without=(*range(6), *gone))
        b = f"{a[:-1]}b"
        for record in records.load(tmp_path / a)[:3]:
            (tmp_path / b / "records").mkdir(parents=True, exist_ok=True)
            records.path(tmp_path / a, record.job, 0).unlink()
            records.write(replace(record, run_id=b), tmp_path / b)
        for part in (a, b):
            plan(tmp_path, part, whole=False, shard="1/2")
        plan(tmp_path, f"{a[:-1]}c", parts=[a, b])
        if night == 3:
            records.path(tmp_path / b, "s6-00", 0).unlink()
    assert [(one.kind, one.what) for one in told(tmp_path)] == [("vanished", "s6 (emulator) in nightly")]
    assert compare.find(tmp_path, "last").endswith("c")
    assert store.query(tmp_path, "SELECT jobs FROM runs ORDER BY run_id")[1] == [(6,), (6,), (5,)]


@pytest.mark.parametrize(
    ("op", "bound", "value", "left"),
    [("==", 5, 6, -0.2), ("==", 5, 5, None), ("<=", 4, 3, 0.25), (">=", 4, 3, -0.25), ("<=", 0, 0, None)],
)
def test_room_to_a_bound(op: str, bound: float, value: float, left: float | None) -> None:
    assert compare._room(op, bound, value) == left
