"""What the operators' extra resolves with: the recorded answers of a resolver agree with this project's ranges."""

import csv
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader((ROOT / "data" / "packages" / "vllm.csv").open()))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALWAYS = PROJECT["dependencies"]
OPS = [*ALWAYS, *PROJECT["optional-dependencies"]["ops"]]
PINNED = ("nvidia-cutlass-dsl", "llvmlite", "numpy", "torch")


def conflicts(needs: list[str], row: dict[str, str]) -> list[str]:
    found = [need for need in map(Requirement, needs) if need.name in PINNED]
    return [need.name for need in found if not need.specifier.contains(row[need.name])]


@pytest.mark.parametrize("row", ROWS, ids=[row["vllm"] for row in ROWS])
def test_a_recorded_resolution_follows_from_the_ranges(row):
    for needs, column in ((ALWAYS, "dsv4lab"), (OPS, "dsv4lab[ops]")):
        refused = conflicts(needs, row)
        assert row[column] == (f"conflict: {', '.join(refused)}" if refused else "resolved"), column


def test_the_readme_names_the_versions_that_resolve():
    oldest = next(row["vllm"] for row in ROWS if row["dsv4lab[ops]"] == "resolved")
    assert [row["dsv4lab[ops]"] == "resolved" for row in ROWS] == sorted(
        row["dsv4lab[ops]"] == "resolved" for row in ROWS
    ), "from one version on"
    text = (ROOT / "README.md").read_text()
    span = f"vLLM {oldest.rpartition('.')[0]} and {ROWS[-1]['vllm'].rpartition('.')[0]}"
    assert span in text and "data/packages/vllm.csv" in text
