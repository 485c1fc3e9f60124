"""FP4 codes and their packing."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1


def test_all_sixteen_codes():
    codes = torch.arange(16).to(torch.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = e2m1.decode(codes)
    assert decoded.tolist() == values + [-v for v in values]
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(e2m1.encode(decoded), codes)


def test_ties_and_saturation_spelled_out():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.001, 6.0, 7.0, 100.0, float("inf"), -float("inf")])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0, 6.0, 6.0, -6.0]
    assert e2m1.decode(e2m1.encode(x)).tolist() == expected


def test_nan_is_refused():
    with pytest.raises(ArgumentError, match="no NaN"):
        e2m1.encode(torch.tensor([0.0, float("nan")]))


def test_low_nibble_is_the_even_element():
    assert e2m1.pack(torch.tensor([0x1, 0xF, 0xA, 0x3], dtype=torch.uint8)).tolist() == [0xF1, 0x3A]
    assert e2m1.unpack(torch.tensor([0xF1, 0x3A], dtype=torch.uint8)).tolist() == [0x1, 0xF, 0xA, 0x3]


def test_every_byte_round_trips_in_every_dtype_of_the_checkpoints():
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(4, 64)
    for same in (packed, packed.view(torch.int8), packed.view(torch.float4_e2m1fn_x2)):
        codes = e2m1.unpack(same)
        assert codes.shape == (4, 128)
        assert torch.equal(e2m1.pack(codes), packed)


def test_non_contiguous_and_empty():
    codes = torch.randint(16, (6, 10), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    assert torch.equal(e2m1.pack(codes[::2, 2:8]), e2m1.pack(codes[::2, 2:8].contiguous()))
    assert torch.equal(e2m1.pack(codes.t()), e2m1.pack(codes.t().contiguous()))
    assert torch.equal(e2m1.unpack(codes.t()), e2m1.unpack(codes.t().contiguous()))
    assert e2m1.pack(torch.empty(3, 0, dtype=torch.uint8)).shape == (3, 0)
    assert e2m1.unpack(torch.empty(0, 2, dtype=torch.uint8)).shape == (0, 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: e2m1.pack(torch.zeros(3, dtype=torch.uint8)), "codes.shape.*multiple of 2"),
        (lambda: e2m1.pack(torch.tensor([1, 16], dtype=torch.uint8)), "codes=16.*0..15"),
        (lambda: e2m1.pack(torch.tensor(1, dtype=torch.uint8)), "codes.shape.*at least one dimension"),
        (lambda: e2m1.pack(torch.zeros(2, dtype=torch.int64)), "codes.dtype"),
        (lambda: e2m1.unpack(torch.zeros(2, dtype=torch.float8_e4m3fn)), "packed.dtype"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
