"""Every injected fault is found by the means that it names, and the kernel without it by none."""

import pytest

from dsv4lib.ops.moe_gemm.faults import CAUGHT_BY, FAULTS, WeightsTwice
from dsv4lib.ops.moe_gemm.inputs import case
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.moe_gemm.run_case import run_moe_gemm

L1 = {"swiglu": True, "routed": True, "out": "nvfp4"}
W4A8 = {"mode": "w4a8", "out": "fp32"}
COUNTS = [65, 0, 1, 2]  # a second tile, an empty group, one token
RUNS = dict.fromkeys(FAULTS, L1) | {"OneScaleId": W4A8, "FirstScales": W4A8, "NoTailMask": W4A8, "FirstRows": W4A8}


def run(kind, options):
    made = case(MoeGemm(**options), COUNTS, 128, 384)
    return run_moe_gemm(kind, options, made, grid=2, schedule="adversarial")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CAUGHT_BY)
def test_found(name):
    assert CAUGHT_BY[name] in {found[0] for found in run(FAULTS[name], RUNS[name]).findings()}


@pytest.mark.full
def test_weights_that_are_fetched_twice_show_in_bytes_alone():
    options = {"mode": "nvfp4", "out": "fp32"}
    right, twice = (run(kind, options) for kind in (MoeGemm, WeightsTwice))
    assert right.clean and twice.right and not twice.stray
    read = [outcome.result.stats["tma_read_bytes"] for outcome in (right, twice)]
    assert read[1] - read[0] == 4 * 2 * 128 * 128  # four tiles, of 65 tokens two, and two K steps of 128 x 128 bytes


def test_nothing_is_found_without_a_fault():
    outcome = run(MoeGemm, L1)
    assert outcome.clean and not outcome.findings()
