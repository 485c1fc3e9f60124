"""Multiply linear layers on SM100. It is the experts' GEMM where every group has all tokens, so no counts are read.

    y[g, t] = alpha_g * (x[g, t] @ W_g^T)           G = 1: a linear; G groups of heads: the output projection

With `swiglu` also the shared expert's first GEMM. Source: DSV4's released code; oracle: `dsv4lib.reference.linear`.
Tiles, roles, pipelines and formats are those of `moe_gemm.sm100`. What differs:

    tokens, outputs    [G, T, ..] with any strides of G and T: groups may lie side by side in a row, as heads do
    schedule           a tile's group is a division; no counts in memory, hence no kernel that writes them

    first weights      are fetched to L2 while the kernel before still runs

FP8 linears of DSV4 (weights 128 x 128, activations 1 x 128, scales E8M0) are mode "mxfp8" with each scale repeated: the
same numbers.

Few tokens: features / 128 CTAs read the weights, and there is no split along K. By `predict.moe`'s static model one
over a cluster would take 6.6 instead of 8.3 us for q_a and kv of Flash (12 tiles), 7.2 instead of 10.4 of Pro (16) and
9.3 instead of 11.1 for wo_b of Flash, FP8, up to 32 tokens; nothing where 56 tiles and more already wait for HBM.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.dsl import boxes
from dsv4lib.ops.moe_gemm.config import ROW_BYTES
from dsv4lib.ops.moe_gemm.load import Sources
from dsv4lib.ops.moe_gemm.schedule import Groups, Place
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm


class Linear(MoeGemm):
    """GEMMs of equal size side by side. Options of `moe_gemm.Config`, but no routing weights."""

    batched = True

    def groups(self, given: Any, mX: cute.Tensor, mW: cute.Tensor):
        """Host side: describe the groups of a call."""
        return Groups(mW.shape[0], cute.ceil_div(mW.shape[1], self.pair_m), None, mX.shape[1])

    @cute.jit
    def first_place(self, groups: Groups):
        """Return where a role starts."""
        block, _, _ = cute.arch.block_idx()
        return self.place(groups, block // self.ctas)

    @cute.jit
    def next_place(self, groups: Groups, place: Place):
        """Return the next tile of this CTA."""
        blocks, _, _ = cute.arch.grid_dim()
        return self.place(groups, place.index + blocks // self.ctas)

    @cute.jit
    def place(self, groups: Groups, index: Int32):
        """Return the place of tile ``index``."""
        tiles = cute.ceil_div(groups.counts, self.tile_n) * groups.feature_tiles
        return Place(index, Int32(0), Int32(0), index // tiles, index % tiles)

    @cute.jit
    def prefetch(self, sources: Sources, groups: Groups, steps: Int32, barrier: cute.Pointer):
        """Fetch weights of the first tile to L2, as many steps as there are stages. No kernel before writes them."""
        place = self.first_place(groups)
        if place.expert < groups.experts:
            feature = self.tile(groups, place).feature
            step = cute.arch.lane_idx()
            if step < self.stages and step < steps:
                boxes.prefetch_box(sources.w, barrier, (step * ROW_BYTES, feature, place.expert))

    def rows_of(self, groups: Groups, expert: Int32):
        """Return the first row of a group's tokens, and how many there are."""
        return Int32(0), groups.counts
