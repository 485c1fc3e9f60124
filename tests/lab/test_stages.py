"""Every stage of the workspace through the runner: its quick set is green, each injected fault turns its gate red.

Items come from `discover()`; the last test compares them with the folders under stages/.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import runner
from dsv4lib.lab.stage import Stage, discover
from dsv4lib.lab.upkeep.lint import lint, unproven
from dsv4lib.lab.verdicts import Verdict

STAGES = discover(env.root())


def negatives() -> list:
    """(stage, name of a negative). All but a stage's first are further cases; tests of the ops inject most, too."""
    return [
        pytest.param(stage, negative.name, id=f"{stage.name}-{negative.name}", marks=pytest.mark.full if place else ())
        for stage in STAGES
        for place, negative in enumerate(stage.negatives)
    ]


def verified(record: Record) -> None:
    """Pass, skip visibly with the runner's reason, or fail with it."""
    if record.verdict is Verdict.SKIPPED:
        pytest.skip(f"{record.job}: {record.reason}")
    assert record.verdict is Verdict.PASSED, f"{record.job}: {record.verdict}: {record.reason}"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_quick(stage: Stage, tmp_path: Path) -> None:
    found = runner.run_stage(stage, "quick", runner.Options(out=tmp_path, workers=1))
    assert found and all(record.finished for record in found)
    for record in found:
        page = tmp_path / record.run_id / record.notebook
        assert not record.notebook or page.is_file()
    for record in sorted(found, key=lambda record: record.verdict is Verdict.SKIPPED):
        verified(record)


@pytest.mark.parametrize(("stage", "name"), negatives())
def test_negative(stage: Stage, name: str, tmp_path: Path) -> None:
    record = runner.run_negative(stage, name, runner.Options(out=tmp_path, workers=1, figures=False, slices=True))
    verified(record)
    failed = {gate.metric for gate in record.gates if gate.state == "failed"}
    assert failed.issuperset(stage.negative(name).metrics)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_lint(stage: Stage) -> None:
    assert [str(problem) for problem in lint(stage)] == []


def test_every_gate_is_turned_red_or_says_why_not() -> None:
    """A gate without a negative has a reason."""
    assert unproven(env.root()) == ([], sum(len(stage.gates) for stage in STAGES))


def test_every_stage_is_among_them(request: pytest.FixtureRequest) -> None:
    """Each folder under stages/ has its `test_quick`, so that a stage that does not run is red, not absent."""
    folders = {path.name for path in (env.root() / "stages").iterdir() if path.is_dir()}
    assert {stage.name for stage in STAGES} == folders
    option = request.config.option
    by_id = any("::" in argument for argument in request.config.args)
    if not (option.keyword or option.markexpr or by_id or getattr(option, "lf", False)):  # no selection
        items = [item for item in request.session.items if isinstance(item, pytest.Function)]
        quick = [item for item in items if item.originalname == "test_quick" and item.path == Path(__file__)]
        assert {item.callspec.params["stage"].name for item in quick} == folders
