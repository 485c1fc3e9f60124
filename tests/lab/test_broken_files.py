"""Files that are not what they should be: each ends in one clear line, and nothing is lost."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import cli, records
from dsv4lib.lab.commands import command
from dsv4lib.lab.report import scrub
from dsv4lib.lab.run import devices, files, manifest, plan, runner
from dsv4lib.lab.run.progress import Progress
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Verdict | None]:
    """Replaces the start of notebooks: each job ends at once, as this maps its stage (None: with a good verdict)."""
    wanted: dict[str, Verdict | None] = {}

    def start(self: runner.Supervisor, job: plan.Job, attempt: int) -> bool:
        stage = runner.load(job.stage, self.root)
        folder = self.folder(job.name, attempt)
        folder.mkdir()
        verdict = {"stage": stage.name, "metrics": {gate.metric: 0.0 for gate in stage.gates}, "skipped": {}}
        (folder / "verdict.json").write_text(json.dumps(verdict))
        self._record(job, stage, attempt, wanted.get(job.stage), "made so", runner.datetime.now(UTC), 1.0, folder)
        return True

    monkeypatch.setattr(runner.Supervisor, "_try_start", start)
    return wanted


def run(root: Path, **wish: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = command.run(command.Wish(**wish), console, root)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def only_run(root: Path) -> Path:
    (folder,) = (root / "data" / "runs").glob("*Z-????")
    return folder


@pytest.mark.parametrize("verdict", [Verdict.DISK_FULL, Verdict.CRASH])
def test_what_a_full_disk_or_a_crash_ended_can_be_resumed(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any], verdict: Verdict
) -> None:
    make("one")
    make("two")
    endings["two"] = verdict
    code, said = run(tmp_path)
    assert code == {Verdict.DISK_FULL: 17, Verdict.CRASH: 14}[verdict] and "--resume" in said
    endings.clear()
    code, said = run(tmp_path, resume=True)
    assert code == 0 and "resuming: 1 of 2" in said
    found = records.load(only_run(tmp_path))
    assert [(r.stage, r.attempt, r.verdict) for r in found if r.stage == "two"] == [
        ("two", 0, verdict), ("two", 1, Verdict.PASSED),
    ]  # fmt: skip
    with pytest.raises(DSV4Error, match="is complete"):
        run(tmp_path, resume=True)


@pytest.mark.parametrize("verdict", [Verdict.GATE_FAILED, Verdict.ERROR, Verdict.TIMEOUT])
def test_what_came_to_its_own_end_is_not_tried_again(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any], verdict: Verdict
) -> None:
    make("one")
    endings["one"] = verdict
    run(tmp_path)
    with pytest.raises(DSV4Error, match="is complete"):
        run(tmp_path, resume=True)


def spoil(folder: Path, how: str) -> Path:
    """Put something that is no record where one was, or beside it."""
    path = next((folder / "records").glob("one-*.parquet"))
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        pq.write_table(pa.table({"x": [1, 2]}), path)
    elif how == "foreign types":
        pq.write_table(pa.table({"run_id": [[1]], "verdict": ["passed"]}), path)
    elif how == "nulls":
        pq.write_table(pa.table({"run_id": ["r"], "verdict": ["passed"]}), path)
    elif how == "verdict":
        table = pq.read_table(path)
        at = table.column_names.index("verdict")
        pq.write_table(table.set_column(at, "verdict", pa.array(["marvellous"])), path)
    elif how == "fifo":
        path.unlink()
        os.mkfifo(path)
    return path


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "foreign types", "nulls", "verdict", "fifo"])
def test_a_broken_record_is_left_out_and_its_job_run_again(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], how: str,
) -> None:  # fmt: skip
    make("one")
    make("two")
    run(tmp_path)
    path = spoil(only_run(tmp_path), how)
    capsys.readouterr()
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    cli.stages(as_json=True)
    said = capsys.readouterr()
    assert [(s["name"], bool(s["last"])) for s in json.loads(said.out)] == [("one", False), ("two", True)]
    assert said.err.count("\n") == 1 and f"records/{path.name} is no record and is left out" in said.err
    assert records.read(tmp_path / "data").num_rows == (2 if how in ("nulls", "verdict") else 1)
    manifest.stored(tmp_path / "data" / "runs")[0].save(state="interrupted")
    shutil.rmtree(only_run(tmp_path) / "one-00")  # as for a skipped job, which has no folder
    code, said = run(tmp_path, resume=True)
    assert code == 0 and "resuming: 1 of 2" in said
    assert {r.job: r.attempt for r in records.load(only_run(tmp_path))} == {"one-00": 1, "two-00": 0}
    assert path.exists()  # it may be of another program


def test_records_of_an_older_lab_are_read(make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any]) -> None:
    make("one")
    run(tmp_path)
    path = next((only_run(tmp_path) / "records").glob("*"))
    table = pq.read_table(path).drop_columns(["cpu_s", "counted_s", "commit", "dirty", "label"])
    pq.write_table(table.rename_columns({"expect_fail": "reds"}), path)
    (record,) = records.load(tmp_path / "data")
    assert record.expect_fail == ""  # null where the old name is unknown
    assert (record.cpu_s, record.counted_s, record.verdict) == (0.0, 0.0, Verdict.PASSED)
    assert (record.commit, record.dirty, record.label) == ("", None, "")


def test_a_plan_of_an_older_lab_is_read_and_resumed(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any]
) -> None:
    make("one")
    endings["one"] = Verdict.CRASH
    run(tmp_path)
    path = only_run(tmp_path) / "plan.json"
    now = json.loads(path.read_text())
    new = ("commit", "dirty", "label", "machine", "versions")
    assert now["machine"]["driver"] and now["versions"]["python"]
    path.write_text(json.dumps({name: value for name, value in now.items() if name not in new}))
    (old,) = manifest.stored(tmp_path / "data" / "runs")
    assert (old.commit, old.dirty, old.label, old.machine, old.versions) == ("", None, "", {}, {})
    endings.clear()
    assert run(tmp_path, resume=True)[0] == 0
    assert {name: json.loads(path.read_text())[name] for name in new} == {name: now[name] for name in new}


def test_records_and_plan_say_commit_and_machine(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("one")
    monkeypatch.setattr(env, "revision", lambda: env.Revision("ab" * 20, True))
    monkeypatch.setattr(env, "driver", lambda: "570.86.15 CUDA 12.8")
    monkeypatch.setenv("DSV4_MACHINE", "builder one")
    assert run(tmp_path)[0] == 0
    (record,), (plan_now,) = records.load(tmp_path / "data"), manifest.stored(tmp_path / "data" / "runs")
    for one in (record, plan_now):
        assert (one.commit, one.dirty, one.label) == ("ab" * 20, True, "builder one")
        assert one.machine["driver"] == "570.86.15 CUDA 12.8"
    monkeypatch.setattr(scrub.socket, "gethostname", lambda: "node-17.example")
    monkeypatch.setenv("DSV4_MACHINE", "node-17.example")
    scrub._replacements.cache_clear()
    assert run(tmp_path)[0] == 0 and records.load(tmp_path / "data")[-1].label == "<host>"
    scrub._replacements.cache_clear()
    monkeypatch.setenv("DSV4_MACHINE", "/home/alice")
    with pytest.raises(DSV4Error, match="DSV4_MACHINE=.*alice.*letters"):
        run(tmp_path)
    assert len(manifest.stored(tmp_path / "data" / "runs")) == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"set": 1}', '{"jobs": 5}'])
def test_a_broken_plan_is_no_plan(make: Callable[..., Stage], tmp_path: Path, endings: Any, text: str) -> None:
    make("one")
    run(tmp_path)
    before = json.loads((only_run(tmp_path) / "plan.json").read_text())
    whole = json.dumps({**before, "jobs": 5}) if "jobs" in text else text
    (only_run(tmp_path) / "plan.json").write_text(whole)
    with pytest.raises(DSV4Error, match="nothing to resume"):
        run(tmp_path, resume=True)


def test_a_clock_that_was_set_back_breaks_no_order(
    make: Callable[..., Stage], tmp_path: Path, endings: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The second run starts an hour before the first: it is the one that is resumed, reported and last all the same."""
    make("one")
    run(tmp_path)

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(manifest, "datetime", Earlier)
    monkeypatch.setattr(runner, "datetime", Earlier)
    endings["one"] = Verdict.CRASH
    run(tmp_path)
    first, second = manifest.stored(tmp_path / "data" / "runs")
    assert (first.state, second.state) == ("complete", "interrupted")
    assert [r.verdict for r in records.load(tmp_path / "data")] == [Verdict.PASSED, Verdict.CRASH]
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cli.report()
    assert second.run_id in capsys.readouterr().out
    endings.clear()
    assert run(tmp_path, resume=True)[0] == 0
    assert [r.attempt for r in records.load(second.folder)] == [0, 1]


