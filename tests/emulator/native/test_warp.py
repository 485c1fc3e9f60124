"""Instructions across lanes against direct Python transcriptions of the PTX ISA's rules."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cases import draw, sign
from harness import FULL, PARTIAL, lanes, prepare, unit, word

OLD = 0xCDCDCDCD
MODES = ("up", "down", "bfly", "idx")
REDUX = ("add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")
FLOAT_REDUX = tuple(f"redux.sync.{op}{a}{n}.f32" for op in ("min", "max") for a in ("", ".abs") for n in ("", ".NaN"))
VOTES = ("all", "any", "uni")
SHAPES = {
    **{f"shfl.sync.{m}.b32": "32|1 32 32 32 32" for m in MODES},
    **{f"vote.sync.{m}.pred": "1 1 32" for m in VOTES},
    "vote.sync.ballot.b32": "32 1 32",
    "activemask.b32": "32",
    "movmatrix.sync.aligned.m8n8.trans.b16": "32 32",
    "elect.sync": "32|1 32",
    "match.any.sync.b32": "32 32 32",
    "match.any.sync.b64": "32 64 32",
    "match.all.sync.b32": "32|1 32 32",
    "match.all.sync.b64": "32|1 64 32",
    **{f"redux.sync.{op}": "32 32 32" for op in REDUX},
    **dict.fromkeys(FLOAT_REDUX, "32 32 32"),
}
OPCODES = list(SHAPES)
MASKS = (FULL, PARTIAL, 0x00000001, 0x80000000, 0x0000FFFF)
MEMBERS = (FULL, 0x80FF0FF1 | PARTIAL)  # a lane that executes outside its member mask is undefined


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare(
        [
            *SHAPES.items(),
            ("shfl.sync.idx.b32", "32 32 i i i"),
            ("elect.sync", "_|1 i"),
            ("match.all.sync.b32", "32 32 i"),
        ]
    )


def rng_for(name: str) -> random.Random:
    return random.Random(name)


def full(value: int) -> np.ndarray:
    return np.full(32, value & 0xFFFFFFFF, np.uint32)


def expect(got: np.ndarray, want: list[int], mask: int) -> None:
    """32-bit results in the active lanes, the old pattern elsewhere."""
    np.testing.assert_array_equal(got, [w if lanes(mask)[i] else OLD for i, w in enumerate(want)])


def expect_pred(got: np.ndarray, want: list[bool], mask: int) -> None:
    assert int(got[0]) == word(want) & mask | OLD & ~mask & FULL


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The PTX ISA's pseudocode of shfl."""
    b, cval, segment = b & 31, c & 31, c >> 8 & 31
    high, low = lane & segment | cval & ~segment, lane & segment
    j, inside = {
        "up": (lane - b, lane - b >= high),
        "down": (lane + b, lane + b <= high),
        "bfly": (lane ^ b, (lane ^ b) <= high),
        "idx": (low | (b & ~segment & 31), (low | (b & ~segment & 31)) <= high),
    }[mode]
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", MASKS)
def test_shfl(mode, mask):
    """Random distances and segments, uniform and different per lane; the destination may be the source."""
    rng = rng_for(mode)
    segments = [0x1F, 0x0, 0x181F, 0x1C1F, 0x1F1F, 0x1800, 0x101F, 0x7]
    for same in ({}, {0: 2}):
        u = unit(f"shfl.sync.{mode}.b32", "32|1 32 32 32 32", same)
        for trial in range(20):
            a = [rng.getrandbits(32) for _ in range(32)]
            b = [rng.randrange(64)] * 32 if trial % 2 else [rng.randrange(32) for _ in range(32)]
            c = [rng.choice(segments)] * 32
            u.run(
                {2: np.array(a, np.uint32), 3: np.array(b, np.uint32), 4: np.array(c, np.uint32), 5: full(FULL)}, mask
            )
            picks = [source_lane(mode, lane, b[lane], c[lane]) for lane in range(32)]
            want = [a[j] for j, _ in picks]
            old = a if same else [OLD] * 32
            active = lanes(mask)
            np.testing.assert_array_equal(u.register(0), [w if active[i] else old[i] for i, w in enumerate(want)])
            expect_pred(u.register(1), [inside for _, inside in picks], mask)


def test_shfl_without_predicate():
    u = unit("shfl.sync.idx.b32", "32 32 i i i")
    a = np.arange(32, dtype=np.uint32) * 3
    u.run({1: a, 2: full(5), 3: full(31), 4: full(FULL)})
    assert (u.register(0) == 15).all()


def test_movmatrix():
    """Against numpy's transpose; lane i of a matrix in row order holds two neighbours."""
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8) * 771
    u = unit("movmatrix.sync.aligned.m8n8.trans.b16", "32 32", {0: 1})
    u.run({1: matrix.reshape(-1).view(np.uint32)})
    np.testing.assert_array_equal(u.register(0).view(np.uint16).reshape(8, 8), matrix.T)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("member", MEMBERS)
