"""A forked run equals a started one, to its cells and to what ends it; what cannot be forked is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.run import forkserver, plan, processes, runner
from dsv4lib.lab.run.progress import Progress
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict

# What a cell can see of its process.
LOOK = """import gc, json, os, pathlib, random, resource, signal, stat, sys, threading, warnings
import numpy, torch, matplotlib, matplotlib.pyplot
import cutlass.cute
from dsv4lib import backends
seen = {
    "argv": sys.argv[0], "main": sys.modules["__main__"].__name__, "name": __name__, "cwd": os.getcwd(),
    "path": list(dict.fromkeys(sys.path)), "gc": [gc.get_threshold(), gc.isenabled()], "umask": os.umask(0o22),
    "torch": [torch.get_num_threads(), str(torch.get_default_dtype())],
    "grad": torch.is_grad_enabled(), "cuda": torch.cuda.is_initialized(), "flags": list(sys.flags),
    "environment": {k: v for k, v in os.environ.items()},
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()], "stdin": len(os.read(0, 1)),
    "rc": {k: str(v) for k, v in matplotlib.rcParams.items()}, "printing": str(numpy.get_printoptions()),
    "limits": [resource.getrlimit(r) for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)],
    "hook": [sys.excepthook.__name__, sys.gettrace() is None, sys.getrecursionlimit(), sys.dont_write_bytecode],
    "children": len(os.listdir("/proc/self/task")) - threading.active_count() >= 0,
    "absent": [name for name in ("pyarrow", "rfc3987_syntax") if name in sys.modules],
    "mark": sorted(w for w in pathlib.Path("/proc/self/environ").read_text().split(chr(0)) if "RUN_TOKEN" in w),
    "figures": matplotlib.pyplot.get_fignums(), "compile": backends.status("emulator").available,
}
cpu = resource.getrusage(resource.RUSAGE_SELF).ru_utime
other = {"numpy": numpy.random.rand(), "random": random.random(), "torch": torch.rand(1).item(), "cpu": cpu}
filters = [[f[0], str(f[1]), f[2].__name__, str(f[3]), f[4]] for f in warnings.filters]
pathlib.Path(os.environ["DSV4_RUN_DIR"], "seen").write_text(json.dumps([seen, other, filters]))"""

# A daemon that no exec has given an environment: double fork, a session of its own.
DAEMON = """import os, pathlib, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    pathlib.Path(os.environ["DSV4_RUN_DIR"], "daemon").write_text(str(os.getpid()))
    time.sleep(900)
    os._exit(0)
while not (path := pathlib.Path(os.environ["DSV4_RUN_DIR"], "daemon")).exists() or not path.read_text():
    time.sleep(0.05)"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Servers of other tests go on; those made here end here."""
    before = list(forkserver._servers)
    yield
    for server in [s for s in forkserver._servers if s not in before]:
        server.close()


