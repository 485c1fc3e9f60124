"""Compute scales and codes of one block in registers.

With the bits of `dsv4lib.formats`, which forms quotients exactly.

**amax** is an integer maximum over the bits without the sign: finite < Inf < NaN, so a NaN or Inf is never lost.

**UE8M0** scale 2^ceil(log2(amax / d)) with d = 448 or 6. With d = 1.m x 2^e, one more where the mantissa of amax is
above m: byte = (bits(amax) + 2^23 - 1 - m) >> 23, less e. Dividing by it is multiplying by a power of two. That product
is exact, or below 2^-126, where every code is a zero.

**A threshold decides exactly by the way its product is rounded.** x / step lies above t where |x| > t step. Let t step
be a product u g of an fp32 value u (few bits, exact) and an fp32 factor g; it need not be an fp32 value itself, but x
is one. So

    |x| >  u g   where   |x| >  (u g rounded towards zero)      the largest fp32 value that is not above it
    |x| >= u g   where   |x| >= (u g rounded up)                the smallest one that is not below it

for all finite fp32 x and all positive g, subnormals and overflows among them: no error term, no branch. A tie goes to
the even code: the first form serves where the lower code is even, the second where it is odd.

**E2M1**: three of the seven thresholds are compared, as in a search by halves; u = t x block scale (3 + 4 bits).

**E4M3** scale of NVFP4: a quotient with an fp32 reciprocal, made too small by 2^-20, gives a code that is right or one
too low; the threshold between it and the next decides, u = 6 x their mean (7 bits). amax and g are moved away from the
ends of fp32 by the same power of two.

**E2M1 on SM100**: `cvt.rn.satfinite.e2m1x2.f32` of x times a reciprocal that is 2^-20 too small and of x times one that
is as much too large. Encoding never decreases, so equal codes are the code of the quotient. Where they differ (at a
tie, for example), the thresholds decide. Without that instruction (SM90) they always do.

**E2M1 of a power of two on SM90**: y = |x| / scale is exact and at most 6. The codes are evenly spaced, by 2^(k - 1),
where 2^k is the power of two in y, at least 1. So y + 1.5 x 2^(22 + k), rounded to nearest even, leaves y over that
step in its lowest bits, and the code is that number and 2 k.

Source: OCP Microscaling Formats 1.0; PTX ISA, "cvt", "mul" (``.rz``, ``.rp``); `formats.ue8m0`, `.nvfp4`, `.mxfp4`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

PIECE = 8  # elements that one lane converts at once
INF = 0x7F800000
NAN_SCALE = {"ue8m0": 255, "e4m3": 0x7F}
_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring E2M1 values; a tie at every second goes up
_COMFORT = (2.0**-60, 2.0**60)  # a factor in here meets no end of fp32


def _hex(value: float) -> str:
    """Return an fp32 literal of PTX."""
    return f"0f{struct.pack('>f', value).hex().upper()}"


def _ptx(lines: list[str], args: list, out: list, loc: Any, ip: Any) -> Any:
    text = "\n".join(["{", *lines, "}"])
    return cute.arch.inline_ptx(text, read_only_args=args, write_only_types=out, loc=loc, ip=ip)


@dsl_user_op
def largest(words: list, packed: bool, *, loc: Any = None, ip: Any = None) -> Int32:
    """Return the bits of the largest magnitude as fp32.

    Of fp32 words, or of words that hold two bf16 each (``packed``).
    """
    n = len(words)
    mask, kind = ("0x7fff7fff", "u16x2") if packed else ("0x7fffffff", "u32")
    lines = [f".reg .b32 a<{n}>;", *(f"and.b32 a{i}, {{$r{i}}}, {mask};" for i in range(n))]
    while n > 1:
        n //= 2
        lines += [f"max.{kind} a{i}, a{i}, a{i + n};" for i in range(n)]
    if packed:
        lines += [".reg .b32 low;", "shl.b32 low, a0, 16;", "and.b32 a0, a0, 0xffff0000;", "max.u32 a0, a0, low;"]
    return _ptx([*lines, "mov.b32 {$w0}, a0;"], words, [Int32], loc, ip)


def larger(a: Int32, b: Int32) -> Int32:
    """Return the larger of two signed numbers."""
    return Int32(cutlass.select_(a > b, a, b))


@cute.jit
def over_lanes(bits: Int32, lanes: cutlass.Constexpr):
    """Return the largest ``bits`` of each aligned group of ``lanes``, in all of them."""
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(bits, 1 << i)
        bits = larger(bits, other)
    return bits


@cute.jit
def ue8m0(amax: Int32, divisor: cutlass.Constexpr, floor: cutlass.Constexpr):
    """Return the byte of 2^ceil(log2(amax / divisor)), at least ``floor``.

    255 for an amax that is Inf or NaN.

    Args:
        amax: bits. divisor: (mantissa field, exponent) of the largest value of the element format.
    """
    mantissa, exponent = divisor
    field = (Uint32(amax) + Uint32(0x7FFFFF - mantissa)) >> Uint32(23)
    byte = larger(Int32(field) - exponent, Int32(floor))
    return Int32(cutlass.select_(amax >= INF, Int32(255), byte))


@cute.jit
def power(byte: Int32):
    """Return 2^(byte - 127) as fp32 for byte 1 .. 254; NaN for 255."""
    return Int32(cutlass.select_(byte == 255, Int32(0x7FC00000), byte << 23)).bitcast(Float32)


@cute.jit
def inverse_power(byte: Int32):
    """Return 2^(127 - byte) as fp32 for byte 1 .. 253; NaN for 255."""
    return Int32(cutlass.select_(byte == 255, Int32(0x7FC00000), (254 - byte) << 23)).bitcast(Float32)


@dsl_user_op
def e4m3(x: list, factor: Float32, *, loc: Any = None, ip: Any = None) -> tuple:
    """Encode x times ``factor`` (a power of two) as E4M3, 4 a word.

    NaN is 0x7F, what is too large saturates.
    """
    n = len(x)
    lines = [f".reg .b32 v<{n}>;", f".reg .b16 c<{n // 2}>;"]
    lines += [f"mul.rn.f32 v{i}, {{$r{i}}}, {{$r{n}}};" for i in range(n)]
    lines += [f"cvt.rn.satfinite.e4m3x2.f32 c{i}, v{2 * i + 1}, v{2 * i};" for i in range(n // 2)]
    lines += [f"mov.b32 {{$w{i}}}, {{c{2 * i}, c{2 * i + 1}}};" for i in range(n // 4)]
    return _ptx(lines, [*x, factor], [Int32] * (n // 4), loc, ip)


class ScaleFactors(NamedTuple):
    """What `e4m3_scale` needs of the global scale g.

    Attributes:
        power: of two, moves g away from the ends of fp32. product: g times it.
        inverse: 1 / (6 g) of that, 2^-20 too small. valid: g is positive and finite, 1 or 0.
    """

    power: Float32
    product: Float32
    inverse: Float32
    valid: Int32


@dsl_user_op
def scale_factors(g: Float32, *, loc: Any = None, ip: Any = None) -> ScaleFactors:
    """Make `ScaleFactors` of the global scale, once a thread."""
    small, large = map(_hex, _COMFORT)
    lines = [
        ".reg .pred p, q;",
        ".reg .f32 k, h, r;",
        f"setp.lt.f32 p, {{$r0}}, {small};",
        f"selp.f32 k, {_hex(2.0**64)}, {_hex(1.0)}, p;",
        f"setp.gt.f32 p, {{$r0}}, {large};",
        f"selp.f32 k, {_hex(2.0**-64)}, k, p;",
        "mul.rn.f32 h, {$r0}, k;",
        "rcp.approx.ftz.f32 r, h;",
        f"mul.rn.f32 {{$w2}}, r, {_hex((1 - 2.0**-20) / 6)};",
        "mov.f32 {$w0}, k;",
        "mov.f32 {$w1}, h;",
        f"setp.gt.f32 p, {{$r0}}, {_hex(0.0)};",
        "setp.lt.and.f32 q, {$r0}, 0f7F800000, p;",
        "selp.b32 {$w3}, 1, 0, q;",
    ]
    return ScaleFactors(*_ptx(lines, [g], [Float32, Float32, Float32, Int32], loc, ip))


@dsl_user_op
def e4m3_scale(amax: Int32, factors: ScaleFactors, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Float32]:
    """Return (code, value as fp32) of E4M3(amax / (6 g)).

    NaN (0x7F) where amax (bits) or g is no number.
    """
    lines = [
        ".reg .pred up, odd, over, bad;",
        ".reg .f32 a, q, v0, v1, u, t;",
        ".reg .b32 code, next, pair, both;",
        ".reg .b16 c, h0, h1;",
        "mul.rn.f32 a, {$r0}, {$r1};",
        "mul.rn.f32 q, a, {$r3};",
        f"cvt.rn.satfinite.e4m3x2.f32 c, {_hex(0.0)}, q;",
        "cvt.u32.u16 code, c;",
        "add.u32 next, code, 1;",  # after 448 comes NaN, and no comparison with it holds
        "mad.lo.u32 pair, next, 256, code;",
        "cvt.u16.u32 c, pair;",
        "cvt.rn.f16x2.e4m3x2 both, c;",
        "mov.b32 {h0, h1}, both;",
        "cvt.f32.f16 v0, h0;",
        "cvt.f32.f16 v1, h1;",
        "add.rn.f32 u, v0, v1;",
        f"mul.rn.f32 u, u, {_hex(3.0)};",
        "and.b32 pair, code, 1;",
        "setp.eq.u32 odd, pair, 1;",
        "mul.rz.f32 t, u, {$r2};",
        "setp.gt.f32 up, a, t;",
        "mul.rp.f32 t, u, {$r2};",
        "setp.ge.and.f32 over, a, t, odd;",
        "or.pred up, up, over;",
        "selp.b32 code, next, code, up;",
        "selp.f32 v0, v1, v0, up;",
        f"setp.ge.u32 bad, {{$r0}}, {INF};",
        "setp.eq.or.u32 bad, {$r4}, 0, bad;",
        "selp.b32 {$w0}, 0x7f, code, bad;",
        "selp.f32 {$w1}, 0f7FC00000, v0, bad;",
    ]
    return _ptx(lines, [amax, *factors], [Int32, Float32], loc, ip)


@dsl_user_op
def e2m1_thresholds(scale: Float32, g: Float32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Make the seven products t scale g, rounded as a tie at t rounds.

    NaN if scale is 0.
    """
    lines = [
        ".reg .pred zero;",
        ".reg .f32 s, u;",
        f"setp.eq.f32 zero, {{$r0}}, {_hex(0.0)};",
        "selp.f32 s, 0f7FC00000, {$r0}, zero;",
    ]
    for i, t in enumerate(_STEPS):
        lines += [f"mul.rn.f32 u, s, {_hex(t)};", f"mul.{'rp' if i % 2 else 'rz'}.f32 {{$w{i}}}, u, {{$r1}};"]
    return _ptx(lines, [scale, g], [Float32] * 7, loc, ip)


