"""Floating-point arithmetic in every format and rounding mode against exact rationals."""

from __future__ import annotations

import numpy as np
import pytest
import softfloat as sf
from cases import Case, by_halves, prepare_cases, run_case, width

MODES = ("rn", "rz", "rm", "rp")
HALF = ("f16", "bf16", "f16x2", "bf16x2")


def rounded(t: str, function, mode: str = "rn", ftz: bool = False, sat: bool = False, relu: bool = False, sources=None):
    """Oracle: decode (and flush) the sources, ``function`` on exact numbers, round, flush, clamp.

    f64 NaN results are only NaN: payloads propagate as the processor likes, see ``f64_nan``.
    """

    def scalar(*raw: int) -> int:
        names = sources or [t] * len(raw)
        values = [sf.decode(bits, name) for bits, name in zip(raw, names, strict=True)]
        if ftz:
            values = [sf.flush(x, name) for x, name in zip(values, names, strict=True)]
        exact = function(*values, mode)
        bits = sf.encode_ftz(exact, t, mode) if ftz else sf.encode(exact, t, mode)
        if sat or relu:
            x = sf.decode(bits, t)
            x = sf.saturate(x) if sat else x
            x = sf.relu(x) if relu else x
            bits = sf.encode(x, t)
        return bits

    return scalar


def add(a, b, mode):
    return sf.add(a, b, mode)


def sub(a, b, mode):
    return sf.NAN if b.nan else sf.add(a, -b, mode)


def mul(a, b, mode):
    return sf.mul(a, b)


def fma(a, b, c, mode):
    return sf.add(sf.mul(a, b), c, mode)


