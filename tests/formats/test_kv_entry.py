"""The 584-byte KV entry, byte by byte, alone and in pages."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry


@pytest.fixture
def kv(scaled_normals) -> torch.Tensor:
    x = scaled_normals(9, 512, seed=61)
    return x * torch.exp2(torch.arange(8).repeat_interleave(64) - 4.0)  # groups of a row differ as well


def test_sizes():
    assert kv_entry.LAYOUT.entry_bytes == 584
    assert kv_entry.LAYOUT.page_bytes(1) == 2 * 576
    assert kv_entry.LAYOUT.page_bytes(64) == 65 * 576  # 64 * 584 = 64.89 rows of 576
    assert all(kv_entry.LAYOUT.page_bytes(n) % 576 == 0 for n in range(1, 200))


def test_bytes_of_an_entry_spelled_out(kv):
    """Scale exponents by math.frexp, E4M3 by torch's cast, bf16 by struct: nothing shared with the codec."""
    data, scales = kv_entry.encode(kv)
    assert data.shape == (9, 576) and scales.shape == (9, 8)
    for row, entry, scale in zip(kv, data, scales, strict=True):
        expected = []
        for group in range(7):
            part = row[group * 64 : group * 64 + 64]
            mantissa, exponent = math.frexp(max(float(part.abs().max()), float(torch.tensor(1e-4))))
            power = exponent - 9 + (mantissa > 0.875)
            assert int(scale[group]) == power + 127
            expected += (part / 2.0**power).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
        for v in row[448:].bfloat16().float().tolist():
            expected += list(struct.pack("<f", v)[2:])  # the upper half of an fp32 is the bf16
        assert int(scale[7]) == 0
        assert entry.tolist() == expected
    assert len(set(scales[:, :7].flatten().tolist())) > 10, "the scales must differ for this test to mean much"


def test_decode_is_exact_in_bf16_and_idempotent(kv):
    data, scales = kv_entry.encode(kv)
    exact = kv_entry.decode(data, scales, torch.float64)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(kv_entry.decode(data, scales, dtype).double(), exact)
    again = kv_entry.encode(kv_entry.decode(data, scales))
    assert torch.equal(kv_entry.decode(*again, dtype=torch.float64), exact)
    assert torch.equal(kv_entry.fake_quantize(kv).double(), exact)
    assert kv_entry.fake_quantize(kv.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(exact[:, 448:], kv[:, 448:].bfloat16().double())
    step = kv[:, :448].unflatten(1, (7, 64)).abs().amax(-1, keepdim=True) / 16
    assert bool(((exact - kv)[:, :448].unflatten(1, (7, 64)).abs() <= step).all())


def test_padding_byte_is_ignored(kv):
    data, scales = kv_entry.encode(kv)
    expected = kv_entry.decode(data, scales)
    scales[:, 7] = 255
    assert torch.equal(kv_entry.decode(data, scales), expected)


def test_page_is_all_data_then_all_scales(kv):
    pages = kv_entry.LAYOUT.allocate(3, 5)
    kv_entry.append(pages, 5, torch.tensor([7, 14, 0]), kv[:3])
    data, scales = kv_entry.encode(kv[:3])
    for entry, (page, slot) in enumerate([(1, 2), (2, 4), (0, 0)]):
        raw = pages[page]
        assert torch.equal(raw[slot * 576 : slot * 576 + 576], data[entry])
        assert torch.equal(raw[5 * 576 + slot * 8 : 5 * 576 + slot * 8 + 8], scales[entry])
        raw[slot * 576 : slot * 576 + 576] = 0
        raw[5 * 576 + slot * 8 : 5 * 576 + slot * 8 + 8] = 0
    assert not pages.any(), "append wrote elsewhere too"


def test_append_and_gather_with_skips(kv):
    pages = kv_entry.LAYOUT.allocate(3, 4)
    indices = torch.tensor([11, 3, -1, 0, 6, -1, 9, 2, 5], dtype=torch.int32)
    kv_entry.append(pages, 4, indices, kv)
    expected = kv_entry.decode(*kv_entry.encode(kv))
    wanted = torch.tensor([[0, -1, 5], [11, 11, -1]])
    got, valid = kv_entry.gather(pages, 4, wanted)
    assert got.shape == (2, 3, 512) and got.dtype == torch.bfloat16
    assert valid.tolist() == [[True, False, True], [True, True, False]]
    assert torch.equal(got[valid], expected[[3, 8, 0, 0]])
    assert not got[~valid].any()
    everything, _ = kv_entry.gather(pages, 4, indices, torch.float32)
    keep = indices >= 0
    assert torch.equal(everything[keep], expected[keep].float())


def test_overwriting_a_slot_replaces_it(kv):
    """The window is a ring: a slot is written again and again."""
    pages = kv_entry.LAYOUT.allocate(1, 3)
    for row in kv:
        kv_entry.append(pages, 3, torch.tensor([1]), row[None])
    got, _ = kv_entry.gather(pages, 3, torch.tensor([1]), torch.float32)
    assert torch.equal(got[0], kv_entry.fake_quantize(kv[-1]))


def test_broken_values_stay_visible():
    kv = torch.ones(2, 512)
    kv[0, 70], kv[1, 500], kv[1, 501] = math.nan, math.nan, math.inf
    out = kv_entry.fake_quantize(kv)
    assert out.isnan().nonzero().tolist() == [[0, i] for i in range(64, 128)] + [[1, 500]]
    assert out[1, 501] == math.inf
    assert kv_entry.encode(kv)[1][0].tolist() == [119, 255] + [119] * 5 + [0]


def test_shapes_strides_and_unaligned_bytes(kv):
    data, scales = kv_entry.encode(kv.reshape(3, 3, 512))
    assert data.shape == (3, 3, 576) and scales.shape == (3, 3, 8)
    transposed = kv.t().contiguous().t()
    assert torch.equal(kv_entry.encode(transposed)[0], data.reshape(9, 576))
    odd = torch.zeros(1 + 576, dtype=torch.uint8)
    odd[1:] = data[0, 0]
    assert torch.equal(kv_entry.decode(odd[1:], scales[0, 0]), kv_entry.decode(data, scales)[0, 0])
    assert kv_entry.fake_quantize(torch.empty(0, 512)).shape == (0, 512)


DATA, SCALES = kv_entry.encode(torch.ones(2, 512))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kv_entry.encode(torch.zeros(2, 448)), "kv.shape.*512"),
        (lambda: kv_entry.encode(torch.zeros(2, 512).int()), "kv.dtype"),
        (lambda: kv_entry.decode(DATA[:, :448], SCALES), "data.shape.*576"),
        (lambda: kv_entry.decode(DATA, SCALES[:, :7]), r"scales.shape.*\(2, 8\)"),
        (lambda: kv_entry.decode(DATA, SCALES, torch.float16), "dtype"),
        (lambda: kv_entry.decode(DATA.int(), SCALES), "data.dtype"),
        (
            lambda: kv_entry.append(kv_entry.LAYOUT.allocate(1, 2), 2, torch.tensor([0]), torch.ones(2, 512)),
            "data.shape",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
