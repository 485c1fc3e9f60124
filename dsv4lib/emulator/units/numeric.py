"""Convert number formats of the tensor cores. Raw operand bytes to float32 (exact), accumulators back to bits.

Every narrow format is a table of 256 (or 65,536) float32 values, so decoding an operand is one ``take``. All formats
but fp64 and int32 are subsets of float32, hence the conversion is exact.

Source: PTX ISA, "Alternate Floating-Point Data Formats" and "Packing formats of elements in Tensor and Shared memory";
OCP Microscaling Formats (MX) v1.0 for e4m3, e5m2, e2m3, e3m2, e2m1 and ue8m0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from dsv4lib.emulator.errors import EmulatorError

Array = np.ndarray


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, specials: str) -> Array:
    """float32 values of all codes of a small signed binary float.

    Args:
        exponent_bits, mantissa_bits, bias: layout, sign first.
        specials: "ieee" (top exponent is infinity and NaN), "fn" (only all ones is NaN) or "none".
    """
    code = np.arange(1 << 1 + exponent_bits + mantissa_bits)
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    top = exponent == (1 << exponent_bits) - 1
    if specials == "ieee":
        value = np.where(top, np.where(mantissa == 0, np.inf, np.nan), value)
    elif specials == "fn":
        value = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    sign = code >> exponent_bits + mantissa_bits
    return np.where(sign == 1, -value, value).astype(np.float32)


E4M3 = minifloat(4, 3, 7, "fn")
E5M2 = minifloat(5, 2, 15, "ieee")
# A 6-bit value sits in the low bits of its byte, a 4-bit value in the four bits in the middle; the rest is padding,
# which the tensor core does not look at.
E2M3 = np.tile(minifloat(2, 3, 1, "none"), 4)
E3M2 = np.tile(minifloat(3, 2, 3, "none"), 4)
E2M1 = minifloat(2, 1, 1, "none")
E2M1_CENTRE = E2M1[np.arange(256) >> 2 & 15]
UE8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)
# The top bit of a ue4m3 byte is padding that must be zero; what hardware does with a one is not documented, so it
# shows as NaN.
UE4M3 = np.where(np.arange(256) < 128, E4M3, np.float32(np.nan)).astype(np.float32)
SCALES = {"ue8m0": UE8M0, "ue4m3": UE4M3}


@functools.cache
def _half_table() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@functools.cache
def _pair_table() -> Array:
    """Two e2m1 values per byte, low nibble first, as one 8-byte item."""
    byte = np.arange(256)
    return np.stack([E2M1[byte & 15], E2M1[byte >> 4]], 1).view(np.float64).ravel()


def _f16(raw: Array) -> Array:
    return _half_table().take(raw.view(np.uint16))


def _bf16(raw: Array) -> Array:
    return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _tf32(raw: Array) -> Array:
    # The low 13 bits are truncated (PTX ISA, wgmma "Precision and rounding").
    return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _table(table: Array) -> Callable[[Array], Array]:
    return table.take


def _e2m1x2(raw: Array) -> Array:
    return _pair_table().take(raw).view(np.float32)


def _s8(raw: Array) -> Array:
    return raw.view(np.int8).astype(np.float32)


def _u8(raw: Array) -> Array:
    return raw.astype(np.float32)


def _e2m1_padded(raw: Array) -> Array:
    """16 values in the low 8 bytes of every 16-byte chunk (``.b4x16_p64``)."""
    return _e2m1x2(np.ascontiguousarray(raw.reshape(len(raw), -1, 16)[:, :, :8]).reshape(len(raw), -1))


def unpack_6bit(raw: Array) -> Array:
    """Return uint8 (rows, n). The 16 6-bit codes are in the low 12 bytes of every 16-byte chunk (``.b6x16_p32``)."""
    packed = raw.reshape(len(raw), -1, 16)[:, :, :12].reshape(len(raw), -1, 3).astype(np.uint32)
    word = packed[..., 0] | packed[..., 1] << np.uint32(8) | packed[..., 2] << np.uint32(16)
    codes = np.stack([word >> np.uint32(6 * k) & np.uint32(63) for k in range(4)], -1)
    return codes.reshape(len(raw), -1).astype(np.uint8)


def unpack_4bit(raw: Array) -> Array:
    """Return uint8 (rows, n). The 16 4-bit codes are in the low 8 bytes of every 16-byte chunk (``.b4x16_p64``)."""
    packed = raw.reshape(len(raw), -1, 16)[:, :, :8]
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(raw), -1)


_DECODERS: dict[str, Callable[[Array], Array]] = {
    "f16": _f16,
    "bf16": _bf16,
    "tf32": _tf32,
    "e4m3": _table(E4M3),
    "e5m2": _table(E5M2),
    "e2m3": _table(E2M3),
    "e3m2": _table(E3M2),
    "e2m1": _table(E2M1_CENTRE),
    "e2m1x2": _e2m1x2,
    "s8": _s8,
    "u8": _u8,
    "e2m1_padded": _e2m1_padded,
    "e2m3_padded": lambda raw: E2M3.take(unpack_6bit(raw)),
    "e3m2_padded": lambda raw: E3M2.take(unpack_6bit(raw)),
}


def decode(raw: Array, name: str) -> Array:
    """float32 (rows, n) of C-contiguous operand bytes uint8 (rows, bytes).

    Args:
        raw: operand rows.
        name: "f16", "bf16", "tf32", "e4m3", "e5m2"; "e2m3", "e3m2", "e2m1" (one value per byte); "e2m1x2" (two per
            byte); "e2m3_padded", "e3m2_padded", "e2m1_padded" (16 values packed at the start of 16 bytes); "s8", "u8".

    Raises:
        EmulatorError: unknown name.
    """
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise EmulatorError(f"no number format {name!r}; known: {', '.join(_DECODERS)}")
    return decoder(raw)


def decode_half(bits: Array) -> Array:
    """float32 of uint32 cells whose low 16 bits hold an f16."""
    return _half_table().take(bits & np.uint32(0xFFFF))


def encode_half(values: Array) -> Array:
    """uint16 bits of float32 values rounded to nearest even; overflow gives infinity."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def accumulate_int32(product: Array, accumulator: Array | None, saturate: bool) -> Array:
    """int32 sum of an exact integer product (any real dtype) and an int32 accumulator.

    Wraps, or clamps to the int32 range if ``saturate``.
    """
    total = product.astype(np.int64)
    if accumulator is not None:
        total = total + accumulator
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)
