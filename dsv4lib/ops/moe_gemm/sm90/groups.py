"""Schedule tiles by a table in shared memory, made once by all threads of a CTA.

Tiles are numbered expert by expert; within an expert token tiles run first, so that CTAs that work at the same time
share a tile of weights in L2. CTA c of a grid of g takes tiles c, c + g, c + 2 g, .. Experts without tokens have none.
An expert's rows are split evenly among as few tiles as hold them, each from a multiple of 8 rows on.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.moe_gemm.sm90.config import EXPERTS_A_LANE, MAX_EXPERTS, ROW_STEP, Config

WARPS = MAX_EXPERTS // 32  # that scan


class Groups(NamedTuple):
    """Hold the groups of tokens in SMEM, MAX_EXPERTS of each.

    Experts that do not exist are empty.
    """

    ends: cute.Tensor  # int32: tiles of the experts up to and with this one
    offsets: cute.Tensor  # int32: first row
    counts: cute.Tensor  # int32: rows
    feature_tiles: Int32


class Tile(NamedTuple):
    """A tile of one expert: features from 64 ``feature`` on, rows ``row`` .. ``row + rows - 1``."""

    expert: Int32
    feature: Int32
    row: Int32
    rows: Int32


class Walk(Config):
    """The table, and the tile of a number."""

    @cute.jit
    def find_groups(self, mOffsets: cute.Tensor, mCounts: cute.Tensor, groups: Groups, sScan: cute.Tensor):
        """Fill the table; all threads of the CTA call it.

        The last barrier is the caller's.
        """
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // 32, cute.arch.lane_idx()
        rUpto = cute.make_rmem_tensor(cute.ceil_div(MAX_EXPERTS, self.threads), Int32)
        for i in cutlass.range_constexpr(rUpto.shape):
            expert = i * self.threads + tidx
            offset, count = Int32(0), Int32(0)
            if expert < mCounts.shape[0]:
                offset, count = mOffsets[expert], mCounts[expert]
            upto = cute.ceil_div(count, self.tile_n) * groups.feature_tiles
            for j in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(upto, 1 << j, mask_and_clamp=0)
                upto = upto + cutlass.select_(lane >= 1 << j, other, Int32(0))
            rUpto[i] = upto
            if expert < MAX_EXPERTS:
                groups.offsets[expert] = offset
                groups.counts[expert] = count
                if lane == 31:
                    sScan[i * self.threads // 32 + warp] = upto
        cute.arch.barrier(barrier_id=0, number_of_threads=self.threads)
        for i in cutlass.range_constexpr(rUpto.shape):
            expert, own = i * self.threads + tidx, i * self.threads // 32 + warp
            if expert < MAX_EXPERTS:
                upto = rUpto[i]
                for w in cutlass.range_constexpr(WARPS - 1):
                    upto = upto + cutlass.select_(own > w, sScan[w], Int32(0))
                groups.ends[expert] = upto

    @cute.jit
    def tile(self, groups: Groups, index: Int32):
        """Return the tile of a number below the number of tiles.

        All lanes of a warp call it.
        """
        lane = cute.arch.lane_idx()
        last = groups.ends[lane * EXPERTS_A_LANE + (EXPERTS_A_LANE - 1)]
        first = cute.arch.popc(cute.arch.vote_ballot_sync(last <= index)) * EXPERTS_A_LANE
        end = groups.ends[first + lane % EXPERTS_A_LANE]
        before = cute.arch.vote_ballot_sync(end <= index) & (1 << EXPERTS_A_LANE) - 1
        expert = first + cute.arch.popc(before)
        count = groups.counts[expert]
        across = cute.ceil_div(count, self.tile_n)
        inside = index - (groups.ends[expert] - across * groups.feature_tiles)
        share = cute.ceil_div(cute.ceil_div(count, across), ROW_STEP) * ROW_STEP
        start = inside % across * share
        rows = cutlass.min(count - start, share)
        return Tile(expert, inside // across, groups.offsets[expert] + start, rows)
