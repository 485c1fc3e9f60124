"""cvt between scalar types against exact rationals, and cvt.pack."""

from __future__ import annotations

import pytest
import softfloat as sf
from cases import Case, clamp, limits, prepare_cases, run_case, typed, width, wrap

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")
TO_INTEGER = ("rni", "rzi", "rmi", "rpi")


def kind(t: str) -> str:
    """Operand kind of an integer type: 8-bit registers hold the 8-bit types."""
    return f"b{width(t)}" if width(t) == 8 else t


def integers() -> list[Case]:
    out = []
    for d in INTEGERS:
        for a in INTEGERS:
            plain = lambda x, a=a, d=d: wrap(typed(x, a), width(d))  # noqa: E731
            out.append(Case(f"cvt.{d}.{a}", (kind(a),), plain, (kind(d),), rows=2))
            (low, high), (lowest, highest) = limits(a), limits(d)
            if low >= lowest and high <= highest:
                continue  # .sat is refused where every value fits
            saturated = lambda x, a=a, d=d: wrap(clamp(typed(x, a), d), width(d))  # noqa: E731
            out.append(Case(f"cvt.sat.{d}.{a}", (kind(a),), saturated, (kind(d),), rows=3))
    return out


def wide_registers() -> list[Case]:
    """Sources of which the low bits count, results that are extended."""
    narrow = lambda a: wrap(typed(a & 0xFF, "s8"), 16)  # noqa: E731
    return [
        Case("cvt.s8.s32", ("b32",), narrow, ("b16",)),
        Case("cvt.u8.u32", ("b32",), lambda a: a & 0xFF, ("b16",)),
        Case("cvt.u8.u32", ("b32",), lambda a: a & 0xFF, ("b32",)),
        Case("cvt.s16.s8", ("b16",), narrow, ("b16",)),
        Case("cvt.s32.s16", ("b32",), lambda a: wrap(typed(a & 0xFFFF, "s16"), 32), ("b32",)),
        Case("cvt.s64.s8", ("b64",), lambda a: wrap(typed(a & 0xFF, "s8"), 64), ("b64",)),
        Case("cvt.rn.f32.s8", ("b32",), lambda a: sf.encode(sf.finite(typed(a & 0xFF, "s8")), "f32"), ("f32",)),
        Case("cvt.rzi.s8.f32", ("f32",), lambda a: wrap(to_integer("rzi", "s8", "f32")(a), 8), ("b8",)),
        Case("cvt.rn.f16.f32", ("f32",), lambda a: sf.encode(sf.decode(a, "f32"), "f16"), ("b32",)),
    ]


def to_integer(mode: str, d: str, a: str, ftz: bool = False):
    def oracle(bits: int) -> int:
        x = sf.decode(bits, a)
        x = sf.flush(x, a) if ftz else x
        n = width(d)
        if x.nan:
            return 1 << (n - 1) if a == "f64" or n == 64 else 0
        if x.kind == "inf":
            return wrap(clamp(-(1 << 80) if x.negative else 1 << 80, d), n)
        return wrap(clamp(int(sf.integral(x, mode).value), d), n)

    return oracle


def float_to_integer() -> list[Case]:
    out = []
    for a in FLOATS:
        for d in INTEGERS:
            for mode in TO_INTEGER:
                out.append(Case(f"cvt.{mode}.{d}.{a}", (a,), to_integer(mode, d, a), (kind(d),), rows=3))
    out.append(Case("cvt.rpi.ftz.s32.f32", ("f32",), to_integer("rpi", "s32", "f32", True), ("s32",)))
    out.append(Case("cvt.rmi.ftz.sat.u16.f32", ("f32",), to_integer("rmi", "u16", "f32", True), ("u16",)))
    out.append(Case("cvt.rzi.sat.u8.f16", ("f16",), to_integer("rzi", "u8", "f16"), ("b8",)))
    return out


def clamped(bits: int, t: str, sat: bool, relu: bool = False) -> int:
    """Result bits after .sat or .relu."""
    x = sf.decode(bits, t)
    x = sf.saturate(x) if sat else x
    x = sf.relu(x) if relu else x
    return sf.encode(x, t) if sat or relu else bits


def integer_to_float() -> list[Case]:
    out = []
    for a in INTEGERS:
        for d in FLOATS:
            for mode in MODES:
                for sat in (False, True) if d != "bf16" and mode == "rn" else (False,):
                    oracle = lambda x, a=a, d=d, m=mode, s=sat: clamped(sf.encode(sf.finite(typed(x, a)), d, m), d, s)  # noqa: E731
                    out.append(Case(f"cvt.{mode}{'.sat' * sat}.{d}.{a}", (kind(a),), oracle, (d,), rows=3))
    return out


def resize(
    a: str, d: str, mode: str = "rn", ftz: bool = False, sat: bool = False, relu: bool = False, fin: bool = False
):
    def oracle(bits: int) -> int:
        x = sf.decode(bits, a)
        x = sf.flush(x, a) if ftz and a == "f32" else x
        if x.nan and a in ("f64", d) and d != "f64" and not (ftz and a == d) and not sat:
            return bits if a == d == "f32" else nan_payload(bits, d) if a == "f64" else sf.encode(x, d)
        if x.nan and a == "bf16" and d == "f32" and not ftz:
            return bits << 16
        out = sf.encode_ftz(x, d, mode) if ftz and d == "f32" else sf.encode(x, d, mode, fin)
        return clamped(out, d, sat, relu)

    return oracle


