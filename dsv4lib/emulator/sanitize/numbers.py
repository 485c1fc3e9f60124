"""Make, read and summarise tensors of a launch description, in the number formats of kernels.

numpy has no bf16 and no FP8: tensors are kept as bits in the unsigned type of their size, and encoded and decoded here.
Encoding rounds to nearest even and saturates at the largest finite value of FP8.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.units.numeric import E4M3, E5M2
from dsv4lib.errors import ArgumentError

CHUNK = 1 << 20  # elements that are made at a time
# name -> (numpy type of the bits, numpy type of the values; None: encoded and decoded here)
DTYPES: dict[str, tuple[str, str | None]] = {
    "f64": ("<u8", "<f8"), "f32": ("<u4", "<f4"), "f16": ("<u2", "<f2"), "bf16": ("<u2", None),
    "e4m3": ("u1", None), "e5m2": ("u1", None),
    "u8": ("u1", "u1"), "u16": ("<u2", "<u2"), "u32": ("<u4", "<u4"), "u64": ("<u8", "<u8"),
    "s8": ("u1", "i1"), "s16": ("<u2", "<i2"), "s32": ("<u4", "<i4"), "s64": ("<u8", "<i8"),
}  # fmt: skip
_TABLES = {"e4m3": E4M3, "e5m2": E5M2}
FLOATS = frozenset(name for name in DTYPES if name[0] in "fbe")
FROM_NUMPY = {"float64": "f64", "float32": "f32", "float16": "f16", **{f"uint{n}": f"u{n}" for n in (8, 16, 32, 64)}}
FROM_NUMPY |= {f"int{n}": f"s{n}" for n in (8, 16, 32, 64)} | {"bool": "u8"}


def bits_of(dtype: str) -> np.dtype:
    """Look up the numpy type that holds the bits of one element."""
    return np.dtype(DTYPES[dtype][0])


@functools.cache
def _codes(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite values from 0 up of an FP8 type, and the midpoints between them; code i has value i."""
    positive = _TABLES[dtype][:128].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    return finite, (finite[1:] + finite[:-1]) / 2


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Encode numbers as bits of ``dtype``."""
    bits, native = DTYPES[dtype]
    with np.errstate(all="ignore"):
        if native is not None and dtype in FLOATS:
            return values.astype(native).view(bits)
        if native is not None:
            limits = np.iinfo(native)
            if values.dtype.kind == "f":
                values = np.clip(np.nan_to_num(np.rint(values)), float(limits.min), float(limits.max))
                largest = values >= float(1 << 63)  # of u64: the float is 2^64
                values = np.where(largest, 0, values).astype(np.int64).astype(native)
                return np.where(largest, np.array(limits.max, native), values).astype(native).view(bits)
            least, most = max(limits.min, -(1 << 63)), min(limits.max, (1 << 63) - 1)
            return np.clip(values, least, most).astype(native).view(bits)
        if dtype == "bf16":
            raw = values.astype(np.float32).view(np.uint32)
            rounded = (raw + np.uint32(0x7FFF) + (raw >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
            return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)
    finite, middles = _codes(dtype)
    size = np.abs(values.astype(np.float64))
    code = np.searchsorted(middles, size, "left")
    tie = (code < len(middles)) & (size == middles[np.minimum(code, len(middles) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(values), 0x7F, np.minimum(code, len(finite) - 1))
    return (code | np.signbit(values.astype(np.float64)) * 0x80).astype(np.uint8)


def decode(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Decode bits: integers stay integers, all others become exact floats."""
    native = DTYPES[dtype][1]
    if native is not None:
        return raw.view(native)
    if dtype == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _TABLES[dtype].take(raw)


@dataclass(frozen=True)
class Fill:
    """How a tensor is filled.

    Attributes:
        kind: one of `FILLS`. value: of "value". low, high: of "uniform", "integers". scale: of "normal". seed: of all
            that draw.
    """

    kind: str = "zeros"
    value: float = 0.0
    low: float = 0.0
    high: float = 1.0
    scale: float = 1.0
    seed: int = 0


