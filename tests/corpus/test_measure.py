"""The table of NVIDIA's examples: which scripts it holds, and what a new measurement of a row keeps."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

import measure
import pytest
import run_example
import torch

TABLE = measure.HERE.parent.parent / "data" / "emulator" / "examples.csv"
BEFORE = {"tma_v0": {"race": "same race_shared", "adversarial": "same", "random": "same", "replay_commit": "old"}}


def measured(monkeypatch: pytest.MonkeyPatch, modes: list[str], seen: dict[str, Any]) -> dict[str, Any]:
    """The row of tma_v0 after a run that saw this."""
    monkeypatch.setattr(measure, "run_script", lambda *arguments: seen)
    monkeypatch.setattr(measure, "commit", lambda: "new")
    ((name, arch, row),) = measure.examples(Path(), ["tma_v0"], modes, 1.0, BEFORE)
    return measure.as_row(name, arch, row)


def test_every_example_has_its_row() -> None:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == measure.COLUMNS["examples"]
    assert [row["configuration"] for row in rows] == [example.name for example in measure.all_examples()]
    for row in rows:
        assert row["commit"], row
        assert (row["result"] == "pass") or row["note"], row


def test_a_run_in_the_default_mode_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, [], {"result": "pass"})
    assert (row["race"], row["commit"], row["replay_commit"]) == ("same race_shared", "new", "old")


def test_a_run_in_all_modes_replaces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, ["race"], {"result": "pass", "race": "same"})
    assert (row["race"], row["random"], row["commit"], row["replay_commit"]) == ("same", "", "new", "new")


def test_the_note_says_why_a_script_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"result": "timeout", "note": "more than 1 s"}
    assert measured(monkeypatch, [], dict(seen))["note"] == "more than 1 s"
    example = measure.Example("tma_v0", "script.py", "", defect="slow")
    monkeypatch.setattr(measure, "all_examples", lambda: [example])
    assert measured(monkeypatch, [], dict(seen))["note"] == "slow [more than 1 s]"
    assert measured(monkeypatch, [], {"result": "nothing launched"})["note"] == "slow"


def test_a_note_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    made, script = f"{tempfile.gettempdir()}/tmp1x/module", f"{tmp_path.resolve()}/examples/a.py"
    note = measure.without_paths(f"cmake -B '{made}', {script}:61 of tests/b.py", tmp_path)
    assert note == "cmake -B '...', examples/a.py:61 of tests/b.py"


def test_a_script_goes_on_after_a_wrong_result() -> None:
    failed: list[str] = []
    close = run_example.listened([], failed)
    close(torch.ones(2), torch.ones(2))
    assert failed == []
    with pytest.raises(AssertionError):
        close(torch.ones(2), torch.zeros(2))
    assert run_example.result(failed[0], 1) == "fail"


def test_a_script_for_torchrun_names_its_devices() -> None:
    (example,) = [example for example in measure.all_examples() if example.name == "dist_all_reduce_tma"]
    command = example.command(Path("cutlass"), ["race"])
    assert command[2:6] == ["sm_100a", "", "2", "race"]
    assert command[6].endswith("distributed/all_reduce_tma.py")
