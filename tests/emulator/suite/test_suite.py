"""Every faulty kernel of the suite is caught under its name at its line; its repaired twin is silent."""

from __future__ import annotations

import pytest

from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.checks.products import Products
from dsv4lib.emulator.errors import Deadlock, Place
from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.suite import barriers, far, relaxed, shared, tensor
from tests.emulator.suite.harness import Outcome, alone, caught, in_place, run

TABLES = {
    "shared": shared.CASES, "far": far.CASES, "barriers": barriers.CASES, "relaxed": relaxed.CASES,
    "tensor": tensor.CASES,
}  # fmt: skip
SILENT = tensor.SILENT | relaxed.SILENT
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_fault_is_reported_with_its_line(name):
    case = CASES[name]
    for schedule in case.schedules:
        outcome = run(case, False, schedule)
        assert caught(case, outcome), (schedule, outcome)
        assert in_place(case, outcome), (schedule, case.marked(), outcome)
        assert alone(case, outcome), (schedule, outcome)


@pytest.mark.parametrize("name", CASES)
def test_the_repaired_twin_is_silent(name):
    for schedule in POLICIES:
        outcome = run(CASES[name], True, schedule)
        assert outcome.error is None and outcome.hazards == [], (schedule, outcome)


@pytest.mark.parametrize("name", SILENT)
def test_what_looks_like_a_fault_is_none(name):
    for schedule in ("round_robin",) if name in tensor.SILENT else POLICIES:
        outcome = run(SILENT[name], False, schedule)
        assert outcome.error is None and outcome.hazards == [], (schedule, outcome)


def test_a_report_at_a_line_without_a_mark_is_out_of_place():
    case = CASES["tensor: a product outside the allocation"]
    (line,) = case.marked()
    marked, other = (Hazard(case.kind, "", Place("k", n, "tcgen05.mma")) for n in (line, line + 1))
    of_another_kind = Hazard("tmem_leak", "", None)
    assert in_place(case, Outcome([marked, of_another_kind]))
    for hazards in ([marked, other], [marked, Hazard(case.kind, "", None)], [of_another_kind], []):
        assert not in_place(case, Outcome(hazards)), hazards
    assert alone(case, Outcome([marked])) and not alone(case, Outcome([marked, of_another_kind]))


def test_an_error_at_a_line_without_a_mark_is_out_of_place():
    case = next(case for case in CASES.values() if case.kind == "Deadlock")
    line, other = min(case.marked()), max(case.marked()) + 1
    assert in_place(case, Outcome([], Deadlock(f"PTX line {line}")))
    for said in (f"PTX line {line}, PTX line {other}", f"PTX line {other}", "nothing"):
        assert not in_place(case, Outcome([], Deadlock(said))), said


@pytest.mark.parametrize(
    "case", [tensor.SILENT["two products in lanes of their own"], shared.CASES["a load from a peer that has exited"]]
)
def test_nothing_of_a_cta_is_kept_after_its_exit(case, monkeypatch):
    made = []
    start = Products.__init__
    monkeypatch.setattr(Products, "__init__", lambda self, machine: (start(self, machine), made.append(machine))[0])
    run(case, True)
    race = made[0].race
    kept = [race._products._cells, race._products._places, race._products._latest, race._peers._gone]
    assert [len(one) for one in kept] == [0] * 4 and made


def test_twins_differ_and_lines_are_marked():
    assert len(CASES) >= 60
    for name, case in CASES.items():
        texts = [
            (case.text(False, second), case.text(True, second))
            for second in ([False, True] if case.second else [False])
        ]
        assert any(faulty != repaired for faulty, repaired in texts), name
        assert case.marked() or case.marked(True), name


def test_every_kind_that_is_an_error_of_a_kernel_is_in_the_suite():
    """Other kinds have their twins in the tests of the unit that reports them."""
    here = {kind for case in CASES.values() for kind in case.kind.split("|")}
    elsewhere = {
        "scale_factors_not_replicated", "mbarrier_reinit_waited", "descriptor_modified", "missing_alias_fence",
        "global_read_past_end_unused", "uninitialised_smem_unused", "missing_wgmma_fence",
        "missing_tcgen05_fence", "missing_proxy_fence_overwrite",
    }  # fmt: skip
    assert set(KINDS) - here == elsewhere
