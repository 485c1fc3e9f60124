"""Packed conversions: exact rationals, every code of the small formats, and ml_dtypes as a second oracle."""

from __future__ import annotations

import random
from fractions import Fraction
from math import floor

import ml_dtypes
import numpy as np
import pytest
import softfloat as sf
from cases import EDGES, Case, clamp, draw, prepare_cases, run_case, sign, wrap
from harness import unit

SMALL = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
PAIR_BITS = {"e2m1": 4}
ORDERS = {
    "": (False, False),
    ".relu": (True, False),
    ".satfinite": (False, True),
    ".relu.satfinite": (True, True),
    ".satfinite.relu": (True, True),
}


def step(t: str) -> int:
    """Bits from one element of a pair to the next."""
    return PAIR_BITS.get(t, 8)


def result(t: str) -> str:
    """Register kind of a pair."""
    return f"b{2 * step(t)}"


def code(x: sf.Num, t: str, mode: str = "rn", fin: bool = False, relu: bool = False) -> int:
    """Encode with .relu before rounding; NaN is not negative."""
    return sf.encode(sf.relu(x) if relu else x, t, mode, fin)


def half_pairs() -> list[Case]:
    out = []
    for t in ("f16", "bf16"):
        for mode in ("rn", "rz"):
            for tail, (relu, fin) in ORDERS.items():

                def oracle(a: int, b: int, t=t, mode=mode, fin=fin, relu=relu) -> int:
                    high, low = (code(sf.decode(x, "f32"), t, mode, fin, relu) for x in (a, b))
                    return high << 16 | low

                out.append(Case(f"cvt.{mode}{tail}.{t}x2.f32", ("f32", "f32"), oracle, rows=6))
    return out


RANDOM = {"f16": (113, 10, 13), "bf16": (1, 7, 16)}  # biased f32 exponent of the smallest normal, fraction, random bits


def random_half(raw: int, random: int, t: str, relu: bool, fin: bool) -> int:
    """Exactly: the magnitude in units of the last place, to as many further bits as are random, plus those, cut."""
    lowest, fraction, count = RANDOM[t]
    infinity = 0x7C00 if t == "f16" else 0x7F80
    sign, magnitude = raw >> 31 << 15, raw & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return 0x7FFF
    if relu and (sign or not magnitude):
        return 0
    if magnitude < 0x7F800000:
        field = magnitude >> 23
        exponent, significand = max(field, 1), magnitude & 0x7FFFFF | bool(field) << 23
        binade = max(exponent, lowest)
        scaled = Fraction(significand) * Fraction(2) ** (exponent - 23 - binade + fraction + count)
        units = floor(scaled) + random % (1 << count) >> count
        size = min(units + (binade - lowest << fraction), infinity)
    else:
        size = infinity
    return sign | (infinity - 1 if fin and size == infinity else size)


def random_pairs() -> list[Case]:
    out = []
    for t in RANDOM:
        for tail, (relu, fin) in ORDERS.items():

            def oracle(a: int, b: int, random: int, t=t, relu=relu, fin=fin) -> int:
                high = random_half(a, random >> 16, t, relu, fin)
                return high << 16 | random_half(b, random & 0xFFFF, t, relu, fin)

            out.append(Case(f"cvt.rs{tail}.{t}x2.f32", ("f32", "f32", "b32"), oracle, rows=12))
    return out


def to_small() -> list[Case]:
    out = []
    for t in SMALL:
        for tail in (".satfinite", ".satfinite.relu", ".relu.satfinite"):
            relu = "relu" in tail

            def pair(a: sf.Num, b: sf.Num, t=t, relu=relu) -> int:
                return (
                    code(a, t, relu=relu) << step(t) | code(b, t, relu=relu)
                    if t != "e5m2"
                    else (code(a, t, "rn", True, relu) << 8 | code(b, t, "rn", True, relu))
                )

            direct = lambda a, b, f=pair: f(sf.decode(a, "f32"), sf.decode(b, "f32"))  # noqa: E731
            out.append(Case(f"cvt.rn{tail}.{t}x2.f32", ("f32", "f32"), direct, (result(t),), rows=8))
            for half in ("f16", "bf16"):
                packed = lambda a, f=pair, h=half: f(sf.decode(a >> 16, h), sf.decode(a & 0xFFFF, h))  # noqa: E731
                out.append(Case(f"cvt.rn{tail}.{t}x2.{half}x2", (f"{half}x2",), packed, (result(t),)))
    wide = lambda a, b: sf.encode(sf.decode(a, "f32"), "e2m1") << 4 | sf.encode(sf.decode(b, "f32"), "e2m1")  # noqa: E731
    out.append(Case("cvt.rn.satfinite.e2m1x2.f32", ("f32", "f32"), wide, ("b16",)))
    return out


