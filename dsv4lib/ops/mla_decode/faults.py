"""Inject faults into MLA decode, one at a time: each class replaces one thing. `FAULTS` holds them by name.

`MaximumForTheSum` is of the kernel that combines splits, the others of `MlaDecode`. `CAUGHT_BY` says what finds each:
"wrong numbers" (the comparison), "MemoryFault" (an access that stops the emulator) or a kind of the emulator's reports.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from dsv4lib.dsl import umma
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.mla_decode.config import CHUNK_BYTES, HEADS, ROW, TILE
from dsv4lib.ops.mla_decode.mma import STEP
from dsv4lib.ops.mla_decode.queries import QueryTensors
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.ops.mla_decode.work import Row, Work


class ColumnOfTile(MlaDecode):
    """Takes a column of the page table for 64 tokens: right for pages of 64."""

    def column_of(self, token: Int32) -> Int32:
        """See `Load.column_of`."""
        return token // TILE  # WRONG: page_size


class NaturalExponent(MlaDecode):
    """Takes powers of two of logits that are scaled for powers of e."""

    def exponent_scale(self, scale: Float32) -> Float32:
        """See `MlaDecode.exponent_scale`."""
        return scale  # WRONG: times log2(e)


class NoRotatedKeys(MlaDecode):
    """The product of the latents overwrites that of the rotated dims.

    Right where q_pe is 0.
    """

    @cute.jit
    def mma_latents(self, d: Int32, sQ: Int32, stage: Int32, block: cutlass.Constexpr):
        """See `Mma.mma_latents`."""
        with cute.arch.elect_one():
            a = umma.at(self.row_descriptor, sQ + block * self.stage_chunks * (HEADS * ROW))
            b = umma.at(self.row_descriptor, stage)
            for chunk in cutlass.range_constexpr(self.stage_chunks):
                for k in cutlass.range_constexpr(ROW // STEP):
                    offset = chunk * CHUNK_BYTES + k * STEP  # also of Q: 64 heads as 64 tokens
                    rows = umma.advanced(a, offset), umma.advanced(b, offset)
                    add = block + chunk + k > 0  # WRONG: True, S has the rotated dims
                    umma.mma(d, *rows, self.qk_instruction, add, **self.variant)


class PadRowsStored(MlaDecode):
    """Stores all 64 rows of the MMA. Right for 64 heads, else over the heads of others."""

    @cute.jit
    def row(self, heads: Int32, work: Work):
        """See `Plan.row`."""
        return MlaDecode.row(self, work.head + HEADS, work)  # WRONG: heads


class PastTheEnd(MlaDecode):
    """Leaves what a page holds past a request's end: right while that is finite."""

    @cute.jit
    def clear_past_end(self, sKV: Int32, done: Int32, left: Int32, tidx: Int32):
        """See `Softmax.clear_past_end`."""
        # WRONG: nothing


class EveryTokenCounts(MlaDecode):
    """Weighs the tokens of the last tile past the end as others. Right for whole tiles."""

    @cute.jit
    def mask(self, rS: cute.Tensor, left: Int32):
        """See `Softmax.mask`."""
        # WRONG: nothing


class NoRescale(MlaDecode):
    """O keeps the scale of the first tile: right while row_max does not move."""

    @cute.jit
    def rescale_o(self, address: cute.Pointer, tidx: Int32, acc_scale: Float32):
        """See `Softmax.rescale_o`."""
        # WRONG: nothing


class OwnHalfMaximum(MlaDecode):
    """Each thread takes the maximum of its half of a tile.

    The halves of O are of different scales.
    """

    @cute.jit
    def tile_max(self, rS: cute.Tensor, row: Row, sRow: cute.Tensor, slot: Int32):
        """See `Softmax.tile_max`."""
        return rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)  # WRONG: of both halves


class SplitsOfTokens(MlaDecode):
    """Splits tokens evenly, not whole tiles: tiles at the borders count in two splits."""

    @cute.jit
    def split_tokens(self, tokens: Int32, split: Int32, num_splits: Int32):
        """See `Plan.split_tokens`."""
        each = cute.ceil_div(tokens, num_splits)  # WRONG: of tiles
        first = cutlass.min(split * each, tokens)
        return first, cutlass.min(first + each, tokens)


