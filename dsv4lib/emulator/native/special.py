"""Approximate ex2, lg2, sin, cos, tanh, rcp, rsqrt, sqrt, div.approx and div.full.

The PTX ISA bounds the error of these instructions and fixes the results for zeros, infinities and NaN; the low bits
are the hardware's own. What is computed here is within 1 ulp for f32, closer than the documented bounds, and so *not*
bit-equal to a GPU. Polynomials are Taylor series on intervals around 0 short enough for the wanted precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import fp
from dsv4lib.emulator.native.float import finish, operand
from dsv4lib.emulator.native.irtools import Emitter, Value

LN2 = math.log(2.0)


def horner(e: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """Evaluate a polynomial, constant term first, by fused multiply-adds."""
    total = x.like(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = e.intrinsic("llvm.fma", total, x, x.like(c))
    return total


def power_of_two(e: Emitter, n: Value, kind: str) -> Value:
    """Compute 2**n of i32 lanes inside the exponent range of f32 or f64."""
    if kind == "f32":
        return e.bitcast((n + 127) << 23, "f32")
    return e.bitcast(e.cast("sext", n + 1023, "i64") << 52, "f64")


def exp2_f32(e: Emitter, x: Value) -> Value:
    """Compute 2**x as 2**n 2**f, |f| <= 1/2. 2**f is a series of ln 2; two steps scale subnormal results."""
    # Beyond these bounds the result is 0 or infinity anyway; minnum drops NaN, which comes back at the end.
    bounded = e.intrinsic("llvm.maxnum", e.intrinsic("llvm.minnum", x, x.like(200.0)), x.like(-200.0))
    n = e.intrinsic("llvm.roundeven", bounded)
    f = bounded - n
    series = [LN2**k / math.factorial(k) for k in range(1, 9)]
    y = e.intrinsic("llvm.fma", f, horner(e, f, series), f.like(1.0))
    whole = e.cast("fptosi", n, "i32")
    half = whole.sar(1)
    y = y * power_of_two(e, half, "f32") * power_of_two(e, whole - half, "f32")
    return e.select(fp.is_nan(e, x), x, y)


def exp2_f64(e: Emitter, x: Value) -> Value:
    """Compute 2**x in double precision for |x| < 1000, relative error below 2**-44."""
    n = e.intrinsic("llvm.roundeven", x)
    series = [LN2**k / math.factorial(k) for k in range(13)]
    return horner(e, x - n, series) * power_of_two(e, e.cast("fptosi", n, "i32"), "f64")


@isa.native(
    "ex2.approx[.<ftz:ftz>].<type:f32>",
    "ex2.approx.<type:f16|f16x2>",
    "ex2.approx.<ftz:ftz>.<type:bf16|bf16x2>",
    note="within 1 ulp; the low bits differ from hardware",
)
def ex2(e: Emitter, form: Form) -> None:
    """d = 2**a."""
    finish(e, form, exp2_f32(e, operand(e, form, 1)))


@isa.native("lg2.approx[.<ftz:ftz>].<type:f32>", note="within 1 ulp; the low bits differ from hardware")
def lg2(e: Emitter, form: Form) -> None:
    """d = log2(a): a = m * 2**k with m in [sqrt(1/2), sqrt(2)), log2(m) by the series of atanh((m - 1) / (m + 1))."""
    a = operand(e, form, 1)
    wide = e.cast("fpext", a, "f64")
    bits = e.bitcast(wide, "i64")
    shifted = bits - 0x3FE6A09E667F3BCD  # sqrt(1/2)
    k = shifted.sar(52)
    m = e.bitcast(bits - (k << 52), "f64")
    s = (m - 1.0) / (m + 1.0)
    series = [2.0 / LN2 / (2 * j + 1) for j in range(9)]
    y = e.cast("sitofp", k, "f64") + s * horner(e, s * s, series)
    y = e.cast("fptrunc", y, "f32")
    infinity = float("inf")
    y = e.select(e.fcmp("oeq", a, infinity), a, y)
    y = e.select(e.fcmp("oeq", a, 0.0), y.like(-infinity), y)
    y = e.select(e.fcmp("ult", a, 0.0), y.like(float("nan")), y)
    finish(e, form, y)


def sine(e: Emitter, form: Form, shift: int) -> None:
    """Compute sin (shift 0) and cos (shift 1): reduce to |r| <= pi/4 and a quadrant."""
    a = operand(e, form, 1)
    x = e.cast("fpext", a, "f64")
    n = e.intrinsic("llvm.roundeven", x * (2.0 / math.pi))
    # pi/2 in two parts; beyond 2**30 quadrants nothing is promised, and the result is merely bounded.
    r = e.intrinsic("llvm.fma", n, x.like(-math.pi / 2), x)
    r = e.intrinsic("llvm.fma", n, x.like(-6.123233995736766e-17), r)
    r = e.intrinsic("llvm.maxnum", e.intrinsic("llvm.minnum", r, r.like(1.0)), r.like(-1.0))
    turns = n - e.intrinsic("llvm.floor", n * 0.25) * 4.0
    quadrant = e.cast("fptosi", e.select(e.fcmp("ord", turns, turns), turns, 0.0), "i64") + shift
    square = r * r
    sin_r = r * horner(e, square, [(-1.0) ** j / math.factorial(2 * j + 1) for j in range(8)])
    cos_r = horner(e, square, [(-1.0) ** j / math.factorial(2 * j) for j in range(9)])
    y = e.select(e.icmp("ne", quadrant & 1, 0), cos_r, sin_r)
    y = e.select(e.icmp("ne", quadrant & 2, 0), -y, y)
    y = e.cast("fptrunc", y, "f32")
    if shift == 0:  # keeps the sign of zero
        y = e.select(e.fcmp("oeq", a, 0.0), a, y)
    unbounded = e.fcmp("ueq", fp.magnitude(e, a), float("inf"))
    finish(e, form, e.select(unbounded, y.like(float("nan")), y))


@isa.native("sin.approx[.<ftz:ftz>].<type:f32>", note="within 1 ulp up to 2**20; the low bits differ from hardware")
def sin(e: Emitter, form: Form) -> None:
    """d = sin(a)."""
    sine(e, form, 0)


@isa.native("cos.approx[.<ftz:ftz>].<type:f32>", note="within 1 ulp up to 2**20; the low bits differ from hardware")
def cos(e: Emitter, form: Form) -> None:
    """d = cos(a)."""
    sine(e, form, 1)


@isa.native("tanh.approx.<type:f32|f16|f16x2|bf16|bf16x2>", note="within 1 ulp; hardware promises 2**-11 only")
def tanh(e: Emitter, form: Form) -> None:
    """d = tanh(a) = (E - 1) / (E + 1), E = exp(2|a|), with the sign of a. A series near 0."""
    a = operand(e, form, 1)
    x = e.cast("fpext", fp.magnitude(e, a), "f64")
    small = x * horner(e, x * x, [1.0, -1.0 / 3.0, 2.0 / 15.0, -17.0 / 315.0])
    bounded = e.intrinsic("llvm.minnum", x, x.like(30.0))
    grown = exp2_f64(e, bounded * (2.0 / LN2))
    y = e.select(e.fcmp("olt", x, 2.0**-6), small, (grown - 1.0) / (grown + 1.0))
    y = e.intrinsic("llvm.copysign", e.cast("fptrunc", y, "f32"), a)
    finish(e, form, e.select(fp.is_nan(e, a), a, y))


@isa.native("rcp.approx[.<ftz:ftz>].<type:f32>", note="correctly rounded; hardware promises 1 ulp")
def rcp_approx(e: Emitter, form: Form) -> None:
    """d = 1 / a."""
    a = operand(e, form, 1)
    finish(e, form, a.like(1.0) / a)


@isa.native("rsqrt.approx[.<ftz:ftz>].<type:f32>", note="within 1 ulp; hardware promises 2**-22.9")
def rsqrt_approx(e: Emitter, form: Form) -> None:
    """d = 1 / sqrt(a), by way of double precision."""
    a = e.cast("fpext", operand(e, form, 1), "f64")
    finish(e, form, e.cast("fptrunc", a.like(1.0) / e.intrinsic("llvm.sqrt", a), "f32"))


@isa.native("rsqrt.approx.<type:f64>", note="hardware emulates it to about 2 ulp")
def rsqrt_f64(e: Emitter, form: Form) -> None:
    """d = 1 / sqrt(a)."""
    a = operand(e, form, 1)
    finish(e, form, a.like(1.0) / e.intrinsic("llvm.sqrt", a))


@isa.native("sqrt.approx[.<ftz:ftz>].<type:f32>", note="correctly rounded; hardware promises 2**-23")
def sqrt_approx(e: Emitter, form: Form) -> None:
    """d = sqrt(a)."""
    finish(e, form, e.intrinsic("llvm.sqrt", operand(e, form, 1)))


@isa.native("div.full[.<ftz:ftz>].<type:f32>", note="correctly rounded; hardware promises 2 ulp")
def div_full(e: Emitter, form: Form) -> None:
    """d = a / b."""
    finish(e, form, operand(e, form, 1) / operand(e, form, 2))


@isa.native("div.approx[.<ftz:ftz>].<type:f32>", note="within 2 ulp; 0 (or NaN) for |b| > 2**126 as documented")
def div_approx(e: Emitter, form: Form) -> None:
    """d = a * (1 / b), the reciprocal flushed to 0 where it is subnormal."""
    a, b = operand(e, form, 1), operand(e, form, 2)
    finish(e, form, a * fp.flush(e, b.like(1.0) / b, fp.SMALLEST_NORMAL["f32"]))


def high_word(e: Emitter, form: Form, root: bool) -> None:
    """Compute rcp and rsqrt on the upper 32 bits of an f64. The lower 32 bits of the result are 0."""
    bits = e.load(1, "i64") & ~0xFFFFFFFF
    exponent = 0x7FF << 52
    bits = e.select(e.icmp("eq", bits & exponent, 0), bits & (1 << 63), bits)
    a = e.bitcast(bits, "f64")
    y = a.like(1.0) / (e.intrinsic("llvm.sqrt", a) if root else a)
    out = e.bitcast(y, "i64")
    out = e.select(e.icmp("eq", out & exponent, 0), out & (1 << 63), out) & ~0xFFFFFFFF
    e.store(0, e.select(fp.is_nan(e, y), out.like(0x7FFFFFFF << 32), out))


@isa.native("rcp.approx.ftz.f64", note="gross approximation: 20 fraction bits")
def rcp_gross(e: Emitter, form: Form) -> None:
    """d = 1 / a."""
    high_word(e, form, root=False)


@isa.native("rsqrt.approx.ftz.f64", note="gross approximation: 20 fraction bits")
def rsqrt_gross(e: Emitter, form: Form) -> None:
    """d = 1 / sqrt(a)."""
    high_word(e, form, root=True)
