"""Which tests run: those marked full only with --all, by name, or in the tenth that an option names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tenth_of

ROOT = Path(__file__).parent.parent
TESTS = """import pytest
@pytest.mark.parametrize("x", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 40))])
def test(x):
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selection")
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text().replace("import torch", "")
                                        .replace("torch.set_num_threads(1)", ""))  # fmt: skip
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full: x\n")
    (folder / "test_it.py").write_text(TESTS)
    return folder


def collected(folder: Path, *arguments: str) -> set[int]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return {int(line.partition("[")[2][:-1]) for line in said.splitlines() if "::" in line}


def test_what_is_left_out(folder: Path) -> None:
    everything = set(range(40))
    assert collected(folder) == {0}
    assert collected(folder, "--all") == everything
    assert collected(folder, "-m", "full") == everything - {0}
    assert collected(folder, "test_it.py::test[7]") == {7}
    third = collected(folder, "--tenth", "3")
    assert third == {0} | {i for i in range(1, 40) if tenth_of(f"test_it.py::test[{i}]") == 3} and len(third) > 1


def test_other_peoples_kernels_run_by_three_tenths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_CORPUS_SITE", "somewhere")
    found = [collected(folder, "--tenth", str(number)) for number in range(10)]
    assert found[8] == {i for i in range(40) if tenth_of(f"test_it.py::test[{i}]") in (8, 1, 4)}
    assert sum(map(len, found)) == 3 * 40  # each in three, marked or not


THINNED = """import pytest
@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("columns", [10, 20, pytest.param(30, marks=pytest.mark.full), 40])
def test(rows, columns):
    pass
@pytest.mark.one_in(4)
@pytest.mark.parametrize("x", range(6))
def test_other(x):
    pass
"""


def names(folder: Path, *arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return {line.partition("::")[2] for line in said.splitlines() if "::" in line}


def test_one_in_keeps_every_value(folder: Path, tmp_path: Path) -> None:
    for name in ("conftest.py", "pytest.ini"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "test_it.py").write_text(THINNED)
    found = names(tmp_path)
    assert found == {"test[10-1]", "test[20-2]", "test[40-3]", "test_other[0]", "test_other[1]"}
    assert len(names(tmp_path, "--all")) == 12 + 6
    assert names(tmp_path, "-m", "full") == names(tmp_path, "--all") - found
    assert names(tmp_path, "-k", "20-1 or 40-3") == {"test[40-3]"}  # what -k leaves changes no choice
    assert names(tmp_path, "test_it.py::test[20-1]") == {"test[20-1]"}


def test_tenths_share_all_tests() -> None:
    counts = [0] * 10
    for number in range(2000):
        counts[tenth_of(f"tests/some/test_file.py::test_case[{number}]")] += 1
    assert min(counts) > 120  # 200 each, were they shared evenly
