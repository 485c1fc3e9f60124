"""Every corruption is rejected at every format's tolerance; what carries no information is not."""

import numpy as np
import pytest
import torch
from rounding import FLOATS, round_to, rows_of_different_scale

from dsv4lib import check
from dsv4lib.check import corrupt
from dsv4lib.errors import ArgumentError
from tests.cases import cases

INJECTED = {float("nan"): corrupt.NEEDS_NAN, float("inf"): corrupt.NEEDS_INF}
SHAPES = {"ragged": (131, 197), "tall_batch": (2, 3, 290, 77), "one_tile": (66, 72)}


def pair(fmt: str, shape: str, seed: int, injected: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the oracle rounded once to ``fmt``, the fp64 oracle), with ``injected`` at one place of both."""
    oracle = rows_of_different_scale(SHAPES[shape], seed)
    if injected is not None:
        oracle.view(-1)[oracle.numel() // 3] = injected
    return round_to(oracle, fmt), oracle


@pytest.mark.parametrize("name", corrupt.CORRUPTIONS)
@pytest.mark.parametrize("fmt", cases("fp32", "bf16", "e4m3", "nvfp4", full=("fp64", "fp16", "e5m2", "e2m1")))
def test_corruption_is_rejected(name, fmt):
    injected = next((v for v, names in INJECTED.items() if name in names), None)
    for shape in SHAPES:
        for seed in range(3):
            good, oracle = pair(fmt, shape, seed, injected)
            clean = check.compare(good, oracle, dtype=fmt)
            assert clean.passed, f"false alarm before the corruption: {clean}"
            bad = corrupt.CORRUPTIONS[name](good, np.random.default_rng(seed))
            record = check.compare(bad, oracle, dtype=fmt)
            assert not record.passed, f"{name} on {shape}, seed {seed}, went unseen: {record}"
            assert record.reasons


@pytest.mark.parametrize("fmt", FLOATS)
def test_corruption_is_rejected_between_two_rounded_sides(fmt):
    """A peer kernel as the expected side, both stored in the format."""
    for name, damage in corrupt.CORRUPTIONS.items():
        if name in corrupt.NEEDS_NAN | corrupt.NEEDS_INF:
            continue
        good, _ = pair(fmt, "ragged", 7)
        record = check.compare(damage(good, np.random.default_rng(7)), good, dtype=fmt)
        assert not record.passed, f"{name}: {record}"


def test_at_least_twenty_kinds():
    assert len(corrupt.CORRUPTIONS) >= 20
    assert all(f.__doc__ for f in corrupt.CORRUPTIONS.values())


@pytest.mark.parametrize("name", corrupt.CORRUPTIONS)
def test_corruption_leaves_its_input_alone_and_is_seeded(name):
    x = rows_of_different_scale((131, 197), 3)
    x[5, 6], x[100, 7] = float("nan"), float("inf")
    before = x.clone()
    once = corrupt.CORRUPTIONS[name](x, np.random.default_rng(1))
    again = corrupt.CORRUPTIONS[name](x, np.random.default_rng(1))
    assert torch.equal(x.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0))
    assert torch.equal(once.nan_to_num(nan=77.0), again.nan_to_num(nan=77.0))
    from_numpy = corrupt.CORRUPTIONS[name](x.numpy(), np.random.default_rng(1))
    np.testing.assert_array_equal(once.numpy(), from_numpy)


@pytest.mark.parametrize("fmt", FLOATS)
def test_sign_of_zero_is_not_an_error(fmt):
    good, oracle = pair(fmt, "ragged", 0)
    oracle[3:9] = 0.0
    good[3:9] = 0.0
    flipped = corrupt.HARMLESS["zero_signs_flipped"](good, np.random.default_rng(0))
    assert torch.signbit(flipped[3, 0]) and not torch.signbit(good[3, 0])
    record = check.compare(flipped, oracle, dtype=fmt)
    assert record.passed and record == check.compare(good, oracle, dtype=fmt)


def test_cosine_alone_is_blind_where_the_record_is_not():
    """Why there is a comparator: one lost tile of 1,024 is invisible to the cosine at FP8's bound."""
    oracle = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bad = round_to(oracle, "e4m3")
    bad[32:64, 96:128] = 0
    record = check.compare(bad, oracle, dtype="e4m3")
    assert record.cosine < record.tol.cosine
    assert not record.passed
    assert record.worst_tile == (0, 0) and record.worst_tile_relative == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("bad", [torch.zeros(65, 200), torch.zeros(200), "text", None])
def test_corrupt_refuses_what_its_patterns_do_not_fit(bad):
    with pytest.raises(ArgumentError, match="at least 66"):
        corrupt.tile_zeroed(bad, np.random.default_rng(0))


@pytest.mark.parametrize("name", sorted(corrupt.NEEDS_NAN | corrupt.NEEDS_INF))
def test_corrupt_refuses_an_array_without_the_value_it_removes(name):
    with pytest.raises(ArgumentError, match="at least one"):
        corrupt.CORRUPTIONS[name](torch.ones(80, 90), np.random.default_rng(0))
