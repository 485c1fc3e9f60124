"""Throwaway workspaces: stages and notebooks made in a temporary folder and run through the real runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dsv4lib.lab import records
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import runner
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.stage import Stage, load
from dsv4lib.lab.verdicts import judge, overall

PARAMETERS = (
    'backend: str = "auto"  # back end\nseed: int = 0  # of every random input\nfault: str = "none"  # injected fault'
)

TOML = {
    "title": "A throwaway stage",
    "summary": "Only for a test.",
    "kernel": False,
    "parameters": {
        "backend": {
            "type": "str", "default": "auto", "help": "back end",
            "choices": ["auto", "native", "emulator", "reference"],
        },
        "seed": {"type": "int", "default": 0, "min": 0, "max": 100, "help": "of every random input"},
        "fault": {"type": "str", "default": "none", "choices": ["none", "injected"], "help": "injected fault"},
    },
    "sets": {name: {"time_limit_s": 60, "runs": [{}]} for name in ("quick", "nightly", "b200")},
    "gates": [{"metric": "wrong", "op": "==", "bound": 0, "last_seen": 0, "reason": "nothing may be wrong"}],
    "negatives": [{"name": "injected", "parameters": {"fault": "injected"}, "expect_fail": "wrong"}],
}  # fmt: skip

VERDICT = 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{"wrong": 0 if fault == "none" else 3}})'


def toml(value: Any) -> str:
    """``value`` as inline TOML (JSON is almost that)."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def write_stage(
    root: Path, name: str, body: str | list[str] = "", verdict: str | None = VERDICT, **changes: Any
) -> Stage:
    """Write stages/<name>/stage.toml and its notebook: parameters, the cells of ``body``, the verdict."""
    contract = {**TOML, "notebook": f"notebooks/{name}.ipynb", **changes}
    folder = root / "stages" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.toml").write_text("\n".join(f"{key} = {toml(item)}" for key, item in contract.items()))
    cells = [nbformat.v4.new_markdown_cell("# Throwaway")]
    cells.append(nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}))
    cells += [nbformat.v4.new_code_cell(source) for source in ([body] if isinstance(body, str) else body) if source]
    if verdict is not None:
        cells.append(nbformat.v4.new_code_cell(verdict.format(name=name)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    notebook.metadata["language_info"] = {"name": "python"}
    (root / "notebooks").mkdir(exist_ok=True)
    nbformat.write(notebook, root / "notebooks" / f"{name}.ipynb")
    return load(name, root)


@pytest.fixture(scope="session")
def stage_writer() -> Callable[..., Stage]:
    """stage_writer(root, name, body, **toml changes) -> a stage in the workspace ``root``."""
    return write_stage


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Stage]:
    """make(name, body, **toml changes) -> a stage in this test's own workspace."""

    def factory(name: str = "tiny", body: str | list[str] = "", **changes: Any) -> Stage:
        return write_stage(tmp_path, name, body, **changes)

    return factory


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replaces the running of notebooks by given reports: stage -> {metrics, skipped}; default: all gates at 0."""
    reports: dict[str, dict[str, Any]] = {}

    def run(self: runner.Supervisor, jobs: list[Job]) -> None:
        for job in jobs:
            stage = load(job.stage, self.root)
            report = reports.get(job.stage, {"metrics": {gate.metric: 0.0 for gate in stage.gates}})
            if "verdict" in report:
                self._record(job, stage, 0, report["verdict"], "made so", datetime.now(UTC), 1.0)
                continue
            gates = judge(stage.gates, report["metrics"], report.get("skipped", {}))
            kind, reason = overall(gates)
            record = Record(
                run_id=self.plan.run_id, job=job.name, attempt=0, stage=job.stage, title="t", set=job.set,
                kind=job.kind, negative="", expect_fail="", overrides=job.overrides, parameters=job.parameters,
                backend=job.backend, arch=runner._arch(job, stage), fingerprint="", stage_fingerprint="",
                versions={}, machine={}, commit=self.plan.commit, label=self.plan.label, verdict=kind, reason=reason,
                started=datetime.now(UTC), seconds=1.0, time_limit_s=9.0, gates=gates,
            )  # fmt: skip
            records.write(record, self.plan.folder)

    monkeypatch.setattr(runner.Supervisor, "run", run)
    return reports
