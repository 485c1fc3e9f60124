"""Widen, round, flush and clamp floating-point operands.

For the arithmetic and cvt families.

16-bit formats are computed in f32. One rounding to f32 and a second one to f16 or bf16 equals a single rounding for
sums, differences and products; where it does not, the first step rounds *to odd*: an inexact result gets an odd last
bit, which keeps it off every tie of the second step (Boldo and Melquiond, "Emulation of a FMA and correctly rounded
sums", 2008).

NaN results are canonical, 0x7fffffff for f32 and 0x7fff for f16 and bf16, as the PTX ISA documents. f64 keeps payloads.
"""

from __future__ import annotations

import struct

from dsv4lib.emulator.native.irtools import Emitter, Value

HALF = "f16|bf16|f16x2|bf16x2"
SMALLEST_NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}


def element(ptx: str) -> str:
    """Get the element type: f16x2 -> f16 and so on."""
    return ptx.removesuffix("x2")


def load_bits(e: Emitter, i: int, ptx: str) -> Value:
    """Load operand ``i`` as integer lanes: 32 of a scalar type, 64 of a packed one."""
    bits = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[element(ptx)]
    if ptx.endswith("x2"):
        return e.bitcast(e.load(i, f"i{2 * bits}"), f"i{bits}")
    return e.load(i, f"i{bits}")


def store_bits(e: Emitter, i: int, value: Value) -> None:
    """Store integer lanes, the inverse of ``load_bits``."""
    kind = f"i{int(value.kind[1:]) * value.n // 32}"
    e.store(i, e.bitcast(value, kind))


def widen(e: Emitter, bits: Value, ptx: str) -> Value:
    """Widen integer lanes to f32 (16-bit formats, f32) or f64."""
    name = element(ptx)
    if name == "bf16":
        return e.bitcast(e.cast("zext", bits, "i32") << 16, "f32")
    if name == "f16":
        return e.cast("fpext", e.bitcast(bits, "f16"), "f32")
    return e.bitcast(bits, name)


def load(e: Emitter, i: int, ptx: str, ftz: bool = False) -> Value:
    """Load operand ``i`` as f32 or f64, subnormals flushed if wanted."""
    x = widen(e, load_bits(e, i, ptx), ptx)
    return flush(e, x, SMALLEST_NORMAL[element(ptx)]) if ftz else x


def is_nan(e: Emitter, x: Value) -> Value:
    """Test lanes for NaN."""
    return e.fcmp("uno", x, x)


def magnitude(e: Emitter, x: Value) -> Value:
    """Compute |x|."""
    return e.intrinsic("llvm.fabs", x)


def flush(e: Emitter, x: Value, smallest: float, scaled: Value | None = None, scale: float = 1.0) -> Value:
    """Zero with the sign of x where |x| is below the smallest normal number.

    Of results, the hardware flushes what is too small when rounded with an unbounded exponent: a value just below the
    smallest normal number, which rounding lifts to it only because subnormals are coarser, is flushed as well (seen
    on an H200). ``scaled`` is the same result computed ``scale`` times as large, where nothing is subnormal.
    """
    zero = e.intrinsic("llvm.copysign", x.like(0.0), x)
    size = magnitude(e, x)
    small = e.fcmp("olt", size, smallest)
    if scaled is not None:
        small = small | (e.fcmp("oeq", size, smallest) & e.fcmp("olt", magnitude(e, scaled), smallest * scale))
    return e.select(small, zero, x)


def saturate(e: Emitter, x: Value) -> Value:
    """Clamp x to [0, 1]; NaN and -0 become +0."""
    return e.select(e.fcmp("ogt", x, 0.0), e.select(e.fcmp("olt", x, 1.0), x, 1.0), 0.0)


def relu(e: Emitter, x: Value) -> Value:
    """Replace x by 0 where it is negative or -0; NaN stays."""
    return e.select(e.fcmp("ole", x, 0.0), x.like(0.0), x)