def test_a_folder_that_cannot_be_written_is_one_line(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("one")
    (tmp_path / "data").write_text("a file, where root could write into any folder")
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dsv4", "run", "--backend", "reference"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and "make it writable or name another folder" in said


@pytest.mark.parametrize("number", ["EACCES", "EROFS"])
def test_what_cannot_be_written_later_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    import errno

    def refuse(*_: object) -> int:
        raise OSError(getattr(errno, number), "no writing", "data/runs/x")

    monkeypatch.setattr(command, "run", refuse)
    monkeypatch.setattr("sys.argv", ["dsv4", "run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said == "dsv4: data/runs/x: no writing\n"


# ---- what others may have put into a temporary folder ------------------------------------------------------------


def job_file(folder: Path, output: Path) -> None:
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"output": str(output)}))


def test_a_killed_runner_s_folders_are_removed_and_nothing_else_is_read(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIFO, device, deep and huge JSON, links: each would have stopped every run on the machine."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    monkeypatch.setattr(runner, "_short_temporary", lambda: str(shared))
    jobs = plan.make([make("one")], "quick", backend="reference")
    plan_now = manifest.new(tmp_path / "runs", "quick", "f", True, jobs)
    mine = plan_now.folder / "one-00" / "notebook.ipynb"
    for name in ("mine", "elsewhere"):
        job_file(shared / f"dsv4-{name}", mine if name != "elsewhere" else tmp_path / "a" / "b" / "c")
    job_file(tmp_path / "target", mine)
    (shared / "dsv4-link").symlink_to(tmp_path / "target")
    contents = {"deep": "[" * 200_000, "list": "[]", "number": '{"output": 5}', "huge": '"' + "x" * (2 << 20) + '"'}
    for name, text in contents.items():
        (shared / f"dsv4-{name}").mkdir()
        (shared / f"dsv4-{name}" / "job.json").write_text(text)
    for name in ("fifo", "zero"):
        (shared / f"dsv4-{name}").mkdir()
    os.mkfifo(shared / "dsv4-fifo" / "job.json")
    (shared / "dsv4-zero" / "job.json").symlink_to("/dev/zero")
    (shared / "dsv4-file").write_text("no folder")
    runner.Supervisor(tmp_path, plan_now, runner.Options(), Progress())._clean_up_after_a_killed_runner()
    left = {path.name.removeprefix("dsv4-") for path in shared.iterdir()}
    assert left == {"elsewhere", "link", *contents, "fifo", "zero", "file"}
    assert (tmp_path / "target" / "job.json").exists()
    assert {path.name for path in files.own_folders(shared, "dsv4-")} == {
        f"dsv4-{name}" for name in left - {"link", "file"}
    }
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)  # to another user all of this is a stranger's
    assert files.own_folders(shared, "dsv4-") == []


def test_read_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_own(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read_own(path, 4)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PermissionError, match="not a regular file"):
        files.read_own(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        files.read_own(tmp_path / "link")
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="of this user"):
        files.read_own(path)
    assert files.read_own(path, anybody=True) == b"12345"


def test_the_lock_folder_is_this_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = devices.lock_folder()
    assert folder == devices.lock_folder() and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(DSV4Error, match="others own or may write"):
        devices.lock_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(DSV4Error, match="a link"):
        devices.lock_folder()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(DSV4Error, match="no folder"):
        devices.lock_folder()
