"""Variants of the experts' GEMM that a probe times: each lacks what it says, and ends."""

import pytest

from dsv4lib.bench.probes.routed_probe import VARIANTS, LaunchTimes, shown
from dsv4lib.ops.moe_gemm.inputs import SENTINEL
from dsv4lib.ops.moe_gemm.sm90.inputs import case
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from tests.ops.moe_gemm.hopper import run

OPTIONS = {"swiglu": True, "routed": True, "out": "mxfp8", "alpha": False, "step_k": 128}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    made = case(TiledMoeGemm(**OPTIONS), [3, 0, 9], 128, 640)
    outcome = run(OPTIONS, made, VARIANTS[name])
    assert outcome.stopped is None and outcome.compiled.local_bytes == 0
    ptx, written = outcome.compiled.ptx, bool((made.call.out[made.rows()] != SENTINEL).any())
    assert ("wgmma.mma_async" in ptx) == (name != "no_mma")
    assert ("cp.async.cg.shared.global" in ptx) == (name != "no_tokens")
    assert written == (name != "no_ends")
    assert (outcome.findings() == set()) == (name == "whole")


def test_a_row_on_the_screen():
    assert shown(LaunchTimes(8, "down", "whole", 50.0, 49.5)).split()[:4] == ["T", "8", "cold", "50.00"]
