"""The k best of a row's scores by one warp, and what a score is made of.

    softplus(x) = max(x, 0) + log1p(e^-|x|)

With h = e^(-|x| / 2) and r = log1p(h^2) / h^2, which lies in (0.69, 1] and is a short series in (h^2 / (2 + h^2))^2,
the affinity sqrt(softplus(x)) is h sqrt(r) below 0 and sqrt(x + h^2 r) above: relative errors of a few 2^-24
everywhere, also where e^x underflows.

A score becomes an unsigned integer that sorts as the number does. A lane holds the keys of 4 q experts in a row and
sorts each four of them. A round of the top-k is then the best head of a lane's fours, `redux.max` over the lanes, and,
where a lane has it, the next of that four: the next round waits for no more. k rounds, whatever k: the row is never
sorted. (Unsorted keys, all compared in every round, took 120 to 270 clocks longer on an H200.)

Who had the best key is asked on the side. If two lanes ever had it, all is done again, a lane at a time: the first one
that has it, as its experts are the lower ones.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

LOG2_E = 1.4426950408889634
LANES, QUAD = 32, 4
NAN = 1  # the key of NaN, and of nothing else
# 1 / (2 n + 1): log1p(e) = 2 z (1 + z^2 / 3 + z^4 / 5 + ..), z = e / (2 + e) <= 1/3; the next term is below 2^-29
_SERIES = tuple(1 / (2 * n + 1) for n in range(8))


@cute.jit
def affinity(x: Float32) -> Float32:
    """``sqrt(softplus(x))``; NaN of NaN."""
    half = 0.5 * LOG2_E
    high = float.fromhex("0x1.715476p-1")  # of `half`, 24 bits
    m = cutlass.select_(x > 0.0, -x, x)
    m = cutlass.select_(m < -400.0, Float32(-400.0), m)  # e^-200 is 0, and infinity makes no NaN below
    t = m * high
    rest = cute.math.fma(m, Float32(half - high), cute.math.fma(m, Float32(high), -t))
    h = cute.math.exp2(t, fastmath=True)
    h = cute.math.fma(h, rest * (1.0 / LOG2_E), h)
    e = h * h
    scale = cute.arch.rcp_approx(2.0 + e)
    z = e * scale
    z = z * z
    r = Float32(_SERIES[-1])
    for n in cutlass.range_constexpr(len(_SERIES) - 1):
        r = cute.math.fma(r, z, Float32(_SERIES[-2 - n]))
    r = r * (2.0 * scale)
    return cutlass.select_(
        x > 0.0, cute.math.sqrt(cute.math.fma(e, r, x), fastmath=True), h * cute.math.sqrt(r, fastmath=True)
    )


@cute.jit
def sort_key(score: Float32) -> Uint32:
    """An integer that orders as the number does, -0 as 0; of NaN 1, below every number's; never 0."""
    bits = (score + 0.0).bitcast(Int32)
    key = (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)
    return cutlass.select_(score == score, key, Uint32(NAN))


@cute.jit
def best(rKey: cute.Tensor, k: int) -> Int32:
    """Expert of the r-th best in lane r, r < k.

    Args:
        rKey: [4, q] keys of experts 4 q lane .., 0 where there is none; overwritten.
        k: at most 32, and at most the number of keys that are not 0.
    """
    lane, quads = cute.arch.lane_idx(), cute.size(rKey) // QUAD
    rAt = cute.make_rmem_tensor((QUAD, quads), Int32)
    for q in cutlass.range_constexpr(quads):
        for i in cutlass.range_constexpr(QUAD):
            rAt[i, q] = (lane * quads + q) * QUAD + i
        for i in cutlass.range_constexpr(6):  # neighbours alone change places, so of equal keys the lower expert leads
            low = (0, 2, 1, 0, 2, 1)[i]
            swap = rKey[low + 1, q] > rKey[low, q]
            rKey[low, q], rKey[low + 1, q] = _exchanged(swap, rKey[low, q], rKey[low + 1, q])
            rAt[low, q], rAt[low + 1, q] = _exchanged(swap, rAt[low, q], rAt[low + 1, q])
    rLeft, rOf = cute.make_rmem_tensor_like(rKey), cute.make_rmem_tensor_like(rAt)
    rLeft.store(rKey.load())
    rOf.store(rAt.load())
    expert, ties = Int32(0), Uint32(0)
    for r in cutlass.range_constexpr(k):
        key, at = _head(rLeft, rOf)
        top = cute.arch.warp_redux_sync(key, "umax")  # "max" compares as signed
        holders = Uint32(cute.arch.vote_ballot_sync(key == top))
        ties = ties | (holders & (holders - 1))
        winner = cute.arch.shuffle_sync(at, _first(holders))
        expert = cutlass.select_(lane == r, winner, expert)
        _take(rLeft, rOf, at, key == top)
    if ties != 0:
        expert = _best_of_equals(rKey, rAt, k)
    return expert


@cute.jit
def _best_of_equals(rKey: cute.Tensor, rAt: cute.Tensor, k: int) -> Int32:
    """As `best`, of sorted fours and their experts, a lane at a time."""
    lane = cute.arch.lane_idx()
    before = (Uint32(1) << lane) - 1
    expert = Int32(0)
    for r in cutlass.range(k, unroll=1):
        key, at = _head(rKey, rAt)
        top = cute.arch.warp_redux_sync(key, "umax")
        holders = Uint32(cute.arch.vote_ballot_sync(key == top))
        winner = cute.arch.shuffle_sync(at, _first(holders))
        expert = cutlass.select_(lane == r, winner, expert)
        _take(rKey, rAt, at, (key == top) & ((holders & before) == 0))
    return expert


def _head(rKey: cute.Tensor, rAt: cute.Tensor) -> tuple:
    """The best key of this lane's sorted fours, and its expert; of equal ones the lower."""
    key, at = rKey[0, 0], rAt[0, 0]
    for q in range(1, cute.size(rKey) // QUAD):
        better = rKey[0, q] > key
        key, at = cutlass.select_(better, rKey[0, q], key), cutlass.select_(better, rAt[0, q], at)
    return key, at


def _take(rKey: cute.Tensor, rAt: cute.Tensor, at: Int32, taken: Any) -> None:
    """The four that ``at`` leads goes on to its next, where ``taken``."""
    for q in range(cute.size(rKey) // QUAD):
        move = taken & (rAt[0, q] == at)
        for i in range(QUAD - 1):
            rKey[i, q] = cutlass.select_(move, rKey[i + 1, q], rKey[i, q])
            rAt[i, q] = cutlass.select_(move, rAt[i + 1, q], rAt[i, q])
        rKey[QUAD - 1, q] = cutlass.select_(move, Uint32(0), rKey[QUAD - 1, q])


def _first(lanes: Uint32) -> Int32:
    """The lowest of a mask's lanes."""
    return Int32(cute.arch.popc((lanes & (~lanes + 1)) - 1))


def _exchanged(swap: Any, a: Any, b: Any) -> tuple:
    return cutlass.select_(swap, b, a), cutlass.select_(swap, a, b)
