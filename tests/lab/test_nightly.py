"""A night without a cluster: plans, shards, budgets, resume, gathering, unsteady checks, retention."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import cli, records
from dsv4lib.lab.nightly import cluster, command, gather, ledger, remote, retention
from dsv4lib.lab.nightly import plan as plans
from dsv4lib.lab.nightly.retention import Limits
from dsv4lib.lab.nightly.shard import Shard
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import manifest, processes, runner
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict


def night(root: Path, **wish: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = command.run(command.Wish(**wish), console, root)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def gathered(root: Path, *folders: Path, **wish: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = command.run_gather(folders or [root / "data" / "runs"], command.Wish(**wish), console, root)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def newest(root: Path) -> dict[str, Any]:
    (*_, folder) = sorted(root.glob("data/runs/*Z-????"))
    return json.loads((folder / "report" / "summary.json").read_text())


def sets(*seeds: int, limit: float = 9) -> dict[str, Any]:
    runs = [{"seed": s} for s in seeds]
    return {name: {"time_limit_s": limit, "runs": runs} for name in ("quick", "nightly", "b200")}


def job(number: int, limit: float = 60.0) -> Job:
    return Job(f"s{number:02d}-00", f"s{number:02d}", "nightly", "run", "", "", {}, {}, "reference", "", limit, "f")


# ---- plans


def test_a_plan_is_stages_by_parameters_by_back_ends(make: Callable[..., Stage]) -> None:
    one, two = make("one", sets=sets(1, 2)), make("two")
    made = plans.make([one, two], "nightly", chosen=["emulator", "reference"], negatives=True)
    assert [j.name for j in made.jobs] == [
        "one-emulator-00", "one-emulator-01", "one-emulator-negative-injected", "one-reference-00", "one-reference-01",
        "one-reference-negative-injected", "two-emulator-00", "two-emulator-negative-injected", "two-reference-00",
        "two-reference-negative-injected",
    ]  # fmt: skip
    assert {j.parameters["backend"] for j in made.jobs} == {"emulator", "reference"}
    assert made.set == "nightly with faults on emulator, reference" and made.whole
    swept = plans.make([one], "nightly", sweep={"seed": ["3", "4"], "fault": ["none", "injected"]}, negatives=True)
    assert [(j.name, j.parameters["seed"], j.parameters["fault"]) for j in swept.jobs] == [
        ("one-00", 3, "none"), ("one-negative-injected", 3, "none"), ("one-01", 3, "injected"),
        ("one-negative-injected-00", 3, "injected"), ("one-02", 4, "none"), ("one-negative-injected-01", 4, "none"),
        ("one-03", 4, "injected"), ("one-negative-injected-02", 4, "injected"),
    ]  # fmt: skip
    assert not swept.whole and not plans.make([one], "nightly", narrowed=True).whole


def test_a_stage_without_a_choice_of_back_end_runs_once(make: Callable[..., Stage]) -> None:
    whole = make("one")
    own = {name: spec.model_dump(exclude_none=True) for name, spec in whole.parameters.items() if name != "backend"}
    made = plans.make([make("two", parameters=own)], "nightly", chosen=["emulator", "reference"])
    assert [j.name for j in made.jobs] == ["two-00"]


def test_the_digest_is_of_what_is_checked(make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make("one", kernel=True)
    here = plans.make([kernel], "nightly")
    monkeypatch.setattr(runner.make.__globals__["backends"], "resolve", lambda name, arch, kernel: "native")
    there = plans.make([kernel], "nightly")
    assert [j.backend for j in here.jobs] != [j.backend for j in there.jobs] and here.digest == there.digest
    others = [
        plans.make([make("one", "x = 1", kernel=True)], "nightly"),
        plans.make([kernel], "nightly", narrowed=True),
        plans.make([kernel], "nightly", negatives=True),
        plans.make([kernel], "quick"),
    ]
    assert len({here.digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("45", 45), ("45s", 45), ("1h1m1s", 3661)]
)
def test_budgets(text: str, seconds: float) -> None:
    assert plans.budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-5", "1d", "nan", "1e3", "h", "m30", "721h", "1.5h", "٣"])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="--budget"):
        plans.budget(text)


# ---- shards


@pytest.mark.parametrize("text", ["0/3", "5/3", "1", "a/b", "1/0", "-1/3", "1/3/3", "1.5/3", " 1/3", "1/100000", "١/٣"])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="--shard"):
        Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shards_divide_a_plan(count: int) -> None:
    jobs = [job(number, limit) for number, limit in enumerate([600, 60, 60, 300, 120, 60, 900, 60, 600, 30] * 3)]
    parts = [Shard(number, count).of(jobs) for number in range(1, count + 1)]
    names = [j.name for part in parts for j in part]
    assert sorted(names) == [j.name for j in jobs] and all(part == sorted(part, key=jobs.index) for part in parts)
    loads = [sum(j.time_limit_s for j in part) for part in parts]
    assert max(loads) <= sum(loads) / count + 900
    shuffled = jobs[::2] + jobs[1::2]
    assert [{j.name for j in Shard(n + 1, count).of(shuffled)} for n in range(count)] == [
        {j.name for j in part} for part in parts
    ]


def test_shards_are_gathered_into_one_run(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one", sets=sets(1, 2, 3))
    make("two")
    without_kernels["two"] = {"metrics": {"wrong": 1.0}}
    codes = [night(tmp_path, shard=f"{i}/3", night="n1")[0] for i in (1, 2, 3)]
    assert sorted(codes) == [0, 0, 10]
    code, said = gathered(tmp_path)
    made = newest(tmp_path)
    assert code == made["exit_code"] == 10 and made["state"] == "complete" and made["whole"]
    assert [one["job"] for one in made["jobs"]] == ["one-00", "one-01", "one-02", "two-00"]
    assert len(made["parts"]) == 3 and made["night"] == "n1" and made["shard"] == "" and made["planned"] == 4
    assert "missing" not in said
    page = tmp_path / "data" / "runs" / made["run"] / "report" / "index.html"
    assert "two-00" in page.read_text() and (page.parent / "one-02.html").is_file()
    assert len(records.load(tmp_path / "data" / "runs")) == 4  # nothing was copied
    without_kernels.clear()
    make("one", sets=sets(1, 2))  # a night of shards is compared with the night before
    for i in (1, 2, 3):
        night(tmp_path, shard=f"{i}/3", night="n2")
    code, said = gathered(tmp_path, night="n2")
    assert code == 19 and 'missing since the last nightly: ["one", "run", "", {"seed": 3}]' in said


def test_an_empty_shard_is_green(make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]) -> None:
    make("one")
    assert [night(tmp_path, shard=f"{i}/3", night="n1", resume=True)[0] for i in (1, 2, 3)] == [0, 0, 0]
    assert newest(tmp_path)["planned"] == 0
    assert gathered(tmp_path)[0] == 0


def test_a_missing_shard_is_unfinished(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one", sets=sets(1, 2, 3))
    for i in (1, 3):
        night(tmp_path, shard=f"{i}/3")
    code, said = gathered(tmp_path)
    made = newest(tmp_path)
    assert code == 25 and "shard 2/3 is missing" in said and made["not_started"] == ["one-01"]
    assert not made["whole"] and made["state"] == "interrupted"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", ["none", "twice", "commit", "digest", "count", "job", "stray", "folder", "running"])
def test_what_is_not_gathered(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], what: str
) -> None:
    make("one", sets=sets(1, 2))
    runs = tmp_path / "data" / "runs"
    words = {
        "none": "there is no shard", "twice": "shard 1/2 is there twice", "commit": "their commit is",
        "digest": "their digest is", "count": "2 and 3 shards", "job": "belongs to shard", "stray": "not its job",
        "folder": "is no folder", "running": "still going on",
    }  # fmt: skip
    if what == "none":
        night(tmp_path)
    else:
        for i in (1, 2):
            night(tmp_path, shard=f"{i}/2")
    first, *_ = stored = manifest.stored(runs)
    locks = []
    if what == "twice":
        shutil.copytree(first.folder, runs / "20990101T000000.000000Z-abcd")
    elif what in ("commit", "digest"):
        first.save(**{what: "other"})
    elif what == "count":
        first.save(shard="1/3")
    elif what == "job":
        first.save(jobs=[*first.jobs, *stored[1].jobs])
    elif what == "stray":
        (found,) = records.load(first.folder)
        records.write(replace(found, job="one-77"), first.folder)
    elif what == "running":
        locks.append(manifest.hold(first.folder))
    with pytest.raises(DSV4Error, match=words[what]):
        gathered(tmp_path, tmp_path / "nowhere" if what == "folder" else runs)
    for lock in locks:
        lock.release()
    assert len(manifest.stored(runs)) == len(stored) + (what == "twice")  # none was added


def test_a_night_is_gathered_from_where_its_shards_were_brought(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    """As artifacts of a CI job: each in a folder of its own, beside shards of another night."""
    make("one", sets=sets(1, 2))
    for name, i in itertools.product(("n1", "n2"), (1, 2)):
        out = tmp_path / "brought" / f"{name}-{i}" / "runs"
        assert night(tmp_path, shard=f"{i}/2", night=name, out=out)[0] == 0
    with pytest.raises(gather.GatherError, match="their night is 'n1', 'n2'"):
        gathered(tmp_path, tmp_path / "brought")
    assert gathered(tmp_path, tmp_path / "brought", night="n2")[0] == 0
    folders = sorted((tmp_path / "brought").glob("n1-*/runs/*"))
    assert gathered(tmp_path, *folders, folders[0])[0] == 0
    assert newest(tmp_path)["parts"] == sorted(folder.name for folder in folders)


def test_a_named_night_runs_once(make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]) -> None:
    make("one")
    assert night(tmp_path, night="n1", resume=True)[0] == 0  # nothing to go on with: it starts
    with pytest.raises(DSV4Error, match="has run this already"):
        night(tmp_path, night="n1", resume=True)
    assert night(tmp_path, night="n2")[0] == 0
    killed = manifest.stored(tmp_path / "data" / "runs")[-1].save(state="running")
    shutil.rmtree(killed.folder / "records")
    with pytest.raises(DSV4Error, match="has begun this already: --resume"):
        night(tmp_path, night="n2")
    assert night(tmp_path, night="n2", resume=True)[0] == 0
    assert len(manifest.stored(tmp_path / "data" / "runs")) == 2
    with pytest.raises(ArgumentError, match="--night"):
        night(tmp_path, night="a/b")


# ---- a budget, and going on


def test_a_budget_leaves_jobs_which_a_resume_runs(make: Callable[..., Stage], tmp_path: Path) -> None:
    """The first notebook outlasts the budget and goes on; the other two are not started, and are run next time."""
    make("a_slow", "import time\nif seed == 0: time.sleep(3)", sets=sets(0))
    make("b", sets=sets(1))
    make("c", sets=sets(1))
    code, said = night(tmp_path, budget="1s", workers=1, backends=["reference"])
    assert code == 25 and "not started: b-00, c-00" in said and "the time budget is spent: 2 jobs" in said
    made = newest(tmp_path)
    assert (made["state"], made["not_started"], made["counts"]) == ("interrupted", ["b-00", "c-00"], {"passed": 1})
    code, said = night(tmp_path, budget="10m", workers=1, backends=["reference"], resume=True)
    assert code == 0 and "resuming: 1 of 3 are finished already" in said
    assert newest(tmp_path)["run"] == made["run"] and newest(tmp_path)["counts"] == {"passed": 3}
    starts = [(r.job, r.attempt) for r in records.load(tmp_path / "data" / "runs")]
    assert sorted(starts) == [("a_slow-00", 0), ("b-00", 0), ("c-00", 0)]


def test_a_budget_begins_with_what_has_waited_longest() -> None:
    jobs = [job(number) for number in range(3)]
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def seen(number: int, day: int, verdict: Verdict = Verdict.PASSED) -> Record:
        return replace(_record(), job=f"s{number:02d}-00", started=start + timedelta(days=day), verdict=verdict)

    order = plans.oldest_first(jobs, [seen(0, 5), seen(1, 2), seen(1, 1), seen(2, 9, Verdict.INTERRUPTED)])
    assert [j.stage for j in order] == ["s02", "s01", "s00"]


# ---- unsteady checks


def _record(verdict: Verdict = Verdict.PASSED, **changes: Any) -> Record:
    made = Record(
        run_id="r1", job="one-00", attempt=0, stage="one", title="t", set="nightly", kind="run", negative="",
        expect_fail="", overrides={"seed": 1}, parameters={}, backend="emulator", arch="", fingerprint="f",
        stage_fingerprint="s", versions={}, machine={"cores": "2", "clocks": "SM 1 MHz"}, verdict=verdict, reason="",
        started=datetime(2026, 1, 1, tzinfo=UTC), seconds=1.0, time_limit_s=9.0, commit="c0ffee",
    )  # fmt: skip
    return replace(made, **changes)


def test_a_check_with_two_verdicts_on_one_commit_is_flaky() -> None:
    found = ledger.find([_record(), _record(Verdict.CRASH, run_id="r2"), _record(run_id="r3")])
    (one,) = found
    assert (one.check, one.kind, one.runs) == ("one", "flaky", ["r1", "r2", "r3"])
    assert one.verdicts == {"passed": 2, "crash": 1}
    assert str(one) == "flaky: one seed=1 on emulator: passed 2x, crash 1x at c0ffee"


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "other"}, {"fingerprint": "g"}, {"stage_fingerprint": "t"}, {"backend": "native"},
        {"overrides": {"seed": 2}}, {"negative": "x"}, {"stage": "two"}, {"verdict": Verdict.SKIPPED},
        {"verdict": Verdict.INTERRUPTED}, {"verdict": Verdict.DISK_FULL}, {"commit": "", "fingerprint": ""},
    ],
)  # fmt: skip
def test_what_is_not_flaky(changes: dict[str, Any]) -> None:
    assert ledger.find([_record(), replace(_record(Verdict.ERROR), **changes)]) == []
    assert len(ledger.find([_record(), _record(Verdict.ERROR)])) == 1


def test_a_verdict_that_depends_on_the_machine_is_no_race() -> None:
    here = [_record(label="a", run_id=name) for name in ("r1", "r2")]
    there = [_record(Verdict.ERROR, label="b", run_id=name) for name in ("r3", "r4")]
    (one,) = ledger.find([*here, *there])
    assert (one.kind, one.machines) == ("by machine", ["a", "b"]) and "machines a, b" in str(one)
    assert ledger.find([*here, *there, _record(label="b")])[0].kind == "flaky"
    clocks = [_record(machine={"cores": "2", "clocks": "SM 9 MHz"}), _record(Verdict.ERROR)]  # one machine
    assert ledger.find(clocks)[0].kind == "flaky"
    assert ledger.find([_record(machine={"cores": "4"}), _record(Verdict.ERROR)])[0].kind == "by machine"


def test_a_night_shows_what_is_flaky(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one")
    make("two")
    assert "flaky" not in night(tmp_path)[1]
    without_kernels["one"] = {"metrics": {"wrong": 1.0}}
    code, said = night(tmp_path)
    assert code == 10 and "flaky: one on " in said and ": passed 1x, gate_failed 1x at " in said  # red all the same
    assert [one["check"] for one in newest(tmp_path)["flaky"]] == ["one"]
    console = Console(file=io.StringIO(), width=400)
    assert command.run_ledger(command.Wish(), console, tmp_path) == 0
    assert console.file.getvalue().count("flaky: one") == 1  # type: ignore[attr-defined]


# ---- retention

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def stored(runs: Path, day: int, *, green: bool = True, **fields: Any) -> str:
    """A run made on this day, with a record, a notebook and pages."""
    folder = runs / f"{NOW + timedelta(days=day):%Y%m%dT%H%M%S}.000000Z-abcd"
    (folder / "one-00").mkdir(parents=True)
    (folder / "one-00" / "notebook.ipynb").write_text("{}")
    (folder / "report").mkdir()
    for name in ("index.html", "junit.xml"):
        (folder / "report" / name).write_text("x")
    code = 0 if green else 10
    (folder / "report" / "summary.json").write_text(json.dumps({"exit_code": code}))
    records.write(_record(Verdict.PASSED if green else Verdict.ERROR, run_id=folder.name), folder)
    facts = {"set": "nightly", "fingerprint": "f", "whole": True, "state": "complete", "jobs": [], "executed": []}
    manifest.Manifest(folder=folder, baseline=False, **{**facts, **fields}).save()  # type: ignore[arg-type]
    return folder.name


def is_whole(runs: Path, name: str) -> bool:
    return (runs / name / "one-00" / "notebook.ipynb").is_file() and (runs / name / "report" / "index.html").is_file()


def test_older_runs_keep_records_and_summary(tmp_path: Path) -> None:
    names = [stored(tmp_path, -day) for day in (40, 20, 3, 1)]
    assert retention.apply(tmp_path, Limits(days=10), NOW) == names[:2]
    assert [is_whole(tmp_path, name) for name in names] == [False, False, True, True]
    left = {str(path.relative_to(tmp_path / names[0])) for path in (tmp_path / names[0]).rglob("*") if path.is_file()}
    assert left - {".lock"} == {"plan.json", "records/one-00-0.parquet", "report/junit.xml", "report/summary.json"}
    assert len(records.load(tmp_path)) == len(manifest.stored(tmp_path)) == 4
    assert retention.apply(tmp_path, Limits(days=10), NOW) == []
    assert retention.apply(tmp_path, Limits(days=10, forget=True), NOW) == names[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[2:]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(), [0, 1, 2, 3]), (Limits(runs=2), [2, 3]), (Limits(runs=9), [0, 1, 2, 3]), (Limits(days=2), [3]),
        (Limits(days=4), [2, 3]), (Limits(days=2, runs=3), [1, 2, 3]), (Limits(days=30, runs=1), [1, 2, 3]),
    ],
)  # fmt: skip
def test_a_run_inside_any_limit_is_kept(tmp_path: Path, limits: Limits, kept: list[int]) -> None:
    names = [stored(tmp_path, -day) for day in (40, 20, 3, 1)]
    retention.apply(tmp_path, limits, NOW)
    assert [number for number, name in enumerate(names) if is_whole(tmp_path, name)] == kept


def test_what_always_stays(tmp_path: Path) -> None:
    part = stored(tmp_path, -100, shard="1/1", set="shards", green=False)
    base = stored(tmp_path, -91, green=False)
    next(one for one in manifest.stored(tmp_path) if one.run_id == base).save(baseline=True)
    old_green, green = stored(tmp_path, -90), stored(tmp_path, -80, parts=[part])
    unfinished = stored(tmp_path, -75, state="interrupted", green=False)
    red, quick = stored(tmp_path, -70, green=False), stored(tmp_path, -60, set="quick")
    held, current = stored(tmp_path, -50, green=False), stored(tmp_path, -40, green=False)
    foreign = tmp_path / "20200101T000000.000000Z-abcd"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("not a run")
    (tmp_path / "notes").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    stored(outside, -99)
    (linked,) = outside.iterdir()
    (tmp_path / linked.name).symlink_to(linked)
    lock = manifest.hold(tmp_path / held)
    gone = retention.apply(tmp_path, Limits(runs=1, forget=True), NOW, current=current)
    lock.release()
    assert gone == [old_green, unfinished, red]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {part, base, green, quick, held, current, foreign.name, "notes", linked.name}
    assert is_whole(outside, linked.name) and (foreign / "mine.txt").is_file()


def test_a_run_without_a_summary_is_green_by_its_records(tmp_path: Path) -> None:
    green, red, unfinished = stored(tmp_path, -9), stored(tmp_path, -8, green=False), stored(tmp_path, -7)
    for name in (green, red, unfinished):
        os.unlink(tmp_path / name / "report" / "summary.json")
    by_name = {one.run_id: one for one in manifest.stored(tmp_path)}
    by_name[unfinished] = by_name[unfinished].save(state="interrupted")
    assert [retention.is_green(by_name[name]) for name in (green, red, unfinished)] == [True, False, False]


def test_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    name = stored(tmp_path, -9)
    (tmp_path / name).rename(tmp_path / f"{retention.LEAVING}{name}")
    assert retention.apply(tmp_path, Limits(runs=1), NOW) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"days": 0}, {"days": float("nan")}, {"days": -1}, {"runs": 0}, {"forget": True}])
def test_limits_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="--keep|--forget"):
        Limits(**wrong)


def test_a_night_keeps_what_it_is_told(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one")
    for _ in range(3):
        assert night(tmp_path)[0] == 0
    code, said = night(tmp_path, limits=Limits(runs=2, forget=True))
    assert code == 0 and "removed 2 older runs" in said and len(manifest.stored(tmp_path / "data" / "runs")) == 2


# ---- workers of a cluster (whose own tests need dask.distributed)


@pytest.mark.parametrize("how", ["left", "held", "young"])
def test_what_a_killed_worker_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Also a process in a session of its own, which carries the mark of its run."""
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"{remote.PREFIX}abcd"
    (folder / "run-1" / "one-00").mkdir(parents=True)
    (tmp_path / "dsv4-other").mkdir()
    marked = {**os.environ, processes.MARK: "run-1/one-00"}
    child = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    lock = FileLock(folder / remote.LOCK)
    if how == "held":
        lock.acquire()
    old = time.time() - (0 if how == "young" else 2 * remote.STALE_S)
    os.utime(folder, (old, old))
    try:
        remote.clear_after_killed_workers()
        assert folder.is_dir() == (child.poll() is None) == (how != "left")
        assert (tmp_path / "dsv4-other").is_dir()
    finally:
        lock.release()
        child.kill()
        child.wait()


