"""Every faulty kernel in CUDA C++ (cpp/*.cu) is caught under its name at its line; its repaired twin is silent."""

from __future__ import annotations

import pytest

from dsv4lib import nvrtc
from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.errors import Deadlock, Place
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.errors import BackendUnavailable
from tests.emulator.suite import cuda
from tests.emulator.suite.harness import Outcome, alone, caught

CASES = cuda.cases()
RUNS = [
    pytest.param(name, arch, marks=[pytest.mark.full] if i else [])
    for name, case in CASES.items()
    for i, arch in enumerate(case.arches)
]


@pytest.fixture(autouse=True, scope="module")
def compiler():
    try:
        nvrtc.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_the_fault_is_reported_with_its_line(name, arch):
    case = CASES[name]
    for schedule in case.schedules:
        outcome = cuda.run(case, False, schedule, arch=arch)
        assert caught(case, outcome), (schedule, outcome)
        assert cuda.in_place(case, outcome), (schedule, case.marked, outcome)
        assert alone(case, outcome), (schedule, outcome)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "arch"), RUNS)
def test_the_repaired_twin_is_silent(name, arch):
    for schedule in POLICIES:
        outcome = cuda.run(CASES[name], True, schedule, arch=arch)
        assert outcome.error is None and outcome.hazards == [], (schedule, outcome)


def test_every_kernel_has_a_kind_marks_and_a_difference():
    assert len(CASES) >= 60
    entries = sum(path.read_text().count("__global__ void") for path in cuda.FOLDER.glob("*.cu"))
    assert entries == len(CASES) + sum(bool(case.companion) for case in CASES.values())
    for name, case in CASES.items():
        assert case.marked, name
        assert set(case.kind.split("|")) <= {*KINDS, "Deadlock", "HazardError", "MemoryFault", "EmulatorError"}, name
        text = case.source()
        assert "FIX(" in text or "FAULT(" in text, name


def test_a_report_at_a_line_without_a_mark_or_of_another_file_is_out_of_place():
    case = CASES["shared: two writers"]
    (line,) = case.marked

    def report(file, number):
        return Hazard(case.kind, "", Place("k", 1, "st.shared", f"/somewhere/{file}:{number}"))

    assert cuda.in_place(case, Outcome([report("shared.cu", line)]))
    for found in ([report("shared.cu", line + 1)], [report("far.cu", line)], [Hazard(case.kind, "", None)], []):
        assert not cuda.in_place(case, Outcome(found)), found


def test_an_error_at_a_line_without_a_mark_is_out_of_place():
    case = next(case for case in CASES.values() if case.kind == "Deadlock")
    right, wrong = (f"/somewhere/{case.file}.cu:{line}" for line in (min(case.marked), max(case.marked) + 1))
    assert cuda.in_place(case, Outcome([], Deadlock(right)))
    for said in (f"{right}, {wrong}", wrong, "nothing"):
        assert not cuda.in_place(case, Outcome([], Deadlock(said))), said
