"""Sum products as the tensor core of this emulator rounds them. The exact sum is rounded once to float32.

An element is thereby a function of its row of A and its column of B. Nothing else has a say in its bits: not M, N, the
other rows and columns, the order of summation or the threads of the BLAS. Every product is exact in float64, and so is
every sum, in any order, whose terms are multiples of one unit and add up to at most 2^53 of them. The first of four
steps that holds is taken:

1. The exponents of both matrices (`span`) prove that of all sums. Most data pass.
2. They prove it once the matrix of wider span is split in two by magnitude. The two sums are added with their error.
3. The error of a float64 sum is at most K 2^-53 times the sum of magnitudes. Where both ends of that interval round to
   the same float32, that is the rounded exact sum.
4. Other elements are summed with their rounding errors (Knuth's two-sum), and if that is not yet exact, by `math.fsum`
   (Shewchuk).

A sum that is rounded to zero is +0, from below too. NaN and infinities do as in IEEE 754; every NaN is the same.

Hardware has a rule of its own, which the PTX ISA leaves open; Hopper's is measured (hopper_sums.py), Blackwell's is not
known.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dsv4lib.emulator.units.hopper_sums import two_sum

EXACT = 53  # bits of a float64 significand
# Bits of the integer m in x = m 2^q. A power of two adds none to a product.
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
_BIAS, _INFINITY = 127, 0xFF << 24  # of a float32; without its sign, shifted left by one
# Products are computed in pieces of rows: beyond 2^18 multiplications the BLAS starts threads, which only spin between
# so small products; temporary arrays beyond 128 KiB may be given back to the system each time.
_MULTIPLICATIONS, _ELEMENTS = 1 << 18, 1 << 13
# Last bits of a float64 in the middle between two float32 that are not subnormal.
_LAST, _MIDDLE, _NORMAL = (1 << 29) - 1, 1 << 28, 2.0**-126
_UNIT = -149  # exponent that divides all float32


class Span(NamedTuple):
    """Bound a set of numbers by significant bits and magnitude.

    Numbers m 2^q with |m| < 2^significant, q >= low, that are less than 2^high in magnitude.
    """

    low: int
    high: int
    significant: int

    @property
    def width(self) -> int:
        """Bits from the unit of all numbers to the largest."""
        return self.high - self.low

    def __mul__(self, other: Span) -> Span:  # type: ignore[override]
        """Span of the products of two sets of numbers."""
        return Span(*(x + y for x, y in zip(self, other, strict=True)))


def span(matrices: list[np.ndarray], fmt: str) -> Span:
    """Find the span of float32 numbers of a format.

    As wide as `UNBOUNDED` if one is not finite.
    """
    largest, smallest = 0, 1 << 32
    for values in matrices:
        magnitudes = values.view(np.uint32) << np.uint32(1)
        largest = max(largest, int(magnitudes.max()))
        magnitudes -= np.uint32(1)  # zeros become the largest
        smallest = min(smallest, int(magnitudes.min()) + 1)
    bits = SIGNIFICANT[fmt]
    if largest >= _INFINITY:
        return Span(0, UNBOUNDED, bits)
    if largest == 0:
        return Span(0, 0, bits)
    top = 1 if bits else 0  # a power of two is not above its exponent
    return Span(_exponent(smallest) + top - bits, _exponent(largest) + top, bits)


def _exponent(magnitude: int) -> int:
    """Exponent of a float32 that is shifted left by one, of its first one if it is subnormal."""
    return (magnitude >> 24 or magnitude.bit_length() - 24) - _BIAS


def exact(a: Span, b: Span, k: int) -> bool:
    """Tell whether all sums of ``k`` products are exact in float64, in any order."""
    return a.width + b.width + (k - 1).bit_length() <= EXACT


def rounded_sums(a: np.ndarray, b: np.ndarray, of_a: Span, of_b: Span, proved: bool = False) -> np.ndarray:
    """float32 (M, N): the exact a @ b.T, rounded once.

    Args:
        a, b: float32 or float64 (M, K), (N, K), with products that are exact in float64.
        of_a, of_b: their spans.
        proved: every float64 sum is known to be exact, whatever the spans say.
    """
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    proved = proved or exact(of_a, of_b, a.shape[1])
    result = np.empty((len(a), len(b)), np.float32)
    rows = max(1, min(_MULTIPLICATIONS // b.size, _ELEMENTS // len(b)))
    with np.errstate(over="ignore", invalid="ignore"):
        for first in range(0, len(a), rows):
            piece = a[first : first + rows]
            sums = piece @ b.T if proved else _wide_sums(piece, b, of_a, of_b)
            result[first : first + rows] = sums
    result += np.float32(0)
    return result


def _wide_sums(a: np.ndarray, b: np.ndarray, of_a: Span, of_b: Span) -> np.ndarray:
    """Sums that need not be exact: (M, N), float32."""
    wider, other = (of_a, of_b) if of_a.width >= of_b.width else (of_b, of_a)
    room = EXACT - other.width - (a.shape[1] - 1).bit_length()  # bits that a part of the wider matrix may span
    low = _split(a if wider is of_a else b, wider, room)
    if low is None:
        return _bounded_sums(a, b)
    if wider is of_a:
        low_sums, high_sums = low @ b.T, (a - low) @ b.T
    else:
        low_sums, high_sums = a @ low.T, a @ (b - low).T
    total = high_sums + low_sums
    result = total.astype(np.float32)
    doubtful = total.view(np.int64) & _LAST == _MIDDLE
    if of_a.low + of_b.low < _UNIT:
        magnitudes = np.abs(total)
        doubtful |= (magnitudes < _NORMAL) & (magnitudes > 0)
    if doubtful.any():
        result[doubtful] = _round(*two_sum(high_sums[doubtful], low_sums[doubtful]))
    return result


def _split(values: np.ndarray, of: Span, room: int) -> np.ndarray | None:
    """Numbers of small magnitude, the others 0, if they and the others span at most ``room`` bits each; else None."""
    if of.width > 2 * room - of.significant + 1:
        return None
    return np.where(np.abs(values) < math.ldexp(1.0, of.low + room), values, 0)


def _round(sums: np.ndarray, rests: np.ndarray) -> np.ndarray:
    """float32 of float64 sums + rests, of which the sums are the rounded ones."""
    # Rounding to odd: from the middle between two float32, which is even, the rest decides; an odd number is no middle.
    step = (rests != 0) & (sums.view(np.int64) & 1 == 0)
    return np.where(step, np.nextafter(sums, np.copysign(np.inf, rests)), sums).astype(np.float32)


def _bounded_sums(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of any numbers: by a bound on the error, exactly where that does not tell."""
    total = a @ b.T
    result = total.astype(np.float32)
    bound = np.abs(a) @ np.abs(b).T
    bound *= a.shape[1] * 2.0 ** (1 - EXACT)  # twice the bound, for its own rounding and that of its ends
    unsettled = (total - bound).astype(np.float32) != (total + bound).astype(np.float32)
    if not unsettled.any():
        return result
    result[np.isnan(total)] = np.nan
    rows, columns = np.nonzero(unsettled & np.isfinite(total))
    if len(rows):
        result[rows, columns] = _exact_sums(a.T[:, rows] * b.T[:, columns])
    return result


def _exact_sums(terms: np.ndarray) -> np.ndarray:
    """float32 (n,): exact sums over the first axis of float64 (K, n), rounded once."""
    first, errors = _cascade(terms)
    second, left = _cascade(errors)
    sums, rests = two_sum(first, second)
    for i in np.nonzero(left.any(0))[0]:
        column = terms[:, i].tolist()
        sums[i] = math.fsum(column)
        rests[i] = math.fsum([*column, -sums[i]])
    return _round(sums, rests)


def _cascade(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum over the first axis of (K, n) in halves: float64 (n,), and (K - 1, n) rounding errors that make it exact."""
    errors = []
    while len(terms) > 1:
        half = len(terms) // 2
        sums, lost = two_sum(terms[:half], terms[half : 2 * half])
        errors.append(lost)
        terms = np.concatenate([sums, terms[2 * half :]]) if len(terms) % 2 else sums
    return terms[0], np.concatenate(errors) if errors else np.zeros((1, terms.shape[1]))
