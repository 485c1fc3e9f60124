"""10,000 damaged files, each beside the safetensors library: never laxer, stricter only where that is written down."""

from __future__ import annotations

import io
import json
import math
import random
import re
import struct
from pathlib import Path

import pytest
import safetensors
import torch

from dsv4lib.loader.safetensors import DTYPES, MAX_ELEMENTS, CheckpointError, header_of, read_header

COUNT = 10_000
FIELDS = {"dtype", "shape", "data_offsets"}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TEXTS = ["a", "b", "", "__metadata__", "dtype", "<img onerror=x>", "../a", "\u00e9", "\U0001f600", "F32", "I8"]
SIZES = [0, 1, 2, 3, 4, 7, 8, 31, 32, 63, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -1]
SCRAPS = [c.encode() for c in "{}[],:\"\\0- \n\t\r\0'"]
SCRAPS += [
    b"",
    b"-0",
    b"9" * 25,
    b"1.0",
    b"1e2",
    b"e",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"null",
    b"true",
]
SCRAPS += [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"\\ud800",
    b"\\udc00",
    b"\\u0061",
    b"\\u00",
    b"\\x",
    b"{}",
    b"[]",
    b"/**/",
]
SCRAPS += [b'"a":1,', b"[" * 40]

# What the library accepts and this loader refuses: by its message, and whether the header gives the reason for it.
STRICTER = {
    "a name occurs twice": lambda raw: _twice(raw),
    "from the first byte": lambda raw: raw[:1] in b" \t\r\n",
    "dtype, shape and data_offsets$": lambda raw: any(
        not isinstance(v, dict) or v.keys() != FIELDS for v in _tensors(raw)
    ),
    ", dtype: .*one of BOOL": lambda raw: any(
        not isinstance(v["dtype"], str) or v["dtype"] in ("F4", "F6_E2M3", "F6_E3M2") for v in _tensors(raw)
    ),
    "__metadata__: None": lambda raw: json.loads(raw)["__metadata__"] is None,
    "at most 64$": lambda raw: any(len(v["shape"]) > 64 for v in _tensors(raw)),
    "sizes of 0 left out": lambda raw: any(0 in v["shape"] and _most(v["shape"]) for v in _tensors(raw)),
    "the number .*a JSON object": lambda raw: any(v.keys() - FIELDS for v in _tensors(raw)),
}


def _tensors(raw):
    return [v for k, v in json.loads(raw).items() if k != "__metadata__"]


def _most(shape):
    return math.prod(size or 1 for size in shape) > MAX_ELEMENTS


def _twice(raw):
    seen = []
    json.loads(raw, object_pairs_hook=lambda pairs: seen.append(len(pairs) - len(dict(pairs))))
    return any(seen)


def good(rng):
    """A header that is right, and its data."""
    header, end = {}, 0
    if rng.random() < 0.4:
        header["__metadata__"] = {rng.choice(TEXTS): rng.choice(TEXTS) for _ in range(rng.randrange(3))}
    for i in range(rng.randrange(5)):
        dtype = rng.choice(list(DTYPES))
        shape = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(rng.randrange(4))]
        nbytes = DTYPES[dtype].itemsize
        for size in shape:
            nbytes *= size
        header[f"{rng.choice(TEXTS[:1] + TEXTS[4:])}{i}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    return header, rng.randbytes(end)


def change(rng, header):
    """Inject one fault in a header that has at least one tensor."""
    name = rng.choice([n for n in header if n != "__metadata__"])
    fields = header[name]
    kind = rng.randrange(17)
    if kind == 0:
        fields["dtype"] = rng.choice([*DTYPES, "F4", "F6_E2M3", "F6_E3M2", "f32", "U7", "", None, 5, {"U8": None}])
    elif kind == 1 and fields["shape"]:
        fields["shape"][rng.randrange(len(fields["shape"]))] = rng.choice([*SIZES, 1.0, True, None, "1"])
    elif kind == 2:
        fields["shape"] = [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 3, 70)))]
    elif kind == 3:
        fields["shape"] = [0, *fields["shape"], rng.choice(SIZES)]
        fields["data_offsets"][1] = fields["data_offsets"][0]
    elif kind == 4:
        fields["data_offsets"][rng.randrange(2)] += rng.choice((-8, -4, -1, 1, 4, 8, 2**40, 2**63))
    elif kind == 5:
        fields["data_offsets"].reverse()
    elif kind == 6:
        fields["data_offsets"] = rng.choice([[], [0], [0, 1, 2], None, "0", [0.0, 1.0], [None, 1], {"0": 1}])
    elif kind == 7:
        header[rng.choice(TEXTS)] = dict(fields)  # the same bytes twice: an overlap, unless there are none
    elif kind == 8:
        header["first"] = {"dtype": "U8", "shape": [0], "data_offsets": [rng.choice((0, 1, 10**6))] * 2}
    elif kind == 9:
        del fields[rng.choice(list(fields))]
    elif kind == 10:
        fields[rng.choice(TEXTS)] = rng.choice([1, None, "x", 1.5, [], {}])
    elif kind == 11:
        header["__metadata__"] = rng.choice([None, 1, "x", [], {"a": 1}, {"a": None}, {"a": {}}, {"a": "b"}])
    elif kind == 12:
        header[name] = rng.choice([list(fields.values()), None, 1, "x", []])
    elif kind == 13:
        fields["shape"] = [*fields["shape"], *[1] * rng.choice((1, 2, 61, 64, 65))]
    elif kind == 14:
        fields["dtype"], fields["shape"] = "F4", [2 * (fields["data_offsets"][1] - fields["data_offsets"][0])]
    elif kind == 15:
        fields["shape"] = fields["shape"][::-1]  # the same size: right again
    else:
        del header[name]


