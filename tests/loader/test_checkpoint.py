"""Files and folders: what the library writes is read to the bit, and nothing that lies about itself is."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import replace

import pytest
import torch
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
        (b"[]", b"", r"b'\[\]'.*a JSON object"),
        (b"{ not json", b"", "JSON"),
        (b"\xff\xfe", b"", "JSON"),
        (b"[" * 100_000, b"", "JSON"),
        (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": 1}', b"x", "twice"),
        ({"a": 5}, b"", "dtype, shape and data_offsets"),
        ({"a": entry() | {"more": 1}}, b"x" * 8, "dtype, shape and data_offsets"),
        ({"a": entry("F4")}, b"x" * 8, "a.safetensors, a, dtype: F4 .*one of BOOL"),
        ({"a": entry(["F32"])}, b"x" * 8, "dtype"),
        ({"a": entry(shape=(-2,))}, b"x" * 8, "shape"),
        ({"a": entry(shape=(2.0,))}, b"x" * 8, "the number 2.0"),
        ({"a": entry(shape=(True, 2))}, b"x" * 8, "shape"),
        ({"a": entry(shape=(0, 2**63), end=0)}, b"", "sizes of 0 left out"),
        ({"a": entry(shape=(0, 2**70), end=0)}, b"", "the number 1180591620717411303424"),
        ({"a": entry(shape=(0, 2**62, 2**62), end=0)}, b"", "sizes of 0 left out"),
        ({"a": entry(shape=(0,) + (1,) * 64, end=0)}, b"", "65 dimensions"),
        (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1' + b"0" * 5000 + b"]}}", b"x" * 8, "the number 1000"),
        ({"a": {"b": [[[[[[[[[0]]]]]]]]]}}, b"", r"\[\.\.\.\].*dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__.*all text"),
        ({"__metadata__": None}, b"", "__metadata__.*all text"),
        ({"__metadata__": ["a"]}, b"", "__metadata__.*all text"),
        (b'{"__metadata__": {"a": "\\ud800"}}', b"", "surrogates not allowed.*JSON"),
        (b'{"\\udfff": 1}', b"", "surrogates not allowed.*JSON"),
        (b'{"a": NaN}', b"", "the number NaN"),
        (b'{"a": -Infinity}', b"", "the number -Infinity"),
        (b'{"a": {"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"", "the number -0"),
        (b' {"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "from the first byte"),
        (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}\0', b"x", "JSON"),
        (b'{"a":' * 100_000, b"", "JSON"),
        ({"a": entry(begin=8, end=0)}, b"x" * 8, "data_offsets"),
        ({"a": entry(shape=(3,))}, b"x" * 8, r"12 bytes for F32 \[3\]"),
        ({"a": entry(shape=(2**62, 2**62))}, b"x" * 8, "at most 9223372036854775807 elements"),
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


@pytest.mark.parametrize("what", ["huge numbers", "many sizes", "many tensors", "long text", "deep"])
def test_a_header_of_2_mb_costs_little(tmp_path, what):
    """Bounds come before arithmetic: multiplying such sizes took a minute and a half."""
    count = 2_000_000
    header = {
        "huge numbers": lambda: {"a": entry(shape=(10**4000,) * (count // 4002), end=0)},  # as long as json reads them
        "many sizes": lambda: {"a": entry(shape=(2**60,) * (count // 21), end=0)},
        "many tensors": lambda: {f"{i}": entry(shape=(0,), end=0) for i in range(count // 60)} | {"x": 1},
        "long text": lambda: {"a": "x" * count},
        "deep": lambda: {"a": 0},
    }[what]()
    raw = json.dumps(header).encode()
    if what == "deep":
        raw = b'{"a":' + b'{"a":[' * (count // 6)
    path = write_raw(tmp_path / "a.safetensors", raw)
    began = time.process_time()
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    # Half a second of CPU time on a quiet machine, several on a busy one.
    assert time.process_time() - began < 10 and len(str(error.value)) < 500


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "a.safetensors")
    found = read_header(tmp_path / "a.safetensors")["a"]
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="15 bytes of a tensor"):
        found.read()


def test_a_file_that_went_away_or_does_not_fit_into_memory(tmp_path, monkeypatch):
    path = write_raw(tmp_path / "a.safetensors", {"a": entry()}, b"x" * 8)
    found = read_header(path)["a"]
    with monkeypatch.context() as patch:
        sizes = []
        patch.setattr(
            torch, "empty", lambda n, **kw: sizes.append(n) or (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        with pytest.raises(CheckpointError, match="8 bytes of a tensor is not allowed: what fits into memory"):
            found.read()
        with pytest.raises(CheckpointError, match="8 bytes of a tensor is not allowed: 9,"):
            replace(found, nbytes=9).read()
        assert sizes == [8], "nothing is allocated for what the file does not have"
    path.unlink()
    with pytest.raises(CheckpointError, match="a.safetensors: no regular file .*No such file"):
        found.read()


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a loop", "nothing"])
@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "model.safetensors.index.json"])
def test_only_regular_files_are_read_and_none_is_waited_for(tmp_path, kind, name):
    save_file({"a": torch.ones(1)}, tmp_path / "b.safetensors")
    path = tmp_path / name
    make = {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a device": lambda: path.symlink_to("/dev/zero"),
        "a loop": lambda: path.symlink_to(path),
        "nothing": lambda: path.symlink_to(tmp_path / "missing"),
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=f"{name}: no regular file"):
        Checkpoint(tmp_path)


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.arange(3)}, tmp_path / "blobs" / "1f")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/1f")
    assert Checkpoint(tmp_path / "snapshot").entry("a").read().tolist() == [0, 1, 2]


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
        (lambda m: m.__setitem__("x", "/etc/a.safetensors"), "in this folder"),
        (lambda m: m.__setitem__("x", "a/b.safetensors"), "in this folder"),
        (lambda m: m.__setitem__("x", "..safetensors/../a.safetensors"), "in this folder"),
        (lambda m: m.__setitem__("x", "a\0.safetensors"), "no regular file that can be read"),
        (lambda m: m.__setitem__("x", "a" * 300 + ".safetensors"), "no regular file that can be read"),
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


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "JSON"),
        ("[1]", "JSON"),
        ("", "JSON"),
        ('{"weight_map": {"a": NaN}}', "the number NaN"),
        ('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "twice"),
        ('{"weight_map": {"a": "\\ud800.safetensors"}}', "surrogates"),
        ('{"weight_map": [1]}', "a weight_map from names to files"),
        ('{"metadata": {"total_size": 1.5}}', "a weight_map from names to files"),
        ('{"a":' * 100_000, "JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, message):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


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