def parts(bits: int, t: str) -> tuple[sf.Num, sf.Num]:
    """The numbers of a pair, the upper one first."""
    n = sf.FORMATS[t].bits
    return tuple(sf.decode(bits >> k * step(t) & ((1 << n) - 1), t) for k in (1, 0))


def scale_of(bits: int) -> tuple[sf.Num, sf.Num]:
    """A pair of ue8m0 scales."""
    return tuple(sf.NAN if c == 0xFF else sf.finite(Fraction(2) ** (c - 127)) for c in (bits >> 8 & 0xFF, bits & 0xFF))


def from_small() -> list[Case]:
    out = []
    for t in SMALL:
        for relu in (False, True):
            f16 = lambda a, t=t, r=relu: code(parts(a, t)[0], "f16", relu=r) << 16 | code(parts(a, t)[1], "f16", relu=r)  # noqa: E731
            out.append(Case(f"cvt.rn{'.relu' * relu}.f16x2.{t}x2", (result(t),), f16, rows=8))
        out += to_bf16(t, lambda a, t=t: parts(a, t), result(t))
    out += to_bf16("s2f6", lambda a: tuple(sf.finite(Fraction(sign(c, 8), 64)) for c in (a >> 8, a & 0xFF)), "b16")
    return out


def to_bf16(t: str, values, source: str) -> list[Case]:
    out = []
    for tail, (relu, fin) in ORDERS.items():

        def join(pair, relu=relu, fin=fin) -> int:
            return code(pair[0], "bf16", "rn", fin, relu) << 16 | code(pair[1], "bf16", "rn", fin, relu)

        plain = lambda a, f=join: f(values(a))  # noqa: E731
        out.append(Case(f"cvt.rn{tail}.bf16x2.{t}x2", (source,), plain, rows=6))
        scaled = lambda a, s, f=join: f([sf.mul(x, y) for x, y in zip(values(a), scale_of(s), strict=True)])  # noqa: E731
        out.append(Case(f"cvt.rn{tail}.scaled::n2::ue8m0.bf16x2.{t}x2", (source, "b16"), scaled, rows=6))
    return out


def fixed(x: sf.Num, scale: sf.Num, relu: bool) -> int:
    """x / scale in 1/64, saturated; NaN is the largest."""
    x = sf.div(x, scale)
    if x.nan:
        return 0x7F
    if relu and x.negative:
        return 0
    if x.kind == "inf":
        return 0x80 if x.negative else 0x7F
    return wrap(clamp(int(sf.integral(sf.finite(x.value * 64), "rni").value), "s8"), 8)


def two(a: int, b: int) -> tuple[sf.Num, sf.Num]:
    return sf.decode(a, "f32"), sf.decode(b, "f32")


def split(a: int) -> tuple[sf.Num, sf.Num]:
    return sf.decode(a >> 16, "bf16"), sf.decode(a & 0xFFFF, "bf16")


def to_s2f6() -> list[Case]:
    out = []
    one = (sf.finite(1), sf.finite(1))
    for tail in (".satfinite", ".satfinite.relu", ".relu.satfinite"):

        def pair(values, factors, relu="relu" in tail) -> int:
            high, low = (fixed(x, s, relu) for x, s in zip(values, factors, strict=True))
            return high << 8 | low

        head, scaled = f"cvt.rn{tail}", ".scaled::n2::ue8m0"
        f32, bf16 = "s2f6x2.f32", "s2f6x2.bf16x2"
        out.append(Case(f"{head}.{f32}", ("f32", "f32"), lambda a, b, f=pair: f(two(a, b), one), ("b16",)))
        out.append(Case(f"{head}.{bf16}", ("bf16x2",), lambda a, f=pair: f(split(a), one), ("b16",)))
        wide = lambda a, b, s, f=pair: f(two(a, b), scale_of(s))  # noqa: E731
        out.append(Case(f"{head}{scaled}.{f32}", ("f32", "f32", "b16"), wide, ("b16",), rows=6))
        narrow = lambda a, s, f=pair: f(split(a), scale_of(s))  # noqa: E731
        out.append(Case(f"{head}{scaled}.{bf16}", ("bf16x2", "b16"), narrow, ("b16",), rows=6))
    return out


