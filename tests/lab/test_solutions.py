"""Each exercise of the notebooks: not solved as it is written, solved by its folded solution."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.notebook import turns
from dsv4lib.lab.stage import discover
from tests.cases import cases

# Exercises that run a kernel or a larger model, seconds of CPU each: (notebook, number of the exercise in it).
HEAVY = [(name, 0) for name in ("30_fmha_a", "31_fmha_b", "32_fmha_c", "75_speculation")] + [("38_fmha_e", 1)]
STAGES = {Path(stage.notebook).stem: stage for stage in discover()}
FOUND = {name: turns.of_notebook(stage.notebook_path) for name, stage in STAGES.items()}
TURNS = sorted((name, number) for name, found in FOUND.items() for number in range(len(found)))

CELLS = [
    ("markdown", "# Title"),
    ("code", "start = 3"),
    ("code", "unused = missing"),
    (
        "markdown",
        "## 1. Your turn\n\nDouble it.\n\n<details><summary>Solution</summary>\n\n"
        "```python\ndef double(x):\n    return 2 * x\n```\n\nTwice.\n\n</details>",
    ),
    ("code", "def double(x):\n    return x\n\n\nlab.answer('double', double(start) == 6, 'add it to itself')"),
]


def run(program: str, folder: Path) -> dict[str, bool]:
    """Run a program as a module (the DSL reads the source of kernels); returns label -> right."""
    path = folder / f"turn_{abs(hash(program))}.py"
    path.write_text(program)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return turns.judged(said.getvalue())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "number"), cases(*(turn for turn in TURNS if turn not in HEAVY), full=HEAVY))
def test_a_solution_solves_its_exercise(name: str, number: int, tmp_path: Path) -> None:
    quick, turn = STAGES[name].parameter_set("quick").runs[0], FOUND[name][number]
    before = run(turn.program(False, quick), tmp_path)
    after = run(turn.program(True, quick), tmp_path)
    assert before.keys() == after.keys() and before
    assert not all(before.values()), "the exercise is solved as it is written"
    assert all(after.values()), after


def changed(number: int, old: str, new: str) -> list[tuple[str, str]]:
    """`CELLS` with a text of one replaced."""
    kind, source = CELLS[number]
    assert old in source
    return [*CELLS[:number], (kind, source.replace(old, new)), *CELLS[number + 1 :]]


def turn_of(cells: list[tuple[str, str]]) -> turns.Turn:
    """The exercise of `CELLS`, or of a variant of it."""
    sources = tuple(source if kind == "code" else None for kind, source in cells)
    return turns.Turn(sources, 4, turns.CODE.search(cells[3][1]).group(1))


def test_a_program_has_what_the_exercise_needs(tmp_path: Path) -> None:
    imports = "from dsv4lib import lab\n"
    turn = turn_of(changed(1, "start", f"{imports}start"))
    assert run(turn.program(False), tmp_path) == {"double": False}
    assert run(turn.program(True), tmp_path) == {"double": True}
    assert run(turn.program(True, {"start": 4}), tmp_path) == {"double": False}
    wrong = turn_of([*changed(1, "start", f"{imports}start")[:3], changed(3, "2 * x", "3 * x")[3], CELLS[4]])
    assert run(wrong.program(True), tmp_path) == {"double": False}


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (CELLS, ""),
        (CELLS[:3], ""),
        (changed(3, "Solution", "Hint"), "no folded solution"),
        (changed(3, "```python", "```text"), "no folded solution"),
        (changed(3, "</details>", "</details>\n\nMore."), "does not end with"),
        (changed(3, "double(x)", "halve(x)"), "names that the exercise binds"),
        (changed(3, "return 2", "return return"), "invalid syntax"),
        (changed(4, "lab.answer", "print"), "no code cell that calls lab.answer"),
        (CELLS[:4], "no code cell that calls lab.answer"),
        ([*CELLS[:4], ("markdown", "x"), CELLS[4]], "no code cell that calls lab.answer"),
    ],
)
def test_an_exercise_of_another_form_is_a_problem(cells: list[tuple[str, str]], said: str) -> None:
    found = list(turns.problems(cells))
    assert (not found) if not said else said in " ".join(found)


def test_a_solution_replaces_all_that_it_binds() -> None:
    exercise = "import a\n\n\n@a.jit\ndef f():\n    pass\n\n\nx, y = 1, 2\nf(x)"
    assert turns.substitute(exercise, "def f():\n    return 1\n").endswith(
        "def f():\n    return 1\n\n\nx, y = 1, 2\nf(x)"
    )
    assert "@a.jit" not in turns.substitute(exercise, "def f():\n    return 1\n")
    assert turns.substitute(exercise, "y = 3") == exercise.replace("x, y = 1, 2", "y = 3")
    with pytest.raises(ArgumentError, match="names that the exercise binds"):
        turns.substitute(exercise, "z = 3")


def test_what_was_judged_is_read_from_the_output() -> None:
    assert turns.judged("1: right\nnoise: 3\nthe kernel: not yet: a hint\n  2: not yet\n") == {
        "1": True, "the kernel": False, "  2": False,
    }  # fmt: skip
