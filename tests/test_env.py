"""What a record says of the sources and the machine: the commit that is checked out here, never another's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.errors import ArgumentError


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with one commit of one file."""
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("made\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_revision_is_the_commit_and_what_differs_from_it(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")
    (clone / "made").write_text("ignored")
    assert env.revision(clone) == (commit, False)
    (clone / "new.py").write_text("")
    assert env.revision(clone) == (commit, True)
    (clone / "new.py").unlink()
    git(clone, "config", "status.showUntrackedFiles", "no")
    (clone / "new.py").write_text("")
    assert env.revision(clone) == (commit, True), "whatever git shows by default"
    (clone / "new.py").unlink()
    (clone / "a.py").write_text("x = 2\n")
    assert env.revision(clone) == (commit, True)
    (clone / ".git" / "index").write_bytes(b"none")
    assert env.revision(clone) == (commit, None), "git fails: nothing is known"


def test_the_workspace_is_in_the_package_of_a_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of sources has `data` beside the package and no stages."""
    package = tmp_path / "dsv4lib"
    package.mkdir()
    monkeypatch.setattr(env, "package", lambda: package)
    assert env.root.__wrapped__() == tmp_path
    (package / env.INSTALLED).mkdir()
    assert env.root.__wrapped__() == package / env.INSTALLED


def test_a_folder_inside_another_repository_has_no_revision(
    clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A wheel in somebody's project is not of that project's commit, whatever git's variables say."""
    (clone / "inner").mkdir()
    assert env.revision(clone / "inner") == ("", None)
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv("GIT_DIR", str(clone / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(outside))
    assert env.revision(outside) == ("", None)
    monkeypatch.setenv("PATH", str(outside))
    assert env.revision(clone) == ("", None)


@pytest.mark.parametrize("label", ["a", "B200 rack-2 no.1_x"])
def test_a_machine_s_label_is_opt_in(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.LABEL, raising=False)
    assert env.machine_label() == ""
    monkeypatch.setenv(env.LABEL, f" {label} ")
    assert env.machine_label() == label
    for bad in ("<b>", "a/b", "-a", "x" * 41, "a\nb"):
        monkeypatch.setenv(env.LABEL, bad)
        with pytest.raises(ArgumentError, match=env.LABEL):
            env.machine_label()


def test_the_driver_s_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n": "550.54.15",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n": "570.86.15",
        "something else\n": "",
    }
    monkeypatch.setattr(env, "DRIVER", tmp_path / "version")
    for cuda, shown in (((12, 8), "CUDA 12.8"), (None, "")):
        monkeypatch.setattr(env, "driver_cuda", lambda cuda=cuda: cuda)
        for text, version in texts.items():
            env.DRIVER.write_text(text)
            assert env.driver() == (" ".join(filter(None, (version, shown))) or "none")
        env.DRIVER.unlink()
        assert env.driver() == (shown or "none")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("345, 1980, 2619, 2619, 700.00\n", "SM 345 of 1980 MHz, memory 2619 of 2619 MHz, power limit 700.00 W"),
        ("1, 2, 3, 4, 5\n1, 2, 3, 4, 5\n", "SM 1 of 2 MHz, memory 3 of 4 MHz, power limit 5 W"),
        ("1, 2, 3, 4, 5\n9, 2, 3, 4, 5\n", "SM 1 of 2 MHz, memory 3 of 4 MHz, power limit 5 W; SM 9 of 2 MHz, "),
        ("1, 2, [N/A], 4, /home/alice\n", "SM 1 of 2 MHz, memory ? of 4 MHz, power limit ? W"),
        ("No devices were found\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_clocks_as_found(answer: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program named nvidia-smi answers as NVIDIA's does, and writes its arguments."""
    monkeypatch.setattr(env, "driver_cuda", lambda: None)
    assert env.clocks() == "none"
    monkeypatch.setattr(env, "driver_cuda", lambda: (13, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(env, "gpu_names", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.clocks() == "unknown"
    program, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {asked}\nprintf '%s' '{answer}'\n")
    program.chmod(0o755)
    assert env.clocks().startswith(shown)
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit --format=csv,noheader,nounits"
    assert asked.read_text().strip() == query
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2")
    assert env.clocks().startswith(shown) and asked.read_text().strip() == f"-i 0,2 {query}"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert env.clocks() == "unknown"
    assert env.machine()["clocks"] == "unknown"
