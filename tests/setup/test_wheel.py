"""The wheel: it carries stages, notebooks and data, runs where there is no clone, and needs little for the emulator."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab.commands import doctor
from tests.emulator.sanitize import kernels

ROOT = Path(__file__).resolve().parents[2]
# What an install without extras has, as a program that hides everything else from imports.
ALONE = """
import runpy, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
KEPT = {"numpy", "llvmlite", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection",
        "rich", "markdown_it", "mdurl", "pygments", "typer", "click", "shellingham", "annotated_doc", "dsv4lib"}
class Alone(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in KEPT or top in sys.stdlib_module_names or top.startswith("_")
        return super().find_spec(name, path, target) if known else None
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Alone]
sys.argv = ["dsv4", *sys.argv[1:]]
runpy.run_module("dsv4lib.lab.cli", run_name="__main__")
"""
MADE = ("data/runs/a/record.json", "data/.hidden/a", "stages/__pycache__/a.pyc")  # of a clone that was used


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An unpacked wheel of this tree, built where runs were made."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("dsv4lib", "notebooks", "README.md", "LICENSE", "pyproject.toml", "setup.py", "requirements.lock"):
        (source / name).symlink_to(ROOT / name)  # the build writes beside its sources
    for name in ("stages", "data"):
        (source / name).mkdir()
        for path in (ROOT / name).iterdir():
            if path.name not in ("runs", "__pycache__"):
                (source / name / path.name).symlink_to(path)
    for name in MADE:
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text("made here")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def dsv4(installed, tmp_path, *arguments, program=("-m", "dsv4lib.lab.cli")):
    variables = {**os.environ, "PYTHONPATH": str(installed), "XDG_DATA_HOME": str(tmp_path / "data")}
    variables.pop("DSV4_WORKSPACE", None)
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)


def test_a_wheel_has_the_workspace(installed):
    inside = installed / "dsv4lib" / env.INSTALLED
    for folder, pattern in (("notebooks", "*.ipynb"), ("stages", "*/stage.toml"), ("data/bench", "**/*.csv")):
        have = {p.relative_to(inside) for p in (inside / folder).glob(pattern)}
        assert have == {p.relative_to(ROOT) for p in (ROOT / folder).glob(pattern)} and have, folder
    assert (inside / "data" / "nano" / "model.safetensors").is_file()
    assert [name for name in MADE if (inside / name).exists()] == []
    facts = next(installed.glob("*.dist-info"))
    assert "License-Expression: Apache-2.0" in (facts / "METADATA").read_text()
    assert (facts / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_commands_of_a_wheel(installed, tmp_path):
    stages = dsv4(installed, tmp_path, "stages", "--json")
    assert stages.returncode == 0, stages.stderr
    assert {s["name"] for s in json.loads(stages.stdout)} == {p.parent.name for p in ROOT.glob("stages/*/stage.toml")}
    checked = dsv4(installed, tmp_path, "doctor")
    assert checked.returncode == 0 and "extra lab" in checked.stdout, checked.stdout + checked.stderr
    for command in (["test"], ["lint"], ["new", "op", "mine"]):
        refused = dsv4(installed, tmp_path, *command)
        assert refused.returncode == 2 and "needs a clone" in refused.stderr, refused.stderr
    nothing = dsv4(installed, tmp_path, "report")
    assert nothing.returncode == 2 and "no report yet: dsv4 run writes one" in nothing.stderr


@pytest.mark.full
def test_a_stage_of_a_wheel_runs_and_keeps_its_record_with_the_user(installed, tmp_path):
    before = sorted(installed.rglob("*"))
    done = dsv4(installed, tmp_path, "run", "--stage", "layouts")
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (tmp_path / "data" / "dsv4" / "runs").glob("*/report/index.html")
    assert "layouts" in page.read_text()
    assert [p for p in sorted(installed.rglob("*")) if p not in before and "__pycache__" not in p.parts] == []


def test_without_extras_there_is_the_emulator(installed, tmp_path):
    alone = ("-c", ALONE)
    help_text = dsv4(installed, tmp_path, "emulate", "--help", program=alone)
    assert help_text.returncode == 0 and "on an emulated GPU" in help_text.stdout, help_text.stderr
    sanitized = dsv4(installed, tmp_path, "sanitize", str(kernels.write(tmp_path)), program=alone)
    assert sanitized.returncode == 90 and "ERROR race_shared" in sanitized.stderr, sanitized.stderr
    points = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "dsv4-sanitize = dsv4lib.lab.cli:sanitize_main" in points.read_text()
    refused = dsv4(installed, tmp_path, "generate", "hi", program=alone)
    assert (refused.returncode, refused.stdout) == (2, "") and "pip install 'dsv4lab[lab]'" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    (tmp_path / "s.py").write_text("print(1)")
    refused = dsv4(installed, tmp_path, "emulate", "s.py", program=alone)
    assert (refused.returncode, refused.stdout) == (2, "") and len(refused.stderr.splitlines()) == 1
    assert "scripts in the emulator need torch: pip install torch" in refused.stderr


def test_doctor_names_the_extra_that_lacks_a_package():
    requires = ["dsv4lab[ops]; extra == 'lab'", "pillow; extra == 'lab'"]
    requires += ["numpy>=2.0", "torch>=2.11; extra == 'ops'", 'Ruff==1; extra == "test"', "ml_dtypes; extra == 'ops'"]
    assert doctor.missing_by_extra(requires, {"numpy": "2.4", "torch": "2.11"}) == {
        "": (), "lab": ("ml-dtypes", "pillow"), "ops": ("ml-dtypes",), "test": ("ruff",)
    }  # fmt: skip


def test_dependencies_are_ranges_that_hold_the_lock():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = doctor.read_lock(ROOT / "requirements.lock")
    wanted = [*project["dependencies"], *(n for extra in project["optional-dependencies"].values() for n in extra)]
    for need in map(Requirement, wanted):
        if need.name == "dsv4lab":
            continue
        assert need.specifier.contains(locked[doctor.normal(need.name)]), str(need)
        exact = any(s.operator == "==" for s in need.specifier)
        assert not exact or need.name == "ruff", f"{need}: a pin keeps others from installing beside it"