@dsl_user_op
def e2m1_decide(x: list, thresholds: tuple[Float32, ...], *, loc: Any = None, ip: Any = None) -> Int32:
    """Encode 8 values, 4 bits each, the first lowest. Each is the sign, and the thresholds that |x| passes.

    A threshold of NaN is passed by nothing. Source: see the module docstring.
    """
    t = [f"{{$r{PIECE + i}}}" for i in range(7)]
    lines = [
        ".reg .pred p4, p2, p1;",
        ".reg .f32 a, m, lower, upper;",
        ".reg .b32 word, c4, c2, c1, sign;",
        "mov.b32 word, 0;",
    ]
    for i in range(PIECE):
        lines += [
            f"abs.f32 a, {{$r{i}}};",
            f"setp.ge.f32 p4, a, {t[3]};",
            f"selp.f32 m, {t[5]}, {t[1]}, p4;",
            f"selp.f32 lower, {t[4]}, {t[0]}, p4;",
            f"selp.f32 upper, {t[6]}, {t[2]}, p4;",
            "setp.ge.f32 p2, a, m;",
            "selp.f32 m, upper, lower, p2;",
            "setp.gt.f32 p1, a, m;",
            f"selp.b32 c4, {4 << 4 * i}, 0, p4;",
            f"selp.b32 c2, {2 << 4 * i}, 0, p2;",
            f"selp.b32 c1, {1 << 4 * i}, 0, p1;",
            f"mov.b32 sign, {{$r{i}}};",
            f"shr.u32 sign, sign, {28 - 4 * i};",
            f"and.b32 sign, sign, 0x{8 << 4 * i:x};",
            "or.b32 c4, c4, c2;",
            "or.b32 c1, c1, sign;",
            "or.b32 word, word, c4;",
            "or.b32 word, word, c1;",
        ]
    return _ptx([*lines, "mov.b32 {$w0}, word;"], [*x, *thresholds], [Int32], loc, ip)


