"""Sum up what the experts made of a token.

    out[t] = sum_s w[t, s] y[row_of[t, s]] + shared[t]           s = 0 .. k - 1 in order, fp32, rounded once to bf16

Rows of -1 are skipped, whatever stands in y. Without w the weights are 1 (the first GEMM applied them).

A thread has 8 columns of a token (16 bytes), a CTA of 128 threads 1,024 columns, so that a single token of width 7168
uses 7 SMs. Its loads, of up to 8 slots and the shared expert's, are in flight together: one latency for the row
numbers, one for the rows. Bytes: T d 2 (k + 1 + shared), read and written once; nothing is reused.

Source: DSV4 paper, MoE section; `dsv4lib.reference.moe_combine`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsv4lib.errors import ConfigError

MAX_K = 16
THREADS = 128
COLUMNS = 8  # of a thread
AT_ONCE = 8  # slots whose loads are in flight together


class MoeCombine:
    """Add rows of experts; see the module docstring.

    Args:
        k: slots a token, 1 to 16.
        weighted: rows are multiplied by weights.
        shared: there is a row of the shared expert.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, k: int = 6, weighted: bool = False, shared: bool = True):
        if not 1 <= k <= MAX_K:
            raise ConfigError("k", k, f"1 to {MAX_K}")
        self.k, self.weighted, self.shared = k, weighted, shared

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [name for name in ("weighted", "shared") if vars(self)[name]]
        return f"MoeCombine({', '.join([str(self.k), *options])})"

    @cute.jit
    def __call__(
        self,
        mY: cute.Tensor,
        mRowOf: cute.Tensor,
        mWeights: Any,
        mShared: Any,
        mOut: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for 1,024 columns of a token.

        Args:
            mY: [R, d] bf16, d a multiple of 8.
            mRowOf: [T, k] int32; what is outside 0 .. R - 1 is skipped.
            mWeights: [T, k] fp32 or None.
            mShared: [T, d] bf16 or None.
            mOut: [T, d] bf16.
            stream: where the launch is queued.
        """
        grid = (mOut.shape[0], cute.ceil_div(mOut.shape[1], THREADS * COLUMNS), 1)
        self.kernel(mY, mRowOf, mWeights, mShared, mOut).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mRowOf: cute.Tensor, mWeights: Any, mShared: Any, mOut: cute.Tensor):
        """Combine 8 columns of a token a thread."""
        token, part, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        place = part * THREADS + tidx
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        if place * COLUMNS < mOut.shape[1]:
            rShared = cute.make_rmem_tensor(COLUMNS, BFloat16)
            if cutlass.const_expr(self.shared):
                cute.autovec_copy(cute.local_tile(mShared[token, None], (COLUMNS,), (place,)), rShared)
            rSum = cute.make_rmem_tensor(COLUMNS, Float32)
            rSum.fill(0.0)
            for first in cutlass.range_constexpr(0, self.k, AT_ONCE):
                self.add(mY, mRowOf, mWeights, token, place, first, rSum)
            if cutlass.const_expr(self.shared):
                rSum.store(rSum.load() + rShared.load().to(Float32))
            rOut = cute.make_rmem_tensor(COLUMNS, BFloat16)
            rOut.store(rSum.load().to(BFloat16))
            cute.autovec_copy(rOut, cute.local_tile(mOut[token, None], (COLUMNS,), (place,)))

    @cute.jit
    def add(
        self,
        mY: cute.Tensor,
        mRowOf: cute.Tensor,
        mWeights: Any,
        token: Int32,
        place: Int32,
        first: cutlass.Constexpr,
        rSum: cute.Tensor,
    ):
        """Up to `AT_ONCE` slots from ``first`` on: fetch all, then add in order."""
        slots = min(AT_ONCE, self.k - first)
        rY = cute.make_rmem_tensor((COLUMNS, slots), BFloat16)
        rY.fill(0.0)
        rRow = cute.make_rmem_tensor(slots, Int32)
        for s in cutlass.range_constexpr(slots):
            rRow[s] = mRowOf[token, first + s]
        for s in cutlass.range_constexpr(slots):
            if rRow[s].bitcast(Uint32) < mY.shape[0].bitcast(Uint32):
                cute.autovec_copy(cute.local_tile(mY[rRow[s], None], (COLUMNS,), (place,)), rY[None, s])
        for s in cutlass.range_constexpr(slots):
            if rRow[s].bitcast(Uint32) < mY.shape[0].bitcast(Uint32):
                y = rY[None, s].load().to(Float32)
                if cutlass.const_expr(self.weighted):
                    y = y * mWeights[token, first + s]
                rSum.store(rSum.load() + y)
