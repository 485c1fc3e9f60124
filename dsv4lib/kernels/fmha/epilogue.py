"""From O in tensor memory to global memory: normalised, rotated, converted; and the log-sum-exp."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.kernels.common import tmem
from dsv4lib.kernels.common.rope import rotate_back
from dsv4lib.kernels.fmha.config import LOG2_E, Config
from dsv4lib.kernels.fmha.work import Row


class Epilogue(Config):
    """The last part of the softmax warps' work."""

    @cute.jit
    def of_part(self, outputs: tuple):
        """(mO, mLse) of this CTA's part of the keys."""
        _, _, mO, mLse = outputs
        if cutlass.const_expr(self.partial):
            _, _, split = cute.arch.block_idx()
            mO, mLse = mO[split, None, None, None], cute.slice_(mLse, (split, *(None,) * (cute.rank(mLse) - 1)))
        return mO, mLse

    @cute.jit
    def normaliser(self, outputs: tuple, row: Row, reference: Float32, total: Float32):
        """(what O is multiplied by, the sum of the weights with the sink); ``reference``: of the exponents, log2."""
        mSink = outputs[0]
        denominator, inverse = total, Float32(1.0)
        if cutlass.const_expr(self.sink):
            if row.inside:
                denominator = total + cute.math.exp2(mSink[row.head] * LOG2_E - reference, fastmath=True)
        if cutlass.const_expr(not self.raw):
            inverse = cutlass.select_(total != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # NaN stays
        return inverse, denominator

    @cute.jit
    def store_lines(
        self,
        outputs: tuple,
        address: cute.Pointer,
        row: Row,
        inverse: Float32,
        any_tile: cutlass.Boolean,
        part: Int32,
        parts: cutlass.Constexpr,
    ):
        """Store a part of this thread's half of O: lines, 32 columns of a lane, which are consecutive dimensions.

        Args:
            outputs: (mSink, rope, mO, mLse) of the host call.
            address: of tensor memory.
            row: of this thread, which holds half of each 128 or 256 dimensions.
            inverse: O is multiplied by it.
            any_tile: there was a key; else O was never written.
            part: of ``parts`` of the lines.
        """
        mO, _ = self.of_part(outputs)
        rO = cute.make_rmem_tensor(32, Float32)
        end = (part + 1) * (self.head_dim // 64) // parts
        # lines of one P V instruction; in a pair all
        lines = (self.pv_n if self.cluster == 1 else self.head_dim) // 64
        for i in cutlass.range(part * (self.head_dim // 64) // parts, end, unroll=1):
            rO.fill(0.0)
            if any_tile:
                tmem.load(address, 32 * i, row.tidx, rO)
                cute.arch.fence_view_async_tmem_load()
            rO.store(rO.load() * inverse)
            block = (2 * (i // lines) + row.half) * lines + i % lines  # of 32 dimensions
            if cutlass.const_expr(self.inverse_rope):
                if row.inside and block >= self.head_dim // 32 - 2:
                    self.rotate(rO, outputs[1], row.token, (block + 2 - self.head_dim // 32) * 16)
            if row.inside:
                gO = cute.logical_divide(cute.local_tile(mO[row.token, row.head, None], (32,), (block,)), (8,))
                rOut = cute.make_rmem_tensor((8, 4), mO.element_type)
                rOut.store(rO.load().reshape((8, 4)).to(mO.element_type))
                cute.autovec_copy(rOut, gO)
            cute.arch.sync_warp()

    @cute.jit
    def rotate(self, rO: cute.Tensor, rope: tuple, token: Int32, first: Int32):
        """Inverse RoPE of the 32 dimensions in ``rO``, pairs ``first`` .. of the rotated part."""
        rotate_back(rO, rope, token, first)

    @cute.jit
    def store_lse(self, mLse: cute.Tensor, row: Row, reference: Float32, total: Float32, with_sink: Float32):
        """ln of the sum of the weights, without the sink: it belongs to a union of parts, this may be one of them.

        Raw: the reference (as a natural logarithm) and the sum of the weights relative to it.
        """
        if row.inside:
            if cutlass.const_expr(self.raw):
                mLse[row.token, row.head, 0] = reference * math.log(2.0)
                mLse[row.token, row.head, 1] = total
            else:
                mLse[row.token, row.head] = (reference + cute.math.log2(total)) * math.log(2.0)