def nan_payload(bits: int, d: str) -> int:
    """An f64 NaN in a narrower format: quiet, with its sign and the top of its payload."""
    f = sf.FORMATS[d]
    payload = bits & (1 << 52) - 1 | 1 << 51
    code = ((1 << f.exponent) - 1) << f.fraction | payload >> (52 - f.fraction)
    return bits >> 63 << (f.bits - 1) | code


def widening() -> list[Case]:
    out = []
    for a, d in (
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f32", "f32"),
        ("f32", "f64"),
        ("f16", "f64"),
        ("f64", "f64"),
        ("f16", "f16"),
    ):
        for sat in (False, True) if a != "bf16" else (False,):
            for ftz in (False, True) if "f32" in (a, d) else (False,):
                opcode = f"cvt{'.ftz' * ftz}{'.sat' * sat}.{d}.{a}"
                out.append(Case(opcode, (a,), resize(a, d, "rn", ftz, sat), (d,)))
    out.append(Case("cvt.f64.bf16", ("bf16",), resize("bf16", "f64"), ("f64",)))
    out.append(Case("cvt.bf16.bf16", ("bf16",), resize("bf16", "bf16"), ("bf16",)))
    return out


def narrowing() -> list[Case]:
    out = []
    pairs = (
        ("f64", "f32"),
        ("f32", "f16"),
        ("f32", "bf16"),
        ("f64", "f16"),
        ("bf16", "f16"),
        ("f64", "bf16"),
        ("f16", "bf16"),
    )
    for a, d in pairs:
        for mode in MODES:
            for sat in (False, True) if "bf16" not in (a, d) else (False,):
                for ftz in (False, True) if "f32" in (a, d) else (False,):
                    opcode = f"cvt.{mode}{'.ftz' * ftz}{'.sat' * sat}.{d}.{a}"
                    out.append(Case(opcode, (a,), resize(a, d, mode, ftz, sat), (d,), rows=6))
    for a, d in (("bf16", "f16"), ("f16", "bf16")):  # the only ones that ptxas takes without a rounding modifier
        out.append(Case(f"cvt.{d}.{a}", (a,), resize(a, d, "rn", False, False), (d,), rows=6))
    for d in ("f16", "bf16"):
        for mode in ("rn", "rz"):
            for tail, relu, fin in (
                (".relu", True, False),
                (".satfinite", False, True),
                (".relu.satfinite", True, True),
                (".satfinite.relu", True, True),
            ):
                oracle = resize("f32", d, mode, relu=relu, fin=fin)
                out.append(Case(f"cvt.{mode}{tail}.{d}.f32", ("f32",), oracle, (d,), rows=6))
    return out


def integral() -> list[Case]:
    out = []
    for t in FLOATS:
        for mode in TO_INTEGER:
            for ftz in (False, True) if t == "f32" else (False,):
                for sat in (False, True) if t != "bf16" else (False,):

                    def oracle(bits: int, t=t, mode=mode, ftz=ftz, sat=sat) -> int:
                        x = sf.decode(bits, t)
                        x = sf.flush(x, t) if ftz else x
                        return clamped(sf.encode(sf.integral(x, mode), t), t, sat)

                    out.append(Case(f"cvt.{mode}{'.ftz' * ftz}{'.sat' * sat}.{t}.{t}", (t,), oracle, (t,)))
    return out


def tf32() -> list[Case]:
    out = []
    tails = [
        (f".{m}{tail}", m, "relu" in tail, "sat" in tail)
        for m in ("rn", "rz")
        for tail in ("", ".relu", ".satfinite", ".satfinite.relu", ".relu.satfinite")
    ]
    tails += [(".rna", "rna", False, False), (".rna.satfinite", "rna", False, True)]
    for name, mode, relu, fin in tails:

        def oracle(bits: int, mode=mode, relu=relu, fin=fin) -> int:
            x = sf.decode(bits, "f32")
            if x.nan:
                return bits & ~0x1FFF if mode == "rna" else 0x7FFFE000
            return clamped(sf.encode(x, "tf32", mode, fin), "tf32", False, relu) << 13

        out.append(Case(f"cvt{name}.tf32.f32", ("f32",), oracle, ("f32",), rows=6))
    return out


def packs() -> list[Case]:
    out = []
    for t in ("u16", "s16", "u2", "s2", "u4", "s4", "u8", "s8"):
        bits = int(t[1:])
        pair = lambda a, b, t=t, n=bits: wrap(clamp(typed(a, "s32"), t), n) << n | wrap(clamp(typed(b, "s32"), t), n)  # noqa: E731
        if bits == 16:
            out.append(Case(f"cvt.pack.sat.{t}.s32", ("s32", "s32"), pair))
        else:
            three = lambda a, b, c, p=pair, n=bits: wrap(p(a, b) | c << 2 * n, 32)  # noqa: E731
            out.append(Case(f"cvt.pack.sat.{t}.s32.b32", ("s32", "s32", "b32"), three))
    return out


CASES = [
    *integers(),
    *wide_registers(),
    *float_to_integer(),
    *integer_to_float(),
    *widening(),
    *narrowing(),
    *integral(),
    *tf32(),
    *packs(),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conversion(case):
    run_case(case)
