"""Sums of products as the tensor core of this emulator rounds them: the exact sum, rounded once to float32.

An element is thereby a function of its row of A and its column of B. Nothing else has a say in its bits: not M, N, the
other rows and columns, the order of summation or the threads of the BLAS. Three steps, each for what the last left:

1. Every product is exact in float64. If all of them are multiples of one unit and no sum of their magnitudes exceeds
   2^53 units, every partial sum is exact as well, in any order. `width` proves it for a whole matrix from the
   exponents of its operands, which most data pass.
2. Else the error of a float64 sum is at most K 2^-53 times the sum of magnitudes. Where both ends of that interval
   round to the same float32, that is the rounded exact sum.
3. The other elements, where products cancel, are summed with their rounding errors (Knuth's two-sum), and if that is
   not yet exact, by `math.fsum` (Shewchuk).

A sum that is rounded to zero is +0, from below too. NaN and infinities do as in IEEE 754; every NaN is the same.

Hardware has a rule of its own, which the PTX ISA leaves open; Hopper's is measured (hopper_sums.py), Blackwell's is not
known.
"""

from __future__ import annotations

import math

import numpy as np

from dsv4lib.emulator.units.hopper_sums import two_sum

EXACT = 53  # bits of a float64 significand
# Significant bits of a number: x = m 2^q with an integer |m| < 2^bits. A power of two adds none to a product.
SIGNIFICANT = {
    "f16": 11,
    "bf16": 8,
    "tf32": 11,
    "e4m3": 4,
    "e5m2": 3,
    "e2m3": 4,
    "e3m2": 3,
    "e2m1": 2,
    "e2m1x2": 2,
    "s8": 8,
    "u8": 8,
    "ue8m0": 0,
    "ue4m3": 4,
}
UNBOUNDED = 1 << 20  # width of what is not finite
_INFINITY = 0xFF << 24  # of a float32 without its sign, shifted left
# The BLAS starts threads beyond this many multiplications; between so small products they only spin.
_ONE_THREAD = 1 << 18


def width(values: np.ndarray, fmt: str) -> int:
    """Bits that float32 numbers of a format span: from the unit that divides all to the largest.

    The widths of both operands (and of their scale factors) and log2 K add up to the bits of a sum of products.

    Returns:
        The bits; `UNBOUNDED` if a number is not finite.
    """
    magnitudes = values.view(np.uint32) << np.uint32(1)
    largest = int(magnitudes.max())
    if largest >= _INFINITY:
        return UNBOUNDED
    if largest == 0:
        return 0
    magnitudes -= np.uint32(1)  # zeros become the largest
    return _exponent(largest) - _exponent(int(magnitudes.min()) + 1) + SIGNIFICANT[fmt]


def _exponent(magnitude: int) -> int:
    """Biased exponent of a float32 that is shifted left by one, subnormal ones included."""
    return magnitude >> 24 or magnitude.bit_length() - 24


def rounded_sums(a: np.ndarray, b: np.ndarray, bits: int) -> np.ndarray:
    """float32 (M, N): the exact a @ b.T, rounded once.

    Args:
        a, b: float32 or float64 (M, K), (N, K), with products that are exact in float64.
        bits: bound on the bits of a sum: widths of both operands plus log2 K, rounded up.
    """
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        total = _product(a, b)
        result = total.astype(np.float32)
        if bits > EXACT:
            _settle(a, b, total, result)
    result += np.float32(0)
    return result


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 a @ b.T by the BLAS, in pieces for one thread."""
    rows = max(1, _ONE_THREAD // b.size)
    if rows >= len(a):
        return a @ b.T
    out = np.empty((len(a), len(b)))
    for first in range(0, len(a), rows):
        np.matmul(a[first : first + rows], b.T, out=out[first : first + rows])
    return out


def _settle(a: np.ndarray, b: np.ndarray, total: np.ndarray, result: np.ndarray) -> None:
    """Correct the elements of ``result`` that the error of ``total`` may have rounded wrongly, in place."""
    bound = _product(np.abs(a), np.abs(b))
    bound *= a.shape[1] * 2.0 ** (1 - EXACT)  # twice the bound, for its own rounding and that of its ends
    unsettled = (total - bound).astype(np.float32) != (total + bound).astype(np.float32)
    if not unsettled.any():
        return
    result[np.isnan(total)] = np.nan
    rows, columns = np.nonzero(unsettled & np.isfinite(total))
    if len(rows):
        result[rows, columns] = _exact(a.T[:, rows] * b.T[:, columns])


def _exact(terms: np.ndarray) -> np.ndarray:
    """float32 (n,): exact sums over the first axis of float64 (K, n), rounded once."""
    first, errors = _cascade(terms)
    second, left = _cascade(errors)
    sums, rests = two_sum(first, second)
    for i in np.nonzero(left.any(0))[0]:
        column = terms[:, i].tolist()
        sums[i] = math.fsum(column)
        rests[i] = math.fsum([*column, -sums[i]])
    # Rounding to odd: an inexact float64 whose last bit is one never lies in the middle of two float32.
    bits = sums.view(np.int64)
    bits += np.where((rests != 0) & (bits & 1 == 0), np.where((rests > 0) == (sums > 0), 1, -1), 0)
    return sums.astype(np.float32)


def _cascade(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum over the first axis of (K, n) in halves: float64 (n,), and (K - 1, n) rounding errors that make it exact."""
    errors = []
    while len(terms) > 1:
        half = len(terms) // 2
        sums, lost = two_sum(terms[:half], terms[half : 2 * half])
        errors.append(lost)
        terms = np.concatenate([sums, terms[2 * half :]]) if len(terms) % 2 else sums
    return terms[0], np.concatenate(errors) if errors else np.zeros((1, terms.shape[1]))
