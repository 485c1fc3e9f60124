"""Slices of notebooks: which cells one metric needs, and runs of injected faults that leave the others out."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dsv4lib import env
from dsv4lib.lab.notebook.slices import LEFT_OUT, of_notebook, slice_for
from dsv4lib.lab.report.cells import render
from dsv4lib.lab.run import runner
from dsv4lib.lab.stage import Stage, discover
from dsv4lib.lab.verdicts import Verdict

PARAMETERS = 'fault: str = "none"\nsize: int = 3'
HEAD = 'import numpy as np\nfrom dsv4lib import lab, viz\nlab.card("x")'
END = 'lab.verdict("x", metrics={"a": a, "b": b})'


def kept(*cells: str, metric: str = "a", end: str = END, changed: tuple[str, ...] = ("fault",)) -> list[int] | None:
    """Numbers among ``cells`` that ``metric`` needs."""
    whole = [PARAMETERS, None, HEAD, *cells, end]
    found = slice_for(whole, (metric,), changed)
    if found is None:
        return None
    assert not {0, 2, len(whole) - 1} & set(found.left_out) and found.verdict == len(whole) - 1
    return [number for number in range(len(cells)) if number + 3 not in found.left_out]


@pytest.mark.parametrize(
    ("cells", "needed"),
    [
        (["a = 1", "b = 2"], [0]),
        (["x = size", "y = 1", "a = x + 1"], [0, 2]),
        (["a = 0", "a += 1", "b = a"], [0, 1]),
        (["a = 0", "a = 1"], [1]),
        (["a = 0", "if size:\n    a = 1"], [0, 1]),
        (["a = 0", "for _ in range(size):\n    a = 1"], [0, 1]),
        (["a = 0", "with open(x) as f:\n    a = f.read()"], [1]),
        (["a = 0", "try:\n    a = 1\nexcept OSError:\n    pass"], [0, 1]),
        (["a = []", "a.append(1)", "b = 1"], [0, 1]),
        (["a = {}", "a['x'] = 1", "a.y = 2", "del a['x']"], [0, 1, 2, 3]),
        (["t = new()", "t.fill_(3)", "a = t"], [0, 1, 2]),
        (["t = new()", "y = t.fill_(3)", "a = t"], [0, 1, 2]),
        (["t = new()", "fill(t)", "fill(1, out=t[0])", "a = t"], [0, 1, 2, 3]),
        (["t = new()", "viz.show(t)", "print(t)", "lab.show(t)", "a = t"], [0, 4]),
        (["np.random.seed(0)", "np.mode = 3", "a = np.ones(3)"], [1, 2]),
        (["x = 1", "def f():\n    return x", "x = 2", "a = f()"], [0, 1, 2, 3]),
        (["x = 1", "f = lambda: x", "a = f()"], [0, 1, 2]),
        (["x = 1", "def f(x):\n    return x", "a = f(3)"], [1, 2]),
        (["x = 1", "a = [x for x in range(size)]"], [1]),
        (["x = 1", "for x in range(3):\n    a = x"], [1]),
        (["x = 1", "(a := x)"], [0, 1]),
        (["def f():\n    global a\n    a = 1", "f()"], [0, 1]),
        (["a = []", "def add(x):\n    a.append(x)", "add(3)", "b = 1"], [0, 1, 2]),
        (["a = []", "def f(x):\n    a = [x]\n    a.append(x)\n    return a", "f(3)"], [0]),
        (["x = 0", "if fault != 'none':\n    patch(3)", "a = 1"], [1, 2]),
        (["x = 0", "y = patch(3) if fault != 'none' else 0", "a = 1"], [2]),
        (["optimise(size)", "a = 1"], [1]),
        (["from dsv4lib.viz import draw", "t = 1", "draw(t)", "a = t"], [1, 3]),
    ],
)
def test_a_metric_needs_what_it_is_computed_from(cells: list[str], needed: list[int]) -> None:
    assert kept(*cells) == needed


def test_the_verdict_is_reduced_to_the_metric() -> None:
    end = 'ratio = a / 2\nother = b + 1\nlab.verdict("x", metrics={"a": ratio, "b": other, **c}, skipped=d)'
    cells = [PARAMETERS, HEAD, "a = 1", "b = 1", "c = {}", "d = {}", end]
    for metrics, left_out, source in (
        ("a", (3, 4), "ratio = a / 2\nlab.verdict('x', metrics={'a': ratio}, skipped=d)"),
        ("b", (2, 4), "other = b + 1\nlab.verdict('x', metrics={'b': other}, skipped=d)"),
        (["of c"], (2, 3), "lab.verdict('x', metrics={**c}, skipped=d)"),
        ("ab", (4,), "ratio = a / 2\nother = b + 1\nlab.verdict('x', metrics={'a': ratio, 'b': other}, skipped=d)"),
        (["a", "of c"], (3,), "ratio = a / 2\nlab.verdict('x', metrics={'a': ratio, **c}, skipped=d)"),
    ):
        found = slice_for(cells, metrics, ())
        assert found and (found.left_out, found.source) == (left_out, source)


def test_a_metric_that_the_verdict_does_not_name_runs_whole() -> None:
    assert slice_for([PARAMETERS, HEAD, "a = 1", "b = 1", END], ("a", "other"), ()) is None


def test_a_dict_of_metrics_is_read_item_by_item() -> None:
    cells = ["metrics = {}", "metrics['a'] = 1", "metrics['b'] = 2", "metrics[f'{size}'] = 3", "metrics['a'] += 1"]
    assert kept(*cells, end='lab.verdict("x", metrics=metrics)') == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("cells", "end"),
    [
        (["%matplotlib inline", "a = 1"], END),
        (["a = 1"], 'lab.verdict("x", metrics=dict(a=a))'),
        (["a = 1"], 'lab.verdict("x", metrics={name: a})'),
        (["a = 1"], 'lab.verdict("x", metrics={"b": a})'),
        (["a = 1"], 'print("x")'),
    ],
)
def test_what_cannot_be_read_runs_whole(cells: list[str], end: str) -> None:
    assert kept(*cells, end=end) is None


@pytest.mark.one_in(4)
@pytest.mark.parametrize("stage", discover(env.root()), ids=lambda stage: stage.name)
def test_every_fault_of_the_workspace_has_a_slice(stage: Stage) -> None:
    for fault in stage.negatives:
        part = of_notebook(stage.notebook_path, fault)
        assert part and part.left_out, f"{fault.name} runs the whole notebook"


BODY = ["right = 0 if fault == 'none' else 3", "assert fault == 'none', 'drawn for a reader'", "other = 0"]
TWO = {
    "negatives": [
        {"name": "injected", "parameters": {"fault": "injected"}, "expect_fail": "wrong"},
        {"name": "missed", "parameters": {"fault": "injected"}, "expect_fail": "other"},
        {"name": "half", "parameters": {"fault": "injected"}, "expect_fail": ["wrong", "other"]},
    ],
    "gates": [{"metric": m, "op": "==", "bound": 0, "last_seen": 0, "reason": "x"} for m in ("wrong", "other")],
    "verdict": 'from dsv4lib import lab\n\nlab.verdict("{name}", metrics={{"wrong": right, "other": other}})',
}


def test_a_run_of_a_slice(make: Callable[..., Stage]) -> None:
    """It runs and judges what the gate needs, and says so; a gate that stays green fails; whole runs see the rest."""
    stage = make(body=BODY, **TWO)
    only = runner.Options(slices=True)
    red, green = (runner.run_negative(stage, name, only) for name in ("injected", "missed"))
    assert (red.verdict, green.verdict) == (Verdict.PASSED, Verdict.STAYED_GREEN)
    assert [gate.metric for gate in red.gates] == ["wrong"] and red.metrics == {"wrong": 3.0}
    assert red.reason.endswith("; 2 cells were left out, which this gate does not depend on")
    half = runner.run_negative(stage, "half", only)
    assert half.verdict is Verdict.STAYED_GREEN and half.expect_fail == "wrong, other"
    assert half.reason.startswith("the injected fault half left the gate on other green")
    assert half.reason.endswith("; 1 cells were left out, which these gates do not depend on")
    assert runner.run_negative(stage, "injected").verdict is Verdict.ASSERTION
    assert runner.run_stage(stage, "quick", only)[0].metrics == {"wrong": 0.0, "other": 0.0}

    page = stage.root / "data" / "runs" / red.run_id / red.notebook
    cells = [cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [LEFT_OUT in cell["metadata"]["tags"] for cell in cells] == [False, False, False, True, True, False]
    shown = [block.kind for block in render(page, stage.title, str).blocks if block.kind in ("code", "pending")]
    assert shown == ["code", "code", "code", "pending", "pending", "code"]


def test_a_fault_that_turns_several_gates_red(make: Callable[..., Stage]) -> None:
    stage = make(body=[BODY[0], "other = right"], **TWO)
    assert stage.never_red() == []
    for options in (runner.Options(slices=True), runner.Options()):
        record = runner.run_negative(stage, "half", options)
        assert record.verdict is Verdict.PASSED, record.reason
        assert {gate.metric for gate in record.gates if gate.state == "failed"} == {"wrong", "other"}


def test_a_slice_that_misses_what_it_needs_does_not_pass(make: Callable[..., Stage]) -> None:
    """A change through a second name is not seen; the gate then fails or stays green, it does not turn red for it."""
    hidden = [
        "wrongs = []\nalias = wrongs\nseen = fault",
        "alias.append(seen)",
        "right = len([w for w in wrongs if w != 'none'])",
    ]
    stage = make(body=hidden, **TWO | {"verdict": TWO["verdict"].replace('"other": other', '"other": 0')})
    assert runner.run_negative(stage, "injected", runner.Options(slices=True)).verdict is Verdict.STAYED_GREEN
    assert runner.run_negative(stage, "injected").verdict is Verdict.PASSED
