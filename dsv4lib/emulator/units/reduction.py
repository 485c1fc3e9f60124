"""Reduce elements as bulk copies, tensor copies and ``red.async`` do.

Source: PTX ISA, ``cp.reduce.async.bulk`` and ``cp.reduce.async.bulk.tensor``: valid combinations of operation and type;
``inc`` and ``dec`` stay within [0, source]; floating-point additions round to nearest even; f32 additions of bulk
copies flush subnormal inputs and results to zero of the same sign. Measured on an H200 (test_tma_h200.py): tensor
copies flush with type f32.ftz and not with f32; which NaN comes out; minimum and maximum prefer a number to a NaN and
order -0 below +0.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator.errors import HazardError
from dsv4lib.emulator.units.shared import Where

_INTEGERS = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
_BITWISE = ("and", "or", "xor")
_NAN_16, _NAN_32, _NAN_64 = 0x7FFF, 0x7FFFFFFF, 0x7FF8000000000000

# operation -> types, for tensor copies and bulk copies to global memory.
GLOBAL_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "tf32", "tf32.ftz", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64", "u32", "s32", "u64"),
    "or": ("b32", "b64", "u32", "s32", "u64"),
    "xor": ("b32", "b64", "u32", "s32", "u64"),
}


def check_type(op: str, element: str, where: Where) -> None:
    """Refuse combinations that the instruction does not have.

    Raises:
        HazardError: no such reduction.
    """
    if element not in GLOBAL_TYPES[op]:
        raise HazardError(f"reduction {op} has no type {element}; it has {', '.join(GLOBAL_TYPES[op])}", where())


def reduce(op: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Compute ``old op new`` per element of type ``element``.

    uint8 arrays of one shape.
    """
    a, b = np.ascontiguousarray(old), np.ascontiguousarray(new)
    if element in _INTEGERS:
        kind = _INTEGERS[element]
        result = _integer(op, a.view(kind), b.view(kind))
    elif element in ("f16", "bf16"):
        result = _half(op, element, a.view(np.uint16), b.view(np.uint16))
    elif element == "f64":
        with np.errstate(all="ignore"):
            total = a.view(np.float64) + b.view(np.float64)
        result = np.where(np.isnan(total), np.uint64(_NAN_64), total.view(np.uint64))
    else:
        result = _add_f32(a.view(np.uint32), b.view(np.uint32), flush=element.endswith(".ftz"))
    return np.ascontiguousarray(result).view(np.uint8)


def _integer(op: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    if op == "add":
        with np.errstate(over="ignore"):
            return old + new
    if op == "min":
        return np.minimum(old, new)
    if op == "max":
        return np.maximum(old, new)
    if op == "inc":
        return np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1))
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - old.dtype.type(1))
    if op in _BITWISE:
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, new)
    raise AssertionError(op)


def _flush(bits: np.ndarray) -> np.ndarray:
    """float32 bits with subnormals replaced by zeros of their sign."""
    return np.where(bits & np.uint32(0x7F800000) == 0, bits & np.uint32(0x80000000), bits)


def _add_f32(old: np.ndarray, new: np.ndarray, flush: bool) -> np.ndarray:
    if flush:
        old, new = _flush(old), _flush(new)
    with np.errstate(all="ignore"):
        total = old.view(np.float32) + new.view(np.float32)
    bits = _flush(total.view(np.uint32)) if flush else total.view(np.uint32)
    return np.where(np.isnan(total), np.uint32(_NAN_32), bits)


def _widen(element: str, bits: np.ndarray) -> np.ndarray:
    """float32 of f16 or bf16 bits."""
    if element == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(element: str, values: np.ndarray) -> np.ndarray:
    """f16 or bf16 bits of float32, to nearest even."""
    if element == "f16":
        bits = values.astype(np.float16).view(np.uint16)
    else:
        wide = values.view(np.uint32)
        bits = ((wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_NAN_16), bits)


def _half(op: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        a, b = _widen(element, old), _widen(element, new)
        if op == "add":
            return _narrow(element, a + b)
    # Order of signed magnitudes: -0 below +0.
    rank_a, rank_b = (np.where(x >> 15, -(x & 0x7FFF).astype(np.int32) - 1, x.astype(np.int32)) for x in (old, new))
    first = rank_a <= rank_b if op == "min" else rank_a >= rank_b
    picked = np.where(first, old, new)
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    picked = np.where(nan_a, new, np.where(nan_b, old, picked))
    return np.where(nan_a & nan_b, np.uint16(_NAN_16), picked).astype(np.uint16)
