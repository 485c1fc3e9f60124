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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import run_case
import torch
from corpus import Case, Check, attention, attention_check, exact, rounded

HERE = Path(__file__).resolve().parent
NEEDED_BY_ALL = ("cutlass", "tvm_ffi", "triton")
SHARED_PROCESS = "sm_100a"  # architecture of the cases that run in the process of the tests


def missing(case: Case) -> str | None:
    """The first package that a case needs and that is not installed."""
    for name in (*NEEDED_BY_ALL, case.module.partition(".")[0]):
        if importlib.util.find_spec(name) is None:
            return name
    return None


class Elsewhere:
    """A process for the cases of another architecture; it imports the packages once."""

    def __init__(self, arch: str, log: Path):
        paths = [str(HERE.parent.parent), *sys.path]
        self.log = log.open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run_case.py"), "--all", "--arch", arch, "-"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def row(self, case: Case) -> dict:
        """Of a case."""
        print(case.name, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("{"):
                row = json.loads(line)
                assert row["name"] == case.name
                return row
        self.log.seek(0)
        raise AssertionError(f"the process of {case.arch} ended: {self.log.read()[-4000:]}")

    def close(self) -> None:
        """End it."""
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Case], dict]]:
    """From a case to its row, run in the process of its architecture."""
    made: dict[str, Elsewhere] = {}
    folder = tmp_path_factory.mktemp("elsewhere")

    def run(case: Case) -> dict:
        there = made.get(case.arch)
        if there is None or there.process.poll() is not None:  # a case that took it down is not the next one's fault
            made[case.arch] = there = Elsewhere(case.arch, folder / f"{case.name}.log")
        return there.row(case)

    yield run
    for there in made.values():
        there.close()


def parameters() -> list:
    """The cases, slow ones marked."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(case, id=case.name, marks=marks[case.slow]) for case in run_case.all_cases()]


@pytest.mark.parametrize("case", parameters())
def test_kernel_of_a_stranger(case: Case, elsewhere: Callable[[Case], dict], monkeypatch: pytest.MonkeyPatch) -> None:
    absent = missing(case)
    if absent:
        pytest.skip(f"{absent} is not installed: ./dsv4 test --corpus installs and runs this")
    if case.arch == SHARED_PROCESS:
        for name, value in run_case.SWITCHES.items():
            monkeypatch.setenv(name, value)
        row = run_case.run_all(case)
    else:
        row = elsewhere(case)
    assert not row["failures"], "\n".join(row["failures"])
    texts = "\n".join(row["texts"])
    assert {*row["hazards"], *row["race_hazards"]} == case.errors, texts
    assert {*row["lints"], *row["race_lints"]} == case.lints, texts
    assert row["unstable"] == case.unstable, (row["wrong"], row["differ"], texts)


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
