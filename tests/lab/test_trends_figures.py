"""The page on trends: the example history and its changes, bands, rules on quiet histories, own runs, figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.history import bands, example, own, series, trends
from dsv4lib.pages.trends import figures, run_case
from dsv4lib.viz.style import alt_text
from tests.cases import cases

ROW = "ops topk k 1024: ours, cold"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """The example as its folder, what was put in, and the history that is read from it."""
    folder = tmp_path_factory.mktemp("example") / "runs"
    made = example.write(folder)
    return folder, made, series.read(folder)


def judged(history):
    """Findings of a history."""
    return trends.judge(history)


@pytest.fixture(scope="module")
def found(written):
    return judged(written[2])


# ------------------------------------------------------------------- the example


def test_every_change_of_the_example_is_found_and_no_other(written, found):
    score = run_case.score(written[1].injected, found)
    assert (score.missed, score.false, score.elsewhere) == ((), (), [])
    kinds = {one.kind for one in written[1].injected}
    assert kinds == {"step", "drift", "machine", "failed", "vanished", "skipped", "flaky"}


@pytest.mark.parametrize(("runs", "seed"), cases(full=[(30, 1), (60, 1), (42, 2), (60, 3), (42, 5), (42, 6)]))
def test_other_examples(runs, seed, tmp_path):
    made = example.write(tmp_path / "runs", runs, seed)
    score = run_case.score(made.injected, judged(series.read(tmp_path / "runs")))
    assert (score.missed, score.false, score.elsewhere) == ((), (), [])


def test_a_range_may_be_wider_but_must_hold_the_change(written, found):
    pairs = run_case.score(written[1].injected, found)
    assert not pairs.wider
    one, finding = next(pair for pair in pairs.found if pair[0].what == ROW)
    runs = own.runs_of(written[2])
    last, first = runs.index(one.last), runs.index(one.first)
    for moved, where in (((-1, 0), "wider"), ((0, 2), "wider"), ((1, 1), "elsewhere"), ((-3, -3), "elsewhere")):
        ends = {name: dataclasses.replace(getattr(finding, name), run_id=runs[at + by])
                for name, at, by in zip(("last", "first"), (last, first), moved, strict=True)}  # fmt: skip
        score = run_case.score([one], [dataclasses.replace(finding, **ends)])
        assert {"wider": len(score.wider), "elsewhere": len(score.elsewhere)} == {"wider": 0, "elsewhere": 0, where: 1}


def test_without_its_slowdown_the_kernel_is_missed(tmp_path):
    made = example.write(tmp_path / "runs", example.LEAST_RUNS, slowdown=0.0)
    score = run_case.score(made.injected, judged(series.read(tmp_path / "runs")))
    assert [(one.kind, one.what) for one in score.missed] == [("step", ROW)] * 2
    assert not score.false and not score.elsewhere


MISSED = {"stale": run_case.NUMBERS, "bounds_lost": ("drift",), "first_verdict": run_case.VERDICTS}


@pytest.mark.parametrize("fault", run_case.FAULTS)
def test_each_fault_is_seen(fault, written):
    """By the number that its gate is about; those of one kind alone leave the others right."""
    score = run_case.score(written[1].injected, judged(run_case.apply(fault, written[2])))
    kinds = MISSED.get(fault, ())
    assert (score.missed_of(kinds) > 0) == bool(kinds)
    if fault in MISSED:
        assert len(score.missed) == score.missed_of(kinds) and not score.false
    assert bool(score.false) == (fault in ("machines_mixed", "smoothed"))
    assert bool(score.elsewhere) == (fault in ("commit_late", "smoothed"))


def test_the_example_is_the_same_every_time(written, tmp_path, monkeypatch):
    """The same bytes of benches, which take all noise that there is; records are compared by their seconds."""
    seconds = []
    monkeypatch.setattr(example.records, "write", lambda record, folder: seconds.append((record.job, record.seconds)))
    example.write(tmp_path / "runs")
    files = sorted((tmp_path / "runs" / "bench").iterdir())
    assert len(files) == 42 and all(f.read_bytes() == (written[0] / "bench" / f.name).read_bytes() for f in files)
    experts = next(
        one for one in written[2].series if "experts" in one.name and one.kind == "time" and one.label == "rack 1"
    )
    assert set(experts.values) < {value for job, value in seconds if job == "experts-00"}


def test_the_example_says_what_it_is(written):
    from dsv4lib.lab import records

    record = records.load(next(path for path in written[0].iterdir() if (path / "records").is_dir()))[0]
    assert record.reason == "synthetic record of an example history" and record.title.startswith("Example: ")
    assert all("an example" in one.label for one in written[2].series if one.kind == "bench")
    assert len(written[1].commits) > 60 and len(set(written[1].commits)) == len(written[1].commits)
    assert {at.commit for one in written[2].series for at in one.at} < set(written[1].commits)


def test_bad_input_is_refused(written):
    for call, words in (
        (lambda: example.write(written[0]), "an empty folder"),
        (lambda: example.write(Path("x"), runs=29), "30 to 120"),
        (lambda: example.write(Path("x"), runs=121), "30 to 120"),
        (lambda: example.quiet("loud", 0), "normal"),
        (lambda: run_case.apply("unknown", written[2]), "none, stale"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    assert not Path("x").exists()


# ------------------------------------------------------------------- bands


def test_a_band_holds_noise_and_shows_changes(written, found):
    drawn = {(band.series.name, band.series.label): band for band in bands.of(written[2].series, found)}
    slowed = drawn[ROW, "rack 1, an example"]
    inside = (slowed.series.values > slowed.low) & (slowed.series.values < slowed.high)
    assert inside.all() and slowed.level[-1] / slowed.level[0] == pytest.approx(1.08, abs=0.005)
    assert slowed.high[0] < slowed.level[-1]  # the change is more than the noise
    one = drawn["ops linear wo_b T 128: ours, cold", "rack 2, an example"]
    (blip,) = np.flatnonzero(one.series.values > 24)
    assert one.series.values[blip] > one.high[blip] and [f.kind for f in one.found] == ["machine"]
    exact = drawn["cache (emulator) in nightly: bytes_over_floor", ""]
    assert np.ptp(exact.high - exact.low) < 1e-12 and (exact.high - exact.low < 1e-6).all()


def test_a_machine_splits_the_levels_of_its_rows(written, found):
    drawn = [band for band in bands.of(written[2].series, found) if band.series.label == "rack 2, an example"]
    plain = next(band for band in drawn if "embedding" in band.series.name)
    assert [one.kind for one in plain.found] == ["machine"]
    assert plain.level[-1] / plain.level[0] == pytest.approx(1.07, abs=0.02)
    assert plain.high[0] < 1.05 * plain.level[0]  # the shift is no noise of the row
    assert (plain.series.values < plain.high).all() and (plain.series.values > plain.low).all()


# ------------------------------------------------------------------- rules


def test_plain_rules_see_what_they_are_for():
    history = example.quiet("normal", 0, slowdown=0.2)
    name = history.series[0].name
    assert run_case.alarms_of(history, judged) == dict.fromkeys(run_case.ALL_RULES, {name})
    faster = example.quiet("normal", 0, slowdown=-0.2)
    assert not any(run_case.alarms_of(faster, judged).values())


def test_what_the_newest_run_alone_shows_is_watched():
    history = example.quiet("normal", 0, slowdown=0.06)
    named = run_case.alarms_of(history, judged)
    assert named[run_case.OURS] == set() and named[run_case.WATCHED] == {history.series[0].name}
    assert run_case.alarmed("5 % over the median", history, judged) == {history.series[0].name}
    faster = example.quiet("normal", 0, slowdown=-0.06)
    assert [one.kind for one in judged(faster)] == ["watch"]
    assert run_case.alarmed(run_case.WATCHED, faster, judged) == set()
    (open_,) = judged(history)
    assert (
        run_case.score([], [open_]).false == () and run_case.score([], [dataclasses.replace(open_, kind="step")]).false
    )
    (band,) = (band for band in bands.of(history.series, [open_]) if band.found)
    assert figures.track(band).changes[0].worse is None and "open" in alt_text(
        figures.over_commits([band], ["bench"], "a")
    )


def test_less_is_worse_where_it_is():
    one = example.quiet("normal", 0, slowdown=-0.2).series[0]
    turned = dataclasses.replace(one, worse=-1)
    assert all(rule(turned) and not rule(one) for rule in run_case.RULES.values())


def test_false_alarms_are_counted():
    table = run_case.false_alarms(example.quiet, ["normal", "six runs"], judged, 3)
    assert len(table) == 10 and all(one.histories == 3 for one in table)
    assert [one.alarmed for one in table if one.rule == run_case.OURS] == [0, 0] and run_case.alarms_pct(table) == 0

    def loud(profile: str, seed: int):
        return example.quiet(profile, seed, slowdown=0.3 * (seed == 1))

    table = run_case.false_alarms(loud, ["normal"], judged, 4)
    assert run_case.alarms_pct(table) == 25 and table[0].names == 1
    assert run_case.alarms_pct(table, "5 % over the median") == 25


def test_smoothed_values_alarm():
    def smoothed(profile: str, seed: int):
        return run_case.apply("smoothed", example.quiet(profile, seed))

    assert run_case.alarms_pct(run_case.false_alarms(smoothed, ["blips"], judged, 8)) > 20


def test_small_slowdowns_need_more_runs():
    def slowed(seed: int, part: float, since: int):
        return example.quiet("normal", seed, slowdown=part, since=since)

    table = run_case.caught(slowed, (0.01, 0.06, 0.3), judged, 3, (1, 3))
    hits = {(one.slowdown, one.since): one.caught for one in table if one.rule == run_case.OURS}
    assert hits[0.01, 1] == hits[0.01, 3] == 0 and hits[0.3, 1] == hits[0.3, 3] == hits[0.06, 3] == 3 > hits[0.06, 1]
    assert run_case.least_caught(table, 3) == 6 and run_case.least_caught(table, 1) == 30
    assert run_case.least_caught([one for one in table if one.slowdown < 0.05], 3) == float("inf")
    assert "0% at 1" in alt_text(figures.caught_over(table, 3))


# ------------------------------------------------------------------- notebooks, own runs


def test_the_slowest_notebook_is_first(written):
    slow = run_case.slowest(written[2])
    assert slow[0].name == "experts (emulator) in nightly" and slow[0].label == "rack 2" and slow[0].seconds > 120
    assert [one.seconds for one in slow] == sorted((one.seconds for one in slow), reverse=True)
    grown = {one.name for one in slow if one.seconds > 1.25 * one.before}
    assert grown == {"indexer (emulator) in nightly"}
    assert "experts (rack 2)" in alt_text(figures.slowest(slow))


def test_margins_end_at_one_on_the_bound(written):
    ways = run_case.margins(written[2])
    used = {name.split()[0]: parts[-1] for name, (_, parts) in ways.items()}
    assert used["experts"] == pytest.approx(1.2 / 1.4) and used["drafts"] > 1 > used["attention"] > 0 > used["norms"]
    late = dataclasses.replace(written[2].series[0], kind="metric", values=np.array([3.0, 2.0]), bound=1.0)
    assert not run_case.margins(series.History([late]))  # past its bound at first: there is no way


def test_own_runs_are_shown_from_five_on(written, tmp_path, monkeypatch):
    folder = written[0]
    monkeypatch.delenv("DSV4_RUN_DIR", raising=False)
    assert own.history(tmp_path / "nothing") is None
    assert len(own.runs_of(own.history(folder))) == 42
    names = own.runs_of(written[2])
    for name in names[:4]:
        (tmp_path / name).symlink_to(folder / name)
    assert own.history(tmp_path) is None
    (tmp_path / names[4]).symlink_to(folder / names[4])
    assert own.runs_of(own.history(tmp_path)) == names[:5]


def test_the_command_that_is_going_on_is_left_out(written, tmp_path, monkeypatch):
    names = own.runs_of(written[2])[:8]
    for name in names:
        (tmp_path / name / "records").mkdir(parents=True)
        for file in (written[0] / name / "records").iterdir():
            (tmp_path / name / "records" / file.name).write_bytes(file.read_bytes())
    (tmp_path / names[6] / "plan.json").write_text("{}")
    monkeypatch.setenv("DSV4_RUN_DIR", str(tmp_path / names[6] / "trends-00"))
    shown = own.history(tmp_path)
    assert own.runs_of(shown) == names[:6]
    assert all(len(one.values) == len(one.at) == len(one.spread) > 0 for one in shown.series)
    assert [at.run_id for at, _ in shown.whole["nightly"]] == names[:6]


# ------------------------------------------------------------------- figures


def test_figures_say_what_changed(written, found, capsys):
    drawn = bands.of(written[2].series, found)
    text = alt_text(figures.over_commits(drawn, ["bench"], "Bench", 6))
    assert "18 more, without a change of their own, not drawn" in text and "topk k 1024 (rack 1), us: worse" in text
    assert "mhc T 4096 (rack 1), us: better" in text and "worse machine" in text
    assert "experts: expand_db 0.86" in alt_text(figures.ways_to_bounds(written[2], found))
    assert "1 error, 4 skipped" in alt_text(figures.verdicts(written[2].jobs))
    figures.findings(found, ["drift"])
    figures.findings([], ["drift"])
    figures.noise_table(drawn)
    figures.score_table(run_case.score(written[1].injected, found[1:]))
    said = capsys.readouterr().out
    assert "nothing of this kind was found" in said


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        ("passed", "passed"),
        ("gate_failed", "failed"),
        ("timeout", "failed"),
        ("crash", "not judged"),
        ("error", "error"),
    ],
)
def test_each_verdict_has_a_state(verdict, state):
    assert figures.state(verdict) == state and state in figures.STATES


def test_suspects_and_bisections():
    commits = list("abcdef")
    assert run_case.suspects(commits, "a", "b") == ["b"] and run_case.suspects(commits, "b", "f") == list("cdef")
    assert [run_case.bisections(n) for n in (0, 1, 2, 3, 4, 5, 8, 9)] == [0, 0, 1, 2, 2, 3, 3, 4]