def ue8m0(x: sf.Num, up: bool, fin: bool) -> int:
    """|x| as a power of two: from below or above, at least 2**-127."""
    if x.nan:
        return 0xFF
    if x.kind == "inf":
        return 0xFE if fin else 0xFF
    size = abs(x.value)
    if size <= Fraction(2) ** -127:
        return 0
    exponent = sf.binade(size)
    exponent += up and size != Fraction(2) ** exponent
    return min(max(exponent, -127) + 127, 0xFE if fin else 0xFF)


def scales() -> list[Case]:
    out = []
    for mode in ("rz", "rp"):
        for fin in (False, True):
            f = lambda x, m=mode, s=fin: ue8m0(x, m == "rp", s)  # noqa: E731
            two = lambda a, b, f=f: f(sf.decode(a, "f32")) << 8 | f(sf.decode(b, "f32"))  # noqa: E731
            head = f"cvt.{mode}{'.satfinite' * fin}.ue8m0x2"
            out.append(Case(f"{head}.f32", ("f32", "f32"), two, ("b16",), rows=8))
            one = lambda a, f=f: f(sf.decode(a >> 16, "bf16")) << 8 | f(sf.decode(a & 0xFFFF, "bf16"))  # noqa: E731
            out.append(Case(f"{head}.bf16x2", ("bf16x2",), one, ("b16",), rows=6))
    back = lambda a: sf.encode(scale_of(a)[0], "bf16") << 16 | sf.encode(scale_of(a)[1], "bf16")  # noqa: E731
    out.append(Case("cvt.rn.bf16x2.ue8m0x2", ("b16",), back, rows=8))
    return out


CASES = half_pairs() + random_pairs() + to_small() + from_small() + to_s2f6() + scales()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed(case):
    run_case(case)


DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("t", SMALL)
def test_every_code_decodes_as_in_ml_dtypes(t):
    """All 2**n codes through cvt.rn.f16x2."""
    n = sf.FORMATS[t].bits
    codes = np.arange(1 << n, dtype=np.uint8)
    want = codes.view(DTYPES[t]).astype(np.float16)
    got = np.empty(len(codes), np.float16)
    u = unit(f"cvt.rn.f16x2.{t}x2", f"32 {2 * step(t)}")
    for start in range(0, len(codes), 32):
        chunk = np.resize(codes[start : start + 32], 32).astype(np.uint32)
        u.run({1: (chunk << step(t) | chunk).astype(f"u{step(t) // 4}")})
        low = (u.register(0) & 0xFFFF).astype(np.uint16).view(np.float16)
        assert ((u.register(0) >> 16) == (u.register(0) & 0xFFFF)).all()
        got[start : start + 32] = low[: min(32, len(codes))]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


@pytest.mark.parametrize("t", SMALL)
def test_nearest_agrees_with_ml_dtypes(t):
    """Finite inputs inside the range: ml_dtypes rounds to nearest even as well."""
    rng = random.Random(t)
    raw = np.array([draw(rng, "f32") for _ in range(32 * 20)] + EDGES["f32"][:32], np.uint32)
    x = np.resize(raw, 32 * 20).view(np.float32)
    top = float(abs(sf.decode(sf.FORMATS[t].top, t).value))
    x = np.where(np.abs(x) <= top, x, np.float32(0.75))
    want = x.astype(DTYPES[t]).view(np.uint8) & ((1 << sf.FORMATS[t].bits) - 1)
    u = unit(f"cvt.rn.satfinite.{t}x2.f32", f"{2 * step(t)} 32 32")
    for start in range(0, len(x), 32):
        u.run({1: x[start : start + 32], 2: x[start : start + 32]})
        np.testing.assert_array_equal(u.register(0) & ((1 << step(t)) - 1), want[start : start + 32])
