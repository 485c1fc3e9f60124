"""A night on a dask.distributed cluster of processes: killed workers and clients, budgets, an absent GPU."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from dsv4lib import env
from dsv4lib.lab import records
from dsv4lib.lab.nightly import cluster, command
from dsv4lib.lab.run import manifest
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict

distributed = pytest.importorskip("distributed", reason="needs dask.distributed: pip install 'dsv4lab[nightly]'")

# Says that it has begun, in a file of its own for each start, and waits until it may go on.
BEGINS = """import os, pathlib, time, uuid
here = pathlib.Path({folder!r})
name = f"{stage}-{{seed}}-{{uuid.uuid4().hex[:8]}}"
(here / f"{{name}}.part").write_text(str(os.getpid()))
(here / f"{{name}}.part").rename(here / f"{{name}}.begun")
deadline = time.monotonic() + 600
while not (here / "go-{stage}").exists() and time.monotonic() < deadline:
    time.sleep(0.05)"""


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class Cluster:
    """A scheduler and workers, each a process of its own, for one workspace."""

    def __init__(self, root: Path):
        self.root, self.file, self.begun = root, root / "scheduler.json", root / "begun"
        self.begun.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start("dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(self.file))
        wait_for(self.file.is_file)

    def start(self, module: str, *arguments: str, label: str = "") -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, (str(env.root()), os.environ.get("PYTHONPATH", ""))))
        variables = {**os.environ, "DSV4_WORKSPACE": str(self.root), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        variables[env.LABEL] = label
        log = (self.root / f"{module}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", *module.split(), *arguments]
        command[2] = f"distributed.cli.{module}" if module.startswith("dask_") else module
        process = subprocess.Popen(command, env=variables, cwd=self.root, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def add_workers(self, count: int, *arguments: str, label: str = "") -> None:
        common = ("--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny", "--no-dashboard")
        started = [self.start("dask_worker", *common, *arguments, label=label) for _ in range(count)]
        self.workers += started

    def night(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("dsv4lib.lab.cli", "nightly", "--scheduler", str(self.file), *arguments)

    def night_here(self, **wish: Any) -> tuple[int, str]:
        """Give the command in this process: its exit code and what it printed."""
        console = Console(file=io.StringIO(), width=200)
        code = command.run(command.Wish(scheduler=str(self.file), **wish), console, self.root)
        return code, console.file.getvalue()  # type: ignore[attr-defined]

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return (self.root / f"dsv4lib.lab.cli-{self.processes.index(process)}.log").read_text()

    def body(self, stage: str) -> str:
        return BEGINS.format(folder=str(self.begun), stage=stage)

    def let(self, stage: str) -> None:
        (self.begun / f"go-{stage}").touch()

    def starts(self) -> Counter[str]:
        return Counter(path.name.rpartition("-")[0] for path in self.begun.glob("*.begun"))

    def kernels(self) -> list[int]:
        """Pids of the notebooks that still run."""
        pids = [int(path.read_text()) for path in self.begun.glob("*.begun")]
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def worker_of(self, stage: str) -> subprocess.Popen[bytes]:
        (path,) = self.begun.glob(f"{stage}-*.begun")
        parents = {process.pid for process in psutil.Process(int(path.read_text())).parents()}
        (found,) = [worker for worker in self.workers if worker.pid in parents]
        return found

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def sets(*seeds: int) -> dict[str, Any]:
    runs = [{"seed": s, "backend": "reference"} for s in seeds]
    return {name: {"time_limit_s": 300, "runs": runs} for name in ("quick", "nightly", "b200")}


def verdicts(root: Path) -> dict[str, tuple[Verdict, int]]:
    last = records.latest(records.load(root / "data" / "runs"))
    return {name: (record.verdict, record.attempt) for name, record in last.items()}


def test_a_killed_worker_loses_nothing_and_nothing_runs_twice(
    make: Callable[..., Stage], tmp_path: Path, machines: Cluster
) -> None:
    """Four workers, eight jobs, one worker killed while it runs a job and others wait: that job is a crash, every
    other is run once, and a resume runs the crashed one alone."""
    make("a_victim", machines.body("a_victim"), sets=sets(0))
    make("others", machines.body("others"), sets=sets(*range(7)))
    machines.add_workers(4)
    run = machines.night()
    wait_for(lambda: sum(machines.starts().values()) == 4 and machines.starts()["a_victim-0"] == 1)
    machines.worker_of("a_victim").send_signal(signal.SIGKILL)
    machines.let("others")
    machines.let("a_victim")
    assert run.wait(120) == 14, machines.said(run)
    others = {f"others-{number:02d}": (Verdict.PASSED, 0) for number in range(7)}
    assert verdicts(tmp_path) == {"a_victim-00": (Verdict.CRASH, 0), **others}
    (folder,) = (tmp_path / "data" / "runs").iterdir()
    lost = next(r for r in records.load(folder) if r.verdict is Verdict.CRASH)
    assert lost.reason == "the worker that ran it was lost" and lost.run_id == folder.name
    summary = json.loads((folder / "report" / "summary.json").read_text())
    assert summary["counts"] == {"crash": 1, "passed": 7} and summary["not_started"] == []
    assert (folder / "others-03" / "notebook.ipynb").is_file()
    once = {"a_victim-0": 1, **{f"others-{number}": 1 for number in range(7)}}
    assert machines.starts() == once

    code, said = machines.night_here(resume=True)
    assert code == 0 and "resuming: 7 of 8 are finished already" in said, said
    assert verdicts(tmp_path) == {"a_victim-00": (Verdict.PASSED, 1), **others}
    assert machines.starts() == {**once, "a_victim-0": 2}
    assert len(records.load(folder)) == 9 and len(list((tmp_path / "data" / "runs").iterdir())) == 1


@pytest.mark.full
def test_signals_budgets_and_a_killed_client(make: Callable[..., Stage], tmp_path: Path, machines: Cluster) -> None:
    """One worker, three jobs. What a client does not see to its end is ended on the worker, and is run by a resume."""
    for name in ("a", "b", "c"):
        make(name, machines.body(name), sets=sets(0))
    machines.add_workers(1)

    def begun(count: int) -> Callable[[], bool]:
        return lambda: sum(machines.starts().values()) == count

    killed = machines.night()
    wait_for(begun(1))
    killed.kill()
    wait_for(lambda: machines.kernels() == [])  # its client is gone
    assert verdicts(tmp_path) == {}

    stopped = machines.night("--resume")
    wait_for(begun(2))
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(120) == 130, machines.said(stopped)
    wait_for(lambda: machines.kernels() == [])
    assert verdicts(tmp_path) == {"a-00": (Verdict.INTERRUPTED, 0)}
    said = machines.said(stopped)
    assert "not started: b-00, c-00" in said and "--resume" in said
    (page,) = tmp_path.glob("data/runs/*/report/summary.json")
    assert json.loads(page.read_text())["exit_class"] == "interrupted" and (page.parent / "junit.xml").is_file()

    short = machines.night("--resume", "--budget", "5s")
    wait_for(begun(3))
    time.sleep(6)
    machines.let("b")
    machines.let("c")
    machines.let("a")  # begun before the budget was spent: it goes on
    assert short.wait(120) == 25, machines.said(short)
    assert verdicts(tmp_path) == {"a-00": (Verdict.PASSED, 1)} and "2 jobs are not started" in machines.said(short)

    code, said = machines.night_here(resume=True)
    assert code == 0, said
    assert verdicts(tmp_path) == {"a-00": (Verdict.PASSED, 1), **dict.fromkeys(("b-00", "c-00"), (Verdict.PASSED, 0))}
    assert machines.starts() == {"a-0": 3, "b-0": 1, "c-0": 1}
    assert len(manifest.stored(tmp_path / "data" / "runs")) == 1


@pytest.mark.full
def test_workers_with_a_gpu_and_others(
    make: Callable[..., Stage], tmp_path: Path, machines: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has to run natively goes to workers with the resource GPU alone; no GPU is needed to see this."""
    monkeypatch.setattr(cluster, "CONNECT_S", 3.0)
    with (
        pytest.raises(cluster.SchedulerError, match="tcp://127.0.0.1:1 cannot be reached"),
        cluster.connected("tcp://127.0.0.1:1", "f"),
    ):
        pass
    with pytest.raises(cluster.SchedulerError, match="has no worker"), cluster.connected(str(machines.file), "f"):
        pass
    machines.add_workers(1, label="plain")
    monkeypatch.setattr(cluster, "CONNECT_S", 100.0)
    sources = f"1 of 1 workers cannot run this plan: their sources are {env.source_fingerprint()}, those here f"
    with pytest.raises(cluster.SchedulerError, match=sources), cluster.connected(str(machines.file), "f"):
        pass

    native = [{"seed": s, "backend": "native"} for s in (1, 2)]
    own = {name: {"time_limit_s": 300, "runs": native} for name in ("quick", "nightly", "b200")}
    make("a_kernel", kernel=True, sets=own)
    make("b_holds", machines.body("b_holds"), sets=sets(0))
    make("c_late", machines.body("c_late"), sets=sets(0))
    run = machines.night("--require", "native")
    wait_for(lambda: machines.starts()["b_holds-0"] == 1)
    make("c_late", "changed = True", sets=sets(0))  # the only worker is busy: it comes to this later
    machines.let("b_holds")
    assert run.wait(120) == 130, machines.said(run)
    said = {record.job: record for record in records.load(tmp_path / "data" / "runs")}
    assert said["c_late-00"].verdict is Verdict.INTERRUPTED
    assert said["c_late-00"].reason == "the worker's stage c_late differs from the plan's"
    assert said["b_holds-00"].label == "plain" and said["b_holds-00"].verdict is Verdict.PASSED
    assert {said[f"a_kernel-0{i}"].reason for i in (0, 1)} == {cluster.NO_GPU_WORKER}

    machines.add_workers(1, "--resources", "GPU=1", label="with a GPU")
    with cluster.connected(str(machines.file), env.source_fingerprint()) as client:
        client.wait_for_workers(2, timeout=100)
    assert machines.night_here(require="native")[0] == 24  # they went there, but no GPU is really in that machine
    folder = manifest.stored(tmp_path / "data" / "runs")[-1].folder
    said = {record.job: record for record in records.load(folder)}
    assert {(said[f"a_kernel-0{i}"].label, said[f"a_kernel-0{i}"].verdict) for i in (0, 1)} == {
        ("with a GPU", Verdict.SKIPPED)
    }
    assert "driver" in said["a_kernel-00"].reason and said["c_late-00"].verdict is Verdict.PASSED


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lost", ["worker", "scheduler"])
def test_a_night_ends_without_workers_or_scheduler(
    make: Callable[..., Stage], tmp_path: Path, machines: Cluster, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """One of two jobs had begun: without its worker it is a crash; without the scheduler nothing is known of it."""
    make("a", machines.body("a"), sets=sets(0, 1))
    machines.add_workers(1)
    monkeypatch.setattr(cluster, "ALONE_S", 0.5)
    monkeypatch.setattr(cluster, "LOOK_EVERY_S", 0.2)
    victim = machines.workers[0] if lost == "worker" else machines.processes[0]

    def kill() -> None:
        wait_for(lambda: sum(machines.starts().values()) == 1)
        victim.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    code, _ = machines.night_here()
    killer.join()
    (page,) = tmp_path.glob("data/runs/*/report/summary.json")
    left = json.loads(page.read_text())["not_started"]
    if lost == "worker":
        assert code == 14 and verdicts(tmp_path) == {"a-00": (Verdict.CRASH, 0)} and left == ["a-01"]
    else:
        assert code == 25 and verdicts(tmp_path) == {} and left == ["a-00", "a-01"]
    wait_for(lambda: machines.kernels() == [])
    assert sum(machines.starts().values()) == 1