def test_a_worker_with_other_sources_says_so(make: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make("one")
    (planned,) = plans.make([stage], "nightly").jobs
    task = remote.as_task(planned, ticket="t", set="nightly", fingerprint=env.source_fingerprint(), memory_mb=None)
    assert remote.differs(task, Job(**task["job"]), tmp_path) == ""
    assert "dsv4lib differs" in remote.differs({**task, "fingerprint": "f"}, planned, tmp_path)
    make("one", "x = 1")
    assert "stage one differs" in remote.differs(task, planned, tmp_path)
    shutil.rmtree(tmp_path / "stages" / "one")
    assert "stage cannot be read" in remote.differs(task, planned, tmp_path)


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shard", "0/3"], "--shard='0/3' is not allowed"),
        (["--shard", "5/3"], "1 <= i <= n"),
        (["--budget", "0"], "--budget='0' is not allowed"),
        (["--scheduler", "nonsense"], "--scheduler='nonsense' is not allowed: an address"),
        (["--backends", "gpu"], "auto, native, emulator, reference"),
        (["--set", "quik"], "quick, nightly, b200, hopper"),
        (["--require", "gpu"], "native or none"),
        (["--night", "a b"], "--night"),
        (["-p", "seed=1", "-p", "seed=1"], "each value of seed once"),
        (["-p", "backend=native"], "--backends"),
        (["--gather", "nowhere"], "nowhere is no folder"),
        (["--gather", ".", "--shard", "1/2"], "it runs nothing"),
        (["--keep-runs", "0"], "--keep-runs"),
        (["--forget"], "together with"),
        (["--set", "b200"], "needs a GPU for alpha"),
    ],
)
def test_a_refusal_is_one_line(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    make("alpha", kernel=True)
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["dsv4", "nightly", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == (22 if "b200" in arguments else 2) and said.out == ""
    assert words in said.err and said.err.startswith("dsv4: ") and said.err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_scheduler_needs_a_package_and_says_which(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("one")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(cluster.SchedulerError, match="needs the package distributed: pip install"):
        night(tmp_path, scheduler="tcp://127.0.0.1:1")
    assert not (tmp_path / "data").exists()


def test_the_plan_of_a_shard_is_shown_and_not_run(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("alpha", sets=sets(1, 2))
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dsv4", "nightly", "--shard", "2/2", "--plan"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().out
    assert left.value.code == 0 and "alpha-01" in said and "alpha-00" not in said and not (tmp_path / "data").exists()
