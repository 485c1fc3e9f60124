"""One safetensors file: an 8-byte length, a JSON header, raw tensors. Nothing in it is ever executed.

Source: the safetensors format description (huggingface/safetensors, README). The header is checked whole before a
tensor is allocated: its size, its JSON (no name twice), every dtype, shape and byte range; and the ranges must cover
the file's data exactly, in order, without overlap or hole. What a wrong file claims about itself costs nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4lib.errors import DSV4Error

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointError(DSV4Error, ValueError):
    """A checkpoint that is not what it should be: which file or tensor, what was found, what is allowed."""

    def __init__(self, where: str, found: Any, allowed: str):
        self.where, self.found, self.allowed = where, found, allowed
        super().__init__(f"{where}: {found!s:.200} is not allowed: {allowed}")


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies.

    Attributes:
        file: path of its file.
        dtype: torch's dtype of the stored bits.
        shape: sizes.
        offset: first byte in the file; nbytes: how many.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            data = bytearray(stream.read(self.nbytes))
        if len(data) != self.nbytes:
            raise CheckpointError(
                self.file.name, f"{len(data)} bytes of a tensor", f"{self.nbytes}, as the header says"
            )
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name; reads the header only.

    Raises:
        CheckpointError: not a regular file, or anything in the header that does not fit the file.
    """
    if not path.is_file():
        raise CheckpointError(path.name, "no regular file", "a safetensors file")
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            allowed = f"2 to {MAX_HEADER} bytes of header, inside the file's {size}"
            raise CheckpointError(path.name, f"a header of {length} bytes", allowed)
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path.name, error, "a header in JSON, each name once") from error
    if not isinstance(header, dict):
        raise CheckpointError(path.name, type(header).__name__, "a JSON object as header")
    header.pop("__metadata__", None)
    base, entries = 8 + length, {}
    for name, fields in header.items():
        entries[name] = _entry(path, name, fields, base)
    _covers(path, entries, base, size)
    return entries


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _entry(path: Path, name: str, fields: Any, base: int) -> Entry:
    where = f"{path.name}, {name}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(where, fields, "dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}, dtype", dtype, "one of " + ", ".join(DTYPES))
    if not _integers(shape):
        raise CheckpointError(f"{where}, shape", shape, "a list of integers >= 0")
    if not _integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}, data_offsets", offsets, "[begin, end] with 0 <= begin <= end")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{where}, data_offsets", offsets, f"{nbytes} bytes for {dtype} {shape}")
    return Entry(path, DTYPES[dtype], tuple(shape), base + offsets[0], nbytes)


def _covers(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            found = f"data at byte {entry.offset - base}"
            raise CheckpointError(f"{path.name}, {name}", found, f"byte {end - base}: no overlap, no hole")
        end += entry.nbytes
    if end != size:
        raise CheckpointError(path.name, f"{size - base} bytes of data", f"{end - base}, as the header says")
