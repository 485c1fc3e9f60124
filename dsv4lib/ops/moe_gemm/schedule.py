"""Schedule tiles. Every role computes its CTA's tiles by itself from the groups' sizes.

Tiles are numbered expert by expert; within an expert token tiles run first, so that CTAs that work at the same time
share a tile of weights in L2. A group's rows are split evenly among as few tiles as hold them: with full tiles and a
rest alternating, an even grid would give all the full ones to every other CTA. CTA (or pair) c of a grid of g takes
tiles c, c + g, c + 2 g, .. A role walks through the experts in windows of 32, a lane an expert: a prefix sum and a
ballot find the expert of a tile, and no role ever goes back. Empty experts have no tiles and cost only their lane.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.moe_gemm.config import N_STEP, ROW_STEP, Config

WINDOW = 32


class Ranges(NamedTuple):
    """First row and rows of each expert's tokens, int32 [E]."""

    offsets: cute.Tensor
    counts: cute.Tensor


class Groups(NamedTuple):
    """The groups of tokens, and how the features of each are split."""

    experts: Int32
    feature_tiles: Int32
    offsets: Any  # [E] int32: first row; of `Linear` None
    counts: Any  # [E] int32: rows; of `Linear` Int32: of each


class Tile(NamedTuple):
    """A tile of one expert: features from ``feature`` on, rows ``row`` .. ``row + rows - 1``."""

    expert: Int32
    feature: Int32  # of this CTA
    row: Int32
    rows: Int32
    n: Int32  # rows, up to a multiple of what an MMA can have


class Place(NamedTuple):
    """Where a role is: the number of its tile, and the window of experts it looks at."""

    index: Int32
    window: Int32  # first expert
    before: Int32  # tiles of the experts before it
    expert: Int32  # of the tile; the number of experts where there is none
    inside: Int32  # number of the tile within its expert


class Schedule(Config):
    """The walk of a role."""

    def groups(self, given: Any, mX: cute.Tensor, mW: cute.Tensor):
        """Host side: describe the groups of a call."""
        return Groups(mW.shape[0], cute.ceil_div(mW.shape[1], self.pair_m), *given)

    @cute.jit
    def first_place(self, groups: Groups):
        """Return where a role starts."""
        block, _, _ = cute.arch.block_idx()
        return self.find(groups, block // self.ctas, Int32(0), Int32(0))

    @cute.jit
    def next_place(self, groups: Groups, place: Place):
        """Return the next tile of this CTA."""
        blocks, _, _ = cute.arch.grid_dim()
        return self.find(groups, place.index + blocks // self.ctas, place.window, place.before)

    @cute.jit
    def find(self, groups: Groups, index: Int32, window: Int32, before: Int32):
        """Return the place of tile ``index``, which is not before ``window``.

        All lanes of a warp call it.
        """
        experts = groups.experts
        tiles, upto = self.tiles_of(groups, window)
        total = cute.arch.shuffle_sync(upto, WINDOW - 1)
        while window < experts and before + total <= index:
            before = before + total
            window = window + WINDOW
            tiles, upto = self.tiles_of(groups, window)
            total = cute.arch.shuffle_sync(upto, WINDOW - 1)
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(before + upto <= index))
        found = cute.arch.shuffle_sync(upto - tiles, lane)
        expert = Int32(experts)
        if window < experts:
            expert = window + lane
        return Place(index, window, before, expert, index - before - found)

    @cute.jit
    def tiles_of(self, groups: Groups, window: Int32):
        """Tiles of this lane's expert, and of all experts of the window up to and with it."""
        lane = cute.arch.lane_idx()
        tiles = Int32(0)
        if window + lane < groups.experts:
            tiles = cute.ceil_div(groups.counts[window + lane], self.tile_n) * groups.feature_tiles
        upto = tiles
        for i in range(5):  # five steps of a prefix sum over 32 lanes
            other = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
            if lane >= 1 << i:
                upto = upto + other
        return tiles, upto

    @cute.jit
    def tile(self, groups: Groups, place: Place):
        """Return the tile at a place that has one."""
        start, count = self.rows_of(groups, place.expert)
        across = cute.ceil_div(count, self.tile_n)
        share = cute.ceil_div(cute.ceil_div(count, across), ROW_STEP) * ROW_STEP
        first = place.inside % across * share
        rows = count - first
        if rows > share:
            rows = share
        feature = place.inside // across * self.pair_m
        if cutlass.const_expr(self.ctas > 1):
            feature = feature + cute.arch.block_idx_in_cluster() * (self.pair_m // self.ctas)
        n = cute.ceil_div(rows, N_STEP) * N_STEP
        return Tile(place.expert, feature, start + first, rows, n)

    def rows_of(self, groups: Groups, expert: Int32):
        """First row of an expert's tokens, and how many there are."""
        return groups.offsets[expert], groups.counts[expert]

    def lead(self, tile: Tile) -> tuple:
        """Return what comes before the row in an index of tokens or outputs."""
        return (tile.expert,) if self.batched else ()
