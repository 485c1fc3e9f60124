"""Mutation score on a small tree: what is checked is killed, what is not survives, what never runs is listed apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab.upkeep import mutants

SOURCE = '''"""Small."""


def checked(x):
    if x < 0:
        raise ValueError("é")
    return x ^ 1


def unchecked(found, x):
    found.append(x + 1)
    return min(x, 3) if x and found else True


def never(x):
    x += 1
    return x
'''
TEST = """import pytest
from dsv4lib.small import checked, unchecked
def test():
    assert [checked(x) for x in (0, 1, 2)] == [1, 0, 3]
    unchecked([], 1)
    with pytest.raises(ValueError):
        checked(-1)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("dsv4lib/small.py", SOURCE), ("dsv4lib/__init__.py", ""), ("tests/test_small.py", TEST)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_verdict(tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    by_operator = {}
    for one in mutants.mutants_of("dsv4lib/small.py", SOURCE):
        by_operator.setdefault(one.operator, one)
    some = ["keep phase", "swap comparison", "drop check", "drop call", "drop update"]
    monkeypatch.setattr(mutants, "chosen", lambda *_: [by_operator[name] for name in some])
    assert mutants.command(["--mutants", "5"], tree) == 1
    said = capsys.readouterr().out
    verdicts = [line.split("] ")[1][:12].strip() for line in said.splitlines() if line.startswith("[")]
    assert verdicts == ["killed", "killed", "killed", "survived", "not executed"], said
    assert "-    found.append(x + 1)" in said and "+    pass" in said
    assert "killed 3 of 4" in said and "1 were not executed" in said
    assert (tree / "dsv4lib/small.py").read_text() == SOURCE
    monkeypatch.setattr(mutants, "run_tests", None)  # verdicts come from the record
    assert mutants.command(["--mutants", "5", "--minutes", "9"], tree) == 1
    assert "killed 3 of 4" in capsys.readouterr().out
    assert mutants.command(["--mutants", "5", "--minutes", "-1"], tree) == 0
    assert "stopped after 0 of 5" in capsys.readouterr().out


def test_tests_that_fail_anyway_kill_nothing(tree: Path) -> None:
    (tree / "tests/test_small.py").write_text("import dsv4lib.small\ndef test():\n    assert False\n")
    score = mutants.Score(tree, tree / "record")
    assert score.judge(mutants.mutants_of("dsv4lib/small.py", SOURCE)[0], tree) == "no baseline"


def test_mutants_are_valid_and_all_different() -> None:
    source = (env.root() / "dsv4lib/emulator/checks/global_memory.py").read_text()
    found = mutants.mutants_of("x.py", source)
    assert len(found) > 200 and len({one.operator for one in found}) >= 8
    texts = [one.applied(source) for one in found[::20]]
    assert len(set(texts)) == len(texts) and source not in texts
    for text in texts:
        ast.parse(text)
    small = {(one.operator, one.new) for one in mutants.mutants_of("x.py", SOURCE)}
    assert {("drop check", "False"), ("swap min, max", "max"), ("flip constant", "False"), ("off by one", "2")} <= small


def test_the_choice_follows_from_the_seed() -> None:
    first, again, other = (mutants.chosen(env.root(), 3, seed, "run/files") for seed in (1, 1, 2))
    assert first == again != other and len(first) == 3


def test_tests_near_a_module() -> None:
    tests = mutants.Tests(env.root())
    assert tests.near("dsv4lib/lab/upkeep/mutants.py")[0] == "tests/lab/test_mutants.py"
    near = tests.near("dsv4lib/emulator/checks/global_memory.py")
    assert len(near) == mutants.FILES and all(name.startswith("tests/emulator/checks/") for name in near[:1])
