"""MXFP4 against loops over blocks and ml_dtypes, and its conversion to FP8 tiles."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, e4m3, fp8_block, mxfp4, ue8m0
from dsv4lib.formats.mxfp4 import MXFP4Tensor


def quantize_by_loops(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed bytes, scale bytes and values; exponent by math.frexp, codes by ml_dtypes, nibbles by hand."""
    rows, cols = x.shape
    packed = np.zeros((rows, cols // 2), np.uint8)
    scales = np.zeros((rows, cols // 32), np.uint8)
    values = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        for b in range(cols // 32):
            block = x[r, b * 32 : b * 32 + 32].float().numpy()
            mantissa, exponent = math.frexp(max(float(np.abs(block).max()), 6 * 2.0**-126))
            scale = 2.0 ** (exponent - 3 + (mantissa > 0.75))  # 6 = 0.75 * 2^3
            codes = (block / np.float32(scale)).astype(ml_dtypes.float4_e2m1fn)
            raw = codes.view(np.uint8)
            packed[r, b * 16 : b * 16 + 16] = raw[0::2] + 16 * raw[1::2]
            scales[r, b] = int(math.log2(scale)) + 127
            values[r, b * 32 : b * 32 + 32] = codes.astype(np.float32) * np.float32(scale)
    return torch.from_numpy(packed), torch.from_numpy(scales), torch.from_numpy(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_loops(dtype, scaled_normals):
    x = scaled_normals(13, 96, seed=21, dtype=dtype)
    q = mxfp4.quantize(x)
    packed, scales, values = quantize_by_loops(x)
    assert torch.equal(q.packed, packed)
    assert torch.equal(q.scales, scales)
    for out in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(mxfp4.dequantize(q, out).double(), values.double())
    assert torch.equal(mxfp4.fake_quantize(x), values.to(dtype))
    assert mxfp4.fake_quantize(x).dtype == dtype


def test_every_byte_and_every_scale():
    """All 256 packed bytes under all 255 scales, against the product of the two tables in fp64."""
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(1, 256).expand(255, 256)
    scales = torch.arange(255, dtype=torch.int32).to(torch.uint8)[:, None].expand(255, 16)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table])
    byte = torch.arange(256)
    expected = torch.stack([table[byte % 16], table[byte // 16]], -1).flatten() * 2.0 ** (
        torch.arange(255, dtype=torch.float64)[:, None] - 127
    )
    assert torch.equal(mxfp4.dequantize(MXFP4Tensor(packed, scales), torch.float64), expected)
    in_range = expected.abs() < 2.0**128
    out = mxfp4.dequantize(MXFP4Tensor(packed, scales), torch.bfloat16).double()
    assert torch.equal(out[in_range], expected[in_range])


def test_turn_of_the_scale_at_six(ulp_neighbours):
    for dtype in (torch.bfloat16, torch.float32):
        below, exact, above = ulp_neighbours(torch.tensor([6.0 * 2**-3], dtype=dtype))
        q = mxfp4.quantize(torch.stack([below, exact, above])[:, None].expand(3, 32))
        assert q.scales.flatten().tolist() == [124, 124, 125]
        assert (q.packed[:, 0] & 0xF).tolist() == [7, 7, 5]  # 6, 6, 3


def test_zero_block_and_floor():
    x = torch.zeros(3, 32)
    x[1] = -0.0
    x[2, 7] = 2.0**-130
    q = mxfp4.quantize(x)
    assert q.scales.tolist() == [[1], [1], [1]]  # 2^-126
    assert q.packed[0].tolist() == [0] * 16 and q.packed[1].tolist() == [0x88] * 16
    assert not mxfp4.dequantize(q).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_element_breaks_its_block_and_no_other(bad):
    x = torch.ones(2, 96)
    x[1, 40] = bad
    q = mxfp4.quantize(x)
    assert q.scales.tolist() == [[125] * 3, [125, 255, 125]]
    assert not q.packed[1, 16:32].any()
    out = mxfp4.dequantize(q)
    assert bool(out[1, 32:64].isnan().all()) and int(out.isnan().sum()) == 32
    assert bool((out[0] == 1).all())


def test_strides_batches_empty_and_checkpoint_dtypes(scaled_normals):
    x = scaled_normals(64, 160, seed=22)
    q = mxfp4.quantize(x.t())
    plain = mxfp4.quantize(x.t().contiguous())
    assert torch.equal(q.packed, plain.packed) and torch.equal(q.scales, plain.scales)
    batched = mxfp4.quantize(x.reshape(4, 16, 160))
    assert torch.equal(batched.packed.reshape(64, 80), mxfp4.quantize(x).packed)
    typed = MXFP4Tensor(q.packed.view(torch.int8), q.scales.view(torch.float8_e8m0fnu))
    assert torch.equal(mxfp4.dequantize(typed), mxfp4.dequantize(q))
    typed = MXFP4Tensor(q.packed.view(torch.float4_e2m1fn_x2), q.scales)
    assert torch.equal(mxfp4.dequantize(typed), mxfp4.dequantize(q))
    for shape in [(0, 64), (5, 0), (0,)]:
        assert mxfp4.fake_quantize(torch.empty(shape)).shape == shape


def tensor_with_exponents(scales: torch.Tensor, seed: int = 23) -> MXFP4Tensor:
    """Random codes, all sixteen present, under given block scale bytes."""
    rows, blocks = scales.shape
    codes = torch.randint(16, (rows, blocks * 32), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return MXFP4Tensor(e2m1.pack(codes), scales.to(torch.uint8))


def convert_by_loops(q: MXFP4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes and tile scale values, tile by tile, with torch's own cast."""
    scale = ue8m0.decode(q.scales).repeat_interleave(32, 1)
    value = e2m1.decode(e2m1.unpack(q.packed))
    rows, cols = value.shape
    codes, tiles = torch.empty(rows, cols, dtype=torch.uint8), torch.empty(-(-rows // 128), -(-cols // 128))
    for i in range(tiles.shape[0]):
        for j in range(tiles.shape[1]):
            part = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            tiles[i, j] = scale[part].max() / 2**6
            scaled = value[part] * (scale[part] / tiles[i, j])
            codes[part] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, tiles


def test_conversion_to_fp8_against_loops():
    generator = torch.Generator().manual_seed(24)
    q = tensor_with_exponents(torch.randint(90, 140, (300, 7), generator=generator))
    fp8, inexact = mxfp4.to_fp8_tiles(q)
    codes, tiles = convert_by_loops(q)
    assert torch.equal(fp8.codes, codes)
    assert torch.equal(ue8m0.decode(fp8.scales), tiles)
    assert fp8.tile == (128, 128) and fp8.scales.shape == (3, 2)
    changed = fp8_block.dequantize(fp8, torch.float64) != mxfp4.dequantize(q, torch.float64)
    assert torch.equal(inexact, changed)
    assert 0 < int(inexact.sum()) < inexact.numel()


@pytest.mark.parametrize("distance", range(0, 20))
def test_exact_up_to_a_distance_of_fourteen(distance):
    """One block 2^-distance below the rest: exact for all codes up to 14; from 15 on, as E4M3's 2^-9 grid has it."""
    scales = torch.full((130, 4), 120)
    scales[5, 2] -= distance
    q = tensor_with_exponents(scales)
    fp8, inexact = mxfp4.to_fp8_tiles(q)
    assert fp8.scales.tolist() == [[114], [114]]
    magnitude = e2m1.decode(e2m1.unpack(q.packed), torch.float64).abs()[5, 64:96]
    expected = torch.zeros_like(inexact)
    expected[5, 64:96] = (magnitude * 2.0 ** (6 - distance + 9)) % 1 != 0  # not a multiple of 2^-9
    assert torch.equal(inexact, expected)
    assert bool(inexact.any()) == (distance > 14)


def test_conversion_at_the_lower_end_of_the_scales():
    q = tensor_with_exponents(torch.tensor([[3, 0, 2, 1]]))  # 3 - 6 < 0: the tile byte stops at 0
    fp8, inexact = mxfp4.to_fp8_tiles(q)
    assert fp8.scales.tolist() == [[0]] and not inexact.any()
    assert torch.equal(fp8_block.dequantize(fp8, torch.float64), mxfp4.dequantize(q, torch.float64))


def test_conversion_keeps_a_broken_block_to_itself():
    q = tensor_with_exponents(torch.tensor([[120, 255, 118, 119], [255, 255, 255, 255]]).repeat_interleave(128, 0))
    fp8, inexact = mxfp4.to_fp8_tiles(q)
    assert fp8.scales.tolist() == [[114], [255]] and not inexact.any()
    nan = fp8_block.dequantize(fp8).isnan()
    assert torch.equal(nan, mxfp4.dequantize(q).isnan())
    assert bool((fp8.codes[nan] == e4m3.NAN).all())


Q = mxfp4.quantize(torch.ones(4, 64))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mxfp4.quantize(torch.zeros(4, 48)), "x.shape.*multiple of 32"),
        (lambda: mxfp4.quantize(torch.zeros(4, 32).int()), "x.dtype"),
        (lambda: mxfp4.dequantize(MXFP4Tensor(Q.packed, Q.scales[:, :1])), r"scales.shape.*\(4, 2\)"),
        (lambda: mxfp4.dequantize(MXFP4Tensor(Q.packed[:, :-1], Q.scales)), "packed.shape.*multiple of 16"),
        (lambda: mxfp4.dequantize(MXFP4Tensor(Q.packed.float(), Q.scales)), "packed.dtype"),
        (lambda: mxfp4.dequantize(MXFP4Tensor(Q.packed, Q.scales.float())), "scales.dtype"),
        (lambda: mxfp4.dequantize(MXFP4Tensor(Q.packed, Q.scales.to("meta"))), "scales.device"),
        (lambda: mxfp4.dequantize(Q, torch.float16), "dtype"),
        (lambda: mxfp4.to_fp8_tiles(mxfp4.quantize(torch.ones(2, 3, 32))), "packed.shape.*two dimensions"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
