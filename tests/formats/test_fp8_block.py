"""FP8 with tile scales, against loops over tiles and torch's own casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, fp8_block, ue8m0
from dsv4lib.formats.fp8_block import FP8Tensor


def quantize_by_loops(x: torch.Tensor, tile: tuple[int, int], scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One tile after the other, scale exponent by math.frexp, codes by torch's cast: nothing shared with the codec."""
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    scales = torch.empty(math.ceil(rows / tile[0]), math.ceil(cols / tile[1]), dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1]))
            amax = max(float(x[part].abs().max()), float(torch.tensor(1e-4, dtype=torch.float32)))
            if scale_format == "e8m0":
                mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent; 448 = 0.875 * 2^9
                scales[i, j] = 2.0 ** (exponent - 9 + (mantissa > 0.875))
            else:
                scales[i, j] = torch.tensor(amax, dtype=torch.float32) / 448
            scaled = (x[part].float() / scales[i, j]).clamp(-448, 448)
            codes[part] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_format", ["e8m0", "fp32"])
@pytest.mark.parametrize("shape, tile", [((300, 200), (128, 128)), ((5, 130), (128, 128)), ((7, 200), (1, 64))])
def test_against_loops_over_ragged_tiles(shape, tile, scale_format, dtype, scaled_normals):
    x = scaled_normals(*shape, seed=11, dtype=dtype)
    q = fp8_block.quantize(x, tile, scale_format)
    codes, scales = quantize_by_loops(x, tile, scale_format)
    values = ue8m0.decode(q.scales) if scale_format == "e8m0" else q.scales
    assert torch.equal(values, scales)
    assert torch.equal(q.codes, codes)
    spread = scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]
    expected = codes.view(torch.float8_e4m3fn).float() * spread
    assert torch.equal(fp8_block.dequantize(q), expected)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_activation_groups(group, scaled_normals):
    x = scaled_normals(6, 448, seed=12, dtype=torch.bfloat16).reshape(2, 3, 448)
    q = fp8_block.quantize_activation(x, group)
    codes, scales = quantize_by_loops(x.reshape(6, 448), (1, group), "e8m0")
    assert torch.equal(q.codes, codes.reshape(x.shape))
    assert torch.equal(ue8m0.decode(q.scales), scales.reshape(2, 3, -1))
    exact = fp8_block.dequantize(q, torch.float64)
    assert torch.equal(fp8_block.dequantize(q, torch.bfloat16).double(), exact)  # a power of two costs bf16 nothing
    assert torch.equal(fp8_block.fake_quantize(x, group).double(), exact)
    row = fp8_block.quantize_activation(x[1, 2], group)
    assert torch.equal(row.codes, q.codes[1, 2]) and torch.equal(row.scales, q.scales[1, 2])
    assert torch.equal(fp8_block.dequantize(row), fp8_block.dequantize(q)[1, 2])


def test_turn_of_the_scale_at_448(ulp_neighbours):
    """amax = 448 * 2^e keeps scale 2^e; one ulp more doubles it, so nothing ever saturates."""
    for dtype in (torch.bfloat16, torch.float32):
        below, exact, above = ulp_neighbours(torch.tensor([448.0 * 2**5], dtype=dtype))
        x = torch.stack([below, exact, above])[:, None].expand(3, 128)
        q = fp8_block.quantize_activation(x)
        assert q.scales.tolist() == [[132], [132], [133]]
        assert q.codes[:, 0].tolist() == [0x7E, 0x7E, 0x76]  # 448, 448, 224


def test_scale_rounds_up_never_saturates(scaled_normals):
    x = scaled_normals(64, 128, seed=13)
    q = fp8_block.quantize_activation(x)
    ratio = x.double().abs().amax(-1) / ue8m0.decode(q.scales, torch.float64)[:, 0]
    assert bool((ratio <= 448).all()) and bool((ratio > 224).all())
    assert bool((ratio > 415).any()), "no row close to the top: the check above proves little"


def test_amax_floor():
    """Zeros and tiny groups: scale 2^ceil(log2(1e-4 / 448)) = 2^-22."""
    x = torch.zeros(2, 128)
    x[1] = 1e-6
    q = fp8_block.quantize_activation(x)
    assert q.scales.tolist() == [[127 - 22], [127 - 22]]
    assert torch.equal(q.codes[0], torch.zeros(128, dtype=torch.uint8))
    assert torch.equal(q.codes[1], e4m3.encode(torch.full((128,), 1e-6 * 2**22)))
    assert fp8_block.quantize(x, (2, 128), "fp32").scales.item() == torch.tensor(1e-4) / 448


