"""One set of pins: requirements.lock, pyproject.toml, environment.yml, the front door and what is installed agree."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from dsv4lib.errors import DSV4Error
from dsv4lib.lab import lock
from dsv4lib.lab.commands.doctor import normal, read_lock

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


def test_the_build_uses_the_locked_setuptools():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (line,) = project["build-system"]["requires"]
    assert line == f"setuptools=={LOCK['setuptools']}"


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


def test_every_pin_but_torch_has_hashes_and_nothing_else_has():
    pins = [line for line in lock.pins((ROOT / lock.PINS).read_text()) if not line.startswith("torch==")]
    lines = [s for s in (ROOT / lock.HASHES).read_text().splitlines() if "==" in s]
    assert [line.split(" --hash")[0] for line in lines] == pins, "python -m dsv4lib.lab.lock"
    assert len(pins) > 170 and any(pin.startswith("# cuda: triton==") for pin in pins)
    for line in [*lines, *corpus_lines()]:
        assert re.fullmatch(r"(# cuda: )?\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line), line


def corpus_lines():
    return [s for s in (ROOT / lock.CORPUS).read_text().splitlines() if not s.startswith("#")]


def test_pip_takes_the_locks_and_refuses_another_file(tmp_path):
    """pip itself reads both files in its hash-checking mode; a wheel that hashes to something else is refused."""
    from pip._internal.network.session import PipSession
    from pip._internal.req import parse_requirements
    from pip._internal.req.constructors import install_req_from_parsed_requirement

    for name in (lock.HASHES, lock.CORPUS):
        with PipSession() as session:
            parsed = [install_req_from_parsed_requirement(r) for r in parse_requirements(str(ROOT / name), session)]
        assert len(parsed) > 10 and all(r.has_hash_options and r.is_pinned for r in parsed)
    wheel = tmp_path / "six-1.17.0-py2.py3-none-any.whl"
    wheel.write_bytes(b"not the file of the index")
    (line,) = [s for s in (ROOT / lock.HASHES).read_text().splitlines() if s.startswith("six==")]
    (tmp_path / "r.txt").write_text(line)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--require-hashes", "--ignore-installed"]
    pip += ["--find-links", str(tmp_path), "--target", str(tmp_path / "out"), "-r", str(tmp_path / "r.txt")]
    done = subprocess.run(pip, capture_output=True, text=True, env={**os.environ, "PIP_FIND_LINKS": ""})
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr and not (tmp_path / "out").exists()


def test_hashes_are_written_in_order_and_a_missing_version_is_named():
    files = {("a", "1"): ["ff", "00", "ff"], ("b_c", "2.0"): ["11"]}
    pins = lock.pins("# torch first\na[x]==1\n\n# cuda: b_c==2.0\n")
    text = lock.hashed(pins, lambda name, version: files[name, version])
    assert text == "a==1 --hash=sha256:00 --hash=sha256:ff\n# cuda: b_c==2.0 --hash=sha256:11\n"
    with pytest.raises(DSV4Error, match="a==1: the index has no file"):
        lock.hashed(["a==1"], lambda name, version: [])
