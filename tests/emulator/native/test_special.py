"""Approximate functions: documented error bounds and the fixed results for special inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from harness import prepare, unit

INF, NAN = math.inf, math.nan
SUBNORMAL = float(np.float32(1e-40))
ROWS = 40


def f32(values) -> np.ndarray:
    return np.array(values, np.float32)


def run(opcode: str, *sources: np.ndarray) -> np.ndarray:
    """Apply a float32 instruction to whole arrays."""
    u = unit(opcode, " ".join(["32"] * (len(sources) + 1)))
    out = np.empty(len(sources[0]), np.float32)
    for start in range(0, len(out), 32):
        u.run({1 + i: np.resize(s[start : start + 32], 32).astype(np.float32) for i, s in enumerate(sources)})
        out[start : start + 32] = u.register(0).view(np.float32)[: len(out) - start]
    return out


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance from the exact value in units of the last place of float32 (subnormals have a fixed unit)."""
    unit_in_last_place = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(want), 1e-45))), -126) - 23)
    return np.abs(got.astype(np.float64) - want) / unit_in_last_place


def uniform(low: float, high: float) -> np.ndarray:
    return f32(np.random.default_rng(7).uniform(low, high, 32 * ROWS))


def magnitudes(low: int, high: int) -> np.ndarray:
    """Positive numbers with exponents in a range."""
    rng = np.random.default_rng(8)
    return f32(2.0 ** rng.uniform(low, high, 32 * ROWS))