class ValuesTooEarly(MlaDecode):
    """P is handed over before the tensor core may see it."""

    @cute.jit
    def publish_p(self):
        """See `Softmax.publish_p`."""
        umma.fence_before_thread_sync()  # WRONG: no proxy fence


class AlwaysOverwrites(MlaDecode):
    """P V of every tile overwrites O: right for one tile."""

    @cute.jit
    def mma_pv(self, o: Int32, sP: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Mma.mma_pv`."""
        MlaDecode.mma_pv(self, o, sP, stage, Boolean(False))  # WRONG: accumulate


class HighLimbOfP(MlaDecode):
    """Multiplies the high limb of P alone, 4 significant bits of 8.

    Of bf16 queries and FP8 entries.
    """

    @cute.jit
    def mma_pv(self, o: Int32, sP: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """See `Mma.mma_pv`."""
        with cute.arch.elect_one():
            p, v = umma.at(self.p_descriptor, sP), umma.at(self.v_descriptor, stage)
            for k in cutlass.range_constexpr(self.p_limb // HEADS // STEP):  # WRONG: of each limb
                add = accumulate if k == 0 else Boolean(True)
                rows = umma.advanced(p, k * STEP), umma.advanced(v, k * self.v_step)
                umma.mma(o, *rows, self.pv_instruction, add, **self.variant)


class ScaleOfHeads(MlaDecode):
    """Forgets by what a head was scaled, of bf16 queries and FP8 entries."""

    @cute.jit
    def split_q(self, queries: QueryTensors, work: Work, row: Row, sQ: Int32, sRow: cute.Tensor):
        """See `Queries.split_q`."""
        MlaDecode.split_q(self, queries, work, row, sQ, sRow)
        return Float32(1.0)  # WRONG: what it returns


class HastyValues(MlaDecode):
    """Signals values of a pair's last tile that have not landed.

    The softmax warps write zeros over their ends.
    """

    @cute.jit
    def signal_last(self, kv: Any, kv_state: Any, s: Any, s_state: Any):
        """See `Mma.signal_last`."""
        last = s_state.clone()
        last.reverse()
        self.signal_values(s, last)  # WRONG: no wait


class OwnTokens(MlaDecode):
    """Both CTAs of a pair bring the keys of the first 64 tokens of a tile."""

    @cute.jit
    def load_keys(
        self,
        atom: cute.CopyAtom,
        rows: Int32,
        barrier: cute.Pointer,
        dim: Int32,
        page: Int32,
        tile: Int32,
        dims: cutlass.Constexpr,
    ):
        """See `Load.load_keys`."""
        self.load_boxes(atom, rows, barrier, dim, page, tile, dims, Int32(0), self.boxes)  # WRONG: rank * boxes


class MaximumForTheSum(Combine):
    """Divides by e^max of the LSEs, not by their sum.

    O of all splits is added up as if one had all the weight.
    """

    @cute.jit
    def max_and_sum(self, mLsePartial: cute.Tensor, token: Int32, head: Int32, lse: Float32):
        """See `Combine.max_and_sum`."""
        lse_max, lse_sum = Combine.max_and_sum(self, mLsePartial, token, head, lse)
        return lse_max, cutlass.select_(lse_sum > 0.0, Float32(1.0), Float32(0.0))  # WRONG: lse_sum


CAUGHT_BY = {
    ColumnOfTile: "wrong numbers",
    NaturalExponent: "wrong numbers",
    NoRotatedKeys: "wrong numbers",
    PadRowsStored: "MemoryFault",
    PastTheEnd: "wrong numbers",
    EveryTokenCounts: "wrong numbers",
    NoRescale: "wrong numbers",
    OwnHalfMaximum: "wrong numbers",
    SplitsOfTokens: "wrong numbers",
    ValuesTooEarly: "missing_proxy_fence",
    AlwaysOverwrites: "wrong numbers",
    HighLimbOfP: "wrong numbers",
    ScaleOfHeads: "wrong numbers",
    HastyValues: "race_shared",
    OwnTokens: "wrong numbers",
    MaximumForTheSum: "wrong numbers",
}
FAULTS = {kernel.__name__: kernel for kernel in CAUGHT_BY}