@pytest.mark.parametrize("scale_format", ["e8m0", "fp32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_element_breaks_its_tile_and_no_other(bad, scale_format):
    x = torch.ones(130, 256)
    x[3, 200] = bad
    q = fp8_block.quantize(x, scale_format=scale_format)
    out = fp8_block.dequantize(q)
    assert bool(out[:128, 128:].isnan().all())
    assert int(out.isnan().sum()) == 128 * 128
    values = q.scales if scale_format == "fp32" else ue8m0.decode(q.scales)
    assert values.isnan().tolist() == [[False, True], [False, False]]
    assert bool((q.codes[:128, 128:] == e4m3.NAN).all()) and int((q.codes == e4m3.NAN).sum()) == 128 * 128
    assert bool((out[:128, :128] - 1).abs().max() < 1e-6)


def test_fp64_input_is_not_rounded_to_fp32_first():
    x = torch.ones(128, dtype=torch.float64) * 448  # scale 1
    x[5] = math.nextafter(1 + 2**-4, 2)
    assert fp8_block.fake_quantize(x)[5] == 1.125
    assert fp8_block.fake_quantize(x.float())[5] == 1.0


def test_strides_batches_and_empty_input(scaled_normals):
    x = scaled_normals(260, 300, seed=14)
    q, qt = fp8_block.quantize(x), fp8_block.quantize(x.t())
    assert torch.equal(qt.codes, q.codes.t()) and torch.equal(qt.scales, q.scales.t())
    both = fp8_block.quantize(torch.stack([x, -2 * x]))
    assert torch.equal(both.codes[0], q.codes)
    assert torch.equal(fp8_block.dequantize(both)[1], -2 * fp8_block.dequantize(q))
    for shape in [(0, 128), (3, 0), (0,)]:
        out = fp8_block.quantize_activation(torch.empty(shape))
        assert out.codes.shape == shape and fp8_block.dequantize(out).shape == shape
    assert fp8_block.quantize(torch.empty(0, 5)).scales.shape == (0, 1)


def test_torch_dtypes_are_accepted_as_the_same_bits(scaled_normals):
    q = fp8_block.quantize(scaled_normals(140, 70, seed=15))
    typed = FP8Tensor(q.codes.view(torch.float8_e4m3fn), q.scales.view(torch.float8_e8m0fnu), q.tile)
    assert torch.equal(fp8_block.dequantize(typed), fp8_block.dequantize(q))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), cols=st.integers(1, 40), tile=st.tuples(st.integers(1, 5), st.integers(1, 17)), seed=...)
def test_quantising_twice_changes_nothing(rows, cols, tile, seed: int):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed % 2**31))
    once = fp8_block.dequantize(fp8_block.quantize(x, tile))
    assert torch.equal(fp8_block.dequantize(fp8_block.quantize(once, tile)), once)
    amax = fp8_block.split_tiles(x.abs(), tile).amax((-3, -1))
    allowed = fp8_block.spread_scales(amax, tile, rows, cols) * 2.0**-4  # half a step of the top binade
    assert bool(((once - x).abs() <= allowed).all())


Q = FP8Tensor(torch.zeros(130, 256, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), (128, 128))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fp8_block.quantize(torch.zeros(4)), "x.shape"),
        (lambda: fp8_block.quantize(torch.zeros(4, 4, dtype=torch.int32)), "x.dtype"),
        (lambda: fp8_block.quantize(torch.zeros(4, 4), (0, 4)), "tile=.0, 4."),
        (lambda: fp8_block.quantize(torch.zeros(4, 4), scale_format="int8"), "scale_format='int8'"),
        (lambda: fp8_block.quantize_activation(torch.tensor(1.0)), "x.shape"),
        (lambda: fp8_block.quantize_activation(torch.zeros(4), 0), "tile"),
        (lambda: fp8_block.quantize_activation([1.0]), "x='list'"),
        (lambda: fp8_block.dequantize(Q, torch.float16), "dtype=torch.float16"),
        (
            lambda: fp8_block.dequantize(FP8Tensor(Q.codes, Q.scales.t()[:1], Q.tile)),
            r"scales.shape=\(1, 2\).*\(2, 2\)",
        ),
        (lambda: fp8_block.dequantize(FP8Tensor(Q.codes, Q.scales.double(), Q.tile)), "scales.dtype=torch.float64"),
        (lambda: fp8_block.dequantize(FP8Tensor(Q.codes.int(), Q.scales, Q.tile)), "codes.dtype=torch.int32"),
        (lambda: fp8_block.dequantize(FP8Tensor(Q.codes, Q.scales.to("meta"), Q.tile)), "scales.device='meta'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
