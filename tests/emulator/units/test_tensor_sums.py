"""Sums of the tensor core: the exact sum rounded once, whatever else is in the product."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from dsv4lib.emulator.units import tensor_sums
from dsv4lib.emulator.units.numeric import decode
from dsv4lib.emulator.units.tensor_sums import EXACT, UNBOUNDED, rounded_sums, width

FORMATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


def nearest(exact: Fraction) -> np.float32:
    """The float32 next to an exact number that it can hold, ties to even, by comparing fractions."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(way)) for way in (-np.inf, np.inf)]
    return min((guess, *around), key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1)) + np.float32(0)


def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left, right = ([[Fraction(float(x)) for x in row] for row in side] for side in (a, b))
    sums = [[nearest(sum(x * y for x, y in zip(r, c, strict=True))) for c in right] for r in left]
    return np.array(sums, np.float32)


def bits_of(a: np.ndarray, b: np.ndarray, fmt: str) -> int:
    return width(a, fmt) + width(b, fmt) + (a.shape[1] - 1).bit_length()


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


def tied(rng, shape):
    """One large product, and small ones near the half of its last bit."""
    small = np.exp2(-rng.integers(11, 14, shape).astype(float)) * rng.choice([-1, 1, 2, 1 + 2.0**-7], shape)
    small[:, 0] = 1
    return small


HARD = (normal, wide, sparse_zeros, cancelling, tiny, tied)


def bf16(values: np.ndarray) -> np.ndarray:
    raw = np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return raw.view(np.float32)


def pair(rng, kind, m, n, k=16):
    a, b = bf16(kind(rng, (m, k))), bf16(kind(rng, (n, k)))
    if kind is cancelling:
        b[:, k // 2 :] = b[:, : k // 2]
    return a, b


@pytest.mark.parametrize("kind", HARD)
def test_the_exact_sum_rounded_once(kind):
    a, b = pair(np.random.default_rng(1), kind, 24, 16)
    np.testing.assert_array_equal(rounded_sums(a, b, bits_of(a, b, "bf16")).view(np.uint32), expected(a, b).view("u4"))


def test_every_step_is_taken(monkeypatch):
    """Normal numbers pass the proof, most wide ones the error bound, of the others some need `math.fsum`."""
    rng, counted, fsums = np.random.default_rng(2), [], []
    exact, fsum = tensor_sums._exact, math.fsum
    monkeypatch.setattr(tensor_sums, "_exact", lambda terms: counted.append(terms.shape[1]) or exact(terms))
    monkeypatch.setattr(math, "fsum", lambda terms: fsums.append(1) or fsum(terms))
    a, b = pair(rng, normal, 128, 64)
    assert bits_of(a, b, "bf16") <= EXACT
    a, b = pair(rng, cancelling, 128, 64)
    assert bits_of(a, b, "bf16") > EXACT
    rounded_sums(a, b, bits_of(a, b, "bf16"))
    assert 0 < sum(counted) < 128 * 64
    assert 0 < len(fsums) // 2 < sum(counted)


@pytest.mark.parametrize("k", [3, 8, 24, 96])
def test_exact_sums_of_any_length(k):
    """Values that need no, one or two float64 beside the first; exact zeros."""
    rng = np.random.default_rng(k)
    terms = rng.standard_normal((k, 40)) * np.exp2(rng.integers(-1, 2, 40) * rng.integers(0, 100, (k, 40)))
    terms[0, :20] = 0
    terms[0, :20] = [-math.fsum(x) for x in terms[:, :20].T.tolist()]
    terms[: k // 2, -5:], terms[k // 2 :, -5:] = 3.0, 0
    want = [nearest(sum(Fraction(x) for x in column)) for column in terms.T.tolist()]
    np.testing.assert_array_equal(tensor_sums._exact(terms) + np.float32(0), np.array(want, np.float32))


@pytest.mark.parametrize("kind", HARD)
def test_an_element_is_a_function_of_its_row_and_column(kind):
    """Slices, other neighbours, another order of K: the same bits, proved or not."""
    rng = np.random.default_rng(3)
    a, b = pair(rng, kind, 128, 256)
    whole = rounded_sums(a, b, bits_of(a, b, "bf16")).view(np.uint32)
    for rows in (slice(0, 1), slice(5, 6), slice(64, 128), slice(7, 40, 3)):
        for columns in (slice(0, 1), slice(9, 10), slice(16, 32), slice(3, 250), slice(0, 256, 7)):
            for order in (slice(None), rng.permutation(16)):
                left, right = a[rows][:, order], b[columns][:, order]
                got = rounded_sums(left, right, bits_of(left, right, "bf16")).view(np.uint32)
                np.testing.assert_array_equal(got, whole[rows, columns])


def test_the_proof_and_the_bound_agree():
    a, b = pair(np.random.default_rng(4), normal, 128, 128)
    bits = bits_of(a, b, "bf16")
    assert bits <= EXACT
    np.testing.assert_array_equal(rounded_sums(a, b, bits).view("u4"), rounded_sums(a, b, UNBOUNDED).view("u4"))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_width_bounds_every_sum(fmt):
    """Every number is a multiple of a unit, and the largest is less than 2^width units."""
    rng = np.random.default_rng(5)
    wide_code = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}.get(fmt, np.uint8)
    for count in (1, 2, 3, 8):
        for _ in range(50):
            raw = rng.integers(0, np.iinfo(wide_code).max, (1, count), wide_code, endpoint=True)
            values = decode(raw.view(np.uint8), fmt)
            if not np.isfinite(values).all():
                assert width(values, fmt) == UNBOUNDED
                continue
            exact = [abs(Fraction(float(x))) for x in values.ravel() if x]
            if not exact:
                assert width(values, fmt) == 0
                continue
            unit = min(Fraction(x.numerator & -x.numerator, x.denominator) for x in exact)
            assert max(exact) / unit < 2 ** width(values, fmt)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(special):
    a, b = pair(np.random.default_rng(6), normal, 32, 16)
    clean = rounded_sums(a, b, bits_of(a, b, "bf16"))
    a[5, 3], b[:, 3] = special, np.abs(b[:, 3])
    b[0, 3] = 0
    a[7, 2], a[7, 9], b[:, 2], b[:, 9] = np.inf, -np.inf, 1, 1
    got = rounded_sums(a, b, bits_of(a, b, "bf16"))
    assert np.isnan(got[5, 0])
    assert np.isnan(got[7]).all()
    np.testing.assert_array_equal(got[5, 1:], np.full(15, special, np.float32))
    assert len(np.unique(got[np.isnan(got)].view(np.uint32))) == 1
    others = np.delete(np.arange(32), [5, 7])
    np.testing.assert_array_equal(got[others], rounded_sums(a[others], b, UNBOUNDED))
    assert np.isfinite(clean).all()


def test_zeros_are_positive_and_overflow_is_infinite():
    one = np.array([[-1.0, 0.0], [2.0**127, 2.0**127], [2.0**-100, 0]], np.float32)
    other = np.array([[0.0, -1.0], [2.0**-127, 0], [2.0, 2.0], [-(2.0**-100), 0]], np.float32)
    for bits in (EXACT, UNBOUNDED):
        got = rounded_sums(one, other, bits)
        assert not np.signbit(got[got == 0]).any()
        assert got[1, 2] == np.inf
        assert got[2, 3] == 0
        assert got[1, 1] == 1
