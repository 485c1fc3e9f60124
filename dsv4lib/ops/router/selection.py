"""The k best of a row's scores by one warp, and what a score is made of.

    softplus(x) = max(x, 0) + log1p(e^-|x|)

With h = e^(-|x| / 2) and r = log1p(h^2) / h^2, which lies in (0.69, 1] and is a short series in (h^2 / (2 + h^2))^2,
the affinity sqrt(softplus(x)) is h sqrt(r) below 0 and sqrt(x + h^2 r) above: relative errors of a few 2^-24
everywhere, also where e^x underflows.

A score becomes an unsigned integer that sorts as the number does. A lane holds the keys of 4 q experts in a row and
sorts each four of them. A round of the top-k is then the best head of a lane's fours, `redux.max` over the lanes, the
first lane that has it (its experts are the lower ones), and there the next of that four. k rounds, whatever k: the row
is never sorted.

Where one warp selects and all wait for it (`soonest`), a lane sorts all its keys, without their numbers, and the next
round waits for `redux.max` and a step to the lane's next key alone. Which lane had a pick is noted on the side; lane r
looks up at the end which of that lane's experts pick r was. If two had the same key, `best` does it all again.
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
    """Compute ``sqrt(softplus(x))``; NaN of NaN."""
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
    """Return an integer that orders as the number does.

    -0 as 0; of NaN 1, below every number's; never 0.
    """
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
def soonest(rKey: cute.Tensor, sKeys: cute.Tensor, k: int) -> Int32:
    """Select as `best`, for a warp whose latency counts. sKeys: the keys of all experts, in order."""
    lane, count = cute.arch.lane_idx(), cute.size(rKey)
    keys = [rKey[i] for i in range(count)]
    for a, b in network(count):
        keys[a], keys[b] = cutlass.max(keys[a], keys[b]), cutlass.min(keys[a], keys[b])
    holder, key, ties, before = Int32(0), Uint32(0), Uint32(0), Uint32(0)
    for r in cutlass.range_constexpr(k):
        top = cute.arch.warp_redux_sync(keys[0], "umax")
        holds = keys[0] == top
        holders = Uint32(cute.arch.vote_ballot_sync(holds))
        deep = min(count, k - r)
        for i in cutlass.range_constexpr(deep - 1):
            keys[i] = cutlass.select_(holds, keys[i + 1], keys[i])
        if cutlass.const_expr(deep == count):
            keys[count - 1] = cutlass.select_(holds, Uint32(0), keys[count - 1])
        ties = ties | (holders & (holders - 1)) | cutlass.select_(top == before, Uint32(1), Uint32(0))
        holder = cutlass.select_(lane == r, _lowest(holders), holder)
        key = cutlass.select_(lane == r, top, key)
        before = top
    rTheirs = cute.make_rmem_tensor((QUAD, count // QUAD), Uint32)
    for q in cutlass.range_constexpr(count // QUAD):
        cute.autovec_copy(cute.local_tile(sKeys, (QUAD,), (holder * (count // QUAD) + q,)), rTheirs[None, q])
    place = Int32(0)
    for i in cutlass.range_constexpr(count):
        place = cutlass.select_(rTheirs[count - 1 - i] == key, Int32(count - 1 - i), place)
    expert = holder * count + place
    if cute.arch.vote_any_sync(ties != 0):
        expert = best(rKey, k)
    return expert


def network(count: int) -> list[tuple[int, int]]:
    """Return exchanges that sort ``count`` numbers, falling. Batcher's odd-even merges; count is a multiple of 4."""
    size, pairs = 1 << (count - 1).bit_length(), []

    def merge(low: int, n: int, step: int) -> None:
        if 2 * step < n:
            merge(low, n, 2 * step)
            merge(low + step, n, 2 * step)
            pairs.extend((i, i + step) for i in range(low + step, low + n - step, 2 * step))
        else:
            pairs.append((low, low + step))

    def order(low: int, n: int) -> None:
        if n > 1:
            order(low, n // 2)
            order(low + n // 2, n // 2)
            merge(low, n, 1)

    order(0, size)
    return [(a, b) for a, b in pairs if b < count]


def _lowest(bits: Uint32) -> Int32:
    """Return the number of the lowest bit that is set."""
    return Int32(cute.arch.popc((bits & (~bits + 1)) - 1))


def _exchanged(swap: Any, a: Any, b: Any) -> tuple:
    return cutlass.select_(swap, b, a), cutlass.select_(swap, a, b)
