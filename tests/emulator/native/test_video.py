"""SIMD video instructions against the pseudocode of the PTX ISA."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from cases import Case, prepare_cases, run_case, sign, wrap

from dsv4lib.emulator.native import video  # noqa: F401

TYPES = ("u32", "s32")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "avrg": lambda a, b: a + b + (a + b >= 0) >> 1,
    "absdiff": lambda a, b: abs(a - b),
    "min": min,
    "max": max,
}


def part(value: int, bits: int, k: int, t: str) -> int:
    found = value >> bits * k & (1 << bits) - 1
    return sign(found, bits) if t == "s32" else found


def oracle(count: int, function: Callable[[int, int], int], types: tuple[str, str, str], end: str):
    dtype, atype, btype = types
    bits = 32 // count
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype == "s32" else (0, (1 << bits) - 1)

    def run(a: int, b: int, c: int) -> int:
        found = [function(part(a, bits, k, atype), part(b, bits, k, btype)) for k in range(count)]
        if end == ".sat":
            found = [max(low, min(high, x)) for x in found]
        if end == ".add":
            return wrap(c + sum(part(x, bits, 0, dtype) for x in found), 32)
        return sum((x & (1 << bits) - 1) << bits * k for k, x in enumerate(found))

    return run


def cases() -> list[Case]:
    out, operands = [], ("b32",) * 3
    for count in (2, 4):
        for a in TYPES:
            for b in TYPES:
                for end in ("", ".sat", ".add"):
                    for name, function in OPERATIONS.items():
                        for d in TYPES:
                            run = oracle(count, function, (d, a, b), end)
                            out.append(Case(f"v{name}{count}.{d}.{a}.{b}{end}", operands, run))
                for end in ("", ".add"):
                    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
                        run = oracle(count, getattr(operator, name), ("u32", a, b), end)
                        out.append(Case(f"vset{count}.{a}.{b}.{name}{end}", operands, run))
    return out


CASES = cases()


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fields(case):
    run_case(case)