def damaged(rng):
    """A file with nothing, one or a few things wrong."""
    header, data = good(rng)
    if rng.random() < 0.5 and any(name != "__metadata__" for name in header):
        change(rng, header)
    raw = json.dumps(header, separators=rng.choice([(",", ":"), (", ", ": ")]), ensure_ascii=rng.random() < 0.5)
    raw = raw.encode()
    if rng.random() < 0.4:
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(raw) + 1)
            raw = raw[:at] + rng.choice(SCRAPS) + raw[at + rng.choice((0, 0, 1, 1, 5)) :]
    if rng.random() < 0.1 and len(raw) > 4:  # a name twice
        raw = raw[:-1] + b"," + raw[1:] if rng.random() < 0.5 else raw.replace(b'"shape"', b'"dtype"', 1)
    if rng.random() < 0.05:
        raw = raw.replace(b"[0", rng.choice([b"[-0", b"[00", b"[0.0", b"[+0", b"[ 0"]))
    if rng.random() < 0.2:
        raw = rng.choice([raw + b" " * 5, b" " + raw, raw + b"\n", raw + b"\0", raw + b"x"])
    length = len(raw)
    if rng.random() < 0.1:
        length = rng.choice([0, 1, 2, length - 1, length + 1, length + 8, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
    if rng.random() < 0.15:
        data = rng.choice([data[:-1], data + b"x", data[1:], b"", data + data])
    whole = struct.pack("<Q", max(0, length)) + raw + data
    return whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.03 else whole


def library(whole):
    """What the library finds: {name: (dtype, shape, bytes)}, None if it refuses."""
    try:
        found = safetensors.deserialize(whole)
    except safetensors.SafetensorError:
        return None
    return {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in found}


def ours(whole):
    """The same from this loader; its message where it refuses. Any exception of another type is a failure."""
    try:
        found = header_of(io.BytesIO(whole), len(whole), Path("f"))
    except CheckpointError as error:
        return str(error)
    return {n: (NAMES[e.dtype], e.shape, whole[e.offset : e.offset + e.nbytes]) for n, e in found.items()}


def test_never_laxer_than_the_library_and_stricter_only_where_documented():
    rng = random.Random(20261123)
    accepted, refused, reasons = 0, 0, dict.fromkeys(STRICTER, 0)
    for i in range(COUNT):
        whole = damaged(rng)
        theirs, mine = library(whole), ours(whole)
        if theirs is None:
            assert isinstance(mine, str), (i, whole)
            refused += 1
        elif isinstance(mine, str):
            raw = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
            why = [text for text in STRICTER if re.search(text, mine, re.S)]
            assert len(why) == 1 and STRICTER[why[0]](raw), (i, mine, raw)
            reasons[why[0]] += 1
        else:
            assert mine == theirs, (i, whole)
            accepted += 1
    assert accepted > COUNT // 5 and refused > COUNT // 5
    assert all(reasons.values()), reasons


@pytest.mark.parametrize("seed", range(20))
def test_values_are_those_of_the_library(tmp_path, seed):
    """Through real files and torch: the bits of every tensor."""
    from safetensors.torch import load

    rng = random.Random(seed)
    header, data = good(rng)
    raw = json.dumps(header).encode()
    whole = struct.pack("<Q", len(raw)) + raw + data
    (tmp_path / "f").write_bytes(whole)
    found = {name: entry.read() for name, entry in read_header(tmp_path / "f").items()}
    if any(v["dtype"] == "F8_E8M0" for k, v in header.items() if k != "__metadata__"):
        theirs = {n: torch.frombuffer(bytearray(d) or bytearray(1), dtype=torch.uint8)[: len(d)].view(DTYPES[t]).view(s)
                  for n, (t, s, d) in library(whole).items()}  # fmt: skip
    else:
        theirs = load(whole)
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
