"""Integer arithmetic against Python integers."""

from __future__ import annotations

import pytest
from cases import Case, by_halves, clamp, prepare_cases, run_case, sign, typed, width, wrap

from dsv4lib.emulator.native import abi

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def quotient(a: int, b: int) -> int:
    """Towards zero; -1 (all ones) for a zero divisor."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def on(t: str, function, out: str | None = None):
    """Oracle of Python integers of type ``t``."""
    bits = width(out or t)
    return lambda *values: wrap(function(*(typed(v, t) for v in values)), bits)


def low24(value: int, t: str) -> int:
    return sign(value & 0xFFFFFF, 24) if t == "s32" else value & 0xFFFFFF


def extract(value: int, bits: int, k: int, t: str) -> int:
    part = value >> (bits * k) & ((1 << bits) - 1)
    return sign(part, bits) if t == "s32" else part


def dot(lanes: list[tuple[int, int, int]], ta: str, tb: str):
    """dp4a, dp2a: a list of (bits of a, index in a, index in b)."""

    def oracle(a: int, b: int, c: int) -> int:
        return wrap(c + sum(extract(a, bits, i, ta) * extract(b, 8, j, tb) for bits, i, j in lanes), 32)

    return oracle


def basic() -> list[Case]:
    out = []
    for t in INTEGERS:
        n = width(t)
        for name, function in {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul.lo": lambda a, b: a * b,
            "mul.hi": lambda a, b, n=n: a * b >> n,
            "div": quotient,
            "rem": lambda a, b: a - quotient(a, b) * b if b else -1,
            "min": min,
            "max": max,
        }.items():
            out.append(Case(f"{name}.{t}", (t, t), on(t, function), (t,)))
        for name, function in {
            "mad.lo": lambda a, b, c: a * b + c,
            "mad.hi": lambda a, b, c, n=n: (a * b >> n) + c,
            "sad": lambda a, b, c: c + abs(a - b),
        }.items():
            out.append(Case(f"{name}.{t}", (t, t, t), on(t, function), (t,)))
    for t, w in WIDE.items():
        out.append(Case(f"mul.wide.{t}", (t, t), on(t, lambda a, b: a * b, w), (w,)))
        out.append(
            Case(
                f"mad.wide.{t}",
                (t, t, w),
                lambda a, b, c, t=t, w=w: wrap(typed(a, t) * typed(b, t) + c, width(w)),
                (w,),
            )
        )
    for t in ("s16", "s32", "s64"):
        out.append(Case(f"abs.{t}", (t,), on(t, abs), (t,)))
        out.append(Case(f"neg.{t}", (t,), on(t, lambda a: -a), (t,)))
    return out


def packed() -> list[Case]:
    out = []
    for t in ("u16", "s16"):
        for name, function in {"add": lambda a, b: a + b, "min": min, "max": max}.items():
            out.append(Case(f"{name}.{t}x2", (f"{t}x2", f"{t}x2"), by_halves(on(t, function)), (f"{t}x2",)))
    for name, best in {"min": min, "max": max}.items():
        pair = by_halves(on("s16", lambda a, b, best=best: max(best(a, b), 0)))
        out.append(Case(f"{name}.relu.s16x2", ("s16x2", "s16x2"), pair, ("s16x2",)))
        out.append(Case(f"{name}.s16x2.relu", ("s16x2", "s16x2"), pair, ("s16x2",)))
        out.append(Case(f"{name}.relu.s32", ("s32", "s32"), on("s32", lambda a, b, best=best: max(best(a, b), 0))))
    return out


def saturating() -> list[Case]:
    return [
        Case("add.sat.s32", ("s32", "s32"), on("s32", lambda a, b: clamp(a + b, "s32"))),
        Case("sub.sat.s32", ("s32", "s32"), on("s32", lambda a, b: clamp(a - b, "s32"))),
        Case("mad.hi.sat.s32", ("s32",) * 3, on("s32", lambda a, b, c: clamp((a * b >> 32) + c, "s32"))),
        Case(
            "mad24.hi.sat.s32",
            ("s32",) * 3,
            lambda a, b, c: wrap(
                clamp(sign((low24(a, "s32") * low24(b, "s32") >> 16) & 0xFFFFFFFF, 32) + sign(c, 32), "s32"), 32
            ),
        ),
    ]


def narrow() -> list[Case]:
    out = []
    for t in ("u32", "s32"):
        for mode, shift in {"lo": 0, "hi": 16}.items():
            product = lambda a, b, t=t, shift=shift: low24(a, t) * low24(b, t) >> shift  # noqa: E731
            out.append(Case(f"mul24.{mode}.{t}", (t, t), lambda a, b, p=product: wrap(p(a, b), 32)))
            out.append(Case(f"mad24.{mode}.{t}", (t, t, t), lambda a, b, c, p=product: wrap(p(a, b) + c, 32)))
        for u in ("u32", "s32"):
            out.append(Case(f"dp4a.{t}.{u}", ("b32",) * 3, dot([(8, k, k) for k in range(4)], t, u)))
            for mode, first in {"lo": 0, "hi": 2}.items():
                out.append(Case(f"dp2a.{mode}.{t}.{u}", ("b32",) * 3, dot([(16, k, first + k) for k in (0, 1)], t, u)))
    return out


CARRY = 0x3C5A0FF1


def extended() -> list[Case]:
    """Results only; the carry out is tested by itself below. Carry in comes from the context, by lane."""
    out = []
    for t in ("u32", "s32", "u64", "s64"):
        out.append(Case(f"add.cc.{t}", (t, t), on(t, lambda a, b: a + b), (t,)))
        out.append(Case(f"sub.cc.{t}", (t, t), on(t, lambda a, b: a - b), (t,)))
        for mode in ("lo", "hi"):
            shift = width(t) if mode == "hi" else 0
            out.append(Case(f"mad.{mode}.cc.{t}", (t, t, t), on(t, lambda a, b, c, s=shift: (a * b >> s) + c), (t,)))
    return out


CASES = basic() + packed() + saturating() + narrow() + extended()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integer(case):
    run_case(case)


CARRIES = [
    *(
        f"{op}.{t}"
        for op in ("add.cc", "addc", "addc.cc", "sub.cc", "subc", "subc.cc")
        for t in ("u32", "s32", "u64", "s64")
    ),
    *(
        f"{op}.{t}"
        for op in ("mad.lo.cc", "madc.hi", "madc.lo", "madc.hi.cc", "madc.lo.cc", "mad.hi.cc")
        for t in ("u32", "s32", "u64", "s64")
    ),
]


@pytest.mark.parametrize("opcode", CARRIES)
@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0F0F1234])
def test_carry(opcode, mask):
    """Result and condition code, lane by lane; inactive lanes keep both. One flag: it says *no* borrow of a difference.

    So does CUDA's division of 128 bits, which adds (``addc``) what a chain of ``subc.cc`` left.
    """
    import random

    import numpy as np
    from cases import draw
    from harness import lanes, unit

    op, t = opcode.rsplit(".", 1)
    bits = width(t)
    rng = random.Random(opcode)
    count = 3 if op.startswith("mad") else 2
    u = unit(opcode, " ".join([str(bits)] * (count + 1)))
    sources = [[draw(rng, t) for _ in range(32)] for _ in range(count)]
    u.context["carry"] = CARRY
    u.run({1 + i: np.array(v, f"u{bits // 8}") for i, v in enumerate(sources)}, mask)
    uses = op.startswith(("addc", "subc", "madc"))
    out = u.register(0)
    expected_carry = 0
    for lane in range(32):
        carry = CARRY >> lane & 1 if uses else 0
        values = [s[lane] for s in sources]
        if op.startswith("mad"):
            a, b = typed(values[0], t), typed(values[1], t)
            values = [wrap(a * b >> (bits if ".hi" in op else 0), bits), values[2]]
        if op.startswith("sub"):
            total = values[0] - values[1] - (uses and not carry)
            flag = total >= 0
        else:
            total = values[0] + values[1] + carry
            flag = total >= 1 << bits
        if not lanes(mask)[lane]:
            expected_carry |= CARRY & 1 << lane
            assert int(out[lane]) == int.from_bytes(b"\xcd" * (bits // 8), "little")
            continue
        assert int(out[lane]) == wrap(total, bits), (opcode, lane)
        expected_carry |= (flag if ".cc" in op else CARRY >> lane & 1) << lane
    assert int(u.context["carry"][0]) == expected_carry
    assert "carry" in abi.CONTEXT.names
