"""Every lint rule, shown failing on a notebook or contract that breaks just that rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbformat
import pytest

from dsv4lib.lab.stage import Gate, Stage
from dsv4lib.lab.upkeep.lint import PROSE_WORDS, lint, lint_all, looser, prose_words, unproven

CARD = 'from dsv4lib import lab\n\nlab.card("tiny", backend=backend, seed=seed)'


def rules(stage: Stage) -> set[str]:
    return {problem.rule for problem in lint(stage)}


def edit(stage: Stage, change: Callable[[Any], None]) -> Stage:
    notebook = nbformat.read(stage.notebook_path, as_version=4)
    change(notebook)
    nbformat.write(notebook, stage.notebook_path)
    return stage


def test_a_sound_stage_has_no_problem(make: Callable[..., Stage]) -> None:
    assert lint(make(body=CARD)) == []


@pytest.mark.parametrize(
    ("op", "bound", "seen", "loose"),
    [
        ("<=", 4.0, 1.0, False), ("<=", 4.1, 1.0, True), ("<", 1e-6, 1e-7, True), ("<=", 1e-9, 0, True),
        ("<=", 0, 0, False), (">=", 0.25, 1.0, False), (">=", 0.2, 1.0, True), (">", -1, 0, True),
        ("==", 3, 3, False), ("<=", -2, -8, False), ("<=", -1, -8, True), (">=", -4, -1, False), (">=", -5, -1, True),
    ],
)  # fmt: skip
def test_a_gate_may_be_four_times_looser(op: Any, bound: float, seen: float, loose: bool) -> None:
    assert looser(Gate(metric="m", op=op, bound=bound, last_seen=seen, reason="x")) is loose


def gate(**changes: Any) -> dict[str, Any]:
    return {"gates": [{"metric": "wrong", "op": "<=", "bound": 1, "last_seen": 1, "reason": "x", **changes}]}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (gate(bound=4.5), "gate"),
        (gate(last_seen=2), "gate"),
        (gate(no_fault="a negative turns it red all the same"), "gate"),
        ({"negatives": []}, "negatives"),
        ({"sets": {"quick": {"time_limit_s": 60, "runs": [{}]}}}, "sets"),
        ({"notebook": "notebooks/nothing.ipynb"}, "notebook"),
    ],
)
def test_rules_of_the_contract(make: Callable[..., Stage], changes: dict[str, Any], rule: str) -> None:
    stage = make(body=CARD, **changes)
    assert rules(stage) == {rule}


def test_a_gate_that_nothing_turns_red_is_listed(make: Callable[..., Stage]) -> None:
    """Unless it says why; the gate that the negative names never is."""
    one = {"metric": "wrong", "op": "==", "bound": 0, "last_seen": 0, "reason": "x"}
    stage = make(body=CARD, gates=[one, {**one, "metric": "rows"}, {**one, "metric": "bytes", "no_fault": "a size"}])
    assert stage.never_red() == ["rows", "bytes"]
    assert unproven(stage.root) == ([f"{stage.name}.rows"], 3)


def retag(nb: Any) -> None:
    nb.cells[1].metadata["tags"] = []


def run_it(nb: Any) -> None:
    nb.cells[2].execution_count = 1


def add_output(nb: Any) -> None:
    nb.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="x")]


def papermill(nb: Any) -> None:
    nb.metadata["papermill"] = {}


def rename(nb: Any) -> None:
    nb.metadata["kernelspec"]["name"] = "dsv4"


def last_prose(nb: Any) -> None:
    nb.cells.append(nbformat.v4.new_markdown_cell("the end"))


def other_stage(nb: Any) -> None:
    nb.cells[-1].source = nb.cells[-1].source.replace('"tiny"', '"other"')


def no_prose(nb: Any) -> None:
    del nb.cells[0]


def link(nb: Any) -> None:
    nb.cells[0].source = "see /home/alice/notes.txt"


def prose(text: str) -> Callable[[Any], None]:
    def change(nb: Any) -> None:
        nb.cells[0].source = text

    return change


def source(index: int, old: str, new: str) -> Callable[[Any], None]:
    def change(nb: Any) -> None:
        assert old in nb.cells[index].source
        nb.cells[index].source = nb.cells[index].source.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (retag, "parameters"),
        (source(1, "seed: int = 0", "seed: int = 1"), "parameters"),
        (source(1, "seed: int = 0", "seed: float = 0"), "parameters"),
        (source(1, "seed: int = 0", "seed = 0"), "parameters"),
        (source(1, "  # of every random input", ""), "parameters"),
        (source(1, "seed: int = 0", "sed: int = 0"), "parameters"),
        (run_it, "stripped"),
        (add_output, "stripped"),
        (papermill, "stripped"),
        (rename, "kernelspec"),
        (last_prose, "verdict"),
        (other_stage, "verdict"),
        (no_prose, "prose"),
        (link, "path"),
        (source(2, "lab.card", "print"), "card"),
        (source(2, "from", "x = '/data/models/weights'\nfrom"), "path"),
        (source(2, "from", "x = '~/weights'\nfrom"), "path"),
        (source(2, "from", "!pip install numpy\nfrom"), "install"),
        (source(2, "from", "%pip install numpy\nfrom"), "install"),
        (source(2, "from", "\n" * 25 + "from"), "length"),
        (source(2, "from", "def (\nfrom"), "syntax"),
        (prose("word " * 121), "words"),
        (prose("| a | b |\n|---|---|\n| c | d |\n\n" + "word " * 121), "words"),
        (prose("```text\ncode\n```\n" + "word " * 121), "words"),
        (prose("<details>\nsolution\n</details>\n" + "word " * 121), "words"),
        (prose("## Your turn\n\nNo solution."), "turn"),
    ],
)
def test_rules_of_the_notebook(make: Callable[..., Stage], change: Callable[[Any], None], rule: str) -> None:
    assert rule in rules(edit(make(body=CARD), change))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("# A title\n\nTwo words, - and * x = 3", 7),
        ("one\n| a b | c |\n|---|---|\n| d | e |\ntwo", 2),
        ("one\n```python\na b c\n```\ntwo ```three``` four\n```\nd\n```\nfive", 5),
        ("one <details><summary>Solution</summary>\n\na b\n</details> two <details>c</details>", 2),
        ("one\n\n    indented code", 3),
    ],
)
def test_words_of_prose_leave_out_code_tables_and_folded_solutions(text: str, count: int) -> None:
    assert prose_words(text) == count


def test_a_cell_of_prose_may_have_120_words(make: Callable[..., Stage]) -> None:
    full = "word " * PROSE_WORDS + "\n\n| a | b |\n|---|---|\n\n```text\nc d\n```\n\n<details>e f</details>"
    assert PROSE_WORDS == 120 and "words" not in rules(edit(make(body=CARD), prose(full)))


@pytest.mark.parametrize(
    "code",
    [
        "print(later)",
        "def f():\n    return later\n\nf()",
        "x = [later for _ in range(3)]",
        "for i in later:\n    pass",
        "x = lambda: later",
        "later += 1",
        "if later:\n    pass",
        "with open(later) as file:\n    pass",
        "class A:\n    b = later",
        "@later\ndef f():\n    pass",
        "x[later] = 1",
        "from math import *",
    ],
)
def test_a_name_is_defined_before_it_is_used(make: Callable[..., Stage], code: str) -> None:
    stage = make(body=[CARD, code, "later = 1\nx = {}"])
    assert "order" in rules(stage)


@pytest.mark.parametrize(
    "code",
    [
        "import os.path as p\nprint(p)",
        "def f(a, *b, c=1, **d):\n    e = a\n    return e, b, c, d, g()\n\ndef g():\n    return f",
        "x = [i for i in range(3) if i]\ny = {a: b for a, b in zip(x, x)}",
        "for i, (a, b) in enumerate([]):\n    print(i, a, b)",
        "try:\n    z = 1\nexcept ValueError as error:\n    print(error)",
        "with open('x') as file:\n    text = file.read()\nprint(text)",
        "(n := 10)\nprint(n, seed, __name__)",
        "class A:\n    b = 1\n    def c(self):\n        return self.b, A",
        "match seed:\n    case [first, *rest]:\n        print(first, rest)",
        "%matplotlib inline\ndisplay(1)",
        "x = {}\nx['k'] = 1\nx['k'] += 1\ndel x",
        "f'{seed:>{seed}}'",
    ],
)
def test_sound_order_is_not_reported(make: Callable[..., Stage], code: str) -> None:
    assert lint(make(body=[CARD, code])) == []


def test_an_unreadable_contract_is_a_problem(make: Callable[..., Stage]) -> None:
    stage = make(body=CARD)
    assert lint_all(stage.root) == []
    (stage.root / "stages" / "tiny" / "stage.toml").write_text("title = ")
    assert [problem.rule for problem in lint_all(stage.root)] == ["contract"]