def canonical(e: Emitter, x: Value) -> Value:
    """Replace NaN of f32 by 0x7fffffff."""
    return e.select(is_nan(e, x), e.bitcast(e.const(0x7FFFFFFF, "i32", x.n), "f32"), x)


def to_odd(e: Emitter, value: Value, error: Value) -> Value:
    """Round to odd from a nearest result and the sign and zeroness of the exact rest."""
    kind = {"f32": "i32", "f64": "i64"}[value.kind]
    bits = e.bitcast(value, kind)
    inexact = e.fcmp("one", error, 0.0) & e.icmp("eq", bits & 1, 0)
    # Away from zero is +1 on the bit pattern whatever the sign.
    outward = e.icmp("sge", e.bitcast(error, kind) ^ bits, 0)
    step = e.select(outward, bits.like(1), -1)
    return e.bitcast(bits + e.select(inexact, step, 0), value.kind)


def two_sum(e: Emitter, a: Value, b: Value) -> tuple[Value, Value]:
    """Add a and b to nearest, with the exact error (Knuth)."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def odd_f32(e: Emitter, x: Value) -> Value:
    """Round f64 to odd in f32."""
    near = e.cast("fptrunc", x, "f32")
    return to_odd_from(e, near, x)


def to_odd_from(e: Emitter, near: Value, x: Value) -> Value:
    """Round to odd in f32, given the nearest f32 ``near`` of the f64 ``x``."""
    error = x - e.cast("fpext", near, "f64")
    bits = e.bitcast(near, "i32")
    inexact = e.fcmp("one", error, 0.0) & e.icmp("eq", bits & 1, 0)
    outward = e.icmp("sge", e.bitcast(error, "i64") ^ e.bitcast(x, "i64"), 0)
    step = e.select(outward, bits.like(1), -1)
    return e.bitcast(bits + e.select(inexact, step, 0), "f32")


def narrow(e: Emitter, x: Value, ptx: str) -> Value:
    """Narrow f32 to the integer lanes of f16 or bf16, to nearest even, NaN canonical."""
    if element(ptx) == "f16":
        bits = e.bitcast(e.cast("fptrunc", x, "f16"), "i16")
        return e.select(is_nan(e, x), bits.like(0x7FFF), bits)
    bits = e.bitcast(x, "i32")
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return e.cast("trunc", e.select(is_nan(e, x), near.like(0x7FFF), near), "i16")


SCALE = {"f16": 2.0**10, "f32": 2.0**64}  # lifts the neighbourhood of the smallest normal number out of the subnormals


def store(
    e: Emitter,
    i: int,
    x: Value,
    ptx: str,
    ftz: bool = False,
    sat: bool = False,
    positive: bool = False,
    scaled: Value | None = None,
) -> None:
    """Round to ``ptx``, flush, clamp, canonicalise and write operand ``i``.

    Rounds to nearest, if ``ptx`` is narrower.

    ``scaled`` is an f32 result computed ``SCALE`` times as large, for ``flush``; sums do not need it, they are exact
    where they are small.
    """
    name = element(ptx)
    if name in ("f16", "bf16") and (ftz or sat or positive):
        if ftz and name == "f16":
            scaled = widen(e, narrow(e, x * SCALE[name], ptx), ptx)
        x = widen(e, narrow(e, x, ptx), ptx)
    if ftz:
        x = flush(e, x, SMALLEST_NORMAL[name], scaled, SCALE.get(name, 1.0))
    if sat:
        x = saturate(e, x)
    if positive:
        x = relu(e, x)
    if name in ("f16", "bf16"):
        store_bits(e, i, narrow(e, x, ptx))
    elif name == "f32":
        store_bits(e, i, e.bitcast(x if sat else canonical(e, x), "i32"))
    else:
        store_bits(e, i, e.bitcast(x, "i64"))


def constant_bits(value: float) -> int:
    """Get the bit pattern of an f32 constant."""
    return struct.unpack("<I", struct.pack("<f", value))[0]
