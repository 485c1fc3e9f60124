"""Read one safetensors file: an 8-byte length, a JSON header, raw tensors. Nothing in it is ever executed.

Source: the safetensors format description (huggingface/safetensors, README). The header is checked whole before a
tensor is allocated: its size, its JSON, every dtype, shape and byte range; and the ranges must cover the file's data
exactly, in order, without overlap or hole. What a wrong file claims about itself costs nothing: sizes are bounded
before they are multiplied.

All that the safetensors library refuses is refused. It accepts what is refused here: a name twice; a header that begins
with a space; fields that the format does not name, and its fields in other forms than the format's; a null in place of
`__metadata__`; more than 64 dimensions, or sizes whose product passes 2^63 - 1 beside a 0; F4 and F6 dtypes.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from dsv4lib.errors import DSV4Error

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
MAX_DIMS = 64  # as numpy's; more than any operator takes
MAX_ELEMENTS = 2**63 - 1  # torch's sizes and strides
MAX_DIGITS = 20  # of an unsigned 64-bit number
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class CheckpointError(DSV4Error, ValueError):
    """A checkpoint that is not what it should be. It says which file or tensor, what was found, what is allowed."""

    def __init__(self, where: str, found: Any, allowed: str):
        self.where, self.found, self.allowed = where, found, allowed
        shown = found if isinstance(found, str) else reprlib.repr(found)  # neither long nor deep
        super().__init__(f"{where}: {shown[:200]} is not allowed: {allowed}")


class Cut(NamedTuple):
    """A rectangle of a tensor: rows, and columns of a matrix (None: all)."""

    rows: range
    columns: range | None = None


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
        """Read the tensor into memory of its own.

        Raises:
            CheckpointError: the file is gone or shorter than it was, or the tensor does not fit into memory.
        """
        with opened(self.file) as stream:
            count = min(self.nbytes, max(0, os.fstat(stream.fileno()).st_size - self.offset))
            if count == self.nbytes:
                raw = self._memory(self.nbytes)
                stream.seek(self.offset)
                count = stream.readinto(raw.numpy()) if self.nbytes else 0
        if count != self.nbytes:
            raise CheckpointError(self.file.name, f"{count} bytes of a tensor", f"{self.nbytes}, as the header says")
        return raw.view(self.dtype).reshape(self.shape)

    def read_cut(self, cut: Cut) -> torch.Tensor:
        """Read a rectangle of a vector or matrix into memory of its own. No other byte is read.

        Raises:
            CheckpointError: as of `read`.
        """
        row = self.dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)
        columns = range(self.shape[1]) if cut.columns is None and len(self.shape) > 1 else cut.columns
        size = (len(cut.rows),) if columns is None else (len(cut.rows), len(columns))
        each = row if columns is None else len(columns) * self.dtype.itemsize
        first = self.offset + cut.rows.start * row + (columns.start * self.dtype.itemsize if columns is not None else 0)
        raw = self._memory(each * len(cut.rows))
        with opened(self.file) as stream:
            if each == row:
                stream.seek(first)
                count = stream.readinto(raw.numpy()) if raw.numel() else 0
            else:
                lines = raw.view(len(cut.rows), each).numpy()
                count = sum(os.preadv(stream.fileno(), [line], first + n * row) for n, line in enumerate(lines))
        if count != raw.numel():
            raise CheckpointError(self.file.name, f"{count} bytes of a tensor", f"{raw.numel()}, as the header says")
        return raw.view(self.dtype).reshape(size)

    def _memory(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(self.file.name, f"{size} bytes of a tensor", "what fits into memory") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, or what a symbolic link to one leads to. Anything else is refused without waiting for it.

    Raises:
        CheckpointError: there is none, or reading it fails inside.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise CheckpointError(path.name, "no regular file", "a file")
            yield stream
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path.name, f"no regular file that can be read ({why})", "a file") from error


def read_header(path: Path) -> dict[str, Entry]:
    """Read the header of a file: its tensors by name.

    Raises:
        CheckpointError: not a regular file, or anything in the header that does not fit the file.
    """
    with opened(path) as stream:
        return header_of(stream, os.fstat(stream.fileno()).st_size, path)


def header_of(stream: BinaryIO, size: int, path: Path) -> dict[str, Entry]:
    """Read and check the header of ``size`` bytes of a stream. ``path`` is what the entries and errors name.

    Raises:
        CheckpointError: anything that does not fit.
    """
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        allowed = f"2 to {MAX_HEADER} bytes of header, inside the file's {size}"
        raise CheckpointError(path.name, f"a header of {length} bytes", allowed)
    header = read_json(stream.read(length), path.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path.name}, __metadata__", metadata, "an object whose values are all text")
    base = 8 + length
    entries = {name: _entry(path, name, fields, base) for name, fields in header.items()}
    _covers(path, entries, base, size)
    return entries


def read_json(raw: bytes, where: str, floats: bool = False) -> dict[str, Any]:
    """Parse an object of strict JSON. Each name once, no NaN, numbers of 64 bits, text without lone surrogates.

    Args:
        where: the file, for messages.
        floats: whether numbers may have a point or an exponent.

    Raises:
        CheckpointError: it is anything else.
    """
    allowed = "a JSON object, each name once, numbers of 64 bits"
    if raw[:1] != b"{":
        raise CheckpointError(where, f"{raw[:8]!r}", f"{allowed}, from the first byte")
    hooks = {"parse_int": _whole, "parse_constant": _no_number, "object_pairs_hook": _no_name_twice}
    if not floats:
        hooks["parse_float"] = _no_number
    try:
        found = json.loads(raw.decode("utf-8"), **hooks)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, str(error) or "too deep", allowed) from error
    return found


def _whole(text: str) -> int:
    if text == "-0" or len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:30]}")
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueError(f"the number {text[:30]}")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    for name, value in pairs:
        if not name.isascii():
            name.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        if isinstance(value, str) and not value.isascii():
            value.encode()
    return found


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _elements(where: str, shape: list[int]) -> int:
    """Multiply sizes, none of which is trusted: 0s are left out first, since torch's strides leave them out."""
    if len(shape) > MAX_DIMS:
        raise CheckpointError(where, f"{len(shape)} dimensions", f"at most {MAX_DIMS}")
    count = 1
    for size in shape:
        count *= size or 1
        if count > MAX_ELEMENTS:
            raise CheckpointError(where, shape, f"at most {MAX_ELEMENTS} elements, sizes of 0 left out")
    return 0 if 0 in shape else count


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
    count = _elements(f"{where}, shape", shape)
    nbytes = count * DTYPES[dtype].itemsize
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
