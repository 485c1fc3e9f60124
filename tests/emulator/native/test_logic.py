"""Bit instructions against Python integers."""

from __future__ import annotations

import pytest
from cases import Case, prepare_cases, run_case, sign, width, wrap

BITWISE = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


def full(n: int) -> int:
    return (1 << n) - 1


def bitwise() -> list[Case]:
    out = []
    for t in ("b16", "b32", "b64", "pred"):
        n = width(t)
        for name, function in BITWISE.items():
            out.append(Case(f"{name}.{t}", (t, t), function, (t,)))
        out.append(Case(f"not.{t}", (t,), lambda a, n=n: a ^ full(n), (t,)))
        if t != "pred":
            out.append(Case(f"cnot.{t}", (t,), lambda a: int(a == 0), (t,)))
    out.append(Case("and.pred", ("pred", "pred"), lambda a, b: a & (1 - b), ("pred",), shape="1 1 !1"))
    return out


def table(a: int, b: int, c: int, lut: int) -> int:
    return sum((lut >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def lop3_bool(combine):
    def oracle(a, b, c, lut, q):
        d = table(a, b, c, lut & 0xFF)
        return d, int(combine(d != 0, bool(q)))

    return oracle


def shifts() -> list[Case]:
    out = []
    for t in ("b16", "b32", "b64"):
        n = width(t)
        out.append(Case(f"shl.{t}", (t, "shift"), lambda a, s, n=n: wrap(a << s, n) if s < n else 0, (t,)))
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"):
        n = width(t)
        if t[0] == "s":
            oracle = lambda a, s, n=n: wrap(sign(a, n) >> min(s, n), n)  # noqa: E731
        else:
            oracle = lambda a, s, n=n: a >> s if s < n else 0  # noqa: E731
        out.append(Case(f"shr.{t}", (t, "shift"), oracle, (t,)))
    for mode in ("wrap", "clamp"):
        amount = (lambda c: c & 31) if mode == "wrap" else (lambda c: min(c, 32))
        left = lambda a, b, c, k=amount: (b << 32 | a) << k(c) >> 32 & full(32)  # noqa: E731
        right = lambda a, b, c, k=amount: (b << 32 | a) >> k(c) & full(32)  # noqa: E731
        out.append(Case(f"shf.l.{mode}.b32", ("b32", "b32", "shift"), left))
        out.append(Case(f"shf.r.{mode}.b32", ("b32", "b32", "shift"), right))
    return out


def find(value: int, n: int, is_signed: bool, shiftamt: bool) -> int:
    if is_signed and value >> (n - 1):
        value = ~value & full(n)
    if value == 0:
        return full(32)
    position = value.bit_length() - 1
    return n - 1 - position if shiftamt else position


def nth(mask: int, base: int, offset: int) -> int:
    """The PTX ISA's pseudocode of fns."""
    base, offset = base & 31, sign(offset, 32)
    if offset == 0:
        return base if mask >> base & 1 else full(32)
    position, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += step
    return full(32)


def counts() -> list[Case]:
    out = [
        Case("fns.b32", ("b32", "byte", "shift"), nth, rows=6),
        Case("fns.b32", ("b32", "byte", "s32"), lambda m, b, k: nth(m, b, k), rows=3),
    ]
    for n in (32, 64):
        t = f"b{n}"
        out.append(Case(f"popc.{t}", (t,), lambda a: a.bit_count()))
        out.append(Case(f"clz.{t}", (t,), lambda a, n=n: n - a.bit_length()))
        out.append(Case(f"brev.{t}", (t,), lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2), (t,)))
        for kind in ("u", "s"):
            for amount in ("", ".shiftamt"):
                oracle = lambda a, n=n, s=kind == "s", k=bool(amount): find(a, n, s, k)  # noqa: E731
                out.append(Case(f"bfind{amount}.{kind}{n}", (t,), oracle))
    return out


def extract(is_signed: bool, n: int):
    """The PTX ISA's pseudocode of bfe."""

    def oracle(a: int, b: int, c: int) -> int:
        position, count = (min(b, 0xFF), min(c, 0xFF)) if n == 64 else (b & 0xFF, c & 0xFF)
        last = min(position + count - 1, n - 1)
        fill = a >> last & 1 if is_signed and count else 0
        bit = lambda i: a >> (position + i) & 1 if i < count and position + i < n else fill  # noqa: E731
        return sum(bit(i) << i for i in range(n))

    return oracle


def insert(n: int):
    """The PTX ISA's pseudocode of bfi."""

    def oracle(a: int, b: int, c: int, d: int) -> int:
        position, count = c & 0xFF, d & 0xFF
        for i in range(count):
            if position + i < n:
                b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
        return b

    return oracle


def mask_of(mode: str):
    """The PTX ISA's pseudocode of bmsk."""

    def oracle(a: int, b: int) -> int:
        start, count = a & 31, b & 31
        first = full(32) << start & full(32)
        over = start + count >= 32
        if mode == "clamp":
            if a >= 32:
                over, first = True, 0
            over = over or b >= 32
        second = 0 if over else full(32) if count == 0 else full(32) << (start + count) & full(32)
        return first & ~second

    return oracle


def extend(mode: str, t: str):
    """The PTX ISA's pseudocode of szext."""

    def oracle(a: int, b: int) -> int:
        count = b & 31
        too_large = b >= 32 and mode == "clamp"
        mask = 0 if too_large else full(32) << count & full(32)
        negative = count and not too_large and t == "s32" and a >> (count - 1) & 1
        return a & ~mask | (mask if negative else 0)

    return oracle


def fields() -> list[Case]:
    out = []
    for n in (32, 64):
        out.append(Case(f"bfi.b{n}", (f"b{n}", f"b{n}", "byte", "byte"), insert(n), (f"b{n}",), rows=6))
        for kind in ("u", "s"):
            out.append(Case(f"bfe.{kind}{n}", (f"b{n}", "byte", "byte"), extract(kind == "s", n), (f"b{n}",), rows=6))
    for mode in ("clamp", "wrap"):
        out.append(Case(f"bmsk.{mode}.b32", ("shift", "shift"), mask_of(mode), rows=6))
        for t in ("u32", "s32"):
            out.append(Case(f"szext.{mode}.{t}", ("b32", "shift"), extend(mode, t), rows=6))
    return out


def permute(mode: str):
    """prmt; the special modes by their rule rather than a table of selectors."""

    def pick(c: int, k: int) -> int:
        c &= 3
        return {
            "f4e": c + k,
            "b4e": (c - k) % 8,
            "rc8": c,
            "ecl": max(c, k),
            "ecr": min(c, k),
            "rc16": (c & 1) * 2 + (k & 1),
        }[mode]

    def oracle(a: int, b: int, c: int) -> int:
        source = b << 32 | a
        out = 0
        for k in range(4):
            selector = c >> 4 * k & 15 if not mode else pick(c, k)
            byte = source >> 8 * (selector & 7) & 0xFF
            if selector & 8:
                byte = 0xFF if byte & 0x80 else 0
            out |= byte << 8 * k
        return out

    return oracle


CASES = [
    *bitwise(),
    Case("lop3.b32", ("b32", "b32", "b32", "byte"), lambda a, b, c, lut: table(a, b, c, lut & 0xFF), rows=6),
    Case("lop3.or.b32", ("b32", "b32", "b32", "byte", "pred"), lop3_bool(lambda t, q: t or q), ("b32", "pred")),
    Case("lop3.and.b32", ("b32", "b32", "b32", "byte", "pred"), lop3_bool(lambda t, q: t and q), ("b32", "pred")),
    *shifts(),
    *counts(),
    *fields(),
    *(
        Case(f"prmt.b32{'.' if m else ''}{m}", ("b32", "b32", "b32"), permute(m))
        for m in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    ),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(case):
    run_case(case)


def test_fns_over_full_masks():
    """The 30th to 40th set bit, up and down, with all or all but one bit set."""
    import numpy as np
    from harness import unit

    u = unit("fns.b32", "32 32 32 32")
    offsets = [k if k < 16 else 16 - k for k in range(32)]
    for mask in (full(32), full(32) ^ 1, full(32) >> 1):
        for base in (0, 31):
            for start in (0, 24, 30):
                shifted = [wrap(o + (start if o > 0 else -start), 32) for o in offsets]
                u.run(
                    {1: np.full(32, mask, np.uint32), 2: np.full(32, base, np.uint32), 3: np.array(shifted, np.uint32)}
                )
                np.testing.assert_array_equal(u.register(0), [nth(mask, base, o) for o in shifted])