class Notes(Progress):
    """Keeps what the runner says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def looked(stage: Stage, out: Path, fork: bool) -> list:
    record = runner.run_stage(stage, options=runner.Options(out=out, workers=1, fork=fork))[0]
    assert record.verdict is Verdict.PASSED, record.reason
    text = next(out.glob("*/*/seen")).read_text()
    run = next(out.glob("*/*/seen")).parent
    private = json.loads(text)[0]["environment"]["JUPYTER_RUNTIME_DIR"].removesuffix("/runtime")
    seen, other, filters = json.loads(
        text.replace(private, "PRIVATE").replace(str(run), "RUN").replace(run.parent.name, "ID")
    )
    for name in ("JPY_PARENT_PID", "JPY_SESSION_NAME", "PYTEST_CURRENT_TEST"):
        seen["environment"].pop(name, None)
    return [seen, other, filters]


def test_a_cell_sees_no_difference(make: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make(body=LOOK)
    started = looked(stage, tmp_path / "started", fork=False)
    first = looked(stage, tmp_path / "first", fork=True)
    second = looked(stage, tmp_path / "second", fork=True)
    assert first[0] == started[0], [(k, first[0][k], v) for k, v in started[0].items() if first[0][k] != v]
    assert second[0] == started[0]
    for one in (first, second):  # what was imported ahead and not by the cell has added filters of its own
        assert {tuple(f) for f in started[2]} <= {tuple(f) for f in one[2]}
    for name in ("numpy", "random", "torch"):
        assert len({run[1][name] for run in (started, first, second)}) == 3, name  # seeded anew, as at a start
    assert second[1]["cpu"] < started[1]["cpu"] / 2  # the purpose: its imports were made


def test_a_daemon_without_exec_ends_with_its_run(make: Callable[..., Stage], tmp_path: Path) -> None:
    record = runner.run_stage(make(body=DAEMON), options=runner.Options(out=tmp_path / "out"))[0]
    assert record.verdict is Verdict.PASSED, record.reason
    pid = int(next((tmp_path / "out").glob("*/*/daemon")).read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_more_than_one_thread_is_not_forked(make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's OpenBLAS starts threads when it is imported: the runner says so, and starts fresh processes."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    stage, notes = make(body="import numpy"), Notes()
    result = runner.run(plan.make([stage], "quick"), stage.root, progress=notes)
    assert result.records[0].verdict is Verdict.PASSED
    assert len(notes.notes) == 1 and "threads" in notes.notes[0] and "slower" in notes.notes[0]


def test_an_open_gpu_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forkserver.why_not() == "" or "threads" in forkserver.why_not()
    monkeypatch.setattr(forkserver.os, "listdir", lambda path: ["self"] if path.endswith("task") else ["0"])
    monkeypatch.setattr(forkserver.Path, "read_text", lambda self: "python")
    monkeypatch.setattr(forkserver.os, "readlink", lambda path: "/dev/nvidiactl")
    assert "GPU" in forkserver.why_not()


def test_a_server_that_is_killed_takes_its_runs_along(make: Callable[..., Stage]) -> None:
    """The run is a crash, not a hang; the next one has a new server."""
    body = "import os, psutil, time\nif seed:\n    psutil.Process(os.getppid()).parent().kill()\n    time.sleep(600)"
    stage = make(body=body)
    broken = runner.run_stage(stage, seed="1")[0]
    assert broken.verdict is Verdict.CRASH and "-9" in broken.reason
    assert runner.run_stage(stage)[0].verdict is Verdict.PASSED


def test_servers_differ_by_what_is_read_at_import(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Stage]) -> None:
    stage = make()
    runner.run_stage(stage)
    one = forkserver._servers[-1]
    monkeypatch.setenv("DSV4_CACHE", "off")
    runner.run_stage(stage)
    assert forkserver._servers[-1] is one
    monkeypatch.setenv("TZ", "UTC+3")
    runner.run_stage(stage)
    assert forkserver._servers[-1] is not one and one.usable


def test_a_mark_that_has_no_room() -> None:
    code = f"""from dsv4lib.lab.run import forkserver, processes
import os
forkserver.write_mark("a/b")
assert os.getpid() in [p.pid for p in processes.marked("a/b")]
forkserver.write_mark("x" * {forkserver.MARK_BYTES + 1})"""
    room = {**os.environ, processes.MARK: "x" * forkserver.MARK_BYTES}
    ended = subprocess.run([sys.executable, "-c", code], env=room, capture_output=True, text=True, check=False)
    assert "no room for the mark 'xxx" in ended.stderr and "AssertionError" not in ended.stderr
    with pytest.raises(DSV4Error, match="no room"):
        forkserver.write_mark("of a process that has none" * 100)


def test_imports_ahead(tmp_path: Path) -> None:
    """Only allowed packages, at the top of a cell; magics and broken cells give none."""
    cells = [
        "import torch\nimport os\nfrom dsv4lib import viz as v",
        "import torch, os\nfrom . import x",
        "%magic\nimport torch",
    ]
    cells += ["def f():\n    import numpy\nfrom matplotlib.pyplot import plot", "import torch"]
    book = {
        "cells": [{"cell_type": "code", "source": cell} for cell in cells] + [{"cell_type": "markdown", "source": "x"}]
    }
    (tmp_path / "book.ipynb").write_text(json.dumps(book))
    expected = ["torch", "dsv4lib:viz", "matplotlib.pyplot:plot"]
    assert forkserver.imports_of(tmp_path / "book.ipynb") == expected


def test_a_run_that_a_signal_ends(make: Callable[..., Stage]) -> None:
    record = runner.run_stage(
        make(body=f"import os; os.kill(os.getppid(), {int(signal.SIGTERM)})\nimport time; time.sleep(60)")
    )[0]
    assert record.verdict is Verdict.CRASH and "-15" in record.reason
