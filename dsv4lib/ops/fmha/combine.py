"""Join attention over parts of the keys: softmax-weighted sum of the parts, sink, inverse RoPE.

    o = sum_i e^{lse_i} o_i / (sum_i e^{lse_i} + e^{sink})        lse = ln sum_i e^{lse_i}

Parts come from `Fmha(partial=True)`; an empty part has lse -inf and o = 0. The sum runs over i in order, so the result
does not depend on which part finished first.

A CTA owns one head of one token: thread t has dimensions 8 t .. 8 t + 7. What it costs is latency, not bytes: it waits
for the kernel that writes the parts, for the LSEs and for the parts. So it is launched early (programmatic dependent
launch) and waits itself; the loads of 4 or 8 parts, of the sink and of the angles are on their way before the first LSE
is looked at; each LSE is read once, by one lane, and handed round.

On an H200 (`bench.combine_probe`, data/bench/combine_times.csv; one after the other, warm, and what it adds after a
kernel that writes the parts):

    parts, tokens x heads      4 loads at once           8 loads at once
    5, 1 x 64                  1.80  behind 1.69 us      1.74  behind 1.58 us
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

from dsv4lib.dsl.rope import rotate_back
from dsv4lib.errors import ConfigError
from dsv4lib.ops.fmha.config import HEAD_DIMS, LOG2_E

AT_ONCE = 4, 8  # parts whose loads are in flight together: with 8 a thread has 128 registers, with 4 it has 80
DIMS = 8  # of a thread


def loads_at_once(splits: int, heads: int) -> int:
    """The larger number for many parts of few heads (of all tokens): with the smaller one more run on an SM at once."""
    few, many = AT_ONCE
    return many if splits > few and splits * 32 >= heads else few


class Combine:
    """Join parts of an attention; see the module docstring.

    Args:
        head_dim: D.
        dtype: of O: "bf16" or "fp16".
        sink: there is a sink logit a head.
        inverse_rope: rotate the last 64 dimensions of O back.
        at_once: parts whose loads are in flight together, one of `AT_ONCE`; `loads_at_once` says which suits a call.

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
        mParts: cute.Tensor,
        mLses: cute.Tensor,
        mSink: Any,
        rope: Any,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch one CTA a head.

        Args:
            mParts: [splits, T, H, D] fp32.
            mLses: [splits, T, H] fp32.
            mSink: [H] fp32 or None.
            rope: (cos [T, 32], sin [T, 32]) fp32 or None.
            mO: [T, H, D].
            mLse: [T, H] fp32.
            stream: where the launch is queued.
        """
        self.kernel(mParts, mLses, mSink, rope, mO, mLse).launch(
            grid=(mO.shape[0], mO.shape[1], 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mLses: cute.Tensor, mSink: Any, rope: Any, mO: cute.Tensor, mLse: Any):
        """One head: fetch, weigh, add, rotate, store."""
        token, head, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        first = DIMS * tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # who waits for this kernel waits for the one before too
        rPart = cute.make_rmem_tensor((DIMS, self.at_once), Float32)
        rPart.fill(0.0)
        self.fetch(mParts, token, head, first, Int32(0), rPart)
        mine = self.lse_of_lane(mLses, token, head, Int32(0))
        logit = mSink[head] if cutlass.const_expr(self.sink) else None
        turns = self.angles(rope, token, first)
        largest, total = self.weights(mLses, token, head, mine)
        denominator = total
        if cutlass.const_expr(self.sink):
            denominator = total + cute.math.exp2((logit - largest) * LOG2_E, fastmath=True)
        scale = cutlass.select_(total != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # true of NaN, too
        rO = cute.make_rmem_tensor(DIMS, Float32)
        rO.fill(0.0)
        if total != 0.0:
            for block in cutlass.range(0, mLses.shape[0], 32, unroll=1):
                if block > 0:
                    mine = self.lse_of_lane(mLses, token, head, block)
                weight = cute.math.exp2((mine - largest) * LOG2_E, fastmath=True) * scale
                end = cutlass.min(block + 32, mLses.shape[0])
                for part in cutlass.range(block, end, self.at_once, unroll=1):
                    if part > 0:
                        self.fetch(mParts, token, head, first, part, rPart)
                    self.add(weight, part - block, end - part, rPart, rO)
        if first < self.head_dim:
            if cutlass.const_expr(self.inverse_rope):
                if first >= self.head_dim - 64 and total != 0.0:
                    rotate_back(rO, turns, 0, 0)
            rOut = cute.make_rmem_tensor(DIMS, self.element)
            rOut.store(rO.load().to(self.element))
            cute.autovec_copy(rOut, cute.local_tile(mO[token, head, None], (DIMS,), (tidx,)))
        if tidx == 0:
            mLse[token, head] = largest + cute.math.log2(total) * math.log(2.0)

    @cute.jit
    def fetch(self, mParts: cute.Tensor, token: Int32, head: Int32, first: Int32, part: Int32, rPart: cute.Tensor):
        """This thread's dimensions of the next parts, `at_once`; behind the last part ``rPart`` stays as it is."""
        for i in cutlass.range_constexpr(self.at_once):
            if part + i < mParts.shape[0] and first < self.head_dim:
                row = mParts[part + i, token, head, None]
                cute.autovec_copy(cute.local_tile(row, (DIMS,), (first // DIMS,)), rPart[None, i])

    @cute.jit
    def angles(self, rope: Any, token: Int32, first: Int32):
        """(cosines, sines) of this thread's pairs, [1, pairs] in registers; anything where it has none."""
        turns = tuple(cute.make_rmem_tensor((1, DIMS // 2), Float32) for _ in range(2))
        if cutlass.const_expr(self.inverse_rope):
            pair = (first - (self.head_dim - 64)) // 2
            for table, registers in zip(rope, turns, strict=True):
                registers.fill(0.0)
                if first >= self.head_dim - 64 and first < self.head_dim:
                    for j in cutlass.range_constexpr(DIMS // 2):
                        registers[0, j] = table[token, pair + j]
        return turns

    @cute.jit
    def weights(self, mLses: cute.Tensor, token: Int32, head: Int32, mine: Float32):
        """The largest LSE of the parts (0 if all are -inf) and the sum of weights relative to it, in all lanes.

        Args:
            mine: the LSE of this lane's part of the first 32.
        """
        largest = mine
        for part in cutlass.range(32, mLses.shape[0], 32, unroll=1):
            largest = cute.arch.fmax(largest, self.lse_of_lane(mLses, token, head, part))
        largest = cute.arch.warp_reduction_max(largest)
        largest = cutlass.select_(largest > -Float32.inf, largest, Float32(0.0))
        total = cute.math.exp2((mine - largest) * LOG2_E, fastmath=True)
        for part in cutlass.range(32, mLses.shape[0], 32, unroll=1):
            lse = self.lse_of_lane(mLses, token, head, part)
            total += cute.math.exp2((lse - largest) * LOG2_E, fastmath=True)
        return largest, cute.arch.warp_reduction_sum(total)

    @cute.jit
    def lse_of_lane(self, mLses: cute.Tensor, token: Int32, head: Int32, part: Int32):
        """Lane l: the LSE of part ``part + l``; -inf behind the last."""
        lse, mine = -Float32.inf, part + cute.arch.lane_idx()
        if mine < mLses.shape[0]:
            lse = mLses[mine, token, head]
        return lse

    @cute.jit
    def add(self, weight: Float32, lane: Int32, parts: Int32, rPart: cute.Tensor, rO: cute.Tensor):
        """O += weight x part, in order, for ``parts`` that there are, at most `at_once`; weights from ``lane`` on."""
        for i in cutlass.range_constexpr(self.at_once):
            of_part = cute.arch.shuffle_sync(weight, lane + i)
            if i < parts:
                rO.store(rO.load() + rPart[None, i].load() * of_part)
