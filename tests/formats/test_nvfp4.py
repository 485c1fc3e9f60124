"""NVFP4 against exact rational arithmetic, and its two kinds of global scale."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, e4m3, mxfp4, nvfp4
from dsv4lib.formats.floatcodec import E2M1, E4M3
from dsv4lib.formats.nvfp4 import NVFP4Tensor


def nearest(fmt, target: Fraction) -> int:
    """Saturating nearest-even code of target >= 0."""
    values = [Fraction(v) for v in fmt.values()[: fmt.max_code + 1].tolist()]
    distance = [abs(v - target) for v in values]
    candidates = [c for c, d in enumerate(distance) if d == min(distance)]
    return min(candidates, key=lambda code: code % 2)


def quantize_exactly(x: torch.Tensor, global_scale: float) -> tuple[list[int], list[int]]:
    """Codes and block scale codes of a 1-D x in rational arithmetic."""
    codes, scales = [], []
    g = Fraction(global_scale)
    for block in x.double().reshape(-1, 16).tolist():
        amax = max(abs(Fraction(v)) for v in block)
        scales.append(nearest(E4M3, amax / (6 * g)))
        step = Fraction(float(E4M3.values()[scales[-1]])) * g
        for v in block:
            sign = 8 if math.copysign(1, v) < 0 else 0
            codes.append(sign | (nearest(E2M1, abs(Fraction(v)) / step) if step else 0))
    return codes, scales


def check_against_exact(x: torch.Tensor, q: NVFP4Tensor) -> None:
    codes, scales = quantize_exactly(x, float(q.global_scale))
    assert e2m1.unpack(q.packed).tolist() == codes
    assert q.scales.tolist() == scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_against_rational_arithmetic(dtype, seed, scaled_normals):
    x = scaled_normals(3, 64, seed=seed).to(dtype).flatten()
    q = nvfp4.quantize(x)
    assert float(q.global_scale) == float((x.double().abs().max() / 2688).float())
    check_against_exact(x, q)
    calibrated = nvfp4.quantize(x, float(x.abs().max()) / 2688 / 3.7)  # too small: the top saturates
    check_against_exact(x, calibrated)
    assert int(calibrated.scales.max()) == 0x7E


def test_ties_of_codes_and_of_block_scales():
    """global 1: block scale exactly 1 (amax 6), so the codes meet every tie; then an amax on a tie of the scale."""
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])
    q = nvfp4.quantize(x, 1.0)
    assert q.scales.tolist() == [0x38]
    assert e2m1.unpack(q.packed).tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 8]
    amax = 6 * (1 + 2**-4) * torch.tensor([1.0, 1.0 + 2**-23, 1 - 2**-23])
    blocks = torch.zeros(3, 16)
    blocks[:, 0] = amax
    assert nvfp4.quantize(blocks, 1.0).scales.flatten().tolist() == [0x38, 0x39, 0x38]
    check_against_exact(blocks.flatten(), nvfp4.quantize(blocks.flatten(), 1.0))


def test_next_to_every_tie_the_exact_quotient_decides(ulp_neighbours):
    """block scale * global needs 28 bits: a step rounded to fp32 would turn some of these codes."""
    generator = torch.Generator().manual_seed(39)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5], dtype=torch.float64)
    for g in (torch.rand(20, generator=generator) + 1).tolist():
        block_scale = float(E4M3.values()[int(torch.randint(0x30, 0x50, (1,), generator=generator))])
        x = torch.cat([torch.tensor([6 * block_scale * g]), ulp_neighbours((ties * block_scale * g).float())])
        check_against_exact(x, nvfp4.quantize(x, g))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    x=st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    global_scale=st.sampled_from([1.0, 0.37, 2.0**-20, 3e-5]),
)
def test_any_block_by_rational_arithmetic(x, global_scale):
    x = torch.tensor(x)
    check_against_exact(x, nvfp4.quantize(x, global_scale))


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32, torch.float64])
def test_dequantise_every_code_under_every_scale(out):
    """All sixteen codes under all 127 finite positive block scales, products in rational arithmetic."""
    packed = e2m1.pack(torch.arange(16).to(torch.uint8))[None].expand(127, 8)
    scales = torch.arange(127).to(torch.uint8)[:, None]
    g = torch.tensor(0.0123, dtype=torch.float32)
    got = nvfp4.dequantize(NVFP4Tensor(packed, scales, g), out)
    exact = [
        [Fraction(v) * Fraction(s) * Fraction(float(g)) for v in E2M1.values().tolist()]
        for s in E4M3.values()[:127].tolist()
    ]
    expected = torch.tensor([[float(v) for v in row] for row in exact], dtype=torch.float64)
    assert torch.equal(got, expected.to(out))


def test_nan_scale_code_dequantises_to_nan():
    q = NVFP4Tensor(torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[0x7F, 0x38]]).to(torch.uint8), torch.ones(()))
    assert nvfp4.dequantize(q).isnan().tolist() == [[True] * 16 + [False] * 16]


def test_derived_global_uses_the_whole_range(scaled_normals):
    x = scaled_normals(8, 64, seed=34)
    q = nvfp4.quantize(x)
    assert int(q.scales.max()) == 0x7E  # 448 in the block of the largest element
    top = x.abs().argmax()
    assert int(e2m1.unpack(q.packed).flatten()[top]) & 7 == 7
    error = (nvfp4.dequantize(q).flatten()[top] - x.flatten()[top]).abs()
    assert error <= x.abs().max() * 2.0**-22


def test_w1_and_w3_share_their_global_scale(scaled_normals):
    w1, w3 = scaled_normals(5, 32, seed=35), 3 * scaled_normals(5, 32, seed=36)
    shared = nvfp4.shared_global_scale(w1, w3)
    assert shared.dtype == torch.float32 and shared.shape == ()
    assert float(shared) == max(float(nvfp4.quantize(w).global_scale) for w in (w1, w3))
    q1, q3 = nvfp4.quantize(w1, shared), nvfp4.quantize(w3, shared)
    assert q1.global_scale == q3.global_scale == shared
    joined = nvfp4.quantize(torch.cat([w1, w3]))
    assert torch.equal(joined.packed, torch.cat([q1.packed, q3.packed]))
    assert torch.equal(joined.scales, torch.cat([q1.scales, q3.scales]))


def test_zeros_and_blocks_that_vanish():
    x = torch.zeros(3, 16)
    q = nvfp4.quantize(x)
    assert float(q.global_scale) == 2.0**-126 and not q.scales.any() and not q.packed.any()
    x[0, 0], x[1, :2] = 1.0, torch.tensor([1e-7, -1e-7])  # row 1 is below the smallest block scale
    q = nvfp4.quantize(x)
    assert q.scales.flatten().tolist() == [0x7E, 0, 0]
    assert e2m1.unpack(q.packed)[1, :2].tolist() == [0, 8]
    assert not nvfp4.dequantize(q)[1:].any()


def test_calibrated_range_saturates_both_signs():
    x = torch.tensor([[1e6, -1e6] + [1.0] * 14])
    q = nvfp4.quantize(x, 1.0)
    assert nvfp4.dequantize(q)[0, :2].tolist() == [2688.0, -2688.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_element_breaks_what_shares_its_scale(bad):
    x = torch.ones(2, 48)
    x[1, 20] = bad
    q = nvfp4.quantize(x, 1 / 448)
    assert q.scales[1].tolist() == [int(q.scales[0, 0]), e4m3.NAN, int(q.scales[0, 0])]
    assert not q.packed[1, 8:16].any()
    assert int(nvfp4.dequantize(q).isnan().sum()) == 16
    derived = nvfp4.quantize(x)  # the derived global scale is shared by the whole tensor
    assert derived.global_scale.isnan() and bool(nvfp4.dequantize(derived).isnan().all())


def test_mxfp4_with_close_exponents_converts_without_loss():
    """The published checkpoints start from MXFP4: E2M1 values with power-of-two scales stay on the grid."""
    generator = torch.Generator().manual_seed(37)
    codes = torch.randint(16, (6, 96), generator=generator).to(torch.uint8)
    codes[:, ::16] = 7  # every block of 16 reaches 6, so that its scale is the power of two itself
    scales = torch.randint(115, 124, (6, 3), generator=generator).to(torch.uint8)
    w = mxfp4.dequantize(mxfp4.MXFP4Tensor(e2m1.pack(codes), scales))
    assert torch.equal(nvfp4.dequantize(nvfp4.quantize(w, 2.0**-8)), w)


def test_strides_batches_empty_and_typed_bits(scaled_normals):
    x = scaled_normals(32, 48, seed=38)
    q = nvfp4.quantize(x.t(), 1.0)
    plain = nvfp4.quantize(x.t().contiguous(), 1.0)
    assert torch.equal(q.packed, plain.packed) and torch.equal(q.scales, plain.scales)
    batched = nvfp4.quantize(x.reshape(2, 16, 48))
    assert torch.equal(batched.packed.reshape(32, 24), nvfp4.quantize(x).packed)
    typed = NVFP4Tensor(q.packed.view(torch.float4_e2m1fn_x2), q.scales.view(torch.float8_e4m3fn), q.global_scale)
    assert torch.equal(nvfp4.dequantize(typed), nvfp4.dequantize(q))
    assert nvfp4.fake_quantize(x.bfloat16()).dtype == torch.bfloat16
    for shape in [(0, 32), (5, 0), (0,)]:
        assert nvfp4.fake_quantize(torch.empty(shape)).shape == shape


Q = nvfp4.quantize(torch.ones(4, 64))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nvfp4.quantize(torch.zeros(4, 24)), "x.shape.*multiple of 16"),
        (lambda: nvfp4.quantize(torch.zeros(4, 16), 0.0), "global_scale=0.0"),
        (lambda: nvfp4.quantize(torch.zeros(4, 16), math.nan), "global_scale=nan"),
        (lambda: nvfp4.quantize(torch.zeros(4, 16), 1e-60), "global_scale=1e-60"),
        (lambda: nvfp4.quantize(torch.zeros(4, 16), torch.ones(2)), "global_scale"),
        (lambda: nvfp4.quantize(torch.zeros(4, 16), 1), "global_scale=1 "),
        (lambda: nvfp4.shared_global_scale(), "tensors"),
        (lambda: nvfp4.shared_global_scale(torch.ones(1), [1.0]), r"tensors\[1\]"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    "q, message",
    [
        (NVFP4Tensor(Q.packed, Q.scales[:, :1], Q.global_scale), r"scales.shape.*\(4, 4\)"),
        (NVFP4Tensor(Q.packed, Q.scales.float(), Q.global_scale), "scales.dtype"),
        (NVFP4Tensor(Q.packed, Q.scales.to("meta"), Q.global_scale), "scales.device"),
        (NVFP4Tensor(Q.packed[:, :-1], Q.scales, Q.global_scale), "packed.shape.*multiple of 8"),
        (NVFP4Tensor(Q.packed, Q.scales, Q.global_scale.double()), "global_scale"),
        (NVFP4Tensor(Q.packed, Q.scales, torch.ones(2)), "global_scale"),
    ],
)
def test_a_tensor_that_does_not_fit_together_is_refused(q, message):
    with pytest.raises(ArgumentError, match=message):
        nvfp4.dequantize(q)
