"""The precision modes of expert weights: exact ones are exact for every code and scale, lossy ones lose this much."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, fp8_block, mxfp4, nvfp4, weight_modes
from dsv4lib.formats.floatcodec import E2M1, E4M3
from dsv4lib.formats.mxfp4 import MXFP4Tensor
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.formats.weight_modes import MODES, convert, dequantize

NV = nvfp4.quantize(0.02 * torch.randn(24, 96, generator=torch.Generator().manual_seed(0)))
MX = mxfp4.quantize(torch.ones(4, 64))


def every_pair_of_scales() -> NVFP4Tensor:
    """Two blocks of 16 share a scale of 32: all 127 x 127 pairs of block scales, all sixteen codes in both blocks."""
    first, second = torch.meshgrid(torch.arange(127), torch.arange(127), indexing="ij")
    scales = torch.stack([first.flatten(), second.flatten()], dim=-1).to(torch.uint8)
    packed = e2m1.pack(torch.arange(16).to(torch.uint8).repeat(2))[None].expand(len(scales), 16)
    return NVFP4Tensor(packed, scales, torch.tensor(1.0))


@pytest.mark.parametrize("mode", ["nvfp4", "e4m3_split", "bf16"])
def test_exact_modes_are_exact_for_every_code_under_every_pair_of_scales(mode):
    q = every_pair_of_scales()
    assert MODES[mode].exact
    assert torch.equal(dequantize(convert(q, mode), torch.float64), nvfp4.dequantize(q, torch.float64))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    codes=st.lists(st.integers(0, 15), min_size=32, max_size=32),
    scales=st.tuples(st.integers(0, 0x7E), st.integers(0, 0x7E)),
)
def test_split_is_exact_for_any_block(codes, scales):
    """The largest code need not be there: the shared scale follows what is."""
    packed = e2m1.pack(torch.tensor([codes]).to(torch.uint8))
    q = NVFP4Tensor(packed, torch.tensor([scales]).to(torch.uint8), torch.tensor(1.0))
    exact = [
        Fraction(E2M1.values()[c].item()) * Fraction(E4M3.values()[scales[i // 16]].item()) for i, c in enumerate(codes)
    ]
    assert [Fraction(v) for v in dequantize(convert(q, "e4m3_split"), torch.float64)[0].tolist()] == exact


def test_expand_rounds_each_product_once():
    """Half a step of E4M3 at most, and never beyond the range; the scale is the smallest that fits."""
    q = every_pair_of_scales()
    exact = nvfp4.dequantize(q, torch.float64)
    weight = convert(q, "e4m3_expand")
    (plane,) = weight.planes
    unit = torch.exp2(plane.scales.double() - 127)
    got = dequantize(weight, torch.float64)
    step = torch.exp2(torch.floor(torch.log2((exact / unit).abs().clamp(min=2.0**-6))) - 3) * unit
    assert bool(((got - exact).abs() <= step / 2).all())
    amax = exact.abs().amax(-1, keepdim=True)
    assert bool((amax <= 448 * unit).all())
    assert bool((amax > 224 * unit)[amax > fp8_block.AMAX_FLOOR].all())


def test_the_global_scale_stays_outside():
    g = torch.tensor(3e-5)
    for mode in ("nvfp4", "e4m3_expand", "e4m3_split", "bf16", "mxfp4"):
        a, b = (convert(NVFP4Tensor(NV.packed, NV.scales, s), mode) for s in (g, 2 * g))
        for one, other in zip(a.planes, b.planes, strict=True):
            assert torch.equal(weight_modes.plane_values(one), weight_modes.plane_values(other))
        assert (float(a.alpha), float(b.alpha)) == (float(g), 2 * float(g))


def test_naive_by_hand():
    """Scales 1 and 1.75, global 2^-7 * 1.5: E4M3(1.5 / 128) and E4M3(2.625 / 128), maximum 2.5 / 128 -> 2^-6."""
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    q = NVFP4Tensor(packed, torch.tensor([[0x38, 0x3E]], dtype=torch.uint8), torch.tensor(1.5 * 2.0**-7))
    (plane,) = convert(q, "ue8m0_naive").planes
    assert plane.packed is packed and plane.scales.tolist() == [[127 - 6]]
    zero = NVFP4Tensor(packed, torch.zeros(1, 2, dtype=torch.uint8), torch.tensor(1.0))
    assert convert(zero, "ue8m0_naive").planes[0].scales.tolist() == [[0]]
    tiny = NVFP4Tensor(packed, torch.tensor([[0x38, 0x38]], dtype=torch.uint8), torch.tensor(2.0**-11))
    assert convert(tiny, "ue8m0_naive").planes[0].scales.tolist() == [[0]], "the folded scale rounds to zero in E4M3"


def test_requantise_takes_the_best_of_its_scales():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 64, generator=generator) * torch.exp2(torch.rand(200, 1, generator=generator) * 20 - 10)
    q = weight_modes.requantize_mxfp4(x)
    blocks = x.double().reshape(200, 2, 32)
    error = (mxfp4.dequantize(q, torch.float64).reshape(blocks.shape) - blocks).square().sum(-1)
    ceil = mxfp4.quantize(x).scales.to(torch.int32)
    tried = []
    for step in (-2, -1, 0, 1):
        unit = torch.exp2((ceil + step).double() - 127)[..., None]
        tried.append((e2m1.decode(e2m1.encode(blocks / unit), torch.float64) * unit - blocks).square().sum(-1))
    assert torch.allclose(error, torch.stack(tried).amin(0), rtol=1e-5)
    assert len((q.scales.to(torch.int32) - ceil).unique()) > 1, "another scale than the ceiling must win somewhere"


def test_requantise_keeps_zeros_and_nan():
    x = torch.zeros(2, 32)
    x[1, 3] = math.nan
    values = mxfp4.dequantize(weight_modes.requantize_mxfp4(x))
    assert not values[0].any() and bool(values[1].isnan().all())


def test_mxfp4_passes_through_and_expands_to_bf16():
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(256, (8, 48), generator=generator).to(torch.uint8)
    q = MXFP4Tensor(codes, torch.randint(90, 140, (8, 3), generator=generator).to(torch.uint8))
    assert convert(q, "mxfp4").planes == (q,)
    assert torch.equal(dequantize(convert(q, "bf16"), torch.float64), mxfp4.dequantize(q, torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_what_is_stored(mode):
    """Counted from the tensors themselves, a large matrix."""
    q = nvfp4.quantize(0.02 * torch.randn(64, 512, generator=torch.Generator().manual_seed(1)))
    stored = 0
    for plane in convert(q, mode).planes:
        parts = (
            [plane] if isinstance(plane, torch.Tensor) else [v for k, v in vars(plane).items() if k != "global_scale"]
        )
        stored += sum(8 * t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))
    assert stored == MODES[mode].bits * 64 * 512
    assert len(convert(q, mode).planes) == MODES[mode].planes
    assert MODES[mode].bytes_per_weight == MODES[mode].bits / 8


@pytest.mark.parametrize("activations", ["bf16", "mxfp8", "nvfp4", "mxfp4"])
def test_activations(activations, scaled_normals):
    x = scaled_normals(7, 64, seed=5)
    got = weight_modes.fake_quantize_activation(x, activations)
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert torch.equal(weight_modes.fake_quantize_activation(x[3:4], activations), got[3:4]), "each token by itself"
    bound = {"bf16": 2**-8, "mxfp8": 2**-3.9, "nvfp4": 0.3, "mxfp4": 0.35}[activations]
    assert bool(((got - x).abs().amax(-1) <= bound * x.abs().amax(-1)).all()) and not torch.equal(got, x)


def test_a_calibrated_activation_scale_saturates():
    x = torch.full((1, 16), 100.0)
    assert weight_modes.fake_quantize_activation(x, "nvfp4", torch.tensor(1 / 512)).max() == 6 * 448 / 512


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: convert(NV, "int4"), "precision='int4'.*e4m3_split"),
        (lambda: convert(MX, "e4m3_expand"), "precision='e4m3_expand'.*MXFP4"),
        (lambda: convert(torch.ones(1), "bf16"), "q='Tensor'"),
        (lambda: convert(nvfp4.quantize(torch.ones(2, 16)), "ue8m0_naive"), "packed.shape.*multiple of 16"),
        (lambda: convert(nvfp4.quantize(torch.ones(2, 16)), "mxfp4"), "x.shape.*multiple of 32"),
        (lambda: weight_modes.fake_quantize_activation(torch.ones(1, 32), "fp4"), "activations='fp4'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
