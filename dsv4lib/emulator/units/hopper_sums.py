"""How Hopper's tensor cores add, bit for bit.

f16, bf16, tf32 and the fp8 of wgmma: one instruction adds all its products and the accumulator at once. Every addend is
aligned to the largest exponent among them and cut to a fixed number of fraction bits, the sum is exact, and the result
is cut to the accumulator's mantissa (f32) or rounded (f16). Exponents of products are sums of the operands' exponents;
a product of two significands in [1, 2) is not normalised first, and subnormal operands keep the smallest exponent. fp8
keeps far fewer bits than the other types, which is why kernels add fp8 partial sums in float32 registers.

fp8 of mma.sync runs as two f16 sums, over k % 4 < 2 (k % 8 < 4 if A is sparse) and then over the rest, and a float32
addition of C.

f64: one fused multiply-add after another, k ascending, starting from C.

Source: measured on an H200 (tests/emulator/units/test_mma_h200.py compares bit for bit, over the whole exponent range);
nothing of it is documented, and other architectures differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """Hold the rounding rule of a sum.

    Fraction bits of aligned addends and of an f32 result; smallest exponent of the operand's normal numbers.
    """

    addend: int
    result: int
    smallest: int


RULES = {
    "f16": Rule(25, 23, -14),
    "bf16": Rule(25, 23, -126),
    "tf32": Rule(25, 23, -126),
    "e4m3": Rule(13, 13, -6),
    "e5m2": Rule(13, 13, -14),
}
_ZERO = -(1 << 12)  # exponent of a zero
_LOWEST = -400  # below the exponent of any product or accumulator


def exponents(values: np.ndarray, smallest: int) -> np.ndarray:
    """Return int32 exponents of floats: floor(log2 |x|), at least ``smallest``. Zeros are far below."""
    found = np.maximum(np.frexp(values)[1] - 1, smallest)
    return np.where(values == 0, _ZERO, found).astype(np.int32)


def fused_sum(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, a_format: str, b_format: str, d_format: str
) -> np.ndarray:
    """(M, N) of a @ b.T + c: float32 or float16.

    Args:
        a, b: float32 (M, K), (N, K); K of one instruction.
        c: (M, N) accumulator, None = zero.
        a_format, b_format: keys of RULES; d_format: "f32" or "f16".
    """
    rule_a, rule_b = RULES[a_format], RULES[b_format]
    pairs = exponents(a, rule_a.smallest)[:, None, :] + exponents(b, rule_b.smallest)[None, :, :]
    largest = np.maximum(pairs.max(-1), _LOWEST)
    if c is not None:
        largest = np.maximum(largest, exponents(c, -14 if d_format == "f16" else -126))
    scale = np.ldexp(1.0, rule_a.addend - largest)
    products = a.astype(np.float64)[:, None, :] * b.astype(np.float64)[None, :, :]
    products *= scale[:, :, None]
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.trunc(products, out=products).sum(-1)
        if c is not None:
            total += np.trunc(c * scale)
        total /= scale
        result = truncate(total, rule_a.result) if d_format == "f32" else total.astype(np.float16)
        return result + result.dtype.type(0)  # what is cut or rounded to zero is +0, also from below


def truncate(values: np.ndarray, bits: int) -> np.ndarray:
    """Cut float64 to float32 with ``bits`` fraction bits.

    Fewer where float32 is subnormal.
    """
    finite = np.where(np.isfinite(values), values, 0)
    unit = np.ldexp(1.0, np.maximum(np.frexp(finite)[1] - 1, -126) - bits)
    return np.where(np.isfinite(values), np.trunc(finite / unit) * unit, values).astype(np.float32)


def fp8_mma_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Compute fp8 mma.sync m16n8k32, or sparse m16n8k64, with f32 accumulators.

    Returns float32 (16, 8).
    """
    both = a.shape[1] // 8  # elements of K whose products (half of them, if A is sparse) go to the two sums in turn
    first = np.arange(a.shape[1]) % both < both // 2
    half = fused_sum(a[:, first], b[:, first], None, "f16", "f16", "f32")
    return fused_sum(a[:, ~first], b[:, ~first], half, "f16", "f16", "f32") + c


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and its exact rounding error (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Product and its exact rounding error (Dekker)."""

    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        big = x * 134217729.0  # 2^27 + 1
        high = big - (big - x)
        return high, x - high

    product = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    return product, ((ah * bh - product) + ah * bl + al * bh) + al * bl


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64 arrays, rounded once.

    Exact as long as no intermediate value over- or underflows. Method: Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57 (2008).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        high, low = two_product(a, b)
        middle, rest = two_sum(c, low)
        top, tail = two_sum(high, middle)
        odd, error = two_sum(rest, tail)
        bits = odd.view(np.int64)
        inexact_even = (error != 0) & (bits & 1 == 0)
        towards = np.where((error > 0) == (odd > 0), 1, -1)
        odd = np.where(inexact_even, bits + towards, bits).view(np.float64)
        plain = a * b + c
        result = top + odd
        return np.where(np.isfinite(result), result, plain)


def chained_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float64 (M, N) of a @ b.T + c by fused multiply-adds, k ascending."""
    total = np.ascontiguousarray(c, np.float64)
    for k in range(a.shape[1]):
        left, right = np.broadcast_arrays(a[:, k, None], b[None, :, k])
        total = fma(left, right, total)
    return total
