"""Round f32 to the small formats, f16 down to 4 bits, and decode them.

By integer arithmetic on all lanes.

A code of ``m`` fraction bits is the f32 significand shifted right by 23 - m, by more below the smallest normal number,
and rounded; exponent and fraction being neighbours in the code, a carry out of the fraction is the next binade. The
overflow rules, NaN codes and ``.satfinite`` follow the PTX ISA (cvt) and the OCP Microscaling Formats specification.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.emulator.native import fp
from dsv4lib.emulator.native.irtools import Emitter, Value


@dataclass(frozen=True)
class Format:
    """A binary format with a sign.

    Attributes:
        bits: total width.
        fraction: fraction bits.
        lowest: exponent of the smallest normal number.
        largest: code of the largest finite magnitude.
        infinity: code of infinity, or None if the format has none (conversions then saturate).
        nan: code that a NaN becomes; the largest number in formats without NaN.
    """

    bits: int
    fraction: int
    lowest: int
    largest: int
    infinity: int | None
    nan: int


FORMATS = {
    "f16": Format(16, 10, -14, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(16, 7, -126, 0x7F7F, 0x7F80, 0x7FFF),
    "tf32": Format(19, 10, -126, 0x3FBFF, 0x3FC00, 0x3FFFF),
    "e4m3": Format(8, 3, -6, 0x7E, None, 0x7F),
    "e5m2": Format(8, 2, -14, 0x7B, 0x7C, 0x7F),
    "e2m3": Format(6, 3, 0, 0x1F, None, 0x1F),
    "e3m2": Format(6, 2, -2, 0x1F, None, 0x1F),
    "e2m1": Format(4, 1, 0, 0x7, None, 0x7),
}


def round_up(e: Emitter, mode: str, quotient: Value, rest: Value, half: Value, negative: Value) -> Value:
    """Decide whether the truncated ``quotient`` goes up by one: i1 lanes. ``half`` is half a unit of ``rest``."""
    inexact = e.icmp("ne", rest, 0)
    if mode == "rn":
        tie = e.icmp("eq", rest, half) & e.icmp("ne", quotient & 1, 0)
        return e.icmp("ugt", rest, half) | tie
    if mode == "rna":
        return e.icmp("uge", rest, half)
    if mode == "rm":
        return inexact & negative
    if mode == "rp":
        return inexact & (negative ^ 1)
    return e.const(0, "i1", rest.n)  # rz


# Random bits that each value of cvt.rs takes; they are added to as many of the bits that are dropped, the highest.
RANDOM_BITS = {"f16": 13, "bf16": 16}


def carries(e: Emitter, significand: Value, shift: Value, name: str, random: Value) -> Value:
    """Decide whether ``random`` and the bits that a right shift drops carry: i1 lanes."""
    count = RANDOM_BITS[name]
    low = e.intrinsic("llvm.umin", shift - count, shift.like(31))
    dropped = (significand >> low) & ((1 << count) - 1)
    return e.icmp("uge", dropped + (random & ((1 << count) - 1)), 1 << count)


def encode(
    e: Emitter,
    x: Value,
    name: str,
    mode: str = "rn",
    satfinite: bool = False,
    relu: bool = False,
    random: Value | None = None,
) -> Value:
    """Encode f32 lanes in format ``name`` as i32 lanes. Mode "rs" rounds by the ``random`` bits."""
    form = FORMATS[name]
    bits = e.bitcast(x, "i32")
    size = bits & 0x7FFFFFFF
    negative = e.icmp("slt", bits, 0)
    biased = e.intrinsic("llvm.umax", size >> 23, size.like(1))
    normal = e.icmp("uge", size, 0x800000)
    significand = (size & 0x7FFFFF) | e.select(normal, size.like(0x800000), 0)
    # Exponents below the smallest normal number shift further; 25 bits leave nothing but a sticky rest.
    missing = e.intrinsic("llvm.smax", (form.lowest + 127) - biased, biased.like(0))
    dropped = missing + (23 - form.fraction)
    shift = e.intrinsic("llvm.umin", dropped, missing.like(25))
    quotient = significand >> shift
    rest = significand - (quotient << shift)
    half = rest.like(1) << (shift - 1)
    if random is None:
        up = round_up(e, mode, quotient, rest, half, negative)
    else:
        up = carries(e, significand, dropped, name, random)
    quotient = quotient + e.cast("zext", up, "i32")
    binade = e.intrinsic("llvm.smax", biased - (form.lowest + 127), biased.like(0))
    code = quotient + (binade << form.fraction)
    infinite = e.icmp("eq", size, 0x7F800000)
    if satfinite or form.infinity is None:
        code = e.select(infinite, code.like(form.largest), code)
        code = e.intrinsic("llvm.umin", code, code.like(form.largest))
    else:
        # Rounding towards zero stops at the largest number; nearest and outward go to infinity.
        stays = {"rz": e.const(1, "i1", x.n), "rm": negative ^ 1, "rp": negative}.get(mode)
        over = e.icmp("ugt", code, form.largest)
        limit = code.like(form.infinity)
        if stays is not None:
            limit = e.select(stays, limit.like(form.largest), limit)
        code = e.select(over, limit, code)
        code = e.select(infinite, code.like(form.infinity), code)
    signed = code | e.select(negative, code.like(1 << (form.bits - 1)), 0)
    if relu:
        signed = e.select(negative, signed.like(0), signed)
    return e.select(e.icmp("ugt", size, 0x7F800000), signed.like(form.nan), signed)


def decode(e: Emitter, code: Value, name: str) -> Value:
    """Decode an 8-, 6- or 4-bit format in i32 lanes to f32; exact."""
    form = FORMATS[name]
    size = code & ((1 << (form.bits - 1)) - 1)
    # As f32 bits the code has the right fraction and an exponent off by a constant, subnormals included.
    scale = 2.0 ** (form.lowest - 1 + 127)
    value = e.bitcast(size << (23 - form.fraction), "f32") * scale
    if name == "e5m2":
        value = e.select(e.icmp("eq", size, form.infinity), value.like(float("inf")), value)
        value = e.select(e.icmp("ugt", size, form.infinity), value.like(float("nan")), value)
    if name == "e4m3":
        value = e.select(e.icmp("eq", size, form.nan), value.like(float("nan")), value)
    sign = (code << (32 - form.bits)) & 0x80000000
    return e.bitcast(e.bitcast(value, "i32") | sign, "f32")


def encode_ue8m0(e: Emitter, x: Value, mode: str, satfinite: bool) -> Value:
    """|x| to a power of two, rounded towards zero or up: the biased exponent, 0xff for NaN and (unless .satfinite)
    infinity. 2**-127 is the smallest code; the sign is ignored."""
    size = e.bitcast(x, "i32") & 0x7FFFFFFF
    code = size >> 23
    if mode == "rp":
        above = e.icmp("ne", size & 0x7FFFFF, 0) & e.icmp("ugt", size, 0x400000) & e.icmp("ult", size, 0x7F800000)
        code = code + e.cast("zext", above, "i32")
    if satfinite:
        number = e.icmp("ule", size, 0x7F800000)
        code = e.select(number, e.intrinsic("llvm.umin", code, code.like(0xFE)), code)
    return code


def decode_ue8m0(e: Emitter, code: Value) -> Value:
    """Decode 2**(code - 127) to f32; 0xff is NaN."""
    bits = e.select(e.icmp("eq", code, 0), code.like(0x400000), code << 23)
    return e.bitcast(e.select(e.icmp("eq", code, 0xFF), bits.like(0x7FFFFFFF), bits), "f32")


def encode_s2f6(e: Emitter, x: Value, scale: Value | None, relu: bool) -> Value:
    """Encode x / scale in units of 1/64 as a saturated signed byte. NaN is the largest number."""
    wide = e.cast("fpext", x, "f64")
    if scale is not None:
        wide = wide / e.cast("fpext", scale, "f64")
    units = e.intrinsic("llvm.roundeven", wide * 64.0)
    low = 0.0 if relu else -128.0
    bounded = e.intrinsic("llvm.minnum", e.intrinsic("llvm.maxnum", units, units.like(low)), units.like(127.0))
    bounded = e.select(fp.is_nan(e, units), units.like(127.0), bounded)
    return e.cast("fptosi", bounded, "i32") & 0xFF


def decode_s2f6(e: Emitter, code: Value) -> Value:
    """Decode a signed byte in units of 1/64 to f32."""
    return e.cast("sitofp", (code << 24).sar(24), "f32") * (1.0 / 64.0)
