"""The default run keeps a case of each kind of check of each op, whatever is left to the full run."""

import re

import pytest

KINDS = "fault|found|notice", "schedule", "budget|spilled|compiler", "."  # in names of tests


def kinds(names: list[str]) -> set[tuple[str, str]]:
    """(op, kind) of tests' ids."""
    parts = [re.match(r"tests/ops/(\w+)/(test_\w+)\.py::(\w+)", name) for name in names]
    return {(part[1], kind) for part in parts if part for kind in KINDS if re.search(kind, f"{part[2]} {part[3]}")}


def lost(names: list[str], left_out: list[str]) -> set[tuple[str, str]]:
    """Kinds of checks of an op that are all left out; those that only a GPU runs are not counted."""
    return kinds([name for name in left_out if "native" not in name]) - kinds(names)


def test_each_op_keeps_a_case_of_each_kind(request: pytest.FixtureRequest) -> None:
    config = request.config
    arguments = {argument.rstrip("/") for argument in config.args}
    if not arguments <= {"tests", "tests/ops"} or config.option.keyword or config.option.markexpr:
        pytest.skip("needs all tests of the ops")
    assert lost([item.nodeid for item in request.session.items], config.left_out) == set()


def test_a_lost_kind_is_seen() -> None:
    left = ["tests/ops/topk/test_op.py::test_faults[a]", "tests/ops/topk/test_native_sm90.py::test_schedules"]
    assert lost(["tests/ops/topk/test_op.py::test_numbers"], left) == {("topk", KINDS[0])}
    assert lost(["tests/ops/topk/test_cpp.py::test_found"], left) == set()
