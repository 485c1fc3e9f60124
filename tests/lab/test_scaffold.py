"""`./dsv4 new`: an op and a stage that work at once, in a workspace of their own; names that are refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab.upkeep import scaffold
from tests.structure_rules import rules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path):
    """Templates, settings of ruff and the package, without the tests of what exists."""
    for name in ("data/templates", "dsv4lib", "stages", "notebooks", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", ".nbstripout"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def python(workspace, *arguments):
    """Run Python in the workspace, whose package it imports."""
    done = subprocess.run([sys.executable, *arguments], cwd=workspace, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_new_op_works(workspace):
    made = scaffold.write("op", "gated_row", workspace)
    places = {str(path.relative_to(workspace)) for path in made}
    assert "dsv4lib/ops/gated_row/kernel.py" in places and "stages/gated_row/stage.toml" in places
    left = [path for path in made if "template" in path.read_text() or "Template" in path.read_text()]
    assert left == [] and not list(workspace.glob(".new-*"))
    code, text = python(workspace, "-m", "ruff", "check", "--quiet", ".")
    assert code == 0, text
    code, text = python(workspace, "-m", "ruff", "format", "--check", "dsv4lib", "tests")
    assert code == 0, text
    quick = ["-k", "numbers or faults or arguments", "-p", "no:cacheprovider", "-q", "tests/ops/gated_row"]
    code, text = python(workspace, "-m", "pytest", *quick)
    assert code == 0, text
    assert rules(workspace / "dsv4lib" / "ops" / "gated_row", workspace) == []


def test_a_new_stage_is_a_contract(workspace):
    scaffold.write("stage", "my_page", workspace)
    script = "from dsv4lib.lab import stage; print(stage.load('my_page').title)"
    code, text = python(workspace, "-c", script)
    assert code == 0 and "Normalised rows" in text


@pytest.mark.parametrize("name", ["", "Swiglu", "two words", "9lives", "class", "a__b", "../x", "template_op"])
def test_names_that_are_none(tmp_path, name):
    with pytest.raises(ArgumentError, match="name"):
        scaffold.write("op", name, ROOT)


def test_what_exists_stays(workspace):
    with pytest.raises(ArgumentError, match="exists"):
        scaffold.write("op", "rmsnorm", workspace)
    with pytest.raises(ArgumentError, match="kind"):
        scaffold.write("kernel", "x", workspace)
    with pytest.raises(DSV4Error, match="templates"):
        scaffold.write("op", "fine", workspace / "stages")


def test_all_or_nothing(workspace, monkeypatch):
    """Interrupted between two files, it takes back the first."""
    moves = []

    def move(source, target):
        moves.append(target)
        if len(moves) == 3:
            raise KeyboardInterrupt
        return shutil.copy(source, target)

    monkeypatch.setattr(scaffold.shutil, "move", move)
    with pytest.raises(KeyboardInterrupt):
        scaffold.write("op", "gated_row", workspace)
    assert not any(Path(target).exists() for target in moves) and not list(workspace.glob(".new-*"))
