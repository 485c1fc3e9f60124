"""Sums of the tensor core: the exact sum rounded once, whatever else is in the product."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from dsv4lib.emulator.units import tensor_sums
from dsv4lib.emulator.units.numeric import SCALES, decode
from dsv4lib.emulator.units.tensor_sums import UNBOUNDED, Span, exact, rounded_sums, span

FORMATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


def nearest(exact: Fraction) -> np.float32:
    """The float32 next to an exact number that it can hold, ties to even, by comparing fractions."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(way)) for way in (-np.inf, np.inf)]
    return min(
        (guess, *around), key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)
    ) + np.float32(0)


def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left, right = ([[Fraction(float(x)) for x in row] for row in side] for side in (a, b))
    sums = [[nearest(sum(x * y for x, y in zip(r, c, strict=True))) for c in right] for r in left]
    return np.array(sums, np.float32)


def sums(a: np.ndarray, b: np.ndarray, fmt: str = "bf16") -> np.ndarray:
    return rounded_sums(a, b, span([a], fmt), span([b], fmt))


def normal(rng, shape):
    return rng.standard_normal(shape)


def wide(rng, shape):
    """Exponents over 120 powers of two."""
    return rng.choice([-1.0, 1.0], shape) * np.exp2(rng.uniform(-60, 60, shape))


def sparse_zeros(rng, shape):
    return np.where(rng.random(shape) < 0.7, 0.0, wide(rng, shape)) * rng.choice([-1, 1], shape)


def cancelling(rng, shape):
    """Large numbers in pairs that cancel if the other operand is the same for both, small ones in between."""
    half = wide(rng, (shape[0], shape[1] // 2))
    return np.concatenate([half, -half * np.where(rng.random(half.shape) < 0.7, 1, 1 + 2.0**-7)], 1)


def tiny(rng, shape):
    """Products at the edge of float32's subnormals."""
    return rng.standard_normal(shape) * 2.0**-73


def softmax(rng, shape):
    """Positive weights, half of them tiny; they multiply normal numbers."""
    return np.exp2(-rng.integers(0, 30, shape) * (rng.random(shape) < 0.5)) * rng.uniform(1, 2, shape)


def tied(rng, shape):
    """One large product, and small ones near the half of its last bit."""
    small = np.exp2(-rng.integers(11, 14, shape).astype(float)) * rng.choice([-1, 1, 2, 1 + 2.0**-7], shape)
    small[:, 0] = 1
    return small


HARD = (normal, wide, sparse_zeros, cancelling, tiny, softmax, tied)
ANY = (Span(0, UNBOUNDED, 8),) * 2


def bf16(values: np.ndarray) -> np.ndarray:
    raw = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return raw.view(np.float32)


def pair(rng, kind, m, n, k=16):
    a, b = bf16(kind(rng, (m, k))), bf16((normal if kind is softmax else kind)(rng, (n, k)))
    if kind is cancelling:
        b[:, k // 2 :] = b[:, : k // 2]
    return a, b


@pytest.mark.parametrize("kind", HARD)
def test_the_exact_sum_rounded_once(kind):
    a, b = pair(np.random.default_rng(1), kind, 24, 16)
    np.testing.assert_array_equal(sums(a, b).view(np.uint32), expected(a, b).view("u4"))


def test_every_step_is_taken(monkeypatch):
    """Which functions sum what; of the numbers that cancel some need `math.fsum`, others not."""
    taken, counts = [], []
    steps = {name: getattr(tensor_sums, name) for name in ("_wide_sums", "_bounded_sums", "_exact_sums")}
    for name, function in steps.items():
        monkeypatch.setattr(tensor_sums, name, lambda *args, _n=name, _f=function: taken.append(_n) or _f(*args))
    fsum = math.fsum
    monkeypatch.setattr(math, "fsum", lambda terms: counts.append(1) or fsum(terms))
    for kind, expected_steps in ((normal, 0), (softmax, 1), (cancelling, 3)):
        taken.clear()
        sums(*pair(np.random.default_rng(2), kind, 128, 64))
        assert taken == list(steps)[:expected_steps], kind.__name__
    assert 0 < len(counts) // 2 < 128 * 64


@pytest.mark.parametrize("k", [3, 8, 24, 96])
def test_exact_sums_of_any_length(k):
    """Values that need no, one or two float64 beside the first; exact zeros."""
    rng = np.random.default_rng(k)
    terms = rng.standard_normal((k, 40)) * np.exp2(rng.integers(-1, 2, 40) * rng.integers(0, 100, (k, 40)))
    terms[0, :20] = 0
    terms[0, :20] = [-math.fsum(x) for x in terms[:, :20].T.tolist()]
    terms[: k // 2, -5:], terms[k // 2 :, -5:] = 3.0, 0
    want = [nearest(sum(Fraction(x) for x in column)) for column in terms.T.tolist()]
    np.testing.assert_array_equal(tensor_sums._exact_sums(terms) + np.float32(0), np.array(want, np.float32))


@pytest.mark.parametrize("kind", HARD)
def test_an_element_is_a_function_of_its_row_and_column(kind):
    """Slices, other neighbours, another order of K: the same bits, proved or not."""
    rng = np.random.default_rng(3)
    a, b = pair(rng, kind, 128, 256)
    whole = sums(a, b).view(np.uint32)
    for rows in (slice(0, 1), slice(5, 6), slice(64, 128), slice(7, 40, 3)):
        for columns in (slice(0, 1), slice(9, 10), slice(16, 32), slice(3, 250), slice(0, 256, 7)):
            for order in (slice(None), rng.permutation(16)):
                left, right = a[rows][:, order], b[columns][:, order]
                got = sums(left, right).view(np.uint32)
                np.testing.assert_array_equal(got, whole[rows, columns])


@pytest.mark.parametrize("kind", [normal, softmax])
def test_the_steps_agree(kind):
    """The later steps hold for any numbers; the first one by the spans."""
    a, b = pair(np.random.default_rng(4), kind, 128, 128)
    spans = span([a], "bf16"), span([b], "bf16")
    assert exact(*spans, 16) == (kind is normal)
    want = sums(a, b).view("u4")
    np.testing.assert_array_equal(rounded_sums(a, b, *ANY).view("u4"), want)
    np.testing.assert_array_equal(sums(b, a).T.view("u4"), want)
    wide = tensor_sums._wide_sums(a.astype(np.float64), b.astype(np.float64), *spans)
    np.testing.assert_array_equal((wide + np.float32(0)).view("u4"), want)


@pytest.mark.parametrize("rest", [0.0, 2.0**-60, -(2.0**-60)])
@pytest.mark.parametrize(("scale", "half"), [(1.0, 2.0**-24), (2.0**-73, 2.0**-4)])
def test_the_low_part_decides_ties(monkeypatch, rest, scale, half):
    """1 + half lies in the middle between two float32, normal or subnormal, and in float64 the rest is lost in it."""
    monkeypatch.setattr(tensor_sums, "_bounded_sums", None)  # not asked
    a = np.array([[1.0, half, rest], [1.0, half, 2.0**-60], [-1.0, -half, rest]], np.float32) * np.float32(scale)
    b = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, -1.0]], np.float32) * np.float32(scale)
    want = expected(a, b).view("u4")
    np.testing.assert_array_equal(sums(a, b).view("u4"), want)
    np.testing.assert_array_equal(sums(b, a).T.view("u4"), want)


@pytest.mark.parametrize("wide_bits", range(20, 60, 3))
def test_both_parts_of_a_split_are_exact(monkeypatch, wide_bits):
    rng, split, found = np.random.default_rng(wide_bits), tensor_sums._split, []
    monkeypatch.setattr(tensor_sums, "_split", lambda values, *args: found.append((values, split(values, *args))))
    a = bf16(rng.uniform(1, 2, (64, 16)) * np.exp2(-rng.integers(0, wide_bits, (64, 16)).astype(float)))
    b = bf16(rng.uniform(1, 2, (8, 16)) * np.exp2(-rng.integers(0, 10, (8, 16)).astype(float)))
    sums(a, b)
    assert bool(found) != exact(span([a], "bf16"), span([b], "bf16"), 16)
    for values, low in found:
        assert (low is not None) == (span([a], "bf16").width <= 2 * (53 - 4 - span([b], "bf16").width) - 7)
        for part in (low, values - low) if low is not None else ():
            assert exact(span([part.astype(np.float32)], "bf16"), span([b], "bf16"), 16)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_span_holds_every_number(fmt):
    rng = np.random.default_rng(5)
    stored = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}.get(fmt, np.uint8)
    for count in (1, 2, 3, 8):
        for _ in range(50):
            raw = rng.integers(0, np.iinfo(stored).max, (1, count), stored, endpoint=True)
            values = decode(raw.view(np.uint8), fmt)
            found = span([values], fmt)
            if not np.isfinite(values).all():
                assert found.width == UNBOUNDED
                continue
            for number in (abs(Fraction(float(x))) for x in values.ravel() if x):
                unit = Fraction(number.numerator & -number.numerator, number.denominator)
                assert number < Fraction(2) ** found.high
                assert unit >= Fraction(2) ** found.low
                assert number / unit < 2**found.significant


