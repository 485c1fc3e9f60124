"""The table of traps: everything it names exists, and each fault is shown by the notebook of its stage."""

import json
import re

import pytest

from dsv4lib import env
from dsv4lib.lab.stage import discover
from dsv4lib.ops.fmha.faults import CAUGHT_BY, FAULTS, REFUSED
from dsv4lib.pages.fmha.traps import TRAPS

STAGES = {stage.name: stage for stage in discover(env.root())}
LADDER = ("a", "b", "c", "d1", "d2", "d3", "d4", "d5")
TESTS = sorted({name for trap in TRAPS for name in trap.tests})


def source(stage: str) -> str:
    """The code and prose of a stage's notebook."""
    cells = json.loads((env.root() / STAGES[stage].notebook).read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def test_the_table_is_whole():
    assert len(TRAPS) == 15 and len({trap.fault for trap in TRAPS}) == 15
    assert all(trap.tests and trap.looks and trap.catch for trap in TRAPS)


@pytest.mark.parametrize("name", TESTS)
def test_a_named_test_exists(name):
    file, _, function = name.partition("::")
    function, _, parameter = function.partition("[")
    text = (env.root() / file).read_text()
    assert re.search(rf"def {function}\(", text)
    if parameter:
        names = {"test_found": CAUGHT_BY, "test_refused": REFUSED}[function]
        assert parameter.removesuffix("]") in names
        assert (
            f'@pytest.mark.parametrize("name", {"CAUGHT_BY" if names is CAUGHT_BY else "REFUSED"})\ndef {function}('
            in text
        )


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.fault[:40])
def test_a_trap_is_shown_by_its_stage(trap):
    text = source(trap.stage)
    assert f'traps.show("{trap.stage}")' in text
    assert set(trap.gates) <= {gate.metric for gate in STAGES[trap.stage].gates}
    for name in trap.classes:
        assert re.search(rf"\b{name}\b", text), f"{name} is not in the notebook of {trap.stage}"
        if name in FAULTS:
            owner = CAUGHT_BY.get(name) or REFUSED[name]
            assert f"fmha_{owner[0]}" == trap.stage


def test_every_fault_is_shown_by_its_stage():
    for name, (stage, _) in {**CAUGHT_BY, **REFUSED}.items():
        if stage in LADDER:  # later stages have pages of another make; tests/ops/fmha/test_faults.py runs them all
            assert re.search(rf"\b{name}\b", source(f"fmha_{stage}")), name


def test_shapes_of_the_tests_are_awkward():
    """Among the shapes of a test matrix: extents that all differ, none a multiple of a tile, more than two tiles."""
    from tests.ops.fmha import test_faults, test_ladder
    from tests.ops.gemm_tile import test_sm90 as test_gemm_tile_sm90
    from tests.ops.gemm_tile import test_sm100 as test_gemm_tile

    for shapes in (test_gemm_tile.SHAPES, test_gemm_tile_sm90.SHAPES, test_ladder.SHAPES, [test_faults.SHAPE]):
        awkward = [s for s in shapes if len(set(s)) == len(s) and all(n % 64 for n in s) and max(s) > 2 * 128]
        assert awkward, shapes
