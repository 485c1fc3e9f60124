"""The section on the launches around attention: its faults, its claims about rotations, its figures."""

from __future__ import annotations

import re

import pytest
import torch

from dsv4lib.pages.router_mhc import around_attention as around
from dsv4lib.reference.rmsnorm import rmsnorm
from dsv4lib.viz.style import alt_text

BOUNDS = {"query_error": 1, "entry_bytes": 0, "output_bytes": 0, "home_error": 0.04}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fault", "red"),
    [
        ("none", set()),
        ("position_late", {"query_error", "entry_bytes", "home_error"}),
        ("kv_unnormed", {"entry_bytes", "home_error"}),
        ("turned_on", {"output_bytes", "home_error"}),
    ],
)
def test_faults_and_what_sees_them(fault, red):
    found = around.run(3, fault)
    assert {name for name, bound in BOUNDS.items() if found.metrics[name] > bound} == red, found.metrics
    assert found.hazards == 0 and set(found.metrics) == set(BOUNDS)


def test_every_fault_is_tried():
    assert set(around.FAULTS) == {"position_late", "kv_unnormed", "turned_on"}


def test_a_norm_without_weight_and_a_turn_may_change_places():
    x = torch.randn(5, 3, around.DIM, generator=torch.Generator().manual_seed(0)).double()
    positions = torch.tensor(around.POSITIONS)
    first = around.turned(rmsnorm(x, None, around.EPS), positions)
    torch.testing.assert_close(rmsnorm(around.turned(x, positions), None, around.EPS), first, rtol=1e-6, atol=1e-7)
    assert torch.equal(first[0], rmsnorm(x, None, around.EPS)[0])  # position 0 does not turn


def test_figures():
    words = alt_text(around.distances(0))
    ends = [float(number.rstrip(".")) for number in re.findall(r"from \S+ to (-?[\d.]+)", words)]
    assert len(ends) == 3 and max(ends) - min(ends) < 0.005  # three lines, one way, but for bf16's rounding
    assert "a token that attends to itself alone" in alt_text(around.way_home(around.run(0)))
