"""The page on the experts' GEMMs: plans follow the configuration, the schedule is that of the trace, counts agree."""

import numpy as np
import pytest
import torch

from dsv4lib.dsl.budget import TMEM_COLUMNS
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.layers.experts import FORMS
from dsv4lib.ops.moe_gemm.inputs import case
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.moe_gemm import figures, routes
from dsv4lib.pages.moe_gemm.run_case import expected, mode_case, run_moe_gemm
from dsv4lib.predict import moe
from dsv4lib.viz.style import alt_text

COUNTS = [72, 0, 1, 65]


@pytest.fixture(scope="module")
def traced():
    made = case(MoeGemm(**figures.L1), COUNTS, 192, 320)
    return run_moe_gemm(MoeGemm, figures.L1, made, grid=3, trace=True), made


@pytest.mark.parametrize("options", [{}, {"tile_n": 192}, {"tile_n": 256, "mode": "bf16"}, {"mode": "w4a8"}], ids=str)
def test_no_column_of_a_plan_is_claimed_twice_and_the_budget_agrees(options):
    kernel = MoeGemm(**options)
    claims = np.zeros(TMEM_COLUMNS, int)
    for _, first, end in figures.columns(kernel):
        claims[first:end] += 1
    rows = {row.resource.removeprefix("TMEM: "): row.used for row in kernel.budget()}
    assert claims.max() == 1 and claims.sum() == rows["accumulators"] + rows.get("scales", 0)
    assert "of 512 columns" in figures.tile_picture(kernel).axes[-1].get_title(loc="left")


def test_the_schedule_is_that_of_the_rule_and_another_is_seen(traced):
    outcome, made = traced
    found = figures.loaded_tiles(outcome.trace, made, outcome.kernel)
    assert sum(map(len, found.values())) == (2 + 1 + 2) * 2
    assert found[0][0] == moe.Tile(0, 0, 0, 0) and found[1][0] == moe.Tile(0, 0, 64, 0)
    assert figures.schedule_mismatches(outcome.trace, made, outcome.kernel, 3) == 0
    assert figures.schedule_mismatches(outcome.trace, made, outcome.kernel, 3, tile_n=128) > 0
    assert figures.schedule_mismatches(outcome.trace, made, outcome.kernel, 2) > 0
    assert "CTA 2: expert 0, 72 tokens" in alt_text(figures.schedule_timeline(outcome.trace, made, outcome.kernel))


def test_scales_lie_where_an_mma_looks_for_them(traced):
    outcome, _ = traced
    held = figures.scales_in_tmem(outcome.trace).axes[0].images[0].get_array()
    for row in (0, 31, 32, 100, 127):
        assert (held[row % 32 :: 32, row // 32] == row).all()
    byte = figures.scale_block().axes[0].images[0].get_array()
    assert byte[100, 3] == scale_swizzle.byte_offset(100, 3, 4)


def test_the_output_is_what_the_format_makes_of_the_truth(traced):
    outcome, made = traced
    assert outcome.clean
    h, truth = figures.hidden(outcome.kernel, made), expected(outcome.kernel, made)[made.rows()]
    alone = slice(COUNTS[0], COUNTS[0] + 1)
    want = nvfp4.dequantize(nvfp4.quantize(truth[alone], made.call.out_global[2]), torch.float64)
    assert torch.allclose(h[alone], want, rtol=1e-6)


@pytest.mark.parametrize("mode", FORMS)
def test_modes_multiply_the_same_numbers(mode):
    """What a mode's operands stand for, times its factors, is the NVFP4 weights as exactly as the mode says."""
    settings, made, exact = mode_case(mode, [5, 0, 2], 64, 128, seed=1)
    rows = made.rows()
    error = expected(MoeGemm(**settings), made)[rows] - exact[rows]
    relative = float(error.norm() / exact[rows].norm())
    low, high = {"bf16": (0, 1e-12), "e4m3_split": (0.01, 0.05), "e4m3_expand": (0.01, 0.06)}.get(mode, (0.05, 0.4))
    assert low <= relative <= high


def test_loads_of_random_tokens(capsys):
    even = figures.routed("Flash", [1, 32])
    assert {n: int(c.sum()) for n, c in even.items()} == {1: 6, 32: 192}
    assert figures.load_table("Flash", even) < 0.04
    assert figures.load_table("Flash", figures.routed("Flash", [1, 32], skew=1.0)) > 0.1
    assert "32 tokens, routed: median" in alt_text(figures.load_histogram(even, "loads"))


def test_faults_are_counted_only_where_they_are_missed(capsys):
    names = figures.PRODUCT_FAULTS + figures.LAUNCH_FAULTS
    assert len(set(names)) == len(names) and set(names) == set(figures.FAULT_SHAPES)
    assert figures.show_faults(figures.LAUNCH_FAULTS[:1]) == 0
    assert figures.show_faults(figures.LAUNCH_FAULTS[:1], sound=True) == 1


def test_costs_follow_the_configuration(capsys):
    options = {"small": {"mode": "w4a8", "out": "fp32"}}
    found = figures.costs(options)
    assert figures.bytes_off(found, options) == 0
    assert figures.bytes_off(found, {"small": {"mode": "mxfp8", "out": "fp32"}}) > 0
    assert "small, 16 tokens" in alt_text(figures.cost_bars(found, moe.gpu("B200")))


def test_the_recorded_model_is_shown(capsys):
    rows = moe.recorded()
    assert all(len(line) == len(figures.PREDICTED) for line in figures.predicted(rows))
    figures.predictions(rows[:6])
    assert "Roofline with 24 points" in alt_text(figures.rooflines(rows))


def test_routes_are_those_of_the_oracles_and_exchanged_ones_are_counted():
    right, wrong = routes.run_routes(seed=3), routes.run_routes(seed=3, exchanged=True)
    assert right.wrong == 0 < wrong.wrong
    assert int(right.placed.counts[1]) == 0 and int(right.placed.row_of[-1, -1]) == -1
    assert routes.route_map(right).axes[0].images[0].get_array().max() == int(right.placed.row_of.max())