def test_the_span_of_scale_factors():
    codes = np.array([[0, 127, 254]], np.uint8)
    factors = span([SCALES["ue8m0"].take(codes)], "ue8m0")
    assert factors == (-127, 127, 0)
    assert span([np.array([[0.5, -6]], np.float32)], "e2m1") * factors == (-2 - 127, 3 + 127, 2)
    assert span([SCALES["ue8m0"].take(codes + np.uint8(1))], "ue8m0").width == UNBOUNDED


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(special):
    a, b = pair(np.random.default_rng(6), normal, 32, 16)
    clean = sums(a, b)
    a[5, 3], b[:, 3] = special, np.abs(b[:, 3])
    b[0, 3] = 0
    a[7, 2], a[7, 9], b[:, 2], b[:, 9] = np.inf, -np.inf, 1, 1
    got = sums(a, b)
    assert np.isnan(got[5, 0])
    assert np.isnan(got[7]).all()
    np.testing.assert_array_equal(got[5, 1:], np.full(15, special, np.float32))
    assert len(np.unique(got[np.isnan(got)].view(np.uint32))) == 1
    others = np.delete(np.arange(32), [5, 7])
    np.testing.assert_array_equal(got[others], rounded_sums(a[others], b, *ANY))
    assert np.isfinite(clean).all()


def test_zeros_are_positive_and_overflow_is_infinite():
    one = np.array([[-1.0, 0.0], [2.0**127, 2.0**127], [2.0**-100, 0]], np.float32)
    other = np.array([[0.0, -1.0], [2.0**-127, 0], [2.0, 2.0], [-(2.0**-100), 0]], np.float32)
    for proved in (True, False):
        got = rounded_sums(one, other, *ANY, proved)
        assert not np.signbit(got[got == 0]).any()
        assert got[1, 2] == np.inf
        assert got[2, 3] == 0
        assert got[1, 1] == 1
