"""Inverse rotary embedding in registers, as the epilogue of attention.

Interleaved pairs (2 i, 2 i + 1) of the last 64 dimensions of a head, 32 frequencies, no amplitude factor. The caller
brings cos and sin of the query's position, computed in fp32. Source: DSV4 inference code; `dsv4lib.reference.rope`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def rotate_back(rO: cute.Tensor, rope: tuple, token: Int32, first: Int32):
    """(a, b) -> (a cos + b sin, b cos - a sin) for the pairs in ``rO``.

    Args:
        rO: fp32 registers, consecutive dimensions, an even number.
        rope: (cos [T, 32], sin [T, 32]) fp32.
        token: row of the tables.
        first: number of the first pair, 0..31.
    """
    mCos, mSin = rope
    for j in cutlass.range_constexpr(cute.size(rO) // 2):
        a, b = rO[2 * j], rO[2 * j + 1]
        cos, sin = mCos[token, first + j], mSin[token, first + j]
        rO[2 * j] = a * cos + b * sin
        rO[2 * j + 1] = b * cos - a * sin