@dsl_user_op
def e2m1_convert(x: list, factor: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Codes of 8 values times ``factor``, 4 bits each, by the instruction of SM100."""
    lines = [f".reg .b32 v<{PIECE}>;", f".reg .b8 c<{PIECE // 2}>;"]
    lines += [f"mul.rn.f32 v{i}, {{$r{i}}}, {{$r{PIECE}}};" for i in range(PIECE)]
    lines += [f"cvt.rn.satfinite.e2m1x2.f32 c{i}, v{2 * i + 1}, v{2 * i};" for i in range(PIECE // 2)]
    return _ptx([*lines, "mov.b32 {$w0}, {c0, c1, c2, c3};"], [*x, factor], [Int32], loc, ip)


@dsl_user_op
def e2m1_round(x: list, factor: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Encode 8 values times ``factor`` (a power of two) in 4 bits each.

    Where no product lies above 6.

    See "E2M1 of a power of two" in the module docstring.
    """
    lines = [".reg .f32 y, f;", ".reg .b32 word, m, c, s;", "mov.b32 word, 0;"]
    for i in range(PIECE):
        lines += [
            f"mul.rn.f32 y, {{$r{i}}}, {{$r{PIECE}}};",
            "abs.f32 y, y;",
            "mov.b32 m, y;",
            "and.b32 m, m, 0x7f800000;",
            "max.u32 m, m, 0x3f800000;",
            "add.u32 c, m, 0x0b400000;",
            "mov.b32 f, c;",
            "add.rn.f32 f, y, f;",
            "mov.b32 c, f;",
            "sub.u32 c, c, m;",
            "shr.u32 m, m, 22;",
            "add.u32 c, c, m;",
            f"sub.u32 c, c, {0x0B400000 + 254};",
            f"mad.lo.u32 word, c, {1 << 4 * i}, word;",
            f"mov.b32 s, {{$r{i}}};",
            f"shr.u32 s, s, {28 - 4 * i};",
            f"and.b32 s, s, 0x{8 << 4 * i:x};",
            "or.b32 word, word, s;",
        ]
    return _ptx([*lines, "mov.b32 {$w0}, word;"], [*x, factor], [Int32], loc, ip)


@dsl_user_op
def _reciprocals(scale: Float32, g: Float32, *, loc: Any = None, ip: Any = None) -> tuple:
    """Compute 1 / (scale g), 2^-20 too small and too large; 0, 0 where scale is 0 or NaN."""
    lines = [
        ".reg .pred some;",
        ".reg .f32 r;",
        "mul.rn.f32 r, {$r0}, {$r1};",
        "rcp.approx.ftz.f32 r, r;",
        f"setp.gt.f32 some, {{$r0}}, {_hex(0.0)};",
        f"selp.f32 r, r, {_hex(0.0)}, some;",
        f"mul.rn.f32 {{$w0}}, r, {_hex(1 - 2.0**-20)};",
        f"mul.rn.f32 {{$w1}}, r, {_hex(1 + 2.0**-20)};",
    ]
    return _ptx(lines, [scale, g], [Float32, Float32], loc, ip)


@cute.jit
def e2m1_of_power(x: list, byte: Int32, convert: cutlass.Constexpr):
    """Word of 8 E2M1 codes of x / 2^(byte - 127); 0 for byte 255.

    Args:
        x: 8 Float32. convert: the instruction of SM100 is there.
    """
    if cutlass.const_expr(convert):
        word = e2m1_convert(x, inverse_power(byte))
    else:
        word = e2m1_round(x, inverse_power(byte))
    return cutlass.select_(byte == 255, Int32(0), word)


@cute.jit
def e2m1_of_quotient(x: list, code: Int32, scale: Float32, g: Float32, convert: cutlass.Constexpr):
    """Return a word of 8 E2M1 codes of x / (scale g). Zeros are signed where scale is 0; 0 where ``code`` is NaN.

    Args:
        x: 8 Float32. code, scale: from `e4m3_scale`. g: the global scale. convert: as in `e2m1_of_power`.
    """
    if cutlass.const_expr(convert):
        small, large = _reciprocals(scale, g)
        word = e2m1_convert(x, small)
        differ = word != e2m1_convert(x, large)
        if differ | (g < Float32(_COMFORT[0])) | (g > Float32(_COMFORT[1])):
            word = e2m1_decide(x, e2m1_thresholds(scale, g))
    else:
        word = e2m1_decide(x, e2m1_thresholds(scale, g))
    return cutlass.select_(code == NAN_SCALE["e4m3"], Int32(0), word)


@dsl_user_op
def global_scale(amax: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """max(amax / 2688, 2^-126), correctly rounded; NaN where amax is Inf or NaN.

    A product with the reciprocal, then one step with its exact remainder (Markstein, "Computation of elementary
    functions on the IBM RISC System/6000 processor", 1990). Tests try all bf16 numbers and many of fp32.
    """
    y = _hex(1 / 2688)
    lines = [
        ".reg .pred bad;",
        ".reg .f32 q, r, n;",
        f"mul.rn.f32 q, {{$r0}}, {y};",
        "neg.f32 n, q;",
        f"fma.rn.f32 r, n, {_hex(2688.0)}, {{$r0}};",
        f"fma.rn.f32 q, r, {y}, q;",
        f"max.f32 q, q, {_hex(2.0**-126)};",
        f"setp.ge.u32 bad, {{$r0}}, {INF};",
        "selp.f32 {$w0}, 0f7FC00000, q, bad;",
    ]
    return _ptx(lines, [amax], [Float32], loc, ip)


@cute.jit
def encoded(
    recipe: cutlass.Constexpr, x: list, amax: Int32, g: Any, factors: Any, convert: cutlass.Constexpr
) -> tuple[Int32, list]:
    """Return (scale byte of a block, words of codes of 8 of its values).

    Args:
        recipe: `config.Recipe`. x: 8 Float32. amax: bits of the block's largest magnitude.
        g, factors: the global scale and `scale_factors` of it, where the recipe has one, else None.
        convert: as in `e2m1_of_power`.
    """
    if cutlass.const_expr(recipe.scale == "e4m3"):
        byte, scale = e4m3_scale(amax, factors)
        words = [e2m1_of_quotient(x, byte, scale, g, convert)]
    else:
        byte = ue8m0(amax, recipe.divisor, recipe.floor)
        if cutlass.const_expr(recipe.bits == 8):
            words = list(e4m3(x, inverse_power(byte)))
        else:
            words = [e2m1_of_power(x, byte, convert)]
    return byte, words
