"""Every stage of the workspace through the runner: its quick set is green, each planted fault turns its gate red.

Items come from `discover()`. The last item compares what was really executed with the folders under stages/, so a
stage that did not run is red, not absent. A partial selection (`-k`) is compared with itself only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab import runner
from dsv4lib.lab.lint import lint
from dsv4lib.lab.records import Record
from dsv4lib.lab.stage import Stage, discover
from dsv4lib.lab.verdicts import Verdict

STAGES = discover(env.root())
NEGATIVES = [(stage, negative.name) for stage in STAGES for negative in stage.negatives]


@pytest.fixture(scope="session")
def executed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every test process of this session notes what it executed: in pytest's folder of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executed"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def verified(record: Record) -> None:
    """Pass, skip visibly with the runner's reason, or fail with it."""
    if record.verdict is Verdict.SKIPPED:
        pytest.skip(f"{record.job}: {record.reason}")
    assert record.verdict is Verdict.PASSED, f"{record.job}: {record.verdict}: {record.reason}"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_quick(stage: Stage, tmp_path: Path, executed_folder: Path) -> None:
    note = executed_folder / stage.name
    note.write_text("started")
    found = runner.run_stage(stage, "quick", runner.Options(out=tmp_path, workers=1))
    note.write_text("executed" if found and all(record.finished for record in found) else "not executed")
    for record in found:
        page = tmp_path / record.run_id / record.notebook
        assert not record.notebook or page.is_file()
    for record in sorted(found, key=lambda record: record.verdict is Verdict.SKIPPED):
        verified(record)


@pytest.mark.parametrize(("stage", "name"), NEGATIVES, ids=[f"{stage.name}-{name}" for stage, name in NEGATIVES])
def test_negative(stage: Stage, name: str, tmp_path: Path) -> None:
    record = runner.run_negative(stage, name, runner.Options(out=tmp_path, workers=1, figures=False))
    verified(record)
    states = {gate.state for gate in record.gates if gate.metric == stage.negative(name).reds}
    assert "failed" in states


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_lint(stage: Stage) -> None:
    assert [str(problem) for problem in lint(stage)] == []


def test_every_stage_was_executed(request: pytest.FixtureRequest, executed_folder: Path) -> None:
    """Comes last (see conftest). With several test processes it waits for the items that still run elsewhere."""
    folders = {path.name for path in (env.root() / "stages").iterdir() if path.is_dir()}
    assert {stage.name for stage in STAGES} == folders
    selected = {
        item.callspec.params["stage"].name
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_quick" and item.path == Path(__file__)
    }
    # Without a selection every folder is expected; with -k and the like, what was selected.
    option = request.config.option
    by_id = any("::" in argument for argument in request.config.args)
    narrowed = bool(option.keyword or option.markexpr or by_id or getattr(option, "lf", False))
    expected = selected if narrowed else folders
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        notes = {path.name: path.read_text() for path in executed_folder.iterdir()}
        if all(notes.get(name) not in (None, "started") for name in expected):
            break
        if "PYTEST_XDIST_WORKER" not in os.environ:
            break  # nothing else is running
        time.sleep(0.5)
    assert {name for name in expected if notes.get(name) != "executed"} == set()
