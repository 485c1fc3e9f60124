"""The page on 4-bit weights: the recorded table is reproduced, the expert too, and every figure says what it shows."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import weight_modes
from dsv4lib.pages.quantize import figures, run_case
from dsv4lib.viz.style import alt_text


@pytest.fixture(scope="module")
def gaussian() -> run_case.Sample:
    return run_case.samples(32, ("gaussian",))["gaussian"]


def test_the_recorded_table_within_a_tenth_of_a_decibel(gaussian):
    """The Gaussian column on 32 of its 512 rows (the stage compares the others)."""
    worst, where, cells = run_case.deviation(run_case.table({"gaussian": gaussian}))
    assert cells == 37 and worst <= 0.1, where


def test_another_global_scale_is_noticed():
    moved = run_case.samples(16, ("gaussian",), stretch=1.3)
    row = [row for row in run_case.ROWS if row.name == "E4M3 per 32, global folded"]
    assert run_case.deviation(run_case.table(moved, row))[0] > 0.3


def test_exact_means_exact(gaussian):
    row = next(row for row in run_case.ROWS if row.name == "bf16")
    (done,) = run_case.table({"gaussian": gaussian}, [row])
    assert done.errors["gaussian"] == run_case.Error(math.inf, pytest.approx(1), pytest.approx(1), 0.0)
    off = run_case.Row("bf16", 16, lambda q, ref, w: ref * (1 + 2**-20))
    assert run_case.deviation(run_case.table({"gaussian": gaussian}, [off]))[0] == math.inf


def test_gates_of_the_modes(gaussian):
    errors = {
        name: run_case.error(
            weight_modes.dequantize(weight_modes.convert(gaussian.quantized, name), torch.float64), gaussian.values
        )
        for name in weight_modes.MODES
    }
    assert errors["e4m3_expand"].db >= 33 and errors["e4m3_expand"].cos >= 0.9995
    assert errors["ue8m0_naive"].cos < 0.98
    assert [name for name, e in errors.items() if e.largest == 0] == ["nvfp4", "e4m3_split", "bf16"]


def test_rows_are_a_part_of_the_whole(gaussian):
    part = run_case.samples(16, ("gaussian",))["gaussian"]
    assert torch.equal(part.values, gaussian.values[:16])
    with pytest.raises(ArgumentError, match="rows=0"):
        run_case.samples(0)


def test_one_expert_in_native_nvfp4():
    """A smaller expert than the page's: activations decide, the size does not."""
    one = run_case.expert(32, 512, 256, 0.04, 10.0, seed=3)
    exact = one.weights(run_case.ROWS[0].convert)
    reference = one.run(exact, "bf16")
    relative = {kind: run_case.error(one.run(exact, kind), reference).relative for kind in ("bf16", "mxfp8", "nvfp4")}
    assert relative["bf16"] == 0
    assert 0.147 <= relative["nvfp4"] <= 0.179 and 0.04 <= relative["mxfp8"] <= 0.055
    w1, w3, _ = one.quantized
    assert w1.global_scale == w3.global_scale


def test_the_operand_is_read_as_the_gemm_reads_it(gaussian):
    assert figures.operand_differences(gaussian) == 0
    assert figures.operand_differences(gaussian, scales_in_order=True) > 1000


def test_differences_of_the_exact_modes_are_seen():
    assert figures.exact_difference("e4m3_split") == figures.exact_difference("bf16") == 0
    assert figures.exact_difference("e4m3_split", lo=False) > 1
    assert figures.exact_difference("bf16", twice=True) > 1


def test_figures(gaussian):
    modes = ["ue8m0_naive", "e4m3_expand"]
    assert "E4M3: 126 from" in alt_text(figures.code_grids())
    assert "41 of 56 cells are 0" in alt_text(figures.product_map())
    assert "e4m3_expand: median" in alt_text(figures.block_errors(gaussian, modes))
    assert "|c| = 6" in alt_text(figures.error_by_code(gaussian, modes))
    assert "the exponent alone" in alt_text(figures.scale_ratios(gaussian))
