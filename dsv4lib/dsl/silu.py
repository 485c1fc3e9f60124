"""Compute silu without fast math: what is left is the error of ex2.approx and a rounding or two.

    silu(x) = x / (1 + 2^n 2^f)        n = round(-x log2 e), f = -x log2 e - n, log2 e in two fp32 numbers

The short form, exp2 of a rounded product and an approximate reciprocal, is off by |x| log2 e roundings of that product.
Source: PTX ISA, "ex2", "fma", "div.rn"; the reduction is Cody's and Waite's.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import dsl_user_op

LOWEST = -100.0  # exp(-x) is past fp32 from -88.8 on: nothing below differs
HIGHEST = 150.0  # exp(-x) is 0 there; f, what rounding leaves of the product, would grow with it past exp2's range


def _fp32(x: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return rounded


def _hex(x: float) -> str:
    """Write fp32 as PTX does."""
    return "0f" + struct.pack(">f", x).hex().upper()


HIGH = _fp32(math.log2(math.e))
LOW = math.log2(math.e) - HIGH


@dsl_user_op
def silu(x: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return x / (1 + exp(-x)); NaN stays NaN, by the quotient, which is rounded once."""
    text = (
        "{ .reg .f32 y, n, f, d; "
        f"max.f32 y, {{$r0}}, {_hex(LOWEST)}; min.f32 y, y, {_hex(HIGHEST)}; "
        f"mul.rn.f32 n, y, {_hex(-HIGH)}; cvt.rni.f32.f32 n, n; neg.f32 d, n; "
        f"fma.rn.f32 f, y, {_hex(-HIGH)}, d; fma.rn.f32 f, y, {_hex(-LOW)}, f; "
        f"ex2.approx.f32 f, f; add.rn.f32 f, f, f; add.rn.f32 n, n, {_hex(-1.0)}; ex2.approx.f32 n, n; "
        f"fma.rn.f32 d, f, n, {_hex(1.0)}; div.rn.f32 {{$w0}}, {{$r0}}, d; }}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip)
