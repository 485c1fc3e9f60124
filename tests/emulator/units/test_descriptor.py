"""Descriptors: every field by itself, and every reserved or undefined bit refused by name."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from dsv4lib.emulator.units.descriptor import (
    DescriptorError,
    instruction_descriptor,
    smem_descriptor,
    smem_descriptor_sm90,
    zero_column_mask,
)
from dsv4lib.emulator.units.operand import k_major

VERSION = 1 << 46


@pytest.mark.parametrize(("low", "field"), [(0, "start"), (16, "leading"), (32, "stride")])
@pytest.mark.parametrize("bit", range(14))
def test_smem_address_fields(low, field, bit):
    found = smem_descriptor(VERSION | 1 << low + bit)
    expected = dict.fromkeys(("start", "leading", "stride"), 0) | {field: 16 << bit}
    assert {name: getattr(found, name) for name in expected} == expected
    found = smem_descriptor_sm90(1 << low + bit)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("code", "name"), [(0, "none"), (1, "128B with 32B atoms"), (2, "128B"), (4, "64B"), (6, "32B")]
)
def test_smem_swizzle(code, name):
    assert smem_descriptor(VERSION | code << 61).swizzle.name == name


@pytest.mark.parametrize(("code", "name"), [(0, "none"), (1, "128B"), (2, "64B"), (3, "32B")])
def test_smem_swizzle_sm90(code, name):
    assert smem_descriptor_sm90(code << 62).swizzle.name == name


@pytest.mark.parametrize(
    ("bits", "field"),
    [(1 << b, "reserved") for b in (14, 15, 30, 31, *range(53, 61))]
    + [(2 << 61 | 1 << 52 | 1 << b, "and no base offset") for b in (49, 50, 51)]
    + [(1 << 52, "an absolute leading address")]
    + [(c << 61, "swizzle mode") for c in (3, 5, 7)],
)
def test_smem_strict(bits, field):
    with pytest.raises(DescriptorError, match=field):
        smem_descriptor(VERSION | bits)


@pytest.mark.parametrize("version", [0, 2, 3, 4, 5])
def test_smem_version(version):
    with pytest.raises(DescriptorError, match="version"):
        smem_descriptor(version << 46)


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 47, 48, *range(52, 62)])
def test_smem_strict_sm90(bit):
    with pytest.raises(DescriptorError, match="reserved"):
        smem_descriptor_sm90(1 << bit)


def test_base_offset():
    """Which 16-byte chunks the 64 rows of A come from; an H200's answer, for starts of 0 to 7 rows."""
    seen = []
    for mode, width in ((1, 128), (2, 64), (3, 32)):
        for row in range(8):
            for base in range(8):
                bits = 4096 + row * width >> 4 | 8 * width >> 4 << 32 | base << 49 | mode << 62
                found = k_major(SimpleNamespace(operands={}), smem_descriptor_sm90(bits), 64, 32)
                seen.append(found.first + found.chunks - 256)
    assert hashlib.sha256(np.array(seen, np.int32).tobytes()).hexdigest()[:32] == "21914517dcfb1c4efcc8094de99ab520"
    assert smem_descriptor(VERSION | 2 << 61 | 5 << 49).base == 5 * 128


def test_a_matrix_cannot_begin_below_the_window():
    with pytest.raises(DescriptorError, match="base offset 1"):
        k_major(SimpleNamespace(operands={}), smem_descriptor(VERSION | 2 << 61 | 1 << 49), 8, 32)


def test_a_base_offset_without_a_swizzle_says_nothing():
    assert smem_descriptor(VERSION | 5 << 49) == smem_descriptor(VERSION)
    assert smem_descriptor_sm90(5 << 49) == smem_descriptor_sm90(0)


def idesc(m=128, n=64, a=0, b=0, d=1, extra=0):
    return d << 4 | a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


def scaled(m=128, n=64, a=0, b=0, ue8m0=1, extra=0):
    return a << 7 | b << 10 | (n >> 3) << 17 | ue8m0 << 23 | (m >> 7) << 27 | extra


