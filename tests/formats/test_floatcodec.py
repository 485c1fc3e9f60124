"""All minifloats: every code, every rounding boundary, against torch, ml_dtypes and a midpoint count."""

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
from dsv4lib.formats.floatcodec import E2M1, E2M3, E3M2, E4M3, E5M2

FORMATS = [E2M1, E2M3, E3M2, E4M3, E5M2]
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ML = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
}
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def all_codes(fmt) -> torch.Tensor:
    return torch.arange(2**fmt.bits, dtype=torch.int32).to(torch.uint8)


def ml_values(fmt) -> torch.Tensor:
    return torch.from_numpy(all_codes(fmt).numpy().view(ML[fmt.name]).astype(np.float64))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as values, NaN equal to NaN, and zeros of equal sign."""
    return torch.equal(torch.signbit(a) & ~a.isnan(), torch.signbit(b) & ~b.isnan()) and bool(
        ((a == b) | (a.isnan() & b.isnan())).all()
    )


@pytest.mark.parametrize(
    "fmt, largest, smallest",
    [(E2M1, 6, 0.5), (E2M3, 7.5, 0.125), (E3M2, 28, 2**-4), (E4M3, 448, 2**-9), (E5M2, 57344, 2**-16)],
    ids=lambda f: getattr(f, "name", ""),
)
def test_range_is_that_of_the_ocp_documents(fmt, largest, smallest):
    assert (fmt.max, fmt.min_subnormal) == (largest, smallest)


def test_e2m1_table():
    assert E2M1.values()[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_decodes_as_ml_dtypes_does(fmt, dtype):
    got = fmt.decode(all_codes(fmt), dtype)
    assert got.dtype == dtype
    assert same(got.to(torch.float64), ml_values(fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_code_decodes_as_torch_does(fmt):
    bits = all_codes(fmt).view(TORCH[fmt.name])
    assert same(fmt.decode(bits), bits.to(torch.float32))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_survives_a_round_trip(fmt, dtype):
    codes = all_codes(fmt)
    values = fmt.decode(codes, dtype)
    keep = values.isfinite()
    assert torch.equal(fmt.encode(values[keep]), codes[keep])


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_boundary_and_its_neighbours(fmt, dtype, boundaries, round_by_midpoints):
    x = boundaries(fmt, dtype)
    assert torch.equal(fmt.encode(x), round_by_midpoints(fmt, x))


@formats
def test_ties_go_to_the_even_code(fmt):
    values = fmt.values()[: fmt.max_code + 1]
    low = torch.arange(fmt.max_code)
    assert torch.equal(fmt.encode((values[1:] + values[:-1]) / 2), (low + low % 2).to(torch.uint8))


@formats
def test_all_of_bf16_by_midpoints(fmt, all_bf16, round_by_midpoints):
    assert torch.equal(fmt.encode(all_bf16), round_by_midpoints(fmt, all_bf16))


@formats
def test_boundaries_and_all_of_bf16_against_ml_dtypes(fmt, all_bf16, boundaries):
    x = torch.cat([all_bf16.float(), boundaries(fmt, torch.float32)])
    x = x[x.abs() <= fmt.max]  # beyond it ml_dtypes makes NaN or Inf where we saturate
    theirs = torch.from_numpy(x.numpy().astype(ML[fmt.name]).view(np.uint8).copy())
    assert torch.equal(fmt.encode(x), theirs)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_without_saturation_against_ml_dtypes(fmt, all_bf16, boundaries):
    x = torch.cat([all_bf16.float(), boundaries(fmt, torch.float32)])
    with np.errstate(over="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(ML[fmt.name]).astype(np.float64))
    assert same(fmt.decode(fmt.encode(x, saturate=False), torch.float64), theirs)


def test_e4m3_against_torch_cast(all_bf16, boundaries):
    x = torch.cat([all_bf16.float(), boundaries(E4M3, torch.float32)])
    x = x.clamp(-E4M3.max, E4M3.max)  # independent of whether this torch saturates
    assert torch.equal(E4M3.encode(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e5m2_against_torch_cast(all_bf16, boundaries):
    x = torch.cat([all_bf16.float(), boundaries(E5M2, torch.float32)])
    assert torch.equal(E5M2.encode(x, saturate=False), x.to(torch.float8_e5m2).view(torch.uint8))


@formats
def test_saturation(fmt):
    x = torch.tensor([fmt.max * 1.01, fmt.max * 2, 3e38, math.inf])
    code = torch.full((4,), fmt.max_code, dtype=torch.uint8)
    assert torch.equal(fmt.encode(x), code)
    assert torch.equal(fmt.encode(-x), code + 2 ** (fmt.bits - 1))


@formats
def test_signed_zero_and_tiny_values_keep_their_sign(fmt):
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45])
    assert fmt.encode(x).tolist() == [0, 2 ** (fmt.bits - 1)] * 2


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("saturate", [True, False])
def test_nan_has_one_code(fmt, saturate):
    nan = torch.tensor([math.nan, -math.nan, 1.0])
    assert fmt.encode(nan, saturate=saturate).tolist() == [0x7F, 0x7F, int(fmt.encode(torch.tensor(1.0)))]


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2], ids=lambda f: f.name)
def test_nan_is_refused_where_there_is_no_code(fmt):
    with pytest.raises(ArgumentError, match=f"NaN.*{fmt.name} has no NaN"):
        fmt.encode(torch.tensor([1.0, math.nan]))
    with pytest.raises(ArgumentError, match="saturate"):
        fmt.encode(torch.tensor([1.0]), saturate=False)


def test_fp64_is_not_rounded_twice():
    # 1 + 2^-4 is the tie between E4M3's 1 and 1.125. One fp64 ulp above it rounds up; by way of fp32 it would tie down.
    above = torch.tensor(1 + 2**-4, dtype=torch.float64).nextafter(torch.tensor(2.0, dtype=torch.float64))
    assert E4M3.decode(E4M3.encode(above)) == 1.125
    assert E4M3.decode(E4M3.encode(above.float())) == 1.0


@formats
def test_rounding_is_unbiased(fmt):
    """Over values drawn evenly between two codes, half must round up: mean within 10 / sqrt(n)."""
    n = 40_000
    generator = torch.Generator().manual_seed(7)
    values = fmt.values()[: fmt.max_code + 1]
    low = torch.randint(fmt.max_code, (n,), generator=generator)
    x = values[low] + torch.rand(n, generator=generator, dtype=torch.float64) * (values[low + 1] - values[low])
    went_up = fmt.encode(x).to(torch.int64) == low + 1
    assert abs(went_up.double().mean() - 0.5) < 10 / math.sqrt(n) / 2
    ties = (values[1:] + values[:-1]) / 2  # on ties alone, ties-away would round up every time
    up = fmt.encode(ties).to(torch.int64) == torch.arange(1, fmt.max_code + 1)
    assert int(up.sum()) == fmt.max_code // 2


@formats
@settings(derandomize=True, max_examples=150, deadline=None)
@given(x=st.floats(allow_nan=False, width=64))
def test_nearest_by_exact_rational_arithmetic(fmt, x):
    code = int(fmt.encode(torch.tensor(x, dtype=torch.float64)))
    magnitude = code & (2 ** (fmt.bits - 1) - 1)
    assert (code != magnitude) == (math.copysign(1, x) < 0)
    values = [Fraction(v) for v in fmt.values()[: fmt.max_code + 1].tolist()]
    target = values[-1] if math.isinf(x) else abs(Fraction(x))
    distance = [abs(v - target) for v in values]
    assert distance[magnitude] == min(distance)
    assert distance.count(min(distance)) == 1 or magnitude % 2 == 0


@formats
@settings(derandomize=True, max_examples=60, deadline=None)
@given(a=st.floats(-1e5, 1e5, width=32), b=st.floats(-1e5, 1e5, width=32))
def test_monotone_and_odd(fmt, a, b):
    low, high = fmt.decode(fmt.encode(torch.tensor([min(a, b), max(a, b)])))
    assert low <= high
    assert fmt.decode(fmt.encode(torch.tensor(-a))) == -fmt.decode(fmt.encode(torch.tensor(a)))


@formats
def test_shapes_strides_and_empty_input(fmt):
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)) * 3
    expected = fmt.encode(x)
    assert torch.equal(fmt.encode(x.t()), expected.t())
    assert torch.equal(fmt.encode(x[::2, 1::3]), expected[::2, 1::3])
    assert torch.equal(fmt.decode(expected.t()), fmt.decode(expected).t())
    assert fmt.encode(x[0, 0]).shape == ()
    for shape in [(0,), (3, 0), (0, 5)]:
        assert fmt.encode(torch.empty(shape)).shape == shape
        assert fmt.decode(torch.empty(shape, dtype=torch.uint8)).shape == shape


def test_input_is_not_changed_and_needs_no_gradient():
    x = torch.tensor([1.3, -2.7, 900.0], requires_grad=True)
    before = x.detach().clone()
    assert not E4M3.decode(E4M3.encode(x)).requires_grad
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: E4M3.encode([1.0]), "x='list'.*torch.Tensor"),
        (lambda: E4M3.encode(torch.tensor([1])), "x.dtype=torch.int64"),
        (lambda: E4M3.decode(torch.tensor([1])), "codes.dtype=torch.int64"),
        (lambda: E4M3.decode([1]), "codes='list'"),
        (lambda: E5M2.decode(torch.zeros(1, dtype=torch.float8_e4m3fn)), "codes.dtype=torch.float8_e4m3fn"),
        (lambda: E4M3.decode(torch.zeros(1, dtype=torch.uint8), torch.float16), "dtype=torch.float16"),
        (lambda: E2M1.decode(torch.tensor([3, 16], dtype=torch.uint8)), "codes=16.*0..15"),
        (lambda: E2M3.decode(torch.tensor([64], dtype=torch.uint8)), "codes=64.*0..63"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