def test_votes(mask, member):
    rng = rng_for("votes")
    part = mask & member
    for pattern in (0, FULL, part, ~part & FULL, *(rng.getrandbits(32) for _ in range(4))):
        yes = [bool(pattern >> i & 1) for i in range(32) if part >> i & 1]
        answers = {"all": all(yes), "any": any(yes), "uni": len(set(yes)) <= 1}
        for mode in VOTES:
            u = unit(f"vote.sync.{mode}.pred", "1 1 32")
            u.run({1: pattern, 2: full(member)}, mask)
            expect_pred(u.register(0), [answers[mode]] * 32, mask)
        u = unit("vote.sync.ballot.b32", "32 1 32")
        u.run({1: pattern, 2: full(member)}, mask)
        expect(u.register(0), [pattern & part] * 32, mask)
        u = unit("vote.sync.ballot.b32", "32 !1 32")
        u.run({1: pattern, 2: full(member)}, mask)
        expect(u.register(0), [~pattern & part] * 32, mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("member", MEMBERS)
def test_elect_and_activemask(mask, member):
    part = mask & member
    leader = (part & -part).bit_length() - 1
    u = unit("elect.sync", "32|1 32")
    u.run({2: full(member)}, mask)
    expect(u.register(0), [leader] * 32, mask)
    expect_pred(u.register(1), [i == leader for i in range(32)], mask)
    u = unit("elect.sync", "_|1 i")
    u.run({2: full(member)}, mask)
    assert (u.register(0) == OLD).all()
    expect_pred(u.register(1), [i == leader for i in range(32)], mask)
    u = unit("activemask.b32", "32")
    u.run({}, mask)
    expect(u.register(0), [mask] * 32, mask)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("mask", MASKS)
def test_match(bits, mask):
    rng = rng_for(f"match{bits}")
    part = [i for i in range(32) if (mask & MEMBERS[1]) >> i & 1]
    values = [rng.choice([7, 9, 7 | 1 << (bits - 1), 11]) for _ in range(32)]
    a = np.array(values, f"u{bits // 8}")
    u = unit(f"match.any.sync.b{bits}", f"32 {bits} 32")
    u.run({1: a, 2: full(MEMBERS[1])}, mask)
    for i in part:
        assert int(u.register(0)[i]) == sum(1 << j for j in part if values[j] == values[i])
    idle = [i for i in range(32) if not mask >> i & 1]
    assert (u.register(0)[idle] == OLD).all()
    u = unit(f"match.all.sync.b{bits}", f"32|1 {bits} 32")
    for inputs in (a, np.full_like(a, 5)):
        u.run({2: inputs, 3: full(MEMBERS[1])}, mask)
        same = len({int(inputs[i]) for i in part}) == 1
        expect(u.register(0), [sum(1 << j for j in part) if same else 0] * 32, mask)
        expect_pred(u.register(1), [same] * 32, mask)
    u = unit("match.all.sync.b32", "32 32 i")
    u.run({1: full(3), 2: full(FULL)}, mask)
    expect(u.register(0), [mask] * 32, mask)


@pytest.mark.parametrize("variant", REDUX)
@pytest.mark.parametrize("mask", MASKS)
def test_redux(variant, mask):
    op, t = variant.split(".")
    rng = rng_for(variant)
    u = unit(f"redux.sync.{variant}", "32 32 32")
    for member in MEMBERS:
        raw = [draw(rng, "u32") for _ in range(32)]
        part = [i for i in range(32) if (mask & member) >> i & 1]
        values = [sign(raw[i], 32) if t == "s32" else raw[i] for i in part]
        total = values[0]
        for v in values[1:]:
            total = {
                "add": lambda x, y: x + y,
                "min": min,
                "max": max,
                "and": lambda x, y: x & y,
                "or": lambda x, y: x | y,
                "xor": lambda x, y: x ^ y,
            }[op](total, v)
        u.run({1: np.array(raw, np.uint32), 2: full(member)}, mask)
        expect(u.register(0), [total & 0xFFFFFFFF] * 32, mask)


@pytest.mark.parametrize("opcode", FLOAT_REDUX)
@pytest.mark.parametrize("mask", MASKS)
def test_redux_float(opcode, mask):
    """-0 < +0; NaN loses unless all are or .NaN is there."""
    rng = rng_for(opcode)
    u = unit(opcode, "32 32 32")
    nan = 0x7FC00000
    pools = [
        [0, 0x80000000],
        [draw(rng, "f32") for _ in range(8)],
        [nan],
        [0x3F800000, 0xBF800000, nan],
        [0x7F800000, 0xFF800000, 0x40000000],
    ]
    for pool in pools:
        raw = [rng.choice(pool) for _ in range(32)]
        part = [raw[i] & (0x7FFFFFFF if ".abs" in opcode else FULL) for i in range(32) if mask >> i & 1]
        numbers = [x for x in part if x & 0x7FFFFFFF <= 0x7F800000]
        order = lambda x: (np.uint32(x).view(np.float32), not x >> 31)  # noqa: E731
        pick = max if ".max" in opcode else min
        spoiled = len(numbers) < len(part) if ".NaN" in opcode else not numbers
        want = 0x7FFFFFFF if spoiled else pick(numbers, key=order)
        u.run({1: np.array(raw, np.uint32), 2: full(FULL)}, mask)
        expect(u.register(0), [want] * 32, mask)
