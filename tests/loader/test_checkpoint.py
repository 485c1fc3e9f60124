"""Files and folders: what the library writes is read to the bit, and nothing that lies about itself is."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.safetensors import DTYPES, CheckpointError, read_header


def write_raw(path, header, data=b"", length=None):
    """A file with exactly this header (an object or raw bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_every_dtype_as_the_library_wrote_it(tmp_path):
    bits = torch.arange(48).to(torch.uint8)
    tensors = {name: bits.clone().view(dtype) if name != "BOOL" else bits > 3 for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 5), "matrix": torch.randn(3, 7)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        got = found[name].read()
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize(
    "header, data, message",
    [
        (b"", b"", "a header of 0 bytes"),
        (b"[]", b"", "list.*a JSON object"),
        (b"{ not json", b"", "JSON"),
        (b"\xff\xfe", b"", "JSON"),
        (b"[" * 100_000, b"", "JSON"),
        (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": 1}', b"x", "twice"),
        ({"a": 5}, b"", "dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, b"x" * 8, "dtype, shape and data_offsets"),
        ({"a": entry("F4")}, b"x" * 8, "a.safetensors, a, dtype: F4 .*one of BOOL"),
        ({"a": entry(["F32"])}, b"x" * 8, "dtype"),
        ({"a": entry(shape=(-2,))}, b"x" * 8, "shape"),
        ({"a": entry(shape=(2.0,))}, b"x" * 8, "shape"),
        ({"a": entry(shape=(True, 2))}, b"x" * 8, "shape"),
        ({"a": entry(begin=8, end=0)}, b"x" * 8, "data_offsets"),
        ({"a": entry(shape=(3,))}, b"x" * 8, r"12 bytes for F32 \[3\]"),
        ({"a": entry(shape=(2**62, 2**62))}, b"x" * 8, "bytes for F32"),
        ({"a": entry()}, b"x" * 7, "7 bytes of data"),
        ({"a": entry()}, b"x" * 9, "9 bytes of data"),
        ({"a": entry(), "b": entry(begin=4, end=12)}, b"x" * 12, "byte 8: no overlap"),
        ({"a": entry(), "b": entry(begin=12, end=20)}, b"x" * 20, "byte 8: no overlap"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, header, data, message):
    path = write_raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize("length", [3, 10**6, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_costs_nothing(tmp_path, length):
    path = write_raw(tmp_path / "a.safetensors", {"a": entry()}, b"x" * 8, length=length)
    with pytest.raises(CheckpointError):
        read_header(path)


@settings(derandomize=True, max_examples=80, deadline=None)
@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_damage_is_refused_or_harmless(tmp_path_factory, at, value, cut):
    """Any byte changed, the end cut off: a typed error, or entries that lie inside the file."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 3)}, path)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] = value
    path.write_bytes(raw[: len(raw) - cut])
    try:
        found = read_header(path)
    except CheckpointError:
        return
    assert all(8 <= e.offset and e.offset + e.nbytes <= len(raw) - cut for e in found.values())
    assert sum(e.nbytes for e in found.values()) == sum(e.read().nbytes for e in found.values())


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    found = read_header(tmp_path / "a.safetensors")["a"]
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="15 bytes of a tensor"):
        found.read()


def test_folder_and_index(deepseek, tmp_path):
    checkpoint = Checkpoint(deepseek)
    name = "layers.3.ffn.experts.0.w1.weight"
    assert name in checkpoint and len(list(checkpoint)) == 18 and checkpoint.config == {}
    assert checkpoint.get(name, (torch.int8,), (160, 128)).shape == (160, 128)
    with pytest.raises(CheckpointError, match=r"w1.weight.dtype: torch.int8.*torch.uint8"):
        checkpoint.get(name, (torch.uint8,), (160, 128))
    with pytest.raises(CheckpointError, match=r"w1.weight.shape: \(160, 128\).*\(160, 64\)"):
        checkpoint.get(name, (torch.int8,), (160, 64))
    with pytest.raises(CheckpointError, match=r"w1.bias: missing.*w1.scale"):
        checkpoint.entry("layers.3.ffn.experts.0.w1.bias")
    (deepseek / "model.safetensors.index.json").unlink()
    assert set(Checkpoint(deepseek)) == set(checkpoint)
    with pytest.raises(CheckpointError, match="no folder"):
        Checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m.__setitem__("x", "../secret.safetensors"), "in this folder"),
        (lambda m: m.__setitem__("x", "weights.bin"), "in this folder"),
        (lambda m: m.__setitem__("x", 3), "in this folder"),
        (lambda m: m.__setitem__("x", "model-00001-of-00002.safetensors"), "the file that holds the tensor"),
        (lambda m: m.__setitem__("x", "model-00003-of-00002.safetensors"), "no regular file"),
        (lambda m: m.__setitem__(next(iter(m)), "model-00002-of-00002.safetensors"), "the file that holds the tensor"),
    ],
)
def test_an_index_that_lies_is_refused(deepseek, change, message):
    path = deepseek / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(deepseek)


def test_no_pickle_is_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="pickles are never read"):
        Checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="each name once"):
        Checkpoint(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    for text in ("[1]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="config.json"):
            Checkpoint(tmp_path)
