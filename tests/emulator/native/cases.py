"""Test cases of lane-wise instruction variants: random and edge inputs by operand kind, one Python oracle per lane."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from harness import check, prepare

WIDTH = {
    "pred": 1,
    "shift": 32,
    "byte": 32,
    "rank": 32,
    "b8": 8,
    "f16x2": 32,
    "bf16x2": 32,
    "f32x2": 64,
    "bf16": 16,
    "e2m1x2": 8,
    "b128": 128,
}
EDGES = {
    "f16": [0, 1, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x3800, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7400, 0x3400],
    "bf16": [0, 1, 0x7F, 0x80, 0x81, 0x3F80, 0x3F7F, 0x3F81, 0x3F00, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x4B00, 0x0040],
    "f32": [
        *(0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F000000, 0x3F000001, 0x3EFFFFFF),
        *(0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x4B000000, 0x4B7FFFFF, 0x4F000000, 0x4EFFFFFF, 0x4F800000),
        *(0x5F000000, 0x34000000, 0x33800000, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x38800000, 0x33000001, 0x3F808000),
        *(0x3F818000, 0x3F801000, 0x3F803000, 0x7F7F8000, 0x43E80000, 0x43E00000, 0x40400000, 0x40A00000, 0x3E800000),
        *(0x40C00000, 0x41E00000, 0x00400000, 0x00400001, 0x003FFFFF, 0x7F000000, 0x7F000001, 0x42FE0000, 0x437F0000),
    ],
    "f64": [
        *(0, 1, (1 << 52) - 1, 1 << 52, 0x3FF << 52, (0x3FF << 52) + 1, (0x3FF << 52) - 1, 0x3FE << 52),
        *(0x7FEFFFFFFFFFFFFF, 0x7FF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 0x433 << 52, 0x41E << 52, 0x43E << 52),
        *(0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x47EFFFFFEFFFFFFF, 0x36A0 << 48, 0x3690 << 48, 0x40EFFE0000000000),
        *(0x3F00000010000000, 0x41DFFFFFFFC00000, 0x41EFFFFFFFE00000, 0x43DFFFFFFFFFFFFF),
    ],
}
LANES = 32


def width(kind: str) -> int:
    """Bits of a register of this kind."""
    return WIDTH.get(kind) or int(kind.removesuffix("x2")[1:]) * (2 if kind.endswith("x2") else 1)


def draw(rng: random.Random, kind: str) -> int:
    """One raw value, edges likely."""
    if kind == "pred":
        return rng.getrandbits(1)
    if kind == "rank":
        return rng.randrange(16)
    if kind == "shift":
        return rng.choice([rng.randrange(70), rng.choice([0, 1, 15, 16, 31, 32, 33, 63, 64, 255, 256, 2**32 - 1])])
    if kind == "byte":
        return rng.getrandbits(32) & ~0xFF | rng.choice([rng.randrange(70), rng.randrange(256)])
    if kind.endswith("x2") and kind.startswith(("f", "bf", "u16", "s16")):
        part = kind.removesuffix("x2")
        return draw(rng, part) | draw(rng, part) << width(part)
    bits = width(kind)
    if kind in EDGES:
        if rng.random() < 0.5:
            return rng.choice(EDGES[kind]) | rng.getrandbits(1) << (bits - 1)
        if rng.random() < 0.5:  # numbers of ordinary size, on which rounding matters
            fraction = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[kind]
            bias = {"f16": 15, "bf16": 127, "f32": 127, "f64": 1023}[kind]
            exponent = bias + rng.randrange(-12, 12)
            return rng.getrandbits(1) << (bits - 1) | exponent << fraction | rng.getrandbits(fraction)
        return rng.getrandbits(bits)
    if bits == 64 and rng.random() < 0.3:  # next to a short number: where rounding twice would show
        return (rng.getrandbits(rng.choice([11, 12, 24, 25])) << rng.randrange(20, 39)) + rng.choice(
            [-1, 0, 1]
        ) & 2**64 - 1
    if rng.random() < 0.3:
        top = 1 << (bits - 1)
        return rng.choice(
            [0, 1, 2, 3, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 127, 128, 255, 65535, 32768]
        ) % (2 * top)
    return rng.getrandbits(rng.randrange(1, bits + 1)) if rng.random() < 0.5 else rng.getrandbits(bits)


@dataclass(frozen=True)
class Case:
    """An instruction variant and its oracle.

    Attributes:
        opcode, shape: what is run.
        sources: kind of every source operand.
        oracle: raw source bits -> raw result bits (a tuple for several destinations, in operand order).
        results: kinds of the destinations.
        rows: warps of inputs.
        alias: also run with the destination in the register of the first source as wide as it.
    """

    opcode: str
    sources: tuple[str, ...]
    oracle: Callable[..., int | tuple[int, ...]]
    results: tuple[str, ...] = ("b32",)
    shape: str = ""
    rows: int = 4
    alias: bool = True
    context: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.opcode} {self.form}"

    @property
    def form(self) -> str:
        """Shape string."""
        if self.shape:
            return self.shape
        heads = "|".join(str(width(k)) for k in self.results)
        return " ".join([heads, *(str(width(k)) for k in self.sources)])


def arrays(case: Case, columns: list[list[list[int]]], kinds: tuple[str, ...]) -> list[np.ndarray]:
    """Raw values [operand][row][lane] as arrays of the register width."""
    out = []
    for values, kind in zip(columns, kinds, strict=True):
        bits = width(kind)
        if bits == 1:
            out.append(np.array(values, bool))
        elif bits == 128:
            low = np.array([[v & (2**64 - 1) for v in row] for row in values], np.uint64)
            high = np.array([[v >> 64 for v in row] for row in values], np.uint64)
            out.append(np.concatenate([low, high], axis=1))
        else:
            out.append(np.array(values, f"u{bits // 8}"))
    return out


def run_case(case: Case) -> None:
    """Compare the handler with the oracle."""
    rng = random.Random(zlib.crc32(case.opcode.encode()))
    grid = [[[draw(rng, kind) for kind in case.sources] for _ in range(LANES)] for _ in range(case.rows)]
    answers = [[case.oracle(*lane) for lane in row] for row in grid]
    answers = [[a if isinstance(a, tuple) else (a,) for a in row] for row in answers]
    sources = arrays(
        case, [[[lane[i] for lane in row] for row in grid] for i in range(len(case.sources))], case.sources
    )
    results = arrays(
        case, [[[lane[i] for lane in row] for row in answers] for i in range(len(case.results))], case.results
    )
    first = len(case.results)
    inputs = {first + i: a for i, a in enumerate(sources)}
    want = dict(enumerate(results))
    any_nan = case.results[0] == "f64"
    check(case.opcode, case.form, inputs, want, any_nan=any_nan, **case.context)
    twins = [first + i for i, k in enumerate(case.sources) if width(k) == width(case.results[0])]
    if case.alias and twins and "i" not in case.form:
        short = {i: a[:1] for i, a in inputs.items()}
        check(
            case.opcode,
            case.form,
            short,
            {i: a[:1] for i, a in want.items()},
            same={0: twins[0]},
            any_nan=any_nan,
            **case.context,
        )


def prepare_cases(cases: list[Case]) -> None:
    """Compile a whole table in one batch."""
    prepare([(case.opcode, case.form) for case in cases])


def sign(value: int, bits: int) -> int:
    """Two's complement to a Python int."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def wrap(value: int, bits: int) -> int:
    """Python int to raw bits."""
    return value & ((1 << bits) - 1)


def typed(value: int, ptx: str) -> int:
    """Raw bits of an integer type as a Python int."""
    bits = width(ptx)
    return sign(value, bits) if ptx.startswith("s") else value


def limits(ptx: str) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    bits = int(ptx[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ptx.startswith("s") else (0, (1 << bits) - 1)


def clamp(value: int, ptx: str) -> int:
    """Value limited to an integer type."""
    low, high = limits(ptx)
    return min(max(value, low), high)


def by_halves(scalar: Callable[..., int], bits: int = 16) -> Callable[..., int]:
    """A packed oracle from a scalar one."""
    mask = (1 << bits) - 1

    def packed(*values: int) -> int:
        return scalar(*(v & mask for v in values)) | scalar(*(v >> bits for v in values)) << bits

    return packed
