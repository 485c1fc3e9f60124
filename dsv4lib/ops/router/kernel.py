"""Select the experts of a token from the logits of the gate.

What is computed is in `op`.

Experts of a score layer come best first, of equal scores the lower number. The bias is in the selection only.

A warp owns a token, eight a CTA, no shared memory; how it selects: `selection`. A lane holds the logits of 4, 8,
12 or 16 experts in a row (16-byte loads where E is a multiple of 4).

A NaN score ranks after every number; a NaN anywhere in a row of a score layer makes all weights of that row NaN, so
that it is seen after the experts too. Experts stay valid and distinct.

Bytes: T E 4 in, T k 8 out, one launch: latency is what it costs.
Source: DSV4 paper, MoE section.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from dsv4lib.errors import ConfigError
from dsv4lib.ops.router.selection import LANES, NAN, QUAD, affinity, best, sort_key

MAX_EXPERTS, MAX_K = 512, 16
WARPS = 8


class Table(NamedTuple):
    """Experts by a table.

    Attributes:
        table: int64 [V, k], experts of a token id. tokens: int64 [T], token ids.
    """

    table: cute.Tensor
    tokens: cute.Tensor


class Router:
    """Select experts; see the module docstring.

    Args:
        experts: E, 1 to 512.
        k: experts a token, 1 to 16.
        hashed: experts come from a table.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, experts: int = 256, k: int = 6, hashed: bool = False):
        if not 1 <= experts <= MAX_EXPERTS:
            raise ConfigError("experts", experts, f"1 to {MAX_EXPERTS}")
        if not 1 <= k <= min(MAX_K, experts):
            raise ConfigError("k", k, f"1 to {min(MAX_K, experts)}")
        self.experts, self.k, self.hashed = experts, k, hashed
        self.threads = LANES * WARPS
        self.width = QUAD if experts % QUAD == 0 else 1  # logits an access
        self.quads = -(-experts // (LANES * QUAD))  # of experts, a lane

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"{type(self).__name__}({self.experts}, {self.k}, {'hash' if self.hashed else 'score'})"

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
            mLogits: [T, E] fp32.
            chosen: bias [E] fp32, or a `Table`.
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
        """Route tokens, a warp each."""
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
        """Route one token by one warp: lane r ends with pick r."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.hashed):
            expert, poison = self.of_table(chosen, token), Float32(0.0)
        else:
            rKey = cute.make_rmem_tensor((QUAD, self.quads), Uint32)
            poison = self.keys(mLogits[token, None], chosen, rKey)
            expert = best(rKey, self.k)
        a = Float32(0.0)
        if (lane < self.k) & (expert >= 0):
            a = affinity(mLogits[token, expert])
        self.write(expert, a, poison, mExperts[token, None], mWeights[token, None], factor)

    @cute.jit
    def of_table(self, chosen: Table, token: Int32) -> Int32:
        """Return the table's expert r of a token, in lane r.

        -1 where the token's id, or the expert, is none that there is.
        """
        lane, expert, number = cute.arch.lane_idx(), Int32(-1), chosen.tokens[token]
        if (lane < self.k) & (Uint64(number) < Uint64(chosen.table.shape[0])):
            found = chosen.table[number, lane]
            expert = Int32(cutlass.select_(Uint64(found) < Uint64(self.experts), Int32(found), Int32(-1)))
        return expert

    @cute.jit
    def write(
        self, expert: Int32, a: Float32, poison: Float32, mExpert: cute.Tensor, mWeight: cute.Tensor, factor: Float32
    ):
        """Write pick r and its weight from lane r, whose affinity is ``a``.

        0 past the last pick.
        """
        lane = cute.arch.lane_idx()
        total = a
        for step in cutlass.range_constexpr((self.k - 1).bit_length()):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        total += poison
        if lane < self.k:
            mExpert[lane] = expert
            weight = a * (factor * cute.arch.rcp_approx(total))
            if cutlass.const_expr(self.hashed):
                weight = Float32(cutlass.select_(expert < 0, Float32(0.0), weight))
            mWeight[lane] = weight

    @cute.jit
    def keys(self, mLogit: cute.Tensor, mBias: cute.Tensor, rKey: cute.Tensor) -> Float32:
        """Keys of this lane's experts (0 past the last); NaN if the row has one, else 0."""
        lane, width = cute.arch.lane_idx(), self.width
        across = QUAD // width
        rLogit = cute.make_rmem_tensor((width, across, self.quads), Float32)
        rBias = cute.make_rmem_tensor((width, across, self.quads), Float32)
        rLogit.fill(0.0)
        rBias.fill(0.0)
        for q in cutlass.range_constexpr(self.quads):
            for i in cutlass.range_constexpr(across):
                tile = (lane * self.quads + q) * across + i
                if tile * width < self.experts:
                    cute.autovec_copy(cute.local_tile(mLogit, (width,), (tile,)), rLogit[None, i, q])
                    cute.autovec_copy(cute.local_tile(mBias, (width,), (tile,)), rBias[None, i, q])
        bad = Int32(0)
        for q in cutlass.range_constexpr(self.quads):
            for j in cutlass.range_constexpr(QUAD):
                i, w = j // width, j % width
                key = sort_key(affinity(rLogit[w, i, q]) + rBias[w, i, q])
                there = (lane * self.quads + q) * QUAD + j < self.experts
                bad = cutlass.select_(there & (key == NAN), Int32(1), bad)
                rKey[j, q] = cutlass.select_(there, key, Uint32(0))
        return self.poison(bad != 0)

    def poison(self, bad: Any) -> Float32:
        """NaN if it holds for any lane, else 0: what a sum of affinities gets."""
        return cutlass.select_(cute.arch.vote_any_sync(bad), Float32.nan, Float32(0.0))
