"""Floating point by exact rational arithmetic: the oracle of the native handlers.

A value is a Fraction with a sign (for zeros), an infinity or NaN; every operation is exact and rounded once by
``encode``. Nothing here is shared with the code under test.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt


@dataclass(frozen=True)
class Format:
    """Exponent bits, fraction bits; ``finite`` formats have no infinity (all codes but the NaN code are numbers)."""

    exponent: int
    fraction: int
    nan: int | None = None  # the code NaN is encoded as; None: the format has no NaN and takes the largest number
    infinity: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def top(self) -> int:
        """Code of the largest finite magnitude."""
        full = (1 << (self.bits - 1)) - 1
        if self.infinity:
            return (((1 << self.exponent) - 1) << self.fraction) - 1
        return full - 1 if self.nan is not None else full


FORMATS = {
    "f16": Format(5, 10, 0x7FFF),
    "bf16": Format(8, 7, 0x7FFF),
    "tf32": Format(8, 10, 0x3FFFF),
    "f32": Format(8, 23, 0x7FFFFFFF),
    "f64": Format(11, 52, 0x7FF8000000000000),
    "e4m3": Format(4, 3, 0x7F, infinity=False),
    "e5m2": Format(5, 2, 0x7F),
    "e2m3": Format(2, 3, infinity=False),
    "e3m2": Format(3, 2, infinity=False),
    "e2m1": Format(2, 1, infinity=False),
}


@dataclass(frozen=True)
class Num:
    """A number: kind is "finite", "inf" or "nan"; ``negative`` counts for zeros and infinities too."""

    kind: str
    negative: bool
    value: Fraction = Fraction(0)

    @property
    def zero(self) -> bool:
        return self.kind == "finite" and self.value == 0

    @property
    def nan(self) -> bool:
        return self.kind == "nan"

    def __neg__(self) -> Num:
        return Num(self.kind, not self.negative, -self.value)


NAN = Num("nan", False)


def finite(value: Fraction | int, negative: bool | None = None) -> Num:
    """A finite number; the sign of zero is ``negative``."""
    value = Fraction(value)
    return Num("finite", value < 0 if value else bool(negative), value)


@functools.cache
def decode(bits: int, name: str) -> Num:
    """Bits to a number."""
    f = FORMATS[name]
    negative = bool(bits >> (f.bits - 1) & 1)
    code = bits & ((1 << (f.bits - 1)) - 1)
    exponent, fraction = code >> f.fraction, code & ((1 << f.fraction) - 1)
    if code > f.top:
        return Num("inf", negative) if f.infinity and fraction == 0 else NAN
    significand = fraction | (1 << f.fraction if exponent else 0)
    value = Fraction(significand) * Fraction(2) ** (max(exponent, 1) - f.bias - f.fraction)
    return Num("finite", negative, -value if negative else value)


def binade(value: Fraction) -> int:
    """floor(log2(value)) of a positive fraction."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def encode(x: Num, name: str, mode: str = "rn", satfinite: bool = False) -> int:
    """Round to a format: rn, rna, rz, rm, rp."""
    f = FORMATS[name]
    sign = 1 << (f.bits - 1) if x.negative else 0
    if x.nan:
        return f.top if f.nan is None else f.nan
    saturating = satfinite or not f.infinity
    if x.kind == "inf":
        return sign | (f.top if saturating else f.top + 1)
    size = abs(x.value)
    if size == 0:
        return sign
    exponent = max(binade(size), f.lowest)
    unit = Fraction(2) ** (exponent - f.fraction)
    whole, rest = divmod(size, unit)
    whole = int(whole)
    up = {
        "rn": rest > unit / 2 or (rest == unit / 2 and whole & 1 == 1),
        "rna": rest >= unit / 2,
        "rz": False,
        "rm": rest > 0 and x.negative,
        "rp": rest > 0 and not x.negative,
    }[mode]
    code = whole + up + ((exponent - f.lowest) << f.fraction)
    if code > f.top:
        inward = mode == "rz" or (mode == "rm" and not x.negative) or (mode == "rp" and x.negative)
        code = f.top if saturating or inward else f.top + 1
    return sign | code