# opcode: (sources, exact function in float64, largest error in ulp)
ULP = {
    "ex2.approx.f32": (uniform(-148, 127.9), np.exp2, 1.0),
    "ex2.approx.ftz.f32": (uniform(-125, 127.9), np.exp2, 1.0),
    "rcp.approx.f32": (magnitudes(-125, 126), lambda x: 1 / x, 0.501),
    "rcp.approx.ftz.f32": (-magnitudes(-125, 125), lambda x: 1 / x, 0.501),
    "sqrt.approx.f32": (magnitudes(-149, 127), np.sqrt, 0.501),
    "sqrt.approx.ftz.f32": (magnitudes(-125, 127), np.sqrt, 0.501),
    "rsqrt.approx.f32": (magnitudes(-149, 127), lambda x: 1 / np.sqrt(x), 0.501),
    "rsqrt.approx.ftz.f32": (magnitudes(-125, 127), lambda x: 1 / np.sqrt(x), 0.501),
    "tanh.approx.f32": (np.concatenate([uniform(-12, 12), magnitudes(-140, 3)]), np.tanh, 1.0),
    "lg2.approx.f32": (magnitudes(-149, 127), np.log2, 1.0),
    "lg2.approx.ftz.f32": (uniform(0.5, 2), np.log2, 1.0),
    "sin.approx.f32": (uniform(-300, 300), np.sin, 1.0),
    "sin.approx.ftz.f32": (uniform(-6, 6), np.sin, 1.0),
    "cos.approx.f32": (uniform(-300, 300), np.cos, 1.0),
    "cos.approx.ftz.f32": (uniform(-6, 6), np.cos, 1.0),
}
# opcode: input -> result, for zeros, infinities, NaN and subnormals
SPECIAL = {
    "ex2.approx.f32": [
        (-INF, 0.0),
        (-0.0, 1.0),
        (0.0, 1.0),
        (INF, INF),
        (NAN, NAN),
        (128.0, INF),
        (-150.5, 0.0),
        (-149.0, 2.0**-149),
    ],
    "ex2.approx.ftz.f32": [(-INF, 0.0), (SUBNORMAL, 1.0), (INF, INF), (NAN, NAN), (-126.5, 0.0), (-126.0, 2.0**-126)],
    "rcp.approx.f32": [(-INF, -0.0), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN), (2.0**127, 2.0**-127)],
    "rcp.approx.ftz.f32": [(-INF, -0.0), (SUBNORMAL, INF), (-SUBNORMAL, -INF), (2.0**127, 0.0), (-(2.0**127), -0.0)],
    "sqrt.approx.f32": [(-INF, NAN), (-1.0, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, INF), (NAN, NAN), (4.0, 2.0)],
    "sqrt.approx.ftz.f32": [(SUBNORMAL, 0.0), (-SUBNORMAL, -0.0)],
    "rsqrt.approx.f32": [(-INF, NAN), (-1.0, NAN), (-0.0, -INF), (0.0, INF), (INF, 0.0), (NAN, NAN), (4.0, 0.5)],
    "rsqrt.approx.ftz.f32": [(SUBNORMAL, INF), (-SUBNORMAL, -INF)],
    "lg2.approx.f32": [
        (-INF, NAN),
        (-1.0, NAN),
        (-0.0, -INF),
        (0.0, -INF),
        (INF, INF),
        (NAN, NAN),
        (1.0, 0.0),
        (8.0, 3.0),
    ],
    "lg2.approx.ftz.f32": [(SUBNORMAL, -INF), (-SUBNORMAL, -INF), (0.25, -2.0)],
    "sin.approx.f32": [(-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (INF, NAN), (NAN, NAN), (SUBNORMAL, SUBNORMAL)],
    "sin.approx.ftz.f32": [(SUBNORMAL, 0.0), (-SUBNORMAL, -0.0)],
    "cos.approx.f32": [(-INF, NAN), (-0.0, 1.0), (0.0, 1.0), (INF, NAN), (NAN, NAN)],
    "cos.approx.ftz.f32": [(SUBNORMAL, 1.0)],
    "tanh.approx.f32": [(-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (INF, 1.0), (NAN, NAN), (SUBNORMAL, SUBNORMAL)],
}
HALF = {
    "ex2.approx.f16": ("f16", np.exp2, 0.51),
    "ex2.approx.f16x2": ("f16", np.exp2, 0.51),
    "ex2.approx.ftz.bf16": ("bf16", np.exp2, 0.51),
    "ex2.approx.ftz.bf16x2": ("bf16", np.exp2, 0.51),
    "tanh.approx.f16": ("f16", np.tanh, 0.51),
    "tanh.approx.f16x2": ("f16", np.tanh, 0.51),
    "tanh.approx.bf16": ("bf16", np.tanh, 0.51),
    "tanh.approx.bf16x2": ("bf16", np.tanh, 0.51),
}
DIVISIONS = ("div.approx.f32", "div.approx.ftz.f32", "div.full.f32", "div.full.ftz.f32")
DOUBLES = ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64")
OPCODES = [*ULP, *HALF, *DIVISIONS, *DOUBLES]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare([(o, "32 32") for o in ULP] + [(o, "32 32 32") for o in DIVISIONS] + [(o, "64 64") for o in DOUBLES])


@pytest.mark.parametrize("opcode", ULP)
def test_error(opcode):
    x, function, bound = ULP[opcode]
    assert ulps(run(opcode, x), function(x.astype(np.float64))).max() <= bound


@pytest.mark.parametrize("opcode", SPECIAL)
def test_special_inputs(opcode):
    x, want = (f32([pair[k] for pair in SPECIAL[opcode]]) for k in (0, 1))
    got = run(opcode, x)
    bits = np.where(np.isnan(want), np.uint32(0x7FFFFFFF), want.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.uint32), bits)


@pytest.mark.parametrize("opcode", HALF)
def test_half(opcode):
    """All 65536 inputs: within rounding of the exact value, special values as documented."""
    import ml_dtypes

    name, function, bound = HALF[opcode]
    dtype = np.float16 if name == "f16" else ml_dtypes.bfloat16
    bits = np.arange(1 << 16, dtype=np.uint32)
    packed = opcode.endswith("x2")
    u = unit(opcode, "32 32" if packed else "16 16")
    got = np.empty(1 << 16, np.uint16)
    for start in range(0, 1 << 16, 32):
        chunk = bits[start : start + 32]
        u.run({1: chunk | chunk << 16 if packed else chunk.astype(np.uint16)})
        if packed:
            assert ((u.register(0) >> 16) == (u.register(0) & 0xFFFF)).all()
        got[start : start + 32] = u.register(0) & 0xFFFF
    with np.errstate(invalid="ignore"):
        x = bits.astype(np.uint16).view(dtype).astype(np.float64)
    smallest = 2.0**-126 if "ftz" in opcode else 0.0
    x = np.where(np.abs(x) < smallest, np.copysign(0.0, x), x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = function(x)
    nan = np.isnan(x)
    assert (got[nan] == 0x7FFF).all()
    y = got.view(dtype).astype(np.float64)[~nan]
    want = want[~nan]
    fraction, lowest, top = (10, -14, 65520.0) if name == "f16" else (7, -126, 2.0**128 * (1 - 2.0**-9))
    want = np.where(np.abs(want) >= top, np.inf, want)
    want = np.where(np.abs(want) < smallest, 0.0, want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(y[~finite], want[~finite])
    with np.errstate(divide="ignore"):
        unit_in_last_place = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(want[finite]))), lowest) - fraction)
    error = np.abs(y[finite] - want[finite]) / unit_in_last_place
    assert error[np.abs(y[finite]) >= smallest].max() <= bound
    np.testing.assert_array_equal(np.signbit(y), np.signbit(want))


