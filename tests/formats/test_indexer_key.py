"""Indexer keys in FP8 (132 bytes) and FP4 (68 bytes), byte by byte, alone and in pages."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import hadamard, indexer_key, mxfp4

VARIANTS = {
    "fp8": (indexer_key.FP8_LAYOUT, indexer_key.encode_fp8, indexer_key.decode_fp8),
    "fp4": (indexer_key.FP4_LAYOUT, indexer_key.encode_fp4, indexer_key.decode_fp4),
}
variants = pytest.mark.parametrize("variant", list(VARIANTS))


@pytest.fixture
def keys(scaled_normals) -> torch.Tensor:
    return hadamard.transform(scaled_normals(7, 128, seed=71))


def test_sizes():
    assert (indexer_key.FP8_LAYOUT.entry_bytes, indexer_key.FP4_LAYOUT.entry_bytes) == (132, 68)
    assert indexer_key.FP8_LAYOUT.page_bytes(64) == 64 * 132
    assert indexer_key.FP4_LAYOUT.page_bytes(64) == 64 * 68


def test_fp8_bytes_spelled_out(keys):
    data, scales = indexer_key.encode_fp8(keys)
    for row, codes, scale in zip(keys, data, scales, strict=True):
        mantissa, exponent = math.frexp(max(float(row.abs().max()), float(torch.tensor(1e-4))))
        power = 2.0 ** (exponent - 9 + (mantissa > 0.875))
        assert bytes(scale.tolist()) == struct.pack("<f", power)
        assert torch.equal(codes, (row / power).to(torch.float8_e4m3fn).view(torch.uint8))


def test_fp4_bytes_spelled_out(keys):
    data, scales = indexer_key.encode_fp4(keys)
    assert data.shape == (7, 64) and scales.shape == (7, 4)
    for row, packed, scale in zip(keys, data, scales, strict=True):
        for block in range(4):
            part = row[block * 32 : block * 32 + 32]
            mantissa, exponent = math.frexp(float(part.abs().max()))
            power = exponent - 3 + (mantissa > 0.75)
            assert int(scale[block]) == power + 127
            codes = (part / 2.0**power).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            assert packed[block * 16 : block * 16 + 16].tolist() == (codes[0::2] | codes[1::2] << 4).tolist()


def test_fp8_decodes_any_fp32_scale(keys):
    data, _ = indexer_key.encode_fp8(keys)
    scale = torch.rand(7, 1, generator=torch.Generator().manual_seed(72))
    got = indexer_key.decode_fp8(data, scale.view(torch.uint8))
    assert torch.equal(got, data.view(torch.float8_e4m3fn).float() * scale)


@variants
def test_exact_decode_in_every_dtype(variant, keys):
    _, encode, decode = VARIANTS[variant]
    exact = decode(*encode(keys), dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(decode(*encode(keys), dtype=dtype).double(), exact)
    assert torch.equal(decode(*encode(exact), dtype=torch.float64), exact)


def test_fp4_is_the_model_side_fake_quantisation(keys):
    assert torch.equal(indexer_key.decode_fp4(*indexer_key.encode_fp4(keys)), mxfp4.fake_quantize(keys))


@variants
def test_page_is_all_data_then_all_scales(variant, keys):
    layout, encode, _ = VARIANTS[variant]
    pages = layout.allocate(2, 5)
    indexer_key.append(pages, 5, torch.tensor([8, 1]), keys[:2], variant)
    data, scales = encode(keys[:2])
    d, s = layout.data_bytes, layout.scale_bytes
    for entry, (page, slot) in enumerate([(1, 3), (0, 1)]):
        raw = pages[page]
        assert torch.equal(raw[slot * d : slot * d + d], data[entry])
        assert torch.equal(raw[5 * d + slot * s : 5 * d + slot * s + s], scales[entry])
        raw[slot * d : slot * d + d] = 0
        raw[5 * d + slot * s : 5 * d + slot * s + s] = 0
    assert not pages.any(), "append wrote elsewhere too"


@variants
def test_append_and_gather_with_skips(variant, keys):
    layout, encode, decode = VARIANTS[variant]
    pages = layout.allocate(3, 3)
    indices = torch.tensor([4, -1, 0, 8, 7, -1, 2])
    indexer_key.append(pages, 3, indices, keys, variant)
    got, valid = indexer_key.gather(pages, 3, indices.reshape(7, 1).int(), variant)
    assert torch.equal(valid[:, 0], indices >= 0)
    assert torch.equal(got[valid], decode(*encode(keys))[indices >= 0])
    assert not got[~valid].any()
    assert indexer_key.gather(pages, 3, indices, variant, torch.bfloat16)[0].dtype == torch.bfloat16


@variants
def test_unwritten_and_skipped_rows_are_zero(variant):
    layout, _, _ = VARIANTS[variant]
    got, valid = indexer_key.gather(layout.allocate(1, 2), 2, torch.tensor([-1, 1]), variant)
    assert valid.tolist() == [False, True] and not got.any()


@variants
def test_broken_values_stay_visible(variant):
    _, encode, decode = VARIANTS[variant]
    keys = torch.ones(2, 128)
    keys[1, 40] = math.inf
    nan = decode(*encode(keys)).isnan()
    width = {"fp8": (0, 128), "fp4": (32, 64)}[variant]
    assert nan.nonzero().tolist() == [[1, i] for i in range(*width)]


@variants
def test_shapes_strides_and_unaligned_bytes(variant, keys):
    layout, encode, decode = VARIANTS[variant]
    data, scales = encode(keys)
    strided = encode(keys.t().contiguous().t())
    assert torch.equal(strided[0], data) and torch.equal(strided[1], scales)
    batched = encode(keys[:6].reshape(2, 3, 128))
    assert torch.equal(batched[0].flatten(0, 1), data[:6]) and batched[1].shape == (2, 3, 4)
    odd = torch.zeros(5, dtype=torch.uint8)
    odd[1:] = scales[0]
    assert torch.equal(decode(data[0], odd[1:]), decode(data, scales)[0])
    assert decode(*encode(torch.empty(0, 128))).shape == (0, 128)


D8, S8 = indexer_key.encode_fp8(torch.ones(2, 128))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: indexer_key.encode_fp8(torch.zeros(2, 64)), "keys.shape.*128"),
        (lambda: indexer_key.encode_fp4(torch.zeros(2, 64)), "keys.shape.*128"),
        (lambda: indexer_key.encode_fp4(torch.zeros(2, 128).int()), "keys.dtype"),
        (lambda: indexer_key.decode_fp8(D8[:, :64], S8), "data.shape.*128"),
        (lambda: indexer_key.decode_fp4(D8, S8), "data.shape.*64"),
        (lambda: indexer_key.decode_fp8(D8, S8[:1]), r"scales.shape.*\(2, 4\)"),
        (lambda: indexer_key.decode_fp8(D8, S8.float()), "scales.dtype"),
        (
            lambda: indexer_key.append(torch.zeros(1, 132).byte(), 1, torch.tensor([0]), torch.ones(1, 128), "fp6"),
            "variant='fp6'",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
