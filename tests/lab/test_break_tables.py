"""The tables under "Break it": every fault is seen by a check of its page, and what is right by none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from dsv4lib.config import FLASH
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.stage import discover, load
from dsv4lib.ops.swiglu_quant.kernel import SwigluQuant
from dsv4lib.pages.decode_step import figures as decode_step
from dsv4lib.pages.decode_step import run_case as decode_step_case
from dsv4lib.pages.decode_step import schedule
from dsv4lib.pages.full_model import figures as full_model
from dsv4lib.pages.full_model import run_case as full_model_case
from dsv4lib.pages.hopper import figures as hopper
from dsv4lib.pages.router_mhc import breaks
from dsv4lib.pages.router_mhc import figures as router_mhc
from dsv4lib.pages.speculation import figures as speculation
from dsv4lib.pages.speculation import run_case as speculation_case
from dsv4lib.pages.swiglu_quant import run_case as swiglu_quant


def bounds(*names: str) -> dict[str, float]:
    """Bounds of gates of stages: metric -> value."""
    return {gate.metric: gate.bound for stage in discover() if stage.name in names for gate in stage.gates}


def harmless(_):
    """Inject nothing."""
    return nullcontext()


def test_faults_of_the_boundary_and_the_router_are_seen(capsys):
    given = router_mhc.case(5, 384, 32, 0)
    found = router_mhc.run(given)
    names = breaks.OF_MHC + breaks.OF_ROUTER
    assert breaks.show_faults(given, found, names) == 0 and breaks.show_faults(given, found, ["none"]) == 1
    assert {*names, "none"} == set(breaks.WHAT) and set(names) <= set(router_mhc.FAULTS)
    stages = bounds("mhc", "router_norms")
    assert {name: stages[name] for name in breaks.ALLOWED} == breaks.ALLOWED


def test_faults_of_gated_rows_are_seen(capsys):
    faults = swiglu_quant.FAULTS
    assert swiglu_quant.show_faults(faults, 5, 1280, 0, "emulator") == 0
    right = {"SwigluQuant": SwigluQuant}
    assert swiglu_quant.show_faults(right, 5, 1280, 0, "emulator") == 1
    assert swiglu_quant.ALLOWED == {"over_oracle": bounds("swiglu_quant")["over_oracle"]}


def test_faults_of_the_model_are_seen(capsys):
    names = [name for name in full_model_case.FAULTS if name != "none"]
    assert full_model.faults_table(names) == 0 and full_model.faults_table(["none"]) == 1
    stages = bounds("full_model")
    assert {name: stages[name] for name in full_model.ALLOWED} == full_model.ALLOWED


def test_faults_of_records_are_seen(capsys):
    names = [name for name in hopper.FAULTS if name != "none"]
    assert hopper.faults_table(names) == 0 and hopper.faults_table(["none"]) == 1
    assert hopper.ALLOWED == {"bytes_over_least": bounds("hopper")["bytes_over_least"]}
    step, whole = schedule.of_a_step(FLASH), decode_step_case.whole_steps()
    names = [name for name in decode_step_case.FAULTS if name not in ("none", "pretended")]
    assert decode_step.faults_table(names, step, whole) == 0
    assert decode_step.faults_table(["none"], step, whole) == 1
    assert decode_step.ALLOWED == {"b128": bounds("decode_step")["over_floor_b128"]}


@pytest.mark.full
def test_faults_of_drafts_are_seen(capsys, monkeypatch):
    found = speculation_case.whole.listed()
    right = speculation_case.serve(found, "The state of", 9, 0, "reference")
    p, q = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    names = list(speculation_case.FAULTS)
    assert len(names) == 5 and speculation.faults_table(names, found, right, p, q) == 0
    for name in ("VerifiesARowLate", "AcceptsByTheDraft"):
        monkeypatch.setitem(speculation_case.FAULTS, name, harmless)
        assert speculation.faults_table([name], found, right, p, q) == 1


def test_a_mistyped_fault_of_the_whole_model_is_refused():
    """Of those that the stage names, each is known."""
    known = {*full_model_case.FAULTS, *full_model_case.RACES, *full_model_case.OF_DRAFTS}
    assert set(load("full_model").parameters["fault"].choices) == known
    with pytest.raises(ArgumentError, match="fault='CombTranspose'"):
        full_model_case.model(full_model_case.listed(), "reference", fault="CombTranspose")
