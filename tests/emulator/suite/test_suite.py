"""Every faulty kernel of the suite is caught under its name at its line; its repaired twin is silent."""

from __future__ import annotations

import csv

import pytest

from dsv4lib.emulator.checks import KINDS
from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite import barriers, far, shared, tensor
from tests.emulator.suite.harness import caught, in_place, run

TABLES = {"shared": shared.CASES, "far": far.CASES, "barriers": barriers.CASES, "tensor": tensor.CASES}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_reported_with_its_line(name):
    case = CASES[name]
    for schedule in case.schedules:
        outcome = run(case, False, schedule)
        assert caught(case, outcome), (schedule, outcome)
        assert in_place(case, outcome), (schedule, case.marked(), outcome)


@pytest.mark.parametrize("name", CASES)
def test_the_repaired_twin_is_silent(name):
    for schedule in POLICIES:
        outcome = run(CASES[name], True, schedule)
        assert outcome.error is None and outcome.hazards == [], (schedule, outcome)


def test_twins_differ_and_lines_are_marked():
    assert len(CASES) >= 60
    for name, case in CASES.items():
        texts = [
            (case.text(False, second), case.text(True, second))
            for second in ([False, True] if case.second else [False])
        ]
        assert any(faulty != repaired for faulty, repaired in texts), name
        assert case.marked() or case.marked(True), name


def test_the_table_of_results_is_of_these_kernels():
    """Its rows are what the tests above find; ``python -m tests.emulator.suite.table`` writes it."""
    from tests.emulator.suite.table import COLUMNS, PATH

    with PATH.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert {f"{row['table']}: {row['variant']}": row["kind"] for row in rows} == {
        name: case.kind.replace("|", " or ") for name, case in CASES.items()
    }
    for fact in ("caught", "line right", "twin silent"):
        assert {row[fact] for row in rows} == {"yes"}


def test_every_kind_that_is_an_error_of_a_kernel_is_in_the_suite():
    """Other kinds have their twins in the tests of the unit that reports them."""
    here = {kind for case in CASES.values() for kind in case.kind.split("|")}
    elsewhere = {
        "scale_factors_not_replicated", "mbarrier_reinit_waited", "descriptor_modified", "missing_alias_fence",
        "global_read_past_end_unused", "uninitialised_smem_unused", "missing_wgmma_fence",
        "missing_tcgen05_fence", "missing_proxy_fence_overwrite",
    }  # fmt: skip
    assert set(KINDS) - here == elsewhere
