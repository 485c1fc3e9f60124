"""The nightly's manifest: a check that ran last time and does not run now makes the night red."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4lib.lab import cli
from dsv4lib.lab.commands import command
from dsv4lib.lab.run import manifest, plan
from dsv4lib.lab.run.plan import Job, make
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict

TWO_GATES = [
    {"metric": name, "op": "==", "bound": 0, "last_seen": 0, "reason": "x"} for name in ("wrong", "late")
]  # fmt: skip


def night(root: Path, **wish: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = command.run(command.Wish(**{"set_name": "nightly", **wish}), console, root)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def runs(*seeds: int) -> dict[str, Any]:
    return {name: {"time_limit_s": 9, "runs": [{"seed": s} for s in seeds]} for name in ("quick", "nightly", "b200")}


def test_a_removed_run_is_missed_until_it_is_accepted(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one", sets=runs(1, 2))
    make("two")
    assert night(tmp_path)[0] == 0
    make("one", sets=runs(1))
    for _ in range(2):  # a shrunk night does not become the measure of the next
        code, said = night(tmp_path)
        assert code == 19
        assert 'missing since the last nightly: ["one", "run", "", {"seed": 2}]' in said
        assert said.count("missing since") == 1  # a run that is gone is not reported for each gate again
    assert night(tmp_path, accept_shrink=True)[0] == 0
    assert night(tmp_path)[0] == 0


def test_a_removed_stage_is_missed(make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]) -> None:
    make("one")
    stage = make("two")
    assert night(tmp_path)[0] == 0
    (tmp_path / "stages" / "two" / "stage.toml").unlink()
    (tmp_path / "stages" / "two").rmdir()
    stage.notebook_path.unlink()
    code, said = night(tmp_path)
    assert code == 19 and '["two", "run", "", {}]' in said


def test_a_removed_gate_and_a_new_skip_are_missed(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one", gates=TWO_GATES)
    make("two")
    assert night(tmp_path)[0] == 0
    make("one")
    code, said = night(tmp_path)
    assert code == 19 and '["one", "run", "", {}] gate late ==' in said
    make("one", gates=TWO_GATES)
    without_kernels["two"] = {"metrics": {}, "skipped": {"wrong": "no GPU"}}
    code, said = night(tmp_path)
    assert code == 19 and '["two", "run", "", {}]' in said


def test_a_crash_is_a_crash_and_not_also_a_shrinkage(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one")
    assert night(tmp_path)[0] == 0
    without_kernels["one"] = {"verdict": Verdict.CRASH}
    code, said = night(tmp_path)
    assert code == 14 and "missing since" not in said


def test_more_checks_are_welcome_and_parts_are_compared_as_parts(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one", sets=runs(1, 2))
    make("two")
    assert night(tmp_path)[0] == 0
    assert night(tmp_path, stages=["two"])[0] == 0  # nothing of `one` is expected
    assert night(tmp_path, texts={"seed": "7"})[0] == 0  # changed by hand: not comparable
    make("one", sets=runs(1, 2, 3))
    assert night(tmp_path)[0] == 0
    make("one", sets=runs(2, 3))
    code, said = night(tmp_path, stages=["one"])
    assert code == 19 and '{"seed": 1}' in said
    assert [m.baseline for m in manifest.stored(tmp_path / "data" / "runs")] == [True, False, False, True, False]


def test_resume_wants_the_same_jobs_and_sources(make: Callable[..., Stage], tmp_path: Path) -> None:
    jobs = make_jobs(make("one"))
    plan = manifest.new(tmp_path / "runs", "quick", "f00", True, jobs)
    assert manifest.to_resume(tmp_path / "runs", "quick", "f00", jobs).run_id == plan.run_id
    for set_name, fingerprint, wanted in (
        ("nightly", "f00", jobs),
        ("quick", "f01", jobs),
        ("quick", "f00", make_jobs(make("one", "x = 1"))),
    ):
        with pytest.raises(manifest.DSV4Error, match="nothing to resume"):
            manifest.to_resume(tmp_path / "runs", set_name, fingerprint, wanted)
    plan.save(state="complete")
    with pytest.raises(manifest.DSV4Error, match="complete"):
        manifest.to_resume(tmp_path / "runs", "quick", "f00", jobs)


def make_jobs(stage: Stage) -> list[Job]:
    return make([stage], "quick", backend="reference")


@pytest.mark.parametrize("wish", [{"set_name": "quick"}, {"set_name": "quick", "negatives": True}])
def test_every_whole_set_is_compared_with_its_own_last_run(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], wish: dict[str, Any]
) -> None:
    make("one", gates=TWO_GATES)
    make("two")
    assert night(tmp_path)[0] == night(tmp_path, **wish)[0] == 0
    make("one")
    for _ in range(2):
        code, said = night(tmp_path, **wish)
        assert code == 19 and "gate late ==" in said
    assert night(tmp_path, accept_shrink=True, **wish)[0] == night(tmp_path, **wish)[0] == 0
    assert night(tmp_path)[0] == 19  # the nightly has lost it all the same


def test_a_night_with_a_crash_is_no_measure_for_the_next(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    """It judged no gate: a gate that is removed afterwards would not be missed."""
    make("one", gates=TWO_GATES)
    make("two")
    assert night(tmp_path)[0] == 0
    without_kernels["one"] = {"verdict": Verdict.CRASH}
    assert night(tmp_path)[0] == 14
    without_kernels.clear()
    make("one")
    assert night(tmp_path)[0] == 19


def test_a_set_for_a_gpu_is_refused_without_one(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    """Green would say that kernels ran on it."""
    sets = {name: {"time_limit_s": 9, "runs": [{}]} for name in ("quick", "nightly", "b200")}
    native = {**sets, "b200": {"time_limit_s": 9, "runs": [{"backend": "native"}]}}
    make("plain")
    assert night(tmp_path, set_name="b200")[0] == 0  # no kernel in it
    for name, changed in (("one", sets), ("two", native)):
        make(name, kernel=True, sets=changed)
        with pytest.raises(command.MissingGpu, match=f"b200 needs a GPU for .*{name}"):
            night(tmp_path, set_name="b200")
        assert night(tmp_path, set_name="quick")[0] == 0
    assert night(tmp_path, set_name="b200", without_gpu=True)[0] == 0
    assert night(tmp_path, set_name="b200", backend="emulator")[0] == 0


def test_a_set_for_a_gpu_has_its_own_exit_code(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make("one", kernel=True)
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["dsv4", "run", "--set", "b200"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 22 and "needs a GPU for one" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_set_for_a_gpu_runs_where_there_is_one(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("one", kernel=True)
    monkeypatch.setattr(plan.backends, "resolve", lambda name, arch, kernel: "native")
    assert night(tmp_path, set_name="b200")[0] == 0