@pytest.mark.parametrize(
    ("kind", "code", "name"),
    [("f16", 0, "f16"), ("f16", 1, "bf16"), ("tf32", 2, "tf32"), ("i8", 0, "u8"), ("i8", 1, "s8")]
    + [("f8f6f4", c, n) for c, n in ((0, "e4m3"), (1, "e5m2"), (3, "e2m3"), (4, "e3m2"), (5, "e2m1"))],
)
def test_operand_types(kind, code, name):
    d = 2 if kind == "i8" else 1
    other = {"tf32": 2}.get(kind, 0)
    assert instruction_descriptor(kind, idesc(a=code, b=other, d=d)).a == name
    assert instruction_descriptor(kind, idesc(a=other, b=code, d=d)).b == name


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("f16", (2, 3, 4, 5, 6, 7)),
        ("tf32", (0, 1, 3, 7)),
        ("i8", (2, 5)),
        ("f8f6f4", (2, 6, 7)),
        ("mxf8f6f4", (2, 6, 7)),
    ]
    + [(k, (0, 2, 5)) for k in ("mxf4", "mxf4nvf4")],
)
def test_undefined_operand_types(kind, bad):
    good = {"tf32": 2, "mxf4": 1, "mxf4nvf4": 1}.get(kind, 0)
    make = scaled if kind.startswith("mx") else idesc
    for code in bad:
        fields = [("A type", make(a=code, b=good))]
        if code < 4 or not kind.startswith("mxf4"):  # whose B type has two bits
            fields.append(("B type", make(a=good, b=code)))
        for field, bits in fields:
            with pytest.raises(DescriptorError, match=field):
                instruction_descriptor(kind, bits)


@pytest.mark.parametrize("kind", ["f16", "tf32", "f8f6f4", "i8"])
def test_undefined_d_types(kind):
    good = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}[kind]
    a = 2 if kind == "tf32" else 0
    for code in range(4):
        if code in good:
            assert instruction_descriptor(kind, idesc(a=a, b=a, d=code)).d == ("f16", "f32", "s32")[code]
        else:
            with pytest.raises(DescriptorError, match="D type"):
                instruction_descriptor(kind, idesc(a=a, b=a, d=code))


@pytest.mark.parametrize(
    ("bit", "field"),
    [
        (0, "selector"),
        (1, "selector"),
        (2, "sparsity"),
        (3, "saturate"),
        (6, "reserved"),
        (23, "reserved"),
        (29, "reserved"),
        (30, "maximum shift"),
        (31, "maximum shift"),
    ],
)
def test_reserved_bits(bit, field):
    with pytest.raises(DescriptorError, match=field):
        instruction_descriptor("f16", idesc(extra=1 << bit))


@pytest.mark.parametrize(
    ("bit", "field"),
    [
        (0, "selector"),
        (1, "selector"),
        (2, "sparsity"),
        (3, "reserved"),
        (6, "reserved"),
        (24, "reserved"),
        (25, "reserved"),
        (26, "reserved"),
        (31, "reserved"),
    ],
)
def test_reserved_bits_of_mxf8f6f4(bit, field):
    with pytest.raises(DescriptorError, match=field):
        instruction_descriptor("mxf8f6f4", scaled(extra=1 << bit))


@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
def test_the_sparsity_version_of_4_bit_kinds_says_nothing(kind):
    bits = scaled(a=1, b=1)
    assert instruction_descriptor(kind, bits | 1 << 12) == instruction_descriptor(kind, bits)
    with pytest.raises(DescriptorError, match="B type"):
        instruction_descriptor("mxf8f6f4", scaled(a=1, b=2, extra=1 << 12))


def test_k96():
    assert instruction_descriptor("mxf4nvf4", scaled(a=1, b=1, extra=1 << 31)).k == 96
    assert instruction_descriptor("mxf4nvf4", scaled(a=1, b=1)).k == 64


def test_flags():
    found = instruction_descriptor("f16", idesc(extra=1 << 13 | 1 << 16))
    assert (found.negate_a, found.negate_b, found.mn_major_a, found.mn_major_b) == (True, False, False, True)
    found = instruction_descriptor("f16", idesc(extra=1 << 14 | 1 << 15))
    assert (found.negate_a, found.negate_b, found.mn_major_a, found.mn_major_b) == (False, True, True, False)
    assert instruction_descriptor("i8", idesc(d=2, extra=8)).saturate
    found = instruction_descriptor("mxf4nvf4", scaled(a=1, b=1, ue8m0=0, extra=2 << 4 | 3 << 29))
    assert (found.scale, found.sfa_id, found.sfb_id, found.k) == ("ue4m3", 3, 2, 64)
    assert [instruction_descriptor("f16", idesc(n=64, extra=s << 30), 1, True).max_shift for s in range(4)] == [
        0,
        8,
        16,
        32,
    ]


