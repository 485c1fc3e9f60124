"""Power-of-two scales: every byte, and ceil decided exactly around every power of two."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import ue8m0

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def ceil_of_fp32_bits(quotient: torch.Tensor) -> torch.Tensor:
    bits = quotient.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_byte_decodes_as_torch_and_ml_dtypes_do(dtype):
    ours = ue8m0.decode(BYTES, dtype)
    assert ours.dtype == dtype
    theirs = BYTES.view(torch.float8_e8m0fnu).to(torch.float32)
    ml = torch.from_numpy(BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    assert torch.equal(ours[:255].double(), theirs[:255].double())
    assert torch.equal(ours[:255].double(), ml[:255])
    assert ours[255].isnan() and theirs[255].isnan() and ml[255].isnan()
    assert torch.equal(ue8m0.decode(BYTES.view(torch.float8_e8m0fnu), dtype)[:255], ours[:255])


def test_every_power_of_two_and_its_neighbours(ulp_neighbours):
    powers = ue8m0.decode(BYTES[:255])
    below, exact, above = ulp_neighbours(powers).reshape(3, 255)
    byte = torch.arange(255)
    assert torch.equal(ue8m0.encode_ceil(exact), byte.to(torch.uint8))
    assert torch.equal(ue8m0.encode_ceil(below), byte.to(torch.uint8))
    assert torch.equal(ue8m0.encode_ceil(above), (byte + 1).to(torch.uint8))  # above 2^127 nothing fits: 255, NaN


@pytest.mark.parametrize("divisor", [448.0, 6.0, 57344.0, 1.0])
def test_turning_points_with_a_divisor(divisor, ulp_neighbours):
    """divisor * 2^e still fits the scale 2^e; one ulp more needs 2^(e+1)."""
    exponents = torch.arange(-100, 100)
    points = (torch.exp2(exponents.double()) * divisor).float()
    below, exact, above = ulp_neighbours(points).reshape(3, -1)
    expected = (exponents + 127).to(torch.uint8)
    assert torch.equal(ue8m0.encode_ceil(exact, divisor), expected)
    assert torch.equal(ue8m0.encode_ceil(below, divisor), expected)
    assert torch.equal(ue8m0.encode_ceil(above, divisor), expected + 1)
    assert torch.equal(ceil_of_fp32_bits(above / divisor), expected + 1)  # fp32 division decides it rightly too


@settings(derandomize=True, max_examples=400, deadline=None)
@given(x=st.floats(0, allow_nan=False, allow_infinity=False, width=32), divisor=st.sampled_from([1.0, 6.0, 448.0]))
def test_smallest_sufficient_power_by_exact_arithmetic(x, divisor):
    byte = int(ue8m0.encode_ceil(torch.tensor(x), divisor))
    ratio = Fraction(x) / Fraction(divisor)
    if byte == 255:
        assert ratio > Fraction(2) ** 127
        return
    assert ratio <= Fraction(2) ** (byte - 127)
    assert byte == 0 or ratio > Fraction(2) ** (byte - 128)


@pytest.mark.parametrize("divisor, floor", [(448.0, 1e-4), (6.0, 6 * 2.0**-126)])
def test_released_recipes_agree_for_every_bf16_amax(divisor, floor, all_bf16):
    """fp32 division, and multiplication by an fp32 reciprocal, above the recipe's own floor."""
    amax = all_bf16[(all_bf16 > 0) & all_bf16.isfinite()].float()
    amax = amax[amax >= floor]
    reciprocal = torch.tensor(1 / divisor, dtype=torch.float32)
    assert torch.equal(ue8m0.encode_ceil(amax, divisor), ceil_of_fp32_bits(amax / divisor))
    assert torch.equal(ue8m0.encode_ceil(amax, divisor), ceil_of_fp32_bits(amax * reciprocal))


def test_neither_nearest_nor_floor():
    x = torch.tensor([1.0, 1.01, 1.49, 1.51, 1.99, 2.0])
    assert ue8m0.decode(ue8m0.encode_ceil(x)).tolist() == [1, 2, 2, 2, 2, 2]


def test_zero_inf_nan_and_strides():
    x = torch.tensor([0.0, -0.0, 1e-45, math.inf, math.nan])
    assert ue8m0.encode_ceil(x).tolist() == [0, 0, 0, 255, 255]
    table = torch.rand(5, 7, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ue8m0.encode_ceil(table.t()), ue8m0.encode_ceil(table).t())
    assert ue8m0.encode_ceil(torch.empty(0, 3)).shape == (0, 3)
    assert ue8m0.encode_ceil(torch.tensor(1e300, dtype=torch.float64)) == 255


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ue8m0.encode_ceil(torch.tensor([1.0, -2.0])), "x=-2.0.*>= 0"),
        (lambda: ue8m0.encode_ceil(torch.tensor([1.0]), 0.0), "divisor=0.0"),
        (lambda: ue8m0.encode_ceil(torch.tensor([1.0]), math.inf), "divisor=inf"),
        (lambda: ue8m0.encode_ceil(torch.tensor([1])), "x.dtype"),
        (lambda: ue8m0.decode(torch.zeros(1, dtype=torch.float8_e4m3fn)), "codes.dtype"),
        (lambda: ue8m0.decode(BYTES, torch.float16), "dtype=torch.float16"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
