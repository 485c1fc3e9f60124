"""Convert fp32 in registers to the codes of small formats.

Epilogues that quantise need them.

Source: PTX ISA, "cvt" (pairs of e2m1, e4m3); OCP Microscaling Formats for E8M0.
"""

from __future__ import annotations

import struct
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import dsl_user_op

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
_MANTISSA = (1 << 23) - 1
_INF, _NAN = 0x7F800000, 0x7FC00000


@dsl_user_op
def magnitude(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """|x|."""
    text = "abs.f32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip)


@dsl_user_op
def bits(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Return the 32 bits of a float."""
    text = "mov.b32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[x], loc=loc, ip=ip)


@dsl_user_op
def from_bits(x: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return the float with these 32 bits."""
    text = "mov.b32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip)


@dsl_user_op
def to_e4m3(x: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Convert one value: nearest, ties to even, saturating."""
    text = "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, {$r0}; cvt.u32.u16 {$w0}, pair; }"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[x], loc=loc, ip=ip)


@dsl_user_op
def from_e4m3(code: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return the value of a code."""
    text = (
        "{ .reg .b16 pair, low, high; .reg .b32 halves; cvt.u16.u32 pair, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 halves, pair; mov.b32 {low, high}, halves; cvt.f32.f16 {$w0}, low; }"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[code], loc=loc, ip=ip)


@dsl_user_op
def to_e4m3x4(values: list, *, loc: Any = None, ip: Any = None) -> Int32:
    """Convert four values, the first in the lowest byte."""
    text = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=list(values), loc=loc, ip=ip)


@dsl_user_op
def from_e4m3x4(codes: Int32, *, loc: Any = None, ip: Any = None) -> list:
    """Return the values of four codes, that of the lowest byte first."""
    text = (
        "{ .reg .b16 low, high, a, b, c, d; .reg .b32 halves; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 halves, low; mov.b32 {a, b}, halves; "
        "cvt.rn.f16x2.e4m3x2 halves, high; mov.b32 {c, d}, halves; "
        "cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; cvt.f32.f16 {$w3}, d; }"
    )
    return list(cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[codes], loc=loc, ip=ip))


def to_e4m3_limbs(values: list, limbs: int) -> list:
    """Convert four values to sums of so many codes: words, the largest limb first."""
    words = []
    for limb in range(limbs):
        words.append(to_e4m3x4(values))
        if limb + 1 < limbs:
            values = [x - rounded for x, rounded in zip(values, from_e4m3x4(words[-1]), strict=True)]
    return words


@dsl_user_op
def to_e2m1x8(values: list, *, loc: Any = None, ip: Any = None) -> Int32:
    """Convert eight values, the first in the lowest nibble."""
    pairs = " ".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4))
    text = f"{{ .reg .b8 b<4>; {pairs} mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}"
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=list(values), loc=loc, ip=ip)


@cute.jit
def to_ue8m0(amax: Float32, largest: cutlass.Constexpr, floor: cutlass.Constexpr = 1e-4):
    """Return a block's scale as a UE8M0 byte and its exact inverse.

    The scale is the smallest power of two that is not below max(amax, floor) / largest.

    ``largest``: of the element format. The quotient is never formed: an exponent is the difference of two, and one
    more where the mantissa of amax is above that of ``largest``. Inf and NaN give 255, NaN, and NaN.
    """
    (top,) = struct.unpack("<i", struct.pack("<f", largest))
    carry = _MANTISSA - (top & _MANTISSA)
    amax = bits(cute.arch.fmax(amax, Float32(floor), nan=True))
    code = (amax + carry >> 23) - (top >> 23) + 127
    code = cutlass.select_(amax >= _INF, Int32(255), code)
    inverse = cutlass.select_(code == 255, Int32(_NAN), 254 - code << 23)
    return code, from_bits(inverse)
