"""What notebooks call: the verdict's checks, its files, and the card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4lib import backends, lab
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import runner
from dsv4lib.lab.run.plan import make as plan_make
from dsv4lib.lab.stage import Stage, UnknownStage
from dsv4lib.lab.verdicts import Verdict


@pytest.fixture
def tiny(make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    return make("tiny")


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, dsv4lib.lab; print([m for m in ('torch', 'pydantic', 'IPython', 'papermill') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [0, 0.0, False, np.float32(0), np.int64(0), np.array(0.0), torch.tensor(0.0)])
def test_numbers_of_every_kind(
    tiny: Stage, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4_RUN_DIR", str(tmp_path))
    lab.verdict("tiny", metrics={"wrong": value, "extra": 1.5}, skipped={"native": "no GPU"})
    assert json.loads((tmp_path / "verdict.json").read_text()) == {
        "stage": "tiny", "metrics": {"wrong": 0.0, "extra": 1.5}, "skipped": {"native": "no GPU"},
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "passed: 1 gate passed" in said and "skipped   native" in said and "measured  extra 1.5" in said


@pytest.mark.parametrize(
    ("metrics", "skipped", "words"),
    [
        ({}, {}, "missing: wrong"),
        ({"wrnog": 0}, {}, "missing: wrong"),
        ({"wrong": "0"}, {}, "a number"),
        ({"wrong": None}, {}, "a number"),
        ({"wrong": np.zeros(2)}, {}, "single number"),
        ({"wrong": torch.zeros(2)}, {}, "single number"),
        ({"wrong": 0}, {"check": " "}, "needs a reason"),
        ({"wrong": 0}, {"wrong": "why"}, "not both"),
    ],
)
def test_a_verdict_that_says_too_little_is_refused(
    tiny: Stage, metrics: dict[str, object], skipped: dict[str, str], words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        lab.verdict("tiny", metrics=metrics, skipped=skipped)
    with pytest.raises(UnknownStage, match="nearest name is tiny"):
        lab.verdict("tinny", metrics={"wrong": 0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e-30])
def test_no_infinite_or_undefined_value_passes(
    make: Callable[..., Stage], tiny: Stage, value: float, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gates = [{"metric": "wrong", "op": ">=", "bound": 1, "last_seen": 2, "reason": "x"},
             {"metric": "wrong", "op": "<=", "bound": 0, "last_seen": 0, "reason": "x"}]  # fmt: skip
    for gate in gates:
        make("tiny", gates=[gate])
        lab.verdict("tiny", metrics={"wrong": value})
        assert capsys.readouterr().out.startswith("gate failed: ")


def test_what_is_written_survives_json_and_is_judged_again(tiny: Stage, tmp_path: Path) -> None:
    """The runner judges the file by the contract, whatever the notebook displayed; NaN survives strict JSON."""
    (tmp_path / "verdict.json").write_text('{"stage": "tiny", "metrics": {"wrong": "nan"}, "skipped": {}}')
    judged = runner._judged(_record(tiny), tiny, tmp_path / "verdict.json")
    assert judged.verdict is Verdict.GATE_FAILED and "nan" in judged.reason
    for broken in ("", "[]", "{", '{"stage": "tiny"}', '{"stage": "tiny", "metrics": {"wrong": []}, "skipped": {}}'):
        (tmp_path / "verdict.json").write_text(broken)
        assert runner._judged(_record(tiny), tiny, tmp_path / "verdict.json").verdict is Verdict.NO_VERDICT


def _record(stage: Stage) -> Record:
    job = plan_make([stage], "quick", backend="reference")[0]
    return Record(
        run_id="r", job=job.name, attempt=0, stage="tiny", title="t", set="quick", kind="run", negative="",
        expect_fail="",
        overrides={}, parameters={}, backend="reference", arch="", fingerprint="", stage_fingerprint="", versions={},
        machine={}, verdict=Verdict.PASSED, reason="", started=datetime.now(UTC), seconds=1.0, time_limit_s=9.0,
    )  # fmt: skip


def test_the_card_says_what_a_reader_must_know(tiny: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    lab.card("tiny", backend="reference", seed=7, tile_n=128)
    said = capsys.readouterr().out
    for words in (
        "tiny · A throwaway stage",
        "back end",
        "reference",
        "seed",
        "7",
        "tile_n",
        "128",
        "torch 2.",
        "source",
    ):
        assert words in said
    assert str(Path.home()) not in said and "/" not in said.split("versions")[0]


def test_in_a_run_the_runner_decides_what_a_page_runs_on(
    make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand a GPU of any architecture of the stage will do; a run may have ruled it out."""
    make("two", kernel=True, also=["sm_90a"])
    monkeypatch.setenv("DSV4_WORKSPACE", str(tmp_path))
    monkeypatch.delenv("DSV4_BACKEND", raising=False)

    def status(name: str, arch: str = "sm_100a") -> backends.Status:
        return backends.Status(name, name != "native" or arch == "sm_90a", "as this test says")

    monkeypatch.setattr(backends, "status", status)
    assert lab.target("two", "auto") == "native" and lab.target("two", "emulator") == "emulator"
    monkeypatch.setenv("DSV4_BACKEND", "emulator")
    assert lab.target("two", "auto") == "emulator"
    lab.card("two", backend=lab.target("two", "auto"))
    assert "sm_100a" in capsys.readouterr().out


def test_the_card_of_a_kernel_warns_that_the_reference_verifies_nothing(
    make: Callable[..., Stage], tiny: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    make("tiny", kernel=True)
    lab.card("tiny", backend="reference")
    assert "will be: skipped" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="backend"):
        lab.card("tiny", backend="gpu")
