"""Rotate a head's last 64 dims (RoPE) in fp32 registers, forward and inverse.

Interleaved pairs (2 i, 2 i + 1) of the last 64 dimensions of a head, 32 frequencies, no amplitude factor. The caller
brings cos and sin of the query's position, computed in fp32. Source: DSV4 inference code; `dsv4lib.reference.rope`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint64
from cutlass.cutlass_dsl import dsl_user_op

ROPE = 64  # dims that rotate
QUAD = 4  # pairs of a piece of 8 dims
PIECES = ROPE // (2 * QUAD)


class Tables(NamedTuple):
    """Hold cosines and sines fp32 [T, 32] of the tokens' positions.

    Of registers [1, pairs].
    """

    cos: cute.Tensor
    sin: cute.Tensor


@cute.jit
def rotate_back(rO: cute.Tensor, rope: Tables, token: Int32, first: Int32):
    """Rotate the pairs in ``rO`` back: (a, b) -> (a cos + b sin, b cos - a sin).

    Args:
        rO: fp32 registers, consecutive dimensions, an even number.
        rope: angles; token: row of the tables.
        first: number of the first pair, 0..31.
    """
    mCos, mSin = rope
    for j in cutlass.range_constexpr(cute.size(rO) // 2):
        a, b = rO[2 * j], rO[2 * j + 1]
        cos, sin = mCos[token, first + j], mSin[token, first + j]
        rO[2 * j] = a * cos + b * sin
        rO[2 * j + 1] = b * cos - a * sin


@dsl_user_op
def rotate(x: list, cos: list, sin: list, back: bool, *, loc: Any = None, ip: Any = None) -> list:
    """Rotate pairs (x[2 i], x[2 i + 1]) by their angles, or back.

    Bits of `dsv4lib.reference.rope` in fp32.

    Each product and each sum is rounded by itself: no compiler may contract them, and the emulator agrees with a GPU.
    """
    n, lines = len(cos), [".reg .f32 s, t;"]
    for i in range(n):
        a, b, c, s = f"{{$r{2 * i}}}", f"{{$r{2 * i + 1}}}", f"{{$r{2 * n + i}}}", f"{{$r{3 * n + i}}}"
        first, second = ("add", "sub") if back else ("sub", "add")
        lines += [f"mul.rn.f32 s, {a}, {c};", f"mul.rn.f32 t, {b}, {s};", f"{first}.rn.f32 {{$w{2 * i}}}, s, t;"]
        lines += [f"mul.rn.f32 s, {b}, {c};", f"mul.rn.f32 t, {a}, {s};"]
        lines += [f"{second}.rn.f32 {{$w{2 * i + 1}}}, s, t;"]
    text = "\n".join(["{", *lines, "}"])
    given = [*x, *cos, *sin]
    return list(cute.arch.inline_ptx(text, read_only_args=given, write_only_types=[Float32] * 2 * n, loc=loc, ip=ip))


@cute.jit
def angles(mTable: cute.Tensor, mPositions: Any, token: Int32, piece: Int32, wanted: Any):
    """Return cosines and sines of a lane's 4 pairs. Two lists; NaN where the position is not in the table.

    Of a negative position, a padded row's, those of angle 0: nothing is read or rotated.

    Args:
        mTable: fp32 [P, 64], 32 cosines and 32 sines a position.
        mPositions: int64 [T], rows of the table; None: row ``token``.
        token: whose angles.
        piece: 0 .. 7, of 8 dims among the 64. wanted: whether this lane needs them; else nothing is loaded.
    """
    rAngles = cute.make_rmem_tensor((QUAD, 2), Float32)
    rAngles.fill(float("nan"))
    if wanted:
        row = Int64(token)
        if cutlass.const_expr(mPositions is not None):
            row = mPositions[token]
        if Uint64(row) < Uint64(mTable.shape[0]):
            line = mTable[row, None]
            cute.autovec_copy(cute.local_tile(line, (QUAD,), (piece,)), rAngles[None, 0])
            cute.autovec_copy(cute.local_tile(line, (QUAD,), (piece + PIECES,)), rAngles[None, 1])
        if cutlass.const_expr(mPositions is not None):
            if row < 0:
                rAngles[None, 0].fill(1.0)
                rAngles[None, 1].fill(0.0)
    return [rAngles[i, 0] for i in range(QUAD)], [rAngles[i, 1] for i in range(QUAD)]