SHAPES = {
    ("f16", 1, False): ((64, 128), range(8, 257, 8)),
    ("f16", 2, False): ((128, 256), range(16, 257, 16)),
    ("f16", 1, True): ((32, 64, 128), (64, 128, 256)),
    ("i8", 1, False): ((64, 128), (8, 16, 24, 32, *range(48, 257, 16))),
    ("i8", 2, False): ((128, 256), range(32, 257, 32)),
    ("mxf8f6f4", 1, False): ((128,), range(8, 257, 8)),
    ("mxf8f6f4", 2, False): ((128, 256), range(16, 257, 16)),
}


@pytest.mark.parametrize(("kind", "group", "ws"), SHAPES)
def test_every_shape(kind, group, ws):
    ms, ns = SHAPES[kind, group, ws]
    for m in range(0, 512, 128 if kind == "mxf8f6f4" else 16):
        for n in range(0, 512, 8):
            bits = scaled(m, n) if kind == "mxf8f6f4" else idesc(m, n, d=2 if kind == "i8" else 1)
            if m in ms and n in ns:
                found = instruction_descriptor(kind, bits, group, ws)
                assert (found.m, found.n) == (m, n)
            else:
                with pytest.raises(DescriptorError, match="M=|N="):
                    instruction_descriptor(kind, bits, group, ws)


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [
        ("f16", idesc(a=1, d=0), "bf16 operands need an f32 D"),
        ("i8", idesc(d=2, extra=1 << 13), "cannot negate"),
        ("i8", idesc(d=2, extra=1 << 14), "cannot negate"),
        ("mxf4", scaled(a=1, b=1, extra=1 << 15), "cannot transpose"),
        ("mxf4", scaled(a=1, b=1, ue8m0=0), "takes ue8m0"),
        ("mxf8f6f4", scaled(ue8m0=0), "takes ue8m0"),
        ("f8f6f4", idesc(n=24, extra=1 << 16), "N=24"),
        ("f8f6f4", idesc(a=5, extra=1 << 15), "type e2m1 cannot be transposed"),
    ],
)
def test_combinations(kind, bits, message):
    with pytest.raises(DescriptorError, match=message):
        instruction_descriptor(kind, bits)


def zero_mask(sc=(0, 0, 0, 0), fs=(0, 0, 0, 0), nonzero=1, skip=2, use=3, shift=0):
    bits = sum(v << 8 * i for i, v in enumerate(sc)) | sum(v << 32 + i for i, v in enumerate(fs))
    return bits | nonzero << 39 | skip << 40 | use << 48 | shift << 56


def pattern(text, n):
    """The ISA writes masks with column 0 on the right; the pattern repeats to the left."""
    bits = [c == "1" for c in reversed(text.replace(" ", ""))]
    return np.array([bits[i] for i in range(n)])


def test_zero_column_examples_of_the_isa():
    assert not zero_column_mask(zero_mask(nonzero=0, skip=4), 128, 64, 0)[0].any()
    np.testing.assert_array_equal(zero_column_mask(zero_mask(), 128, 64, 0)[0][:14], pattern("111 0000 111 0000", 14))
    mask = zero_column_mask(zero_mask(fs=(1, 0, 0, 0)), 64, 64, 0)[0]
    np.testing.assert_array_equal(mask[:17], pattern("111 0000 111 0000 111", 17))
    np.testing.assert_array_equal(mask[32:50], pattern("0000 111 0000 111 0000", 18))
    mask, shift = zero_column_mask(zero_mask(sc=(0, 1, 2, 1), fs=(1, 1, 0, 0), shift=2), 32, 128, 8)
    assert shift == 2
    np.testing.assert_array_equal(mask[:14], pattern("0000 111 0000 111", 14))
    np.testing.assert_array_equal(mask[32:45], pattern("0000 111 0000 11", 13))
    np.testing.assert_array_equal(mask[64:76], pattern("111 0000 111 00", 12))
    np.testing.assert_array_equal(mask[96:109], pattern("111 0000 111 000", 13))


@pytest.mark.parametrize("bit", [36, 37, 38, 62, 63])
def test_zero_column_reserved_bits(bit):
    with pytest.raises(DescriptorError, match="reserved"):
        zero_column_mask(1 << bit, 128, 64, 32)


@pytest.mark.parametrize(
    ("m", "maximum", "good", "bad"), [(128, 32, 32, 33), (32, 32, 16, 17), (64, 8, 8, 9), (64, 0, 0, 1)]
)
def test_zero_column_shift_limit(m, maximum, good, bad):
    assert zero_column_mask(zero_mask(shift=good), m, 128, maximum)[1] == good
    with pytest.raises(DescriptorError, match="column shift"):
        zero_column_mask(zero_mask(shift=bad), m, 128, maximum)
