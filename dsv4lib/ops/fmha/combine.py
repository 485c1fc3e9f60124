"""Combine attention over splits of the keys. This is a softmax-weighted sum, then sink and inverse RoPE.

    o = sum_i e^{lse_i} o_i / (sum_i e^{lse_i} + e^{sink})        lse = ln sum_i e^{lse_i}

Splits come from `Fmha(partial=True)`; an empty split has lse -inf and o = 0. The sum runs over i in order, so the
result does not depend on which split finished first.

A CTA owns one head of one token: thread t has dimensions 8 t .. 8 t + 7. It is bound by latency, not bytes: it waits
for the kernel that writes the splits, for the LSEs and for O. So it is launched early (programmatic dependent launch)
and waits itself; the loads of 4 or 8 splits, of the sink and of the angles are in flight before the first LSE is
needed; each LSE is read once, by one lane, and broadcast.

On an H200 (`bench.probes.combine_probe`, data/bench/combine_times.csv; one after the other, warm, and what it adds
after a kernel that writes the splits):

    splits, tokens x heads     4 loads at once           8 loads at once
    5, 1 x 64                  1.80  after  1.69 us      1.74  after  1.58 us
    16, 1 x 64                 2.55         2.75         2.30         2.33
    44, 1 x 64                 5.35         6.02         4.71         5.23
    8, 4 x 64                  2.23         2.53         2.20         2.75
    8, 8 x 64                  2.64         3.16         2.82         3.14
    16, 8 x 64                 3.67         5.82         3.83         5.26
    4, 32 x 64                 3.80         4.71         4.89         5.50

Source: DSV4 paper eq. 27; `dsv4lib.reference.fmha.merge`.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl.rope import Tables, rotate_back
from dsv4lib.errors import ConfigError
from dsv4lib.ops.fmha.config import HEAD_DIMS, LOG2_E

AT_ONCE = 4, 8  # splits whose loads are in flight together: with 8 a thread has 128 registers, with 4 it has 80
DIMS = 8  # of a thread


def loads_at_once(splits: int, heads: int) -> int:
    """Choose of `AT_ONCE`: 8 for many splits of few heads (of all tokens). With 4 more CTAs run on an SM at once."""
    few, many = AT_ONCE
    return many if splits > few and splits * 32 >= heads else few


class Combine:
    """Combine splits of an attention; see the module docstring.

    Args:
        head_dim: D.
        dtype: of O: "bf16" or "fp16".
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back.
        at_once: splits whose loads are in flight together, one of `AT_ONCE`; `loads_at_once` says which suits a call.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(
        self,
        head_dim: int = 512,
        dtype: str = "bf16",
        sink: bool = True,
        inverse_rope: bool = False,
        at_once: int = 8,
    ):
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        if dtype not in ("bf16", "fp16"):
            raise ConfigError("dtype", dtype, "bf16 or fp16")
        if at_once not in AT_ONCE:
            raise ConfigError("at_once", at_once, " or ".join(map(str, AT_ONCE)))
        self.head_dim, self.dtype, self.sink, self.inverse_rope = head_dim, dtype, sink, inverse_rope
        self.element = cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.at_once = at_once
        self.threads = max(32, head_dim // DIMS)

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [name for name in ("sink", "inverse_rope") if vars(self)[name]]
        return f"Combine({', '.join([str(self.head_dim), self.dtype, str(self.at_once), *options])})"

    @cute.jit
    def __call__(
        self,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch one CTA a head.

        Args:
            mOPartial: [splits, T, H, D] fp32.
            mLsePartial: [splits, T, H] fp32.
            mSink: [H] fp32 or None.
            rope: `rope.Tables` or None.
            mO: [T, H, D].
            mLse: [T, H] fp32.
            stream: where the launch is queued.
        """
        self.kernel(mOPartial, mLsePartial, mSink, rope, mO, mLse).launch(
            grid=(mO.shape[0], mO.shape[1], 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, mOPartial: cute.Tensor, mLsePartial: cute.Tensor, mSink: Any, rope: Any, mO: cute.Tensor, mLse: Any
    ):
        """Combine one head: fetch, scale, add, rotate, store."""
        token, head, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        first = DIMS * tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rOPartial = cute.make_rmem_tensor((DIMS, self.at_once), Float32)
        rOPartial.fill(0.0)
        self.fetch(mOPartial, token, head, first, Int32(0), rOPartial)
        lse = self.lse_of_lane(mLsePartial, token, head, Int32(0))
        logit = mSink[head] if cutlass.const_expr(self.sink) else None
        angles = self.angles(rope, token, first)
        lse_max, lse_sum = self.max_and_sum(mLsePartial, token, head, lse)
        denominator = lse_sum
        if cutlass.const_expr(self.sink):
            denominator = lse_sum + cute.math.exp2((logit - lse_max) * LOG2_E, fastmath=True)
        inverse = cutlass.select_(lse_sum != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # NaN stays
        rO = cute.make_rmem_tensor(DIMS, Float32)
        rO.fill(0.0)
        if lse_sum != 0.0:
            for block in cutlass.range(0, mLsePartial.shape[0], 32, unroll=1):
                if block > 0:
                    lse = self.lse_of_lane(mLsePartial, token, head, block)
                # scale_i = e^{lse_i - lse_max} / (sum_i e^{lse_i - lse_max} + e^{sink - lse_max})
                scale = cute.math.exp2((lse - lse_max) * LOG2_E, fastmath=True) * inverse
                end = cutlass.min(block + 32, mLsePartial.shape[0])
                for split in cutlass.range(block, end, self.at_once, unroll=1):
                    if split > 0:
                        self.fetch(mOPartial, token, head, first, split, rOPartial)
                    self.add(scale, split - block, end - split, rOPartial, rO)
        if first < self.head_dim:
            if cutlass.const_expr(self.inverse_rope):
                if first >= self.head_dim - 64 and lse_sum != 0.0:
                    rotate_back(rO, angles, 0, 0)
            rOut = cute.make_rmem_tensor(DIMS, self.element)
            rOut.store(rO.load().to(self.element))
            cute.autovec_copy(rOut, cute.local_tile(mO[token, head, None], (DIMS,), (tidx,)))
        if tidx == 0:
            mLse[token, head] = lse_max + cute.math.log2(lse_sum) * math.log(2.0)

    @cute.jit
    def fetch(
        self, mOPartial: cute.Tensor, token: Int32, head: Int32, first: Int32, split: Int32, rOPartial: cute.Tensor
    ):
        """Load this thread's dimensions of the next `at_once` splits.

        Past the last, ``rOPartial`` stays as it is.
        """
        for i in cutlass.range_constexpr(self.at_once):
            if split + i < mOPartial.shape[0] and first < self.head_dim:
                row = mOPartial[split + i, token, head, None]
                cute.autovec_copy(cute.local_tile(row, (DIMS,), (first // DIMS,)), rOPartial[None, i])

    @cute.jit
    def angles(self, rope: Any, token: Int32, first: Int32):
        """Load the angles of this thread's pairs, [1, pairs] in registers.

        Anything where it has none.
        """
        angles = Tables(*(cute.make_rmem_tensor((1, DIMS // 2), Float32) for _ in range(2)))
        if cutlass.const_expr(self.inverse_rope):
            pair = (first - (self.head_dim - 64)) // 2
            for table, registers in zip(rope, angles, strict=True):
                registers.fill(0.0)
                if first >= self.head_dim - 64 and first < self.head_dim:
                    for j in cutlass.range_constexpr(DIMS // 2):
                        registers[0, j] = table[token, pair + j]
        return angles

    @cute.jit
    def max_and_sum(self, mLsePartial: cute.Tensor, token: Int32, head: Int32, lse: Float32):
        """Return the largest LSE and the sum of e^{lse_i} relative to it, in all lanes.

        The largest is 0 if all are -inf.

        Args:
            lse: the LSE of this lane's split of the first 32.
        """
        lse_max = lse
        for split in cutlass.range(32, mLsePartial.shape[0], 32, unroll=1):
            lse_max = cute.arch.fmax(lse_max, self.lse_of_lane(mLsePartial, token, head, split))
        lse_max = cute.arch.warp_reduction_max(lse_max)
        lse_max = cutlass.select_(lse_max > -Float32.inf, lse_max, Float32(0.0))
        lse_sum = cute.math.exp2((lse - lse_max) * LOG2_E, fastmath=True)
        for split in cutlass.range(32, mLsePartial.shape[0], 32, unroll=1):
            other = self.lse_of_lane(mLsePartial, token, head, split)
            lse_sum += cute.math.exp2((other - lse_max) * LOG2_E, fastmath=True)
        return lse_max, cute.arch.warp_reduction_sum(lse_sum)

    @cute.jit
    def lse_of_lane(self, mLsePartial: cute.Tensor, token: Int32, head: Int32, split: Int32):
        """Return in lane l the LSE of split ``split + l``; -inf past the last."""
        lse, own = -Float32.inf, split + cute.arch.lane_idx()
        if own < mLsePartial.shape[0]:
            lse = mLsePartial[own, token, head]
        return lse

    @cute.jit
    def add(self, scale: Float32, lane: Int32, splits: Int32, rOPartial: cute.Tensor, rO: cute.Tensor):
        """Add O += scale_i * O_i in order, for at most `at_once` splits.

        ``splits`` of them are there; from ``lane`` on.
        """
        for i in cutlass.range_constexpr(self.at_once):
            of_split = cute.arch.shuffle_sync(scale, lane + i)
            if i < splits:
                rO.store(rO.load() + rOPartial[None, i].load() * of_split)