def flush(x: Num, name: str) -> Num:
    """Subnormals of a format to zero."""
    if x.kind == "finite" and abs(x.value) < Fraction(2) ** FORMATS[name].lowest:
        return Num("finite", x.negative)
    return x


def encode_ftz(x: Num, name: str, mode: str = "rn") -> int:
    """Round with an unbounded exponent first: what is then below the normal numbers becomes zero."""
    if x.kind == "finite" and x.value:
        f = FORMATS[name]
        lift = max(0, f.lowest - binade(abs(x.value)) + 1)
        larger = decode(encode(finite(x.value * 2**lift), name, mode), name)
        if abs(larger.value) < Fraction(2) ** (f.lowest + lift) and larger.kind == "finite":
            return 1 << (f.bits - 1) if x.negative else 0
    return encode(x, name, mode)


def add(a: Num, b: Num, mode: str = "rn") -> Num:
    """Exact sum; the sign of an exact zero depends on the rounding mode."""
    if a.nan or b.nan:
        return NAN
    if a.kind == "inf" or b.kind == "inf":
        if a.kind == b.kind and a.negative != b.negative:
            return NAN
        return a if a.kind == "inf" else b
    total = a.value + b.value
    if total == 0:
        return finite(0, a.negative if a.zero and b.zero and a.negative == b.negative else mode == "rm")
    return finite(total)


def mul(a: Num, b: Num) -> Num:
    """Exact product."""
    negative = a.negative != b.negative
    if a.nan or b.nan or (a.kind == "inf" and b.zero) or (b.kind == "inf" and a.zero):
        return NAN
    if a.kind == "inf" or b.kind == "inf":
        return Num("inf", negative)
    return finite(a.value * b.value, negative)


def div(a: Num, b: Num) -> Num:
    """Exact quotient."""
    negative = a.negative != b.negative
    if a.nan or b.nan or (a.kind == b.kind == "inf") or (a.zero and b.zero):
        return NAN
    if a.kind == "inf" or b.zero:
        return Num("inf", negative)
    if b.kind == "inf":
        return finite(0, negative)
    return finite(a.value / b.value, negative)


def sqrt(a: Num) -> Num:
    """Square root, exact or with 200 bits and a sticky bit after them."""
    if a.nan or a.zero:
        return a
    if a.negative:
        return NAN
    if a.kind == "inf":
        return a
    shift = 2 * (200 + a.value.denominator.bit_length())
    scaled = (a.value.numerator << shift) // a.value.denominator
    root = isqrt(scaled)
    exact = root * root == scaled and (a.value.numerator << shift) % a.value.denominator == 0
    return finite(Fraction(2 * root + (not exact), 2) / (1 << (shift // 2)))


def less(a: Num, b: Num) -> bool:
    """a < b with -0 < +0; not for NaN."""

    def key(x: Num) -> tuple:
        if x.kind == "inf":
            return (-1 if x.negative else 1, Fraction(0), 0)
        return (0, x.value, not x.negative)

    return key(a) < key(b)


def saturate(x: Num) -> Num:
    """Clamped to [0, 1], NaN to +0."""
    if x.nan or x.negative:
        return finite(0)
    if x.kind == "inf" or x.value > 1:
        return finite(1)
    return x


def relu(x: Num) -> Num:
    """0 for negative numbers and -0."""
    return finite(0) if x.negative and not x.nan else x


def integral(x: Num, mode: str) -> Num:
    """Round to an integer: rni, rzi, rmi, rpi."""
    if x.kind != "finite":
        return x
    floor = x.value.numerator // x.value.denominator
    rest = x.value - floor
    up = {
        "rni": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor & 1 == 1),
        "rzi": x.value < 0 and rest > 0,
        "rmi": False,
        "rpi": rest > 0,
    }[mode]
    return finite(floor + up, x.negative)
