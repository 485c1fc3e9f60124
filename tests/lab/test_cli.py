"""The command line: names for pipes, one red line for a refusal, exit codes, tables."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dsv4lib import env
from dsv4lib.lab import cli
from dsv4lib.lab.commands import command
from dsv4lib.lab.stage import Stage, discover
from dsv4lib.lab.verdicts import Verdict, exit_code_table


def dsv4(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "DSV4_WORKSPACE": str(root), "PYTHONPATH": str(env.root()), **environment}
    return subprocess.run(
        [sys.executable, "-m", "dsv4lib.lab.cli", *arguments], env=variables, capture_output=True, text=True, cwd=root,
        timeout=900, check=False,
    )  # fmt: skip


def test_a_run_ends_with_a_table_a_report_and_the_worst_class(make: Callable[..., Stage], tmp_path: Path) -> None:
    make("alpha")
    make("beta", "import os; os._exit(3)")  # no SIGKILL: it is OOM's if the system kills any process meanwhile
    done = dsv4(tmp_path, "run", "--backend", "reference")
    assert done.returncode == 14, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    assert ["alpha-00", "passed", "reference"] in [row[:3] for row in table]
    assert ["beta-00", "crash", "reference"] in [row[:3] for row in table]
    path = tmp_path / done.stdout.split("report: ")[1].strip()
    assert path.is_file() and "crash" in path.read_text()
    assert "\x1b[" not in done.stdout

    listed = dsv4(tmp_path, "stages")
    assert listed.stdout == "alpha\nbeta\n"
    described = json.loads(dsv4(tmp_path, "stages", "--json").stdout)
    assert [(stage["name"], stage["last"]["verdict"]) for stage in described] == [
        ("alpha", "passed"),
        ("beta", "crash"),
    ]
    assert dsv4(tmp_path, "report").stdout.strip() == os.path.relpath(path, tmp_path)
    (tmp_path / "data" / "runs").rename(tmp_path / "elsewhere")  # as `run --out elsewhere` leaves it
    moved = dsv4(tmp_path, "report", "--out", "elsewhere").stdout.strip()
    assert moved == os.path.relpath(path, tmp_path).replace("data/runs", "elsewhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--stage", "alhpa"], "the nearest name is alpha"),
        (["run", "-p", "seed=abc"], "takes an int"),
        (["run", "-p", "seed=1000"], "out of bounds"),
        (["run", "-p", "sed=1"], "nearest name is seed"),
        (["run", "-p", "seed"], "name=value"),
        (["run", "-p", "seed=1", "-p", "seed=2"], "already set"),
        (["run", "--set", "quik"], "quick, nightly, b200"),
        (["run", "--backend", "gpu"], "native"),
        (["report"], "no report yet: "),
        (["report", "--out", "."], "no report yet in .: "),
        (["report", "--out", "nothing"], "--out='nothing'"),
    ],
)
def test_a_refusal_is_one_line(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:  # fmt: skip
    make("alpha")
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["dsv4", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    assert words in said.err and said.err.startswith("dsv4: ") and said.err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_full_disk_is_one_line_too(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "run", full)
    monkeypatch.setattr(sys, "argv", ["dsv4", "run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 17 and capsys.readouterr().err.count("\n") == 1


def test_no_stages_is_a_refusal(tmp_path: Path) -> None:
    done = dsv4(tmp_path, "run")
    assert done.returncode == 2 and done.stderr == "dsv4: there are no stages under stages/\n"


def test_lint_prints_what_is_wrong(make: Callable[..., Stage], tmp_path: Path) -> None:
    make("alpha")
    done = dsv4(tmp_path, "lint")
    assert done.returncode == 1 and "\nalpha: card: " in done.stdout


def test_the_tests_get_every_argument(tmp_path: Path) -> None:
    done = dsv4(tmp_path, "test", "--co", "-q", "tests/lab/test_cli.py", "-k", "every_argument")
    assert done.returncode == 0 and "test_the_tests_get_every_argument" in done.stdout


def test_the_help_lists_every_exit_code() -> None:
    codes = [code for code, _, _ in exit_code_table()]
    assert codes == sorted(set(codes)) and {0, 2, 19, 130} <= set(codes)
    for code, name, _ in exit_code_table():
        assert f"{code} {name}" in cli.EXIT_CODES


def test_assignments() -> None:
    assert command.assignments(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}


def test_the_ladder_has_the_number_of_the_last_run_else_the_committed_one():
    stages = {stage.name: stage for stage in discover(env.root())}
    chosen = [stages["fmha_a"], stages["fmha_c"]]
    gate = chosen[1].gates[0]
    ran = SimpleNamespace(
        gates=[SimpleNamespace(metric=gate.metric, value=0.1234)], verdict=Verdict.PASSED, seconds=41.2
    )
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(command.ladder(chosen, {"fmha_c": ran}))
    first, second = (line for line in console.export_text().splitlines() if "error_over_torch" in line)
    committed = chosen[0].gates[0].last_seen
    assert f"error_over_torch {committed:.3g} (<= 2)" in first and first.rstrip().endswith("-")
    assert f"error_over_torch 0.123 (<= {gate.bound:g})" in second and "passed, 41 s" in second


def test_the_version_names_the_sources(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsv4", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"dsv4 {env.version()}, source {env.source_fingerprint()}\n"


def test_a_plan_runs_nothing_and_patterns_choose_stages(make: Callable[..., Stage], tmp_path: Path) -> None:
    for name in ("alpha", "alps", "beta"):
        make(name)
    done = dsv4(tmp_path, "run", "--plan", "--stage", "al*", "--backend", "reference")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["alpha-00", "alps-00"]
    assert "reference" in done.stdout and not (tmp_path / "data" / "runs").exists()
    assert dsv4(tmp_path, "run", "--stage", "alps", "--backend", "reference").returncode == 0
    again = dsv4(tmp_path, "run", "--plan", "--stage", "alps", "--backend", "reference")
    assert again.stdout.splitlines()[1].split()[-1].isdigit(), "seconds of the last run"
    none = dsv4(tmp_path, "run", "--plan", "--stage", "gam*")
    assert none.returncode == 2 and "no stage 'gam*'" in none.stderr and none.stdout == ""
