"""The k best of a row's scores by one warp, and what a score is made of.

    softplus(x) = max(x, 0) + log1p(e^-|x|)

With h = e^(-|x| / 2) and r = log1p(h^2) / h^2, which lies in (0.69, 1] and is a short series in (h^2 / (2 + h^2))^2,
the affinity sqrt(softplus(x)) is h sqrt(r) below 0 and sqrt(x + h^2 r) above: relative errors of a few 2^-24
everywhere, also where e^x underflows.

A score becomes an unsigned integer that sorts as the number does. A lane holds the keys of 4 q experts in a row and
sorts each four of them. A round of the top-k is then the best head of a lane's fours, `redux.max` over the lanes, the
first lane that has it (its experts are the lower ones), and there the next of that four. k rounds, whatever k: the row
is never sorted.

Where one warp selects and all wait for it (`soonest`), nothing is sorted and the next round waits for less: the best
key of a lane, `redux.max`, and 0 in the place of every key that is as good. Which lane had it, and where, is noted on
the side; if more than one had, `best` does it all again.
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
    before = (Uint32(1) << lane) - 1
    expert = Int32(0)
    for r in cutlass.range(k, unroll=1):
        key, at = rKey[0, 0], rAt[0, 0]
        for q in cutlass.range_constexpr(1, quads):
            better = rKey[0, q] > key
            key, at = cutlass.select_(better, rKey[0, q], key), cutlass.select_(better, rAt[0, q], at)
        top = cute.arch.warp_redux_sync(key, "umax")  # "max" compares as signed
        holders = Uint32(cute.arch.vote_ballot_sync(key == top))
        taken = (key == top) & ((holders & before) == 0)
        for q in cutlass.range_constexpr(quads):
            move = taken & (rAt[0, q] == at)
            for i in cutlass.range_constexpr(QUAD - 1):
                rKey[i, q] = cutlass.select_(move, rKey[i + 1, q], rKey[i, q])
                rAt[i, q] = cutlass.select_(move, rAt[i + 1, q], rAt[i, q])
            rKey[QUAD - 1, q] = cutlass.select_(move, Uint32(0), rKey[QUAD - 1, q])
        winner = cute.arch.shuffle_sync(at, _lowest(holders))
        expert = cutlass.select_(lane == r, winner, expert)
    return expert


@cute.jit
def soonest(rKey: cute.Tensor, k: int) -> Int32:
    """As `best`, for a warp whose latency counts."""
    lane, count = cute.arch.lane_idx(), cute.size(rKey)
    rLeft = cute.make_rmem_tensor_like(rKey)
    rLeft.store(rKey.load())
    expert, ties = Int32(0), Uint32(0)
    for r in cutlass.range_constexpr(k):
        key = _highest([rLeft[i] for i in range(count)])
        top = cute.arch.warp_redux_sync(key, "umax")
        holders, places = Uint32(cute.arch.vote_ballot_sync(key == top)), Uint32(0)
        for i in cutlass.range_constexpr(count):
            places = cutlass.select_(rLeft[i] == top, places | (1 << i), places)
            rLeft[i] = cutlass.select_(rLeft[i] == top, Uint32(0), rLeft[i])
        ties = ties | (holders & (holders - 1)) | (places & (places - 1))
        holder = _lowest(holders)
        winner = holder * count + cute.arch.shuffle_sync(_lowest(places), holder)
        expert = cutlass.select_(lane == r, winner, expert)
    if cute.arch.vote_any_sync(ties != 0):
        expert = best(rKey, k)
    return expert


def _highest(keys: list) -> Uint32:
    """The largest."""
    while len(keys) > 1:
        keys = [cutlass.max(*keys[i : i + 2]) if i + 1 < len(keys) else keys[i] for i in range(0, len(keys), 2)]
    return keys[0]


def _lowest(bits: Uint32) -> Int32:
    """The number of the lowest bit that is set."""
    return Int32(cute.arch.popc((bits & (~bits + 1)) - 1))


def _exchanged(swap: Any, a: Any, b: Any) -> tuple:
    return cutlass.select_(swap, b, a), cutlass.select_(swap, a, b)
