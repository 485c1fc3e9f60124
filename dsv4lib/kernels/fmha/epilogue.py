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


@cute.jit
def multiply(registers: cute.Tensor, factor: Float32):
    """An even number of fp32 registers by one factor, two at a time."""
    for i in cutlass.range_constexpr(0, cute.size(registers), 2):
        both = cute.arch.mul_packed_f32x2((registers[i], registers[i + 1]), (factor, factor))
        registers[i], registers[i + 1] = both


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
    ):
        """Store this thread's half of O, a line after the other: 32 columns of a lane, consecutive dimensions.

        Args:
            outputs: (mSink, rope, mO, mLse) of the host call.
            address: of tensor memory.
            row: of this thread, which holds half of each 128 or 256 dimensions.
            inverse: O is multiplied by it.
            any_tile: there was a key; else O was never written.
        """
        mO, _ = self.of_part(outputs)
        rO = cute.make_rmem_tensor(32, Float32)
        # lines of one P V instruction, in a pair all; addresses of lines differ by constants
        lines = (self.pv_n if self.cluster == 1 else self.head_dim) // 64
        gRow = cute.domain_offset((cute.assume(row.half * (lines * 32), divby=32),), mO[row.token, row.head, None])
        for i in cutlass.range_constexpr(self.head_dim // 64):
            if any_tile:
                tmem.load(address, 32 * i, row.tidx, rO)
                cute.arch.fence_view_async_tmem_load()
                multiply(rO, inverse)
            else:
                rO.fill(0.0)
            block = 2 * (i // lines) * lines + i % lines  # of 32 dimensions, for lanes 0-63
            first = block + lines + 2 - self.head_dim // 32  # of the two that are rotated; below 0: none in this line
            if cutlass.const_expr(self.inverse_rope and first >= 0):
                if row.inside and first - (1 - row.half) * lines >= 0:
                    self.rotate(rO, outputs[1], row.token, (first - (1 - row.half) * lines) * 16)
            if row.inside:
                gO = cute.logical_divide(cute.local_tile(gRow, (32,), (block,)), (8,))
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
