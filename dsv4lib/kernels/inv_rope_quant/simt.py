"""Inverse RoPE of attention's output and its quantisation for the grouped output projection, in one pass.

    x = o, its last 64 dims turned back by the query's position          fp32, not rounded in between
    codes = E4M3(x / s), s = 2^ceil(log2(max(amax, 1e-4) / 448)) of each 128 dims of a head

The bits are those of `reference.rope.apply_inverse` in fp32 and `formats.fp8_block`. A NaN or Inf makes its group NaN;
so does a position that the table does not have.

**Threads** as in `common.head_rows`. A group is 16 lanes: 4 shuffles for its amax, taken over bits (packed in pairs of
bf16, or fp32 where lanes have rotated); codes leave 8 bytes a lane, 256 of a warp in a row; the 4 scales of a head come
together in lane 0 and leave as one word. No shared memory, no barrier.

**Bytes** 3 an element (2 in, 1 out) and 1/128; about 170 machine instructions a head of a warp, where memory leaves
time for 300 on an H200: limited by memory. A decode step: the chain of position, table, rotation, store.

Source: DSV4 paper, grouped output projection; DSV4 released inference code.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.kernels.common import rope
from dsv4lib.kernels.common.head_rows import FIRST_ROPE_LANE, HALVES, LANES, PIECE, HeadRows
from dsv4lib.kernels.quantize import codes
from dsv4lib.kernels.quantize.config import RECIPES
from dsv4lib.kernels.quantize.simt import divide, in_fp32, store_words, values_of, words_of

FORMAT = RECIPES["fp8"]
GROUP_LANES = FORMAT.block // PIECE


class InvRopeQuant(HeadRows):
    """Turn back and quantise; see the module docstring.

    Args:
        heads, warps: as in `HeadRows`.
        gathered: rows of the table are chosen by positions; else row t is token t's.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, heads: int = 4, warps: int = 8, gathered: bool = True):
        super().__init__(heads, warps)
        self.gathered = gathered

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"InvRopeQuant({self.heads}, {self.warps}{', gathered' * self.gathered})"

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        blocks: tuple,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mO: [T, H, 512] bf16.
            mPositions: [T] int64, or None unless ``gathered``.
            mTable: [P, 64] fp32, 32 cosines and 32 sines a row.
            mCodes: [T, H, 128] int32, 4 codes a word. mScales: [T, H] int32, 4 bytes of UE8M0.
            blocks: of a token, to divide by (`simt.divide`).
            stream: where the launch is queued.
        """
        self.kernel(mO, mPositions, mTable, mCodes, mScales, blocks).launch(
            grid=(mO.shape[0] * blocks[0], 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        blocks: tuple,
    ):
        """Fetch heads and angles, then one head after the other."""
        cta, _, _ = cute.arch.block_idx()
        token, block = divide(cta, blocks)
        first = self.first_head(block)
        cute.arch.griddepcontrol_wait()
        rO = self.fetch(mO, token, first)
        turn = self.angles(mTable, mPositions, token)
        my_codes = cute.domain_offset((token, first, 0), mCodes)
        my_scales = cute.domain_offset((token, first), mScales)
        for i in cutlass.range_constexpr(self.heads):
            if first + i < mO.shape[1]:
                scales = self.convert(rO[None, None, i], turn, my_codes[0, i, None])
                if cute.arch.lane_idx() == 0:
                    my_scales[0, i] = scales

    @cute.jit
    def convert(self, rRow: cute.Tensor, turn: tuple, codes_line: cute.Tensor) -> Int32:
        """Turn, scale, convert and store one head; all lanes of a warp come here. Lane 0 learns the four scales."""
        lane, packed = cute.arch.lane_idx(), Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            rX = in_fp32(rRow[None, half])
            amax = codes.largest(words_of(rRow[None, half]), True)
            if cutlass.const_expr(half == HALVES - 1):
                if lane >= FIRST_ROPE_LANE:
                    turned = rope.turn([rX[i] for i in range(PIECE)], *turn, True)
                    for i in cutlass.range_constexpr(PIECE):
                        rX[i] = turned[i]
                    amax = codes.largest(words_of(rX), False)
            byte = codes.ue8m0(codes.over_lanes(amax, GROUP_LANES), FORMAT.divisor, FORMAT.floor)
            words = list(codes.e4m3(values_of(rX), codes.inverse_power(byte)))
            store_words(codes_line, half * LANES + lane, words)
            packed |= byte << 16 * half
        return packed | cute.arch.shuffle_sync_bfly(packed, GROUP_LANES) << 8
