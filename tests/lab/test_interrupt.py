"""Signals: nothing keeps running, the record says interrupted, and a resumed run repeats only what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from dsv4lib import env
from dsv4lib.lab import records
from dsv4lib.lab.run import manifest
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict
from tests.cases import cases

# Sleeps where the environment says so, and leaves a child that has its own session.
SLEEPER = """import os, pathlib, subprocess, time
here = pathlib.Path(os.environ["DSV4_RUN_DIR"])
if os.environ.get("SLEEP_TEST") == "1":
    child = subprocess.Popen(["sleep", "900"], start_new_session=True)
    (here / "pids").write_text(f"{os.getpid()} {os.getppid()} {child.pid}")
    time.sleep(900)"""


COMMANDS = {
    "run": ("run", "--backend", "reference"),
    "nightly": ("nightly", "--backends", "reference", "--shard", "1/1"),
}


def start(root: Path, *arguments: str, sleep: bool = True, command: str = "run") -> subprocess.Popen[str]:
    environment = {
        **os.environ, "DSV4_WORKSPACE": str(root), "PYTHONPATH": str(env.root()), "SLEEP_TEST": "1" if sleep else "0",
    }  # fmt: skip
    line = [sys.executable, "-m", "dsv4lib.lab.cli", *COMMANDS[command], "--jobs", "2", *arguments]
    return subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=root
    )  # fmt: skip


def wait_for(condition: Callable[[], object], seconds: float = 900.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def pids(root: Path) -> list[int]:
    return [int(pid) for path in root.glob("data/runs/*/*/pids") for pid in path.read_text().split()]


def alive(numbers: list[int]) -> list[int]:
    return [n for n in numbers if psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_resume_repeats_what_is_missing(
    make: Callable[..., Stage], tmp_path: Path, number: signal.Signals
) -> None:
    for name in ("a_quick", "b_sleeps", "c_sleeps", "d_later"):
        make(name, SLEEPER if name != "a_quick" else "")
    private_before = set(Path("/tmp").glob("dsv4-*"))
    process = start(tmp_path)
    wait_for(lambda: len(pids(tmp_path)) == 6 and list(tmp_path.glob("data/runs/*/records/a_quick*")))
    process.send_signal(number)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 130, output
    assert alive(pids(tmp_path)) == []
    assert "not started: d_later-00" in output and "--resume" in output
    folder = next(tmp_path.glob("data/runs/*"))
    summary = json.loads((folder / "report" / "summary.json").read_text())
    assert summary["exit_class"] == "interrupted" and summary["not_started"] == ["d_later-00"]
    assert summary["counts"] == {"interrupted": 2, "passed": 1}
    junit = ElementTree.parse(folder / "report" / "junit.xml").getroot()
    assert (junit.get("tests"), junit.get("errors"), junit.get("skipped")) == ("4", "2", "1")
    verdicts = {record.stage: record.verdict for record in records.load(folder)}
    assert verdicts == {
        "a_quick": Verdict.PASSED, "b_sleeps": Verdict.INTERRUPTED, "c_sleeps": Verdict.INTERRUPTED,
    }  # fmt: skip
    notebook = json.loads((folder / "b_sleeps-00" / "notebook.ipynb").read_text())
    assert notebook["metadata"]["dsv4"]["verdict"] == "interrupted"
    assert notebook["metadata"]["dsv4"]["reason"] == f"stopped by {number.name}"
    left = [path for path in set(Path("/tmp").glob("dsv4-*")) - private_before if _belongs(path, tmp_path)]
    assert left == []
    if number == signal.SIGTERM:
        return

    first = next((folder / "records").glob("a_quick*")).stat().st_mtime_ns
    again = start(tmp_path, "--resume", sleep=False)
    output = again.communicate(timeout=900)[0]
    assert again.returncode == 0, output
    assert "resuming: 1 of 4 are finished already" in output
    assert [path.name for path in tmp_path.glob("data/runs/*")] == [folder.name]
    latest = records.latest(records.load(folder))
    assert {record.stage: (record.verdict, record.attempt) for record in latest.values()} == {
        "a_quick": (Verdict.PASSED, 0), "b_sleeps": (Verdict.PASSED, 1), "c_sleeps": (Verdict.PASSED, 1),
        "d_later": (Verdict.PASSED, 0),
    }  # fmt: skip
    assert next((folder / "records").glob("a_quick*")).stat().st_mtime_ns == first

    finished = start(tmp_path, "--resume", sleep=False)
    output = finished.communicate(timeout=900)[0]
    assert finished.returncode == 2 and "is complete" in output


def _belongs(path: Path, root: Path) -> bool:
    try:
        return str(root) in (path / "job.json").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("command", cases("run", full=["nightly"]))
def test_a_killed_runner_takes_its_notebooks_along_and_can_be_resumed(
    make: Callable[..., Stage], tmp_path: Path, command: str
) -> None:
    """SIGKILL gives the runner no chance to act: the worker registered this with the operating system in advance."""
    make("b_sleeps", SLEEPER)
    process = start(tmp_path, command=command)
    wait_for(lambda: len(pids(tmp_path)) == 3)
    process.kill()
    process.wait(900)
    kernel, worker, child = pids(tmp_path)
    wait_for(lambda: not alive([kernel, worker]))
    folder = next(tmp_path.glob("data/runs/*"))
    assert manifest.stored(tmp_path / "data/runs")[0].state == "running"
    again = start(tmp_path, "--resume", sleep=False, command=command)
    output = again.communicate(timeout=900)[0]
    assert again.returncode == 0, output
    assert alive([child]) == []  # in a session of its own it outlived the runner, not the next one
    assert [path for path in Path("/tmp").glob("dsv4-*") if _belongs(path, tmp_path)] == []
    assert [record.attempt for record in records.load(folder)] == [1]


def test_nothing_to_resume(make: Callable[..., Stage], tmp_path: Path) -> None:
    make("one")
    process = start(tmp_path, "--resume", sleep=False)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 2 and "nothing to resume" in output
    assert not list(tmp_path.glob("data/runs/*/plan.json"))
