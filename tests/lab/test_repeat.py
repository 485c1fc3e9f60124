"""Every notebook shows the same numbers and figures when it is run twice; what differs is found and named.

The two cheapest stages run here, each twice, the others under `--all`; `./dsv4 run --twice` does it with all.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsv4lib import env
from dsv4lib.lab.commands import command
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import repeat, runner
from dsv4lib.lab.stage import Stage, load, names
from dsv4lib.lab.verdicts import Verdict

CHEAPEST = ["start_here"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in CHEAPEST else pytest.mark.full) for n in names(env.root())]
)
def test_run_twice_a_stage_shows_the_same(name: str, tmp_path: Path) -> None:
    shown = []
    for _ in range(2):
        found = runner.run_stage(load(name, env.root()), "quick", runner.Options(out=tmp_path, workers=1))
        assert all(record.verdict is Verdict.PASSED for record in found)
        shown.append([repeat.shown(record, tmp_path / record.run_id) for record in found])
    for first, second in zip(*shown, strict=True):
        assert any(key.startswith("figure") for key in first) and any(key.startswith("metric") for key in first)
        assert repeat.differences(first, second) == []


def written(folder: Path, pictures: list[str], metrics: dict[str, float], pieces: int = 0) -> dict[str, str]:
    outputs = [{"output_type": "stream", "name": "stdout", "text": "text"} for _ in range(pieces)]
    outputs += [{"output_type": "display_data", "data": {"image/png": picture}} for picture in pictures]
    (folder / "n.ipynb").write_text(json.dumps({"cells": [{"outputs": outputs}, {"source": "prose"}]}))
    record = Record(
        run_id="r", job="one-00", attempt=0, stage="one", title="t", set="quick", kind="run", negative="",
        expect_fail="",
        overrides={}, parameters={}, backend="", arch="", fingerprint="", stage_fingerprint="", versions={}, machine={},
        verdict=Verdict.PASSED, reason="", started=datetime.now(UTC), seconds=1.0, time_limit_s=9.0,
        notebook="n.ipynb", metrics=metrics,
    )  # fmt: skip
    return repeat.shown(record, folder)


def test_differences_are_named(tmp_path: Path) -> None:
    """The last bit of a number, a NaN that stays one, a figure, one more of them; not a time."""
    first = written(tmp_path, ["aaaa", "bbbb"], {"x": 0.1, "nan": float("nan"), "gone": 1.0, "compile_s": 1.0})
    assert repeat.differences(first, first) == []
    second = written(tmp_path, ["aaaa", "bbbc", "cccc"], {"x": 0.1 + 2**-56, "nan": float("nan"), "compile_s": 2.0})
    assert repeat.differences(first, second) == [
        "metric x", "metric gone", "figure 0.1 image/png", "figure 0.2 image/png",
    ]  # fmt: skip


def test_text_in_pieces_is_no_difference(tmp_path: Path) -> None:
    first, second = (written(tmp_path, ["aaaa"], {}, pieces) for pieces in (1, 2))
    assert repeat.differences(first, second) == [] and list(first) == ["figure 0.0 image/png"]


@pytest.mark.parametrize("steady", [True, False])
def test_the_command_says_what_was_not_the_same(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady: bool
) -> None:
    values = iter([0.0, 0.0] if steady else [0.0, -0.0])

    def start(self: runner.Supervisor, job: Any, attempt: int) -> bool:
        stage = runner.load(job.stage, self.root)
        folder = self.folder(job.name, attempt)
        folder.mkdir()
        verdict = {"stage": stage.name, "metrics": {gate.metric: next(values) for gate in stage.gates}, "skipped": {}}
        (folder / "verdict.json").write_text(json.dumps(verdict))
        self._record(job, stage, attempt, None, "", datetime.now(UTC), 1.0, folder)
        return True

    monkeypatch.setattr(runner.Supervisor, "_try_start", start)
    make("one")
    console = Console(file=io.StringIO(), width=200)
    code = command.run(command.Wish(twice=True), console, tmp_path)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert code == (0 if steady else 23)
    assert ("the same twice: 1 runs" if steady else "not the same twice: one-00: metric wrong") in said
