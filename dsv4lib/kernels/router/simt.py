"""Experts of a token and their weights, from the logits of the gate.

    a       = sqrt(softplus(logit))                          affinity
    score:  experts = top-k of a + bias                      best first, of equal scores the lower number
    hash:   experts = tid2eid[token id]
    weights = a[experts] / sum(a[experts]) * factor          the bias is in the selection only

A warp owns a token, eight a CTA, no shared memory. Lane l holds the logits of experts 4 l .. 4 l + 3 of each 128 (one
16-byte load; where E is no multiple of 4: l, l + 32, ..). A score becomes an unsigned integer that sorts as the number
does; a round of the top-k is the maximum of a lane's keys, `redux.max` over the lanes, `redux.min` over the numbers of
the experts that have it, and the winner's key set to 0. k rounds, whatever k: the row is never sorted.

    softplus(x) = max(x, 0) + log1p(e^-|x|)

With h = e^(-|x| / 2) and r = log1p(h^2) / h^2, which lies in (0.69, 1] and is a short series in (h^2 / (2 + h^2))^2,
a is h sqrt(r) below 0 and sqrt(x + h^2 r) above: relative errors of a few 2^-24 everywhere, also where e^x
underflows.

A NaN score ranks behind every number; a NaN anywhere in a row of a score layer makes all weights of that row NaN, so
that it is seen behind the experts too. Experts stay valid and distinct.

Bytes: T E 4 in, T k 8 out, one launch: latency is what it costs.
Source: DSV4 paper, MoE section; `dsv4lib.reference.router`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4lib.errors import ConfigError

LOG2_E = 1.4426950408889634
MAX_EXPERTS, MAX_K = 512, 16
LANES, WARPS = 32, 8
NONE = 0xFFFF  # behind every expert's number
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
    return cutlass.select_(score == score, key, Uint32(1))


class Router:
    """Select experts; see the module docstring.

    Args:
        experts: E, 1 to 512.
        k: experts a token, 1 to 16.
        hashed: experts come from a table.
        parts: the logits are the sum of so many parts, in order.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, experts: int = 256, k: int = 6, hashed: bool = False, parts: int = 1):
        if not 1 <= experts <= MAX_EXPERTS:
            raise ConfigError("experts", experts, f"1 to {MAX_EXPERTS}")
        if not 1 <= k <= min(MAX_K, experts):
            raise ConfigError("k", k, f"1 to {min(MAX_K, experts)}")
        if not 1 <= parts <= 4:
            raise ConfigError("parts", parts, "1 to 4")
        self.experts, self.k, self.hashed, self.parts = experts, k, hashed, parts
        self.threads = LANES * WARPS
        # A lane's experts: `width` in a row, `vectors` times.
        self.width = 4 if experts % 4 == 0 else 1
        self.vectors = -(-experts // (LANES * self.width))

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{type(self).__name__}({self.experts}, {self.k}, {'hash' if self.hashed else 'score'}, {self.parts})"

    @cute.jit
    def __call__(
        self,
        mLogits: cute.Tensor,
        chosen: Any,
        mExperts: cute.Tensor,
        mWeights: cute.Tensor,
        factor: Float32,
        stream: cuda.CUstream,
    ):
        """Launch a warp a token.

        Args:
            mLogits: [parts, T, E] fp32.
            chosen: bias [E] fp32, or (tid2eid int64 [V, k], token ids int64 [T]).
            mExperts: [T, k] int32.
            mWeights: [T, k] fp32.
            factor: the sum of a token's weights.
            stream: where the launch is queued.
        """
        grid = (cute.ceil_div(mExperts.shape[0], WARPS), 1, 1)
        self.kernel(mLogits, chosen, mExperts, mWeights, factor).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mLogits: cute.Tensor, chosen: Any, mExperts: cute.Tensor, mWeights: cute.Tensor, factor: Float32):
        """A token a warp."""
        block, _, _ = cute.arch.block_idx()
        token = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.griddepcontrol_wait()
        if token < mExperts.shape[0]:
            self.route(mLogits, chosen, mExperts, mWeights, factor, token)

    @cute.jit
    def route(
        self,
        mLogits: cute.Tensor,
        chosen: Any,
        mExperts: cute.Tensor,
        mWeights: cute.Tensor,
        factor: Float32,
        token: Int32,
    ):
        """All of one token, by one warp: lane r ends with pick r."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.hashed):
            expert, a, poison = self.from_table(mLogits, *chosen, token)
        else:
            expert, a, poison = self.best(mLogits, chosen, token)
        total = cute.arch.warp_reduction_sum(a) + poison
        if lane < self.k:
            mExperts[token, lane] = expert
            mWeights[token, lane] = a * (factor * cute.arch.rcp_approx(total))

    @cute.jit
    def from_table(self, mLogits: cute.Tensor, mTable: cute.Tensor, mTokens: cute.Tensor, token: Int32):
        """(expert, affinity, 0) of pick l in lane l; behind the last pick the affinity is 0."""
        lane = cute.arch.lane_idx()
        expert, a = Int32(0), Float32(0.0)
        if lane < self.k:
            expert = Int32(mTable[mTokens[token], lane])
            logit = mLogits[0, token, expert]
            for part in cutlass.range_constexpr(1, self.parts):
                logit += mLogits[part, token, expert]
            a = affinity(logit)
        return expert, a, Float32(0.0)

    @cute.jit
    def best(self, mLogits: cute.Tensor, mBias: cute.Tensor, token: Int32):
        """(expert, affinity, NaN if the row has one, else 0) of the r-th best in lane r."""
        lane = cute.arch.lane_idx()
        count = self.width * self.vectors
        rA = cute.make_rmem_tensor(count, Float32)
        rKey = cute.make_rmem_tensor(count, Uint32)
        poison = self.keys(mLogits, mBias, token, rA, rKey)
        expert, mine = Int32(0), Float32(0.0)
        for r in cutlass.range(self.k, unroll=1):
            key, at, value = Uint32(0), Int32(NONE), Float32(0.0)
            for j in cutlass.range_constexpr(count):
                better = rKey[j] > key
                key = cutlass.select_(better, rKey[j], key)
                at = cutlass.select_(better, self.number(lane, j), at)
                value = cutlass.select_(better, rA[j], value)
            top = cute.arch.warp_redux_sync(key, "umax")  # "max" compares as signed
            winner = cute.arch.warp_redux_sync(cutlass.select_(key == top, at, Int32(NONE)), "min")
            value = cute.arch.shuffle_sync(value, (winner // self.width) % LANES)
            for j in cutlass.range_constexpr(count):
                rKey[j] = cutlass.select_(self.number(lane, j) == winner, Uint32(0), rKey[j])
            expert = cutlass.select_(lane == r, winner, expert)
            mine = cutlass.select_(lane == r, value, mine)
        return expert, mine, poison

    def number(self, lane: Int32, j: int) -> Int32:
        """The expert whose logit is a lane's j-th."""
        return lane * self.width + (LANES * self.width * (j // self.width) + j % self.width)

    @cute.jit
    def keys(self, mLogits: cute.Tensor, mBias: cute.Tensor, token: Int32, rA: cute.Tensor, rKey: cute.Tensor):
        """Affinities and keys of this lane's experts (0 behind the last); NaN if the row has one, else 0."""
        lane = cute.arch.lane_idx()
        count, width = cute.size(rA), self.width
        rLogit = cute.make_rmem_tensor((width, self.vectors, self.parts), Float32)
        rBias = cute.make_rmem_tensor((width, self.vectors), Float32)
        rLogit.fill(0.0)
        rBias.fill(0.0)
        for v in cutlass.range_constexpr(self.vectors):
            tile = lane + LANES * v
            if tile * width < self.experts:
                for part in cutlass.range_constexpr(self.parts):
                    row = mLogits[part, token, None]
                    cute.autovec_copy(cute.local_tile(row, (width,), (tile,)), rLogit[None, v, part])
                cute.autovec_copy(cute.local_tile(mBias, (width,), (tile,)), rBias[None, v])
        poison = Float32(0.0)
        for j in cutlass.range_constexpr(count):
            i, v = j % width, j // width
            logit = rLogit[i, v, 0]
            for part in cutlass.range_constexpr(1, self.parts):
                logit += rLogit[i, v, part]
            rA[j] = affinity(logit)
            score = rA[j] + rBias[i, v]
            there = self.number(lane, j) < self.experts
            poison = cutlass.select_(score == score, poison, score)
            rKey[j] = cutlass.select_(there, sort_key(score), Uint32(0))
        bad = cute.arch.vote_any_sync(poison != poison)
        return cutlass.select_(bad, Float32.nan, Float32(0.0))