@pytest.mark.parametrize("opcode", DIVISIONS)
def test_division(opcode):
    """Within 2 ulp; div.approx gives 0 or NaN for divisors beyond 2**126."""
    a, b = magnitudes(-60, 60), magnitudes(-60, 60)[::-1].copy()
    assert ulps(run(opcode, a, b), a.astype(np.float64) / b).max() <= 2.0
    big = f32([2.0**126 * 1.5] * 4)
    got = run(opcode, f32([1e30, -1e30, INF, 2.0**127]), big)
    if "approx" in opcode:
        assert got[0] == 0.0 and not np.signbit(got[0])
        assert got[1] == 0.0 and np.signbit(got[1])
        assert np.isnan(got[2]) and got[3] == 0.0
    else:
        assert got[3] == np.float32(2.0**127) / big[0] and got[2] == INF
    specials = run(opcode, f32([0.0, 1.0, INF, NAN, SUBNORMAL]), f32([0.0, 0.0, INF, 1.0, 1.0]))
    assert np.isnan(specials[[0, 2, 3]]).all() and specials[1] == INF
    assert specials[4] == (0.0 if "ftz" in opcode else np.float32(SUBNORMAL))


@pytest.mark.parametrize("opcode", DOUBLES)
def test_double(opcode):
    rng = np.random.default_rng(3)
    x = 2.0 ** rng.uniform(-900, 900, 32)
    u = unit(opcode, "64 64")
    u.run({1: x})
    root = opcode.startswith("rsqrt")
    want = 1 / np.sqrt(x) if root else 1 / x
    got = u.register(0).view(np.float64)
    assert np.abs(got / want - 1).max() <= (2.0**-18 if "ftz" in opcode else 2.0**-51)
    if "ftz" in opcode:
        assert (u.register(0) & 0xFFFFFFFF == 0).all()
        special = [-INF, -5e-310, -0.0, 0.0, 5e-310, INF, NAN, -1.0]
        table = [NAN if root else -0.0, -INF, -INF, INF, INF, 0.0, NAN, NAN if root else -1.0]
        u.run({1: np.resize(np.array(special), 32)})
        bits = np.array(table).view(np.uint64)
        bits[np.isnan(table)] = 0x7FFFFFFF00000000
        np.testing.assert_array_equal(u.register(0)[:8], bits)
    else:
        u.run({1: np.resize(np.array([-0.0, 0.0, INF, 4.0, -1.0]), 32)})
        np.testing.assert_array_equal(u.register(0).view(np.float64)[:4], [-INF, INF, 0.0, 0.5])
        assert np.isnan(u.register(0).view(np.float64)[4])


def test_angles_beyond_the_promised_range_stay_bounded():
    huge = f32([1e10, -3e20, 3e38, 2.0**40])
    for opcode in ("sin.approx.f32", "cos.approx.f32"):
        got = run(opcode, huge)
        assert (np.abs(got) <= 1.0).all()


def test_partial_mask():
    u = unit("ex2.approx.ftz.f32", "32 32")
    u.run({1: np.full(32, 3.0, np.float32)}, 0x00FF00F0)
    active = (0x00FF00F0 >> np.arange(32) & 1).astype(bool)
    assert (u.register(0)[active] == np.float32(8.0).view(np.uint32)).all()
    assert (u.register(0)[~active] == 0xCDCDCDCD).all()
