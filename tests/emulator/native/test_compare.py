"""set and setp against exact rationals and Python integers."""

from __future__ import annotations

import pytest
import softfloat as sf
from cases import Case, prepare_cases, run_case, typed, width

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
ORDER = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
ALIAS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOATS = (*ORDER, *(f"{name}u" for name in ORDER), "num", "nan")
BOOLS = {"and": lambda t, c: t and c, "or": lambda t, c: t or c, "xor": lambda t, c: t != c}


def comparisons() -> list[tuple[str, str]]:
    """(comparison, type) of all scalar types."""
    out = [(name, t) for t in INTEGERS for name in ORDER]
    out += [(name, t) for t in INTEGERS if t[0] == "u" for name in ALIAS]
    out += [(name, t) for t in ("b16", "b32", "b64") for name in ("eq", "ne")]
    return out + [(name, t) for t in ("f32", "f64", "f16", "bf16") for name in FLOATS]


def real(x: sf.Num) -> object:
    """A key that compares like the number; -0 equals +0."""
    return float("-inf" if x.negative else "inf") if x.kind == "inf" else x.value


def compare(name: str, t: str, ftz: bool = False):
    """Oracle on raw bits."""
    if t[0] in "usb" and t != "bf16":
        return lambda a, b: ORDER[ALIAS.get(name, name)](typed(a, t), typed(b, t))

    def oracle(a: int, b: int) -> bool:
        x, y = sf.decode(a, t), sf.decode(b, t)
        if ftz:
            x, y = sf.flush(x, t), sf.flush(y, t)
        unordered = x.nan or y.nan
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name.endswith("u")
        return ORDER[name.removesuffix("u") if name not in ORDER else name](real(x), real(y))

    return oracle


def one(t: str) -> int:
    """True as a value of the destination type."""
    return {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(t) or (1 << width(t)) - 1


def setp_cases() -> list[Case]:
    out = []
    for name, t in comparisons():
        test = compare(name, t)
        out.append(Case(f"setp.{name}.{t}", (t, t), lambda a, b, f=test: int(f(a, b)), ("pred",)))
    for bool_name, combine in BOOLS.items():
        for name, t in (("lt", "s32"), ("geu", "f32"), ("ne", "b64"), ("hi", "u16"), ("nan", "bf16"), ("gt", "f64")):
            test = compare(name, t)
            both = lambda a, b, c, f=test, g=combine: (int(g(f(a, b), bool(c))), int(g(not f(a, b), bool(c))))  # noqa: E731
            opcode = f"setp.{name}.{bool_name}.{t}"
            out.append(Case(opcode, (t, t, "pred"), both, ("pred", "pred")))
            first = lambda *v, f=both: f(*v)[0]  # noqa: E731
            out.append(Case(opcode, (t, t, "pred"), first, ("pred",)))
            negated = lambda a, b, c, f=both: f(a, b, 1 - c)[0]  # noqa: E731
            w = width(t)
            out.append(Case(opcode, (t, t, "pred"), negated, ("pred",), shape=f"1 {w} {w} !1"))
    for t in ("f32", "f16"):
        for name in ("lt", "equ"):
            test = compare(name, t, ftz=True)
            out.append(Case(f"setp.{name}.ftz.{t}", (t, t), lambda a, b, f=test: int(f(a, b)), ("pred",)))
    for t in ("f16x2", "bf16x2"):
        for name in ("lt", "neu", "num"):
            test = compare(name, t.removesuffix("x2"))
            pair = lambda a, b, f=test: (int(f(a & 0xFFFF, b & 0xFFFF)), int(f(a >> 16, b >> 16)))  # noqa: E731
            out.append(Case(f"setp.{name}.{t}", (t, t), pair, ("pred", "pred")))
            joined = lambda a, b, c, f=pair: tuple(x | c for x in f(a, b))  # noqa: E731
            out.append(Case(f"setp.{name}.or.{t}", (t, t, "pred"), joined, ("pred", "pred")))
    return out


def set_cases() -> list[Case]:
    out = []
    pairs = [("ge", "s32"), ("ltu", "f32"), ("ls", "u64"), ("eq", "b16"), ("gt", "f64")]
    for dtype in ("u32", "s32", "f32", "f16", "bf16"):
        out += [set_case(name, dtype, t, combine) for name, t in pairs for combine in ("", ".xor")]
        if dtype != "bf16":
            out.append(set_case("lt", dtype, "f32", "", ".ftz"))
    for t in ("f16", "bf16"):
        for dtype in ("u16", "s16", "u32", "s32", t):
            out += [set_case("gt", dtype, t), set_case("nan", dtype, t, ".or")]
    out.append(set_case("leu", "u32", "f16", "", ".ftz"))
    for t in ("f16x2", "bf16x2"):
        for dtype in (t, "u32", "s32"):
            out += [set_packed(name, dtype, t, combine) for name in ("lt", "equ") for combine in ("", ".and")]
    return out


def set_case(name: str, dtype: str, t: str, combine: str = "", ftz: str = "") -> Case:
    test = compare(name, t, bool(ftz))
    opcode = f"set.{name}{combine}{ftz}.{dtype}.{t}"
    if combine:
        oracle = lambda a, b, c: one(dtype) if BOOLS[combine[1:]](test(a, b), bool(c)) else 0  # noqa: E731
        return Case(opcode, (t, t, "pred"), oracle, (dtype,))
    return Case(opcode, (t, t), lambda a, b: one(dtype) if test(a, b) else 0, (dtype,))


def set_packed(name: str, dtype: str, t: str, combine: str) -> Case:
    test = compare(name, t.removesuffix("x2"))
    yes = one(dtype.removesuffix("x2")) if dtype == t else 0xFFFF

    def half(a: int, b: int, c: int) -> int:
        answer = test(a, b)
        return yes if (BOOLS[combine[1:]](answer, bool(c)) if combine else answer) else 0

    def oracle(a: int, b: int, c: int = 0) -> int:
        return half(a & 0xFFFF, b & 0xFFFF, c) | half(a >> 16, b >> 16, c) << 16

    return Case(f"set.{name}{combine}.{dtype}.{t}", (t, t, "pred") if combine else (t, t), oracle, (dtype,))


CASES = setp_cases() + set_cases()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_comparison(case):
    run_case(case)
