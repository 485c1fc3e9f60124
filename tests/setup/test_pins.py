"""One set of pins: requirements.lock, pyproject.toml, environment.yml, the front door and what is installed agree."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import yaml

from dsv4lib.lab.doctor import normal, read_lock

ROOT = Path(__file__).resolve().parents[2]
LOCK = read_lock(ROOT / "requirements.lock")


def lock_lines():
    return [s for s in (ROOT / "requirements.lock").read_text().splitlines() if s and not s.startswith("#")]


def test_every_lock_line_is_an_exact_pin_and_torch_is_first():
    lines = lock_lines()
    assert lines[0] == "torch==2.13.0"
    assert [s for s in lines if not re.fullmatch(r"[A-Za-z0-9._-]+(\[[a-z0-9,]+\])?==[A-Za-z0-9.]+", s)] == []
    names = [normal(re.split(r"[\[=]", s)[0]) for s in lines]
    assert len(names) == len(set(names))


def test_named_packages_are_listed_explicitly():
    lines = lock_lines()
    assert "nvidia-cutlass-dsl[cu13]==4.8.1" in lines
    assert any(s.startswith("cuda-python==") for s in lines)
    for name in ("jupyterlab", "matplotlib", "ipywidgets", "papermill", "nbstripout", "transformers"):
        assert name in LOCK


def test_pyproject_pins_equal_the_lock():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"]
    wanted += project["build-system"]["requires"]
    for line in wanted:
        name, version = line.split("==")
        assert LOCK[normal(name.split("[")[0])] == version, line


def test_conda_installs_the_same_lock():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, rest = conda["dependencies"]
    assert python == "python=3.11"
    assert pip == f"pip={LOCK['pip']}"
    assert rest == {"pip": ["-r requirements.lock"]}


def test_the_lock_is_closed_over_requirements():
    """Nothing that our packages need is left to the resolver's mood: every installed requirement is in the lock."""
    from packaging.requirements import Requirement

    unlocked = set()
    for name in LOCK:
        for text in metadata.distribution(name).requires or []:
            need = Requirement(text)
            if (need.marker is None or need.marker.evaluate({"extra": ""})) and normal(need.name) not in LOCK:
                unlocked.add(f"{name} -> {need.name}")
    # torch's CUDA build names its own libraries; they are the `# cuda:` constraints of the lock.
    cuda = {
        normal(s[8:].split("==")[0])
        for s in (ROOT / "requirements.lock").read_text().splitlines()
        if s[:8] == "# cuda: "
    }
    assert {u for u in unlocked if normal(u.split(" -> ")[1]) not in cuda} == set()


def test_installed_versions_are_the_locked_ones():
    wrong = {n: metadata.version(n) for n, v in LOCK.items() if metadata.version(n).split("+")[0] != v}
    assert wrong == {}


def test_the_corpus_is_pinned_and_agrees_with_the_lock():
    corpus = read_lock(ROOT / "requirements-corpus.lock")
    assert len(corpus) >= 6
    assert {name: v for name, v in corpus.items() if LOCK.get(name, v) != v} == {}
