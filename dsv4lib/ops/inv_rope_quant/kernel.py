"""Rotate and quantise heads in registers; what is computed is in `op`.

x is not rounded between rotation and quotient. A NaN or Inf makes its group NaN.

**Threads** as in `dsl.head_rows`. A group is 16 lanes: 4 shuffles for its amax, taken over bits (packed in pairs of
bf16, or fp32 where lanes have rotated); codes leave 8 bytes a lane, 256 of a warp in a row; the 4 scales of a head come
together in lane 0 and leave as one word. No shared memory, no barrier.

**Scales** lie as their reader wants them, `SCALES`; the bytes of a head are 4 s, s a UE8M0 byte of 128 dims:

    rowmajor        [T, H, 4] bytes: a word of a head
    swizzled        an image of `formats.scale_swizzle` for each group of heads, of a scale for every 32 dims: each of
                    the 4 bytes four times, a word in a 128x4 block of its own. The tokens of the last 128 rows write
                    zeros to the rows that no token has, each every n-th of them, n being how many tokens there are
    colmajor        fp32 [H, 4, T]: tokens side by side, rows on 16 bytes
    colmajor_ue8m0  [H, T] words of 4 bytes: the same

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

from dsv4lib.dsl import rope
from dsv4lib.dsl.head_rows import DIM, FIRST_ROPE_LANE, HALVES, LANES, PIECE, HeadRows
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.errors import ConfigError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize import codes
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.quantize.kernel import divide, in_fp32, store_words, values_of, words_of

FORMAT = RECIPES["fp8"]
GROUP_LANES = FORMAT.block // PIECE
GROUPS = DIM // FORMAT.block  # of a head, each with a scale
LAYOUTS = ("rowmajor", "swizzled", "colmajor", "colmajor_ue8m0")  # of scales


class InvRopeQuant(HeadRows):
    """Rotate back and quantise; see the module docstring.

    Args:
        heads, warps: as in `HeadRows`.
        gathered: rows of the table are chosen by positions; else row t is token t's.
        layout: of the scales, one of `LAYOUTS`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, heads: int = 4, warps: int = 8, gathered: bool = True, layout: str = "rowmajor"):
        super().__init__(heads, warps)
        if layout not in LAYOUTS:
            raise ConfigError("layout", layout, "one of " + ", ".join(LAYOUTS))
        self.gathered, self.layout = gathered, layout

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = ["gathered"] * self.gathered + [self.layout] * (self.layout != "rowmajor")
        return f"InvRopeQuant({', '.join([str(self.heads), str(self.warps), *flags])})"

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        blocks: Divisor,
        share: Any,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mO: [T, H, 512] bf16.
            mPositions: [T] int64, or None unless ``gathered``.
            mTable: [P, 64] fp32, 32 cosines and 32 sines a row.
            mCodes: [T, H, 128] int32, 4 codes a word.
            mScales: int32 words: [T, H], [groups, words of an image], [H, 4, T] or [H, T], as `LAYOUTS` go.
            blocks: of a token. share: `Divisor`, heads of a group, where swizzled, else None.
            stream: where the launch is queued.
        """
        self.kernel(mO, mPositions, mTable, mCodes, mScales, blocks, share).launch(
            grid=(mO.shape[0] * blocks.number, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mPositions: Any,
        mTable: cute.Tensor,
        mCodes: cute.Tensor,
        mScales: cute.Tensor,
        blocks: Divisor,
        share: Any,
    ):
        """Fetch heads and angles, then one head after the other."""
        cta, _, _ = cute.arch.block_idx()
        token, block = divide(cta, blocks)
        first = self.first_head(block)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        rO = self.fetch(mO, token, first)
        cos, sin = self.angles(mTable, mPositions, token)
        my_codes = cute.domain_offset((token, self.stored_from(first), 0), mCodes)
        my_scales = mScales
        if cutlass.const_expr(self.layout == "rowmajor"):
            my_scales = cute.domain_offset((token, first), mScales)
        for i in cutlass.range_constexpr(self.heads):
            if first + i < mO.shape[1]:
                scales = self.convert(rO[None, None, i], cos, sin, my_codes[0, i, None])
                if cutlass.const_expr(self.layout == "swizzled"):
                    self.store_image(mScales, share, token, mO.shape[0], first + i, scales)
                elif cutlass.const_expr(self.layout == "colmajor"):
                    if cute.arch.lane_idx() < GROUPS:
                        mScales[first + i, cute.arch.lane_idx(), token] = codes.power(mine(scales)).bitcast(Int32)
                elif cute.arch.lane_idx() == 0:
                    if cutlass.const_expr(self.layout == "rowmajor"):
                        my_scales[0, i] = scales
                    else:
                        mScales[first + i, token] = scales

    def stored_from(self, first: Int32) -> Int32:
        """Return the head from which a warp stores codes, given the first that it has read."""
        return first

    @cute.jit
    def convert(self, rRow: cute.Tensor, cos: list, sin: list, codes_line: cute.Tensor) -> Int32:
        """Rotate, scale, convert and store one head; all lanes come here. The lower half returns the four scales."""
        lane, packed = cute.arch.lane_idx(), Int32(0)
        for half in cutlass.range_constexpr(HALVES):
            rX = in_fp32(rRow[None, half])
            amax = codes.largest(words_of(rRow[None, half]), True)
            if cutlass.const_expr(half == HALVES - 1):
                if lane >= FIRST_ROPE_LANE:
                    rotated = rope.rotate([rX[i] for i in range(PIECE)], cos, sin, True)
                    for i in cutlass.range_constexpr(PIECE):
                        rX[i] = rotated[i]
                    amax = codes.largest(words_of(rX), False)
            byte = codes.ue8m0(codes.over_lanes(amax, GROUP_LANES), FORMAT.divisor, FORMAT.floor)
            words = list(codes.e4m3(values_of(rX), codes.inverse_power(byte)))
            store_words(codes_line, half * LANES + lane, words)
            packed |= byte << 16 * half
        return packed | cute.arch.shuffle_sync_bfly(packed, GROUP_LANES) << 8

    @cute.jit
    def store_image(
        self, mScales: cute.Tensor, share: Divisor, token: Int32, tokens: Int32, head: Int32, packed: Int32
    ):
        """Store a head's scales into its group's image.

        Also its share of the zeros after the last token.
        """
        lane, (group, place) = cute.arch.lane_idx(), divide(head, share)
        line, across = mScales[group, None], share.number * GROUPS
        if lane < GROUPS:
            line[word_of(token, place * GROUPS + lane, across)] = mine(packed) * 0x01010101
        last = (tokens - 1) // scale_swizzle.ROWS * scale_swizzle.ROWS
        if token >= last:
            step = tokens - last
            for row in cutlass.range(
                token + step * (1 + lane // GROUPS), last + scale_swizzle.ROWS, step * (LANES // GROUPS), unroll=1
            ):
                line[word_of(row, place * GROUPS + lane % GROUPS, across)] = Int32(0)


def mine(packed: Int32) -> Int32:
    """Return the scale of 128 dims that this lane, one of the first four, stores."""
    return packed >> 8 * cute.arch.lane_idx() & 255


def word_of(row: Int32, block: Int32, across: Int32) -> Int32:
    """Return the word of a row's ``block``-th run of 4 scales in an image.

    The image is so many of them wide.
    """
    return scale_swizzle.offset_of(row, block * scale_swizzle.COLS, across) // scale_swizzle.COLS