def packed(t: str, oracle):
    """The scalar oracle, or one for both halves of a packed type."""
    return by_halves(oracle, width(t) // 2) if t.endswith("x2") else oracle


def scalar_name(t: str) -> str:
    return t.removesuffix("x2")


BINARY = {"add": add, "sub": sub, "mul": mul}


def arithmetic() -> list[Case]:
    out = []
    for name, function in {**BINARY, "fma": fma, "mad": fma}.items():
        count = 3 if function is fma else 2
        for mode in MODES if count == 3 else ("", *MODES):
            dot = f".{mode}" if mode else ""
            for t in ("f32", "f32x2", "f64"):
                if name == "mad" and t == "f32x2":
                    continue
                for ftz in (False, True) if t != "f64" else (False,):
                    for sat in (False, True) if t == "f32" else (False,):
                        opcode = f"{name}{dot}{'.ftz' * ftz}{'.sat' * sat}.{t}"
                        oracle = rounded(scalar_name(t), function, mode or "rn", ftz, sat)
                        out.append(Case(opcode, (t,) * count, packed(t, oracle), (t,), rows=6 if mode else 3))
        if name == "mad":
            continue
        for t in HALF:
            for mode in ("rn",) if count == 3 else ("", "rn"):
                out += half_arithmetic(name, function, count, mode, t)
    return out


def half_arithmetic(name: str, function, count: int, mode: str, t: str) -> list[Case]:
    out = []
    dot = f".{mode}" if mode else ""
    for ftz in (False, True) if t.startswith("f16") else (False,):
        for clamp in ("", ".sat") if t.startswith("f16") else ("",):
            opcode = f"{name}{dot}{'.ftz' * ftz}{clamp}.{t}"
            oracle = rounded(scalar_name(t), function, "rn", ftz, bool(clamp))
            out.append(Case(opcode, (t,) * count, packed(t, oracle), (t,), rows=6 if mode else 3))
        if name == "fma":
            oracle = rounded(scalar_name(t), function, "rn", ftz, relu=True)
            out.append(Case(f"fma.rn{'.ftz' * ftz}.relu.{t}", (t,) * count, packed(t, oracle), (t,)))
            for clamp in ("", ".relu", ".sat") if t.startswith("f16") else ("", ".relu"):
                oracle = within_bounds(scalar_name(t), clamp)
                out += [] if ftz else [Case(f"fma.rn.oob{clamp}.{t}", (t,) * count, packed(t, oracle), (t,))]
    return out


def within_bounds(t: str, clamp: str):
    """Oracle of ``fma.rn.oob``, see `test_oob_as_on_an_h200`."""
    plain = rounded(t, fma, "rn", sat=clamp == ".sat", relu=clamp == ".relu")

    def scalar(a: int, b: int, c: int) -> int:
        return 0 if clamp != ".sat" and 0x7FF7 in (a & 0x7FFF, b & 0x7FFF) else plain(a, b, c)

    return scalar


def mixed() -> list[Case]:
    out = []
    for t in ("f16", "bf16"):
        for mode in ("", *MODES):
            dot = f".{mode}" if mode else ""
            for sat in (False, True):
                tail = f"{dot}{'.sat' * sat}.f32.{t}"
                for name, function in {"add": add, "sub": sub}.items():
                    oracle = rounded("f32", function, mode or "rn", sat=sat, sources=(t, "f32"))
                    out.append(Case(name + tail, (t, "f32"), oracle, ("f32",)))
                if mode:
                    oracle = rounded("f32", fma, mode, sat=sat, sources=(t, t, "f32"))
                    out.append(Case("fma" + tail, (t, t, "f32"), oracle, ("f32",)))
    return out


def exact_division() -> list[Case]:
    one = sf.finite(1)
    functions = {
        "div": (2, lambda a, b, mode: sf.div(a, b)),
        "rcp": (1, lambda a, mode: sf.div(one, a)),
        "sqrt": (1, lambda a, mode: sf.sqrt(a)),
    }
    out = []
    for name, (count, function) in functions.items():
        for mode in MODES:
            for t, ftz in (("f32", False), ("f32", True), ("f64", False)):
                oracle = rounded(t, function, mode, ftz)
                out.append(Case(f"{name}.{mode}{'.ftz' * ftz}.{t}", (t,) * count, oracle, (t,), rows=6))
    return out


def extremum(t: str, name: str, nan: bool, xorsign: bool, absolute: bool, ftz: bool):
    """min and max by the PTX ISA's pseudocode, for two or three operands."""

    def best(x: sf.Num, y: sf.Num) -> sf.Num:
        if x.nan or y.nan:
            return sf.NAN if nan or (x.nan and y.nan) else y if x.nan else x
        return x if sf.less(x, y) == (name == "min") else y

    def oracle(*raw: int) -> int:
        top = width(t) - 1
        values = [sf.decode(bits, t) for bits in raw]
        if ftz:
            values = [sf.flush(x, t) for x in values]
        if absolute:
            values = [sf.Num(x.kind, False, abs(x.value)) for x in values]
        result = values[0]
        for x in values[1:]:
            result = best(result, x)
        bits = sf.encode(result, t)
        if xorsign and not result.nan:
            bits = bits & ((1 << top) - 1) | ((raw[0] ^ raw[1]) >> top) << top
        return bits

    return oracle


def extrema() -> list[Case]:
    out = []
    for name in ("min", "max"):
        for t in ("f32", *HALF):
            for ftz in (False, True) if t.startswith("f") and t != "f64" else (False,):
                for nan in (False, True):
                    for xorsign in (False, True):
                        opcode = f"{name}{'.ftz' * ftz}{'.NaN' * nan}{'.xorsign.abs' * xorsign}.{t}"
                        oracle = extremum(scalar_name(t), name, nan, xorsign, xorsign, ftz)
                        out.append(Case(opcode, (t, t), packed(t, oracle), (t,)))
        for nan in (False, True):
            for absolute in (False, True):
                opcode = f"{name}{'.NaN' * nan}{'.abs' * absolute}.f32"
                oracle = extremum("f32", name, nan, False, absolute, False)
                out.append(Case(opcode, ("f32",) * 3, oracle, ("f32",)))
        out.append(Case(f"{name}.f64", ("f64", "f64"), extremum("f64", name, False, False, False, False), ("f64",)))
    return out


def signs() -> list[Case]:
    out = []
    for t in ("f32", "f64", *HALF):
        s = scalar_name(t)
        top = 1 << (width(s) - 1)
        for ftz in (False, True) if t in ("f32", "f16", "f16x2") else (False,):
            flush = lambda a, s=s, top=top, ftz=ftz: (  # noqa: E731
                a & top if ftz and sf.decode(a, s).kind == "finite" and sf.flush(sf.decode(a, s), s).value == 0 else a
            )
            nan = lambda a, s=s: s != "f64" and sf.decode(a, s).nan  # noqa: E731
            neg = packed(t, lambda a, top=top, f=flush, n=nan: top - 1 if n(a) else f(a) ^ top)
            absolute = packed(t, lambda a, top=top, f=flush, n=nan: top - 1 if n(a) else f(a) & (top - 1))
            out.append(Case(f"neg{'.ftz' * ftz}.{t}", (t,), neg, (t,)))
            out.append(Case(f"abs{'.ftz' * ftz}.{t}", (t,), absolute, (t,)))
        if t in ("f32", "f64"):
            out.append(Case(f"copysign.{t}", (t, t), lambda a, b, m=top: a & m | b & (m - 1), (t,)))
    return out


def classes() -> list[Case]:
    out = []
    for t, smallest in (("f32", sf.Fraction(2) ** -126), ("f64", sf.Fraction(2) ** -1022)):
        subnormal = lambda x, m=smallest: x.kind == "finite" and 0 < abs(x.value) < m  # noqa: E731
        tests = {
            "finite": lambda x: x.kind == "finite",
            "infinite": lambda x: x.kind == "inf",
            "number": lambda x: not x.nan,
            "notanumber": lambda x: x.nan,
            "normal": lambda x, s=subnormal: x.kind == "finite" and not s(x),
            "subnormal": subnormal,
        }
        for name, test in tests.items():
            oracle = lambda a, f=test, t=t: int(f(sf.decode(a, t)))  # noqa: E731
            out.append(Case(f"testp.{name}.{t}", (t,), oracle, ("pred",), rows=6))
    return out


CASES = arithmetic() + mixed() + exact_division() + extrema() + signs() + classes()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float(case):
    run_case(case)


@pytest.mark.parametrize("opcode", ["mul.bf16x2", "fma.rn.bf16x2"])
def test_bf16_products_below_the_normal_range(opcode):
    """Products whose last bits lie below those of a subnormal f32: rounding twice would be wrong at ties."""
    import random

    from harness import unit

    rng = random.Random(5)
    count = 2 if opcode.startswith("mul") else 3
    u = unit(opcode, " ".join(["32"] * (count + 1)))
    oracle = by_halves(rounded("bf16", mul if count == 2 else fma))
    small = lambda: rng.getrandbits(1) << 15 | rng.getrandbits(7)  # noqa: E731
    for _ in range(60):
        exponents = [rng.randrange(50, 75) for _ in range(64)]
        first = [e << 7 | small() for e in exponents]
        second = [rng.randrange(118, 130) - e << 7 | small() for e in exponents]
        third = [rng.choice([0, 1, small(), 0x80, 0x8001]) for _ in exponents]
        columns = [np.array(x[:32], np.uint32) | np.array(x[32:], np.uint32) << 16 for x in (first, second, third)]
        u.run({1 + i: columns[i] for i in range(count)})
        want = [oracle(*(int(columns[i][lane]) for i in range(count))) for lane in range(32)]
        np.testing.assert_array_equal(u.register(0), want)


@pytest.mark.parametrize(("t", "half"), [("f16", 11), ("bf16", 8)])
def test_fma_at_ties(t, half):
    """Products in the middle between two numbers, with an addend too small for f32 to keep."""
    from harness import unit

    one = 0x3C00 if t == "f16" else 0x3F80
    digits = half - 1
    u = unit(f"fma.rn.{t}", "16 16 16 16")
    oracle = rounded(t, fma)
    a = [one | 1 << (digits - 1 - i % (half - 1)) for i in range(32)]
    b = [one | 1 << (i % (half - 1)) for i in range(32)]
    a = [x | 0x8000 if i & 1 else x for i, x in enumerate(a)]
    for tiny in (0x0001, 0x8001, 0x0400 if t == "f16" else 0x2000, 0x8002 if t == "f16" else 0xA000, 0x0000):
        u.run({1: np.array(a, np.uint16), 2: np.array(b, np.uint16), 3: np.full(32, tiny, np.uint16)})
        np.testing.assert_array_equal(u.register(0), [oracle(x, y, tiny) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize(
    ("t", "clamp"), [("f16", ""), ("f16", ".relu"), ("f16", ".sat"), ("bf16", ""), ("bf16", ".relu")]
)
def test_oob_as_on_an_h200(t, clamp):
    """a or b of 0x7FF7 or 0xFFF7, what TMA fills in, gives +0; c may be it, other NaNs stay, .sat heeds none of it."""
    from harness import unit

    values = [0, 0x8000, 0x3C00, 0xBF80, 0x7FF7, 0xFFF7, 0x7FFF, 0x7FF6, 0x7FF8, 0xFFF0, 0x7FC0, 0x7C00]
    a, b = (np.array(x, np.uint16).ravel() for x in np.meshgrid(values, values))
    u, one = unit(f"fma.rn.oob{clamp}.{t}", "16 16 16 16"), {"f16": 0x3C00, "bf16": 0x3F80}[t]
    oracle = within_bounds(t, clamp)
    for operands in ((a, b, np.full_like(a, 0x8000)), (np.full_like(a, one), a, b), (a, np.full_like(a, 0), b)):
        for start in range(0, len(a) - 31, 32):
            rows = [x[start : start + 32] for x in operands]
            u.run({i + 1: row for i, row in enumerate(rows)})
            assert u.register(0).tolist() == [oracle(*map(int, lane)) for lane in zip(*rows, strict=True)]


def test_bf16_fma_with_products_outside_f32():
    """A product that overflows f32 or vanishes in it still counts: 2**128 - max, and the sign of -tiny + 0."""
    from harness import unit

    u = unit("fma.rn.bf16", "16 16 16 16")
    two64, tiny = 0x5F80, 0x0D80  # 2**64, 2**-100
    rows = [
        (two64, two64, 0xFF7F),
        (two64 | 0x8000, two64, 0x7F7F),
        (two64, two64, 0x7F7F),
        (tiny | 0x8000, tiny, 0x0000),
        (tiny, tiny, 0x8000),
        (tiny | 0x8000, tiny, 0x8000),
        (0x8000, tiny, 0x0000),
        (0x7F80, tiny, 0xFF80),
    ]
    oracle = rounded("bf16", fma)
    for row in rows:  # one at a time: a single such lane switches the whole warp to the slower way
        u.run({1 + i: np.full(32, x, np.uint16) for i, x in enumerate(row)})
        assert (u.register(0) == oracle(*row)).all(), row


def test_oracle_agrees_with_numpy():
    """The rational arithmetic itself, on float32 where numpy is an independent implementation of nearest-even."""
    import random

    from cases import draw

    rng = random.Random(1)
    raw = [(draw(rng, "f32"), draw(rng, "f32")) for _ in range(2000)]
    a, b = (np.array([pair[i] for pair in raw], np.uint32).view(np.float32) for i in (0, 1))
    with np.errstate(all="ignore"):
        for got, function in ((a + b, add), (a - b, sub), (a * b, mul), (a / b, lambda x, y, m: sf.div(x, y))):
            want = np.array([rounded("f32", function)(*pair) for pair in raw], np.uint32).view(np.float32)
            np.testing.assert_array_equal(got.view(np.uint32)[~np.isnan(got)], want.view(np.uint32)[~np.isnan(got)])
            assert np.isnan(want[np.isnan(got)]).all()
