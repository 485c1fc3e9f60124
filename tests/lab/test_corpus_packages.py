"""`./dsv4 test --corpus` installs other people's packages once, beside the lab. pip is a stand-in."""

import subprocess
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.bench.peers import corpus
from dsv4lib.errors import DSV4Error


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were run; the last argument of `fail` decides whether pip fails."""
    made: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        made.append(command)
        folder = Path(command[command.index("--target") + 1])
        assert not folder.exists(), "pip --target does not replace what lies there"
        folder.mkdir()
        return subprocess.CompletedProcess(command, "--fail" in command)

    (tmp_path / corpus.LOCK).write_text("quack-kernels==0.6.5\n")
    monkeypatch.setattr(env, "root", lambda: tmp_path)
    monkeypatch.setattr(corpus.subprocess, "run", run)
    monkeypatch.delenv("DSV4_PIP_ARGS", raising=False)
    monkeypatch.setenv(corpus.VARIABLE, "")
    return made


def test_installed_once_without_requirements_in_a_folder_of_its_own(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_PIP_ARGS", "--no-index --find-links /some/wheels")
    folder = corpus.install()
    assert folder == tmp_path / corpus.FOLDER and corpus.install() == folder
    (command,) = pip
    assert "--no-deps" in command and command[command.index("--find-links") + 1] == "/some/wheels"
    assert command[-2:] == ["-r", str(tmp_path / corpus.LOCK)]


def test_changed_pins_install_anew(pip, tmp_path):
    folder = corpus.install()
    (folder / "old.py").touch()
    (tmp_path / corpus.LOCK).write_text("quack-kernels==0.6.6\n")
    corpus.install()
    assert len(pip) == 2 and not (folder / "old.py").exists()


def test_a_failed_attempt_is_no_installation(pip, monkeypatch):
    monkeypatch.setenv("DSV4_PIP_ARGS", "--fail")
    with pytest.raises(DSV4Error, match="could not be installed"):
        corpus.install()
    monkeypatch.delenv("DSV4_PIP_ARGS")
    corpus.install()
    assert len(pip) == 2


def test_too_little_disk_is_said_before_anything_is_loaded(pip, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_FREE_GIB", 1e9)
    with pytest.raises(DSV4Error, match="GiB of free disk"):
        corpus.install()
    assert pip == []


def test_only_the_option_installs_and_it_chooses_the_tests(pip, tmp_path):
    assert corpus.pytest_arguments(["-k", "x"]) == ["-k", "x"] and pip == []
    assert corpus.pytest_arguments(["--corpus", "-x"]) == ["--all", *corpus.TESTS, "-x"] and len(pip) == 1
    assert all((Path(__file__).resolve().parents[2] / test).exists() for test in corpus.TESTS)
    assert corpus.pytest_arguments(["--corpus", "--tenth", "3"]) == [*corpus.TESTS, "--tenth", "3"]
    one = "tests/corpus/test_corpus.py::test_x"
    assert corpus.pytest_arguments([one, "--corpus"]) == [one]
    assert corpus.os.environ[corpus.VARIABLE] == str(tmp_path / corpus.FOLDER)


def test_the_folder_is_not_committed():
    ignored = (Path(__file__).resolve().parents[2] / ".gitignore").read_text().splitlines()
    assert corpus.FOLDER + "/" in ignored