Maker = Callable[[Fill, np.random.Generator, int, int], np.ndarray]
FILLS: dict[str, Maker] = {
    "zeros": lambda fill, rng, start, n: np.zeros(n),
    "ones": lambda fill, rng, start, n: np.ones(n),
    "value": lambda fill, rng, start, n: np.full(n, fill.value),
    "arange": lambda fill, rng, start, n: np.arange(start, start + n),
    "normal": lambda fill, rng, start, n: rng.standard_normal(n) * fill.scale,
    "uniform": lambda fill, rng, start, n: rng.uniform(fill.low, fill.high, n),
    "integers": lambda fill, rng, start, n: rng.integers(int(fill.low), int(fill.high), n, endpoint=True),
    "ties": lambda fill, rng, start, n: rng.integers(0, 3, n, endpoint=True),
    "nan": lambda fill, rng, start, n: np.full(n, np.nan),
    "bits": lambda fill, rng, start, n: rng.integers(0, 1 << 64, n, np.uint64),
}


def make(shape: tuple[int, ...], dtype: str, fill: Fill) -> np.ndarray:
    """Make the bits of a tensor. "bits" is random bits, "nan" of integers all ones."""
    bits = bits_of(dtype)
    out = np.zeros(math.prod(shape), bits)
    if fill.kind == "nan" and dtype not in FLOATS:
        out[:] = np.iinfo(bits).max
    elif fill.kind != "zeros":
        rng = np.random.default_rng(fill.seed)
        for start in range(0, out.size, CHUNK):
            part = out[start : start + CHUNK]
            values = FILLS[fill.kind](fill, rng, start, part.size)
            part[:] = values.astype(bits) if fill.kind == "bits" else encode(values, dtype)
    return out.reshape(shape)


def read_npy(path: Any, name: str, limit: int) -> tuple[np.ndarray, str]:
    """Read a .npy file of numbers as bits, with the name of its type.

    Raises:
        ArgumentError: no such file, not of that format, another type, or more than ``limit`` bytes.
    """
    allowed = f"a .npy file of numbers, at most {limit:,} bytes"
    try:
        array = np.load(path, mmap_mode="r")  # the header alone is read, and the size of the file checked
        if not isinstance(array, np.ndarray) or array.dtype.name not in FROM_NUMPY or array.nbytes > limit:
            raise ArgumentError(name, str(path), allowed)
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    except (OSError, ValueError, TypeError, SyntaxError, EOFError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(name, str(path), f"{allowed} ({type(error).__name__})") from None
    dtype = FROM_NUMPY[array.dtype.name]
    return array.view(bits_of(dtype)), dtype


def summary(raw: np.ndarray, dtype: str) -> dict[str, Any]:
    """Summarise a tensor: smallest, largest, mean, how many NaN, the first values."""
    values = decode(raw.reshape(-1), dtype)
    known = values[~np.isnan(values)] if dtype in FLOATS else values
    with np.errstate(all="ignore"):
        sizes = (known.min(), known.max(), known.mean(dtype=np.float64)) if known.size else (None, None, None)
    least, most, mean = (None if size is None else size.item() for size in sizes)
    return {
        "min": least,
        "max": most,
        "mean": mean,
        "nan": int(values.size - known.size),
        "first": [value.item() for value in values[:6]],
    }


@dataclass(frozen=True)
class Difference:
    """Where a tensor is not what was expected.

    Attributes:
        wrong: how many elements. index: of the first. got, want: there. largest: error over all, NaN if one is.
    """

    wrong: int
    index: tuple[int, ...]
    got: float
    want: float
    largest: float


def compare(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> Difference | None:
    """Compare values: |got - want| <= atol + rtol |want|, NaN equals NaN. None: all agree."""
    with np.errstate(all="ignore"):
        if got.dtype.kind == "f" or want.dtype.kind == "f":
            left, right = got.astype(np.float64), want.astype(np.float64)
            error = np.where(left == right, 0.0, np.abs(left - right))
            good = (error <= atol + rtol * np.abs(right)) | (np.isnan(left) & np.isnan(right))
            good &= np.isfinite(right) | (left == right) | np.isnan(left)  # inf is within no tolerance of a number
        else:
            error = np.abs(got.astype(np.float64) - want.astype(np.float64))
            good = (got == want) | (error <= atol + rtol * np.abs(want.astype(np.float64)))
            if not rtol and not atol:
                good = got == want
    if good.all():
        return None
    flat = int(np.argmin(good.reshape(-1)))
    index = tuple(int(i) for i in np.unravel_index(flat, got.shape))
    largest = float(np.max(error[~good]))
    return Difference(int((~good).sum()), index, got[index].item(), want[index].item(), largest)
