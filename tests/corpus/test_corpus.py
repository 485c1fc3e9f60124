"""Other people's kernels as a regression test of the emulator; see `corpus` and the `cases_*` modules.

Each case runs with the default checks, and with the race detector under every schedule: results must have the same
bits, and what is reported must be exactly what the case says, so that a new false report fails. The packages are not
dependencies of the lab: a case is skipped when its package is missing; `./dsv4 test --corpus` installs them beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import run_case
import torch
from corpus import Case, Check, attention, attention_check, exact, rounded

HERE = Path(__file__).resolve().parent
NEEDED_BY_ALL = ("cutlass", "tvm_ffi", "triton")
LIMIT = 270  # seconds of a case, the import of its package too; less than those of a test


def missing(case: Case) -> str | None:
    """The first package that a case needs and that is not installed."""
    for name in (*NEEDED_BY_ALL, case.module.partition(".")[0]):
        if importlib.util.find_spec(name) is None:
            return name
    return None


def run_cases(arch: str) -> list[str]:
    """The command that runs cases of an architecture by name."""
    return [sys.executable, "-X", "faulthandler", str(HERE / "run_case.py"), "--all", "--chosen", "--arch", arch, "-"]


class Elsewhere:
    """A process for the cases of one architecture; it imports the packages once.

    Args:
        command: what answers each line of its standard input, a name, with a line of JSON.
        log: file of its standard error.
        limit: seconds of a case.
    """

    def __init__(self, command: list[str], log: Path, limit: float = LIMIT):
        paths = [str(HERE.parent.parent), *sys.path]
        self.limit, self.log = limit, log.open("w+")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def row(self, name: str) -> dict:
        """Of a case; one that ends the process or takes longer than the limit fails, and the process is gone."""
        began = time.monotonic()
        timer = threading.Timer(self.limit, self.process.kill)
        timer.start()
        try:
            print(name, file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    assert row["name"] == name
                    return row
            self.process.wait()
            self.log.seek(0)
            seconds = f"{time.monotonic() - began:.0f} of {self.limit:g} s"
            raise AssertionError(f"exit code {self.process.returncode} after {seconds}: {self.log.read()[-4000:]}")
        except BaseException:  # its next answer could be to this name
            self.process.kill()
            self.process.wait()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End it."""
        self.process.communicate()  # no more names
        self.log.close()


class Processes:
    """From a case to its row, run in the process of its architecture; after one that took it down, in a new one."""

    def __init__(self, folder: Path, command: Callable[[str], list[str]] = run_cases, limit: float = LIMIT):
        self.folder, self.command, self.limit = folder, command, limit
        self.made: dict[str, Elsewhere] = {}

    def row(self, name: str, arch: str) -> dict:
        """Of a case."""
        there = self.made.get(arch)
        if there is None or there.process.poll() is not None:
            if there is not None:
                there.close()
            there = self.made[arch] = Elsewhere(self.command(arch), self.folder / f"{name}.log", self.limit)
        return there.row(name)

    def close(self) -> None:
        """End all."""
        for there in self.made.values():
            there.close()


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("elsewhere"))
    yield made
    made.close()


def parameters() -> list:
    """The cases, slow ones marked."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.slow]) for case in run_case.all_cases()]


@pytest.mark.parametrize("case", parameters())
def test_kernel_of_a_stranger(case: Case, processes: Processes) -> None:
    absent = missing(case)
    if absent:
        pytest.skip(f"{absent} is not installed: ./dsv4 test --corpus installs and runs this")
    row = processes.row(case.name, case.arch)
    assert not row["failures"], "\n".join(row["failures"])
    texts = "\n".join(row["texts"])
    assert {*row["hazards"], *row["race_hazards"]} == case.errors, texts
    assert {*row["lints"], *row["race_lints"]} == case.lints, texts
    assert row["unstable"] == case.unstable, (row["wrong"], row["differ"], texts)


INJECTED = """
import json, os, sys, time

for line in sys.stdin:
    name = line.strip()
    if name == "crash":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if name == "hang":
        time.sleep(600)
    print(json.dumps({"name": name, "process": os.getpid()}), flush=True)
"""


def test_a_case_that_takes_its_process_down_fails_alone(tmp_path: Path) -> None:
    made = Processes(tmp_path, lambda arch: [sys.executable, "-c", INJECTED], limit=4)
    try:
        first, other = made.row("a", "x")["process"], made.row("b", "y")["process"]
        assert made.row("c", "x")["process"] == first
        with pytest.raises(AssertionError, match=r"exit code -6 after .* s: last words"):
            made.row("crash", "x")
        second = made.row("d", "x")["process"]
        with pytest.raises(AssertionError, match=r"exit code -9 after \d+ of 4 s"):
            made.row("hang", "x")
        assert made.row("e", "y")["process"] == other and len({first, second, made.row("f", "x")["process"]}) == 3
    finally:
        made.close()


def test_a_case_may_choose_its_schedules_but_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(case: Case, checks: str = "default", schedule: str = "own", seed: int = 0) -> dict:
        seen.append(f"{checks} {schedule} {seed}")
        return {"bits": "", "failures": [], "hazards": {}, "lints": {}, "texts": []}

    monkeypatch.setattr(run_case, "run", run)
    case = Case("name", "module", list, schedules=("adversarial", "random 2"))
    run_case.run_all(case, chosen=True)
    assert seen == ["default own 0", "race adversarial 0", "race random 2"]
    run_case.run_all(case)
    assert len(seen) == 3 + 1 + len(run_case.SCHEDULES)
    run_case.run_all(Case("name", "module", list), chosen=True)
    assert len(seen) == 3 + 2 * (1 + len(run_case.SCHEDULES))


def test_the_checks_see_a_wrong_lane() -> None:
    """What a kernel that reads a neighbour's row, misses a store or ignores a key would show."""
    torch.manual_seed(0)
    want = torch.randn(64, 128)
    good = want.to(torch.bfloat16)
    assert rounded("y", good, want).failure() is None
    stale, swapped = good.clone(), good.clone()
    stale[3, 7], swapped[[0, 1]] = 0.0, good[[1, 0]]
    for bad in (stale, swapped, torch.full_like(good, float("nan"))):
        assert "out of bounds" in rounded("y", bad, want).failure()
    assert exact("n", torch.ones(3), torch.ones(3)).failure() is None
    assert exact("n", torch.tensor([1.0, 1.0, 2.0]), torch.ones(3)).failure() is not None
    q, k = torch.randn(1, 64, 2, 32), torch.randn(1, 96, 1, 32)
    out, _ = attention(q, k, k, 32**-0.5)
    without_last, _ = attention(q, k[:, :-1], k[:, :-1], 32**-0.5)
    assert attention_check("o", out.to(torch.bfloat16), out, k, 2.0**-8).failure() is None
    assert attention_check("o", without_last, out, k, 2.0**-4).failure() is not None
    with pytest.raises(AssertionError, match="shape"):
        Check("s", want[:1], want, 1.0, 1.0, 1.0, "").measure()
