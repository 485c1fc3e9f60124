"""Join attention over parts of the keys: softmax-weighted sum of the parts, sink, inverse RoPE.

    o = sum_i e^{lse_i} o_i / (sum_i e^{lse_i} + e^{sink})        lse = ln sum_i e^{lse_i}

Parts come from `Fmha(partial=True)`; an empty part has lse -inf and o = 0. The sum runs over i in order, so the result
does not depend on which part finished first.

A warp owns one head of one token: lane l has dimensions 4 l .. 4 l + 3 of every 128. Memory-bound: it reads splits x D
x 4 bytes a head and writes D x 2.

Source: DSV4 paper eq. 27; `dsv4lib.reference.fmha.merge`.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.common.rope import rotate_back
from dsv4lib.kernels.fmha.sm100 import HEAD_DIMS, LOG2_E

WARPS = 4  # heads a CTA
LINE = 128  # dimensions a warp handles at once


class Combine:
    """Join parts of an attention; see the module docstring.

    Args:
        head_dim: D.
        dtype: of O: "bf16" or "fp16".
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(self, head_dim: int = 512, dtype: str = "bf16", sink: bool = True, inverse_rope: bool = False):
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        if dtype not in ("bf16", "fp16"):
            raise ConfigError("dtype", dtype, "bf16 or fp16")
        self.head_dim, self.dtype, self.sink, self.inverse_rope = head_dim, dtype, sink, inverse_rope
        self.element = cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.lines = -(-head_dim // LINE)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [name for name in ("sink", "inverse_rope") if vars(self)[name]]
        return f"Combine({', '.join([str(self.head_dim), self.dtype, *options])})"

    @cute.jit
    def __call__(self, mParts: cute.Tensor, mLses: cute.Tensor, mSink: Any, rope: Any, mO: cute.Tensor, mLse: Any):
        """Launch one warp a head.

        Args:
            mParts: [splits, T, H, D] fp32.
            mLses: [splits, T, H] fp32.
            mSink: [H] fp32 or None.
            rope: (cos [T, 32], sin [T, 32]) fp32 or None.
            mO: [T, H, D].
            mLse: [T, H] fp32.
        """
        grid = (mO.shape[0], cute.ceil_div(mO.shape[1], WARPS), 1)
        self.kernel(mParts, mLses, mSink, rope, mO, mLse).launch(grid=grid, block=(32 * WARPS, 1, 1))

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mLses: cute.Tensor, mSink: Any, rope: Any, mO: cute.Tensor, mLse: Any):
        """One head a warp."""
        token, block, _ = cute.arch.block_idx()
        head = block * WARPS + cute.arch.warp_idx()
        lane = cute.arch.lane_idx()
        if head < mO.shape[1]:
            largest, total = self.weights(mLses, token, head)
            denominator = total
            if cutlass.const_expr(self.sink):
                denominator = total + cute.math.exp2((mSink[head] - largest) * LOG2_E, fastmath=True)
            scale = cutlass.select_(total > 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))
            for line in cutlass.range_constexpr(self.lines):
                self.line(mParts, mLses, rope, mO, token, head, line * LINE + 4 * lane, largest, scale)
            if lane == 0:
                lse = -Float32.inf
                if total > 0.0:
                    lse = largest + cute.math.log2(total) * math.log(2.0)
                mLse[token, head] = lse

    @cute.jit
    def weights(self, mLses: cute.Tensor, token: Int32, head: Int32):
        """The largest LSE of the parts and the sum of their weights relative to it."""
        largest, total = -Float32.inf, Float32(0.0)
        for i in cutlass.range(mLses.shape[0], unroll=1):
            largest = cute.arch.fmax(largest, mLses[i, token, head])
        if largest > -Float32.inf:
            for i in cutlass.range(mLses.shape[0], unroll=1):
                total += cute.math.exp2((mLses[i, token, head] - largest) * LOG2_E, fastmath=True)
        return largest, total

    @cute.jit
    def line(
        self,
        mParts: cute.Tensor,
        mLses: cute.Tensor,
        rope: Any,
        mO: cute.Tensor,
        token: Int32,
        head: Int32,
        first: Int32,
        largest: Float32,
        scale: Float32,
    ):
        """Four dimensions of O: the weighted sum over the parts, rotated, converted, stored."""
        if first < self.head_dim:
            rO = cute.make_rmem_tensor(4, Float32)
            rPart = cute.make_rmem_tensor(4, Float32)
            rO.fill(0.0)
            if scale > 0.0:
                for i in cutlass.range(mLses.shape[0], unroll=1):
                    weight = cute.math.exp2((mLses[i, token, head] - largest) * LOG2_E, fastmath=True)
                    cute.autovec_copy(cute.local_tile(mParts[i, token, head, None], (4,), (first // 4,)), rPart)
                    rO.store(rO.load() + rPart.load() * weight)
            rO.store(rO.load() * scale)
            if cutlass.const_expr(self.inverse_rope):
                if first >= self.head_dim - 64:
                    rotate_back(rO, rope, token, (first - (self.head_dim - 64)) // 2)
            rOut = cute.make_rmem_tensor(4, self.element)
            rOut.store(rO.load().to(self.element))
            cute.autovec_copy(rOut, cute.local_tile(mO[token, head, None], (4,), (first // 4,)))
