"""Every faulty kernel in CuTeDSL (cutedsl/*.py) is caught under its name at its line; its repaired twin is silent."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass.cute")

from dsv4lib.emulator.checks import KINDS
from dsv4lib.emulator.machine.policies import POLICIES
from tests.cases import cases
from tests.emulator.suite import cuda
from tests.emulator.suite.cutedsl import barriers, common, far, rings, shared, tensor
from tests.emulator.suite.harness import alone, caught

FILES = (barriers, far, rings, shared, tensor)
# Of each file what only the DSL has (pipelines, its copies, maps by its host code), then other kinds.
SAMPLE = [
    "barriers: a pipeline whose consumer never releases",
    "barriers: a warp barrier of half the lanes",
    "far: a flag that ends at the device",
    "far: another warp waits",
    "far: rows that do not end at 16 bytes",
    "rings: a ring of more stages than buffers",
    "rings: an epilogue that releases before its loads are done",
    "shared: a consumer that does not wait for tma",
    "shared: a consumer that releases before it reads",
    "shared: cp async that is not waited for",
    "shared: st async that is not waited for",
    "tensor: a consumer that does not wait for the product",
    "tensor: a copy whose values are used early",
    "tensor: sums that a product still writes",
]
NAMES = cases(*SAMPLE, full=[name for name in common.LISTED if name not in SAMPLE])


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_reported_with_its_line(name):
    case = common.LISTED[name]
    for schedule in case.schedules:
        outcome = common.run(name, False, schedule)
        assert caught(case, outcome), (schedule, outcome)
        assert cuda.in_place(case, outcome, case.file), (schedule, case.marked, outcome)
        assert alone(case, outcome), (schedule, outcome)


@pytest.mark.parametrize("name", NAMES)
def test_the_repaired_twin_is_silent(name):
    for schedule in POLICIES:
        outcome = common.run(name, True, schedule)
        assert outcome.error is None and outcome.hazards == [], (schedule, outcome)


def test_every_kernel_has_a_kind_marks_and_a_difference():
    assert len(common.LISTED) >= 60 and set(SAMPLE) <= set(common.LISTED)
    assert {name.partition(":")[0] for name in common.LISTED} == {file.__name__.rpartition(".")[2] for file in FILES}
    for name, case in common.LISTED.items():
        assert case.marked, name
        assert set(case.kind.split("|")) <= {*KINDS, "Deadlock", "HazardError", "MemoryFault", "EmulatorError"}, name
        assert "fixed" in case.source().partition("\n")[2].replace("fixed: Constexpr", ""), name
