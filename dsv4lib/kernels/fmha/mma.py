"""The warp that issues both products of a tile; of a pair only the one in the first CTA, for both."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.kernels.common import umma
from dsv4lib.kernels.fmha.config import (
    CHUNK,
    CHUNK_BYTES,
    P_BYTES,
    P_STAGES,
    S_STAGES,
    TILE_N,
)
from dsv4lib.kernels.fmha.work import Items, Plan


class Mma(Plan):
    """The MMA warp: S = Q K^T and O += P V, both weight-stationary, or of a pair of CTAs."""

    @cute.jit
    def mma(
        self,
        lists: tuple,
        items: Items,
        sKV: Int32,
        sP: Int32,
        allocator: memory.TmemAllocator,
        kv: pipeline.PipelineTmaUmma,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
    ):
        """MMA warp: one item after the other; of a pair only the first CTA's."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        if cutlass.const_expr(self.cluster == 1):
            self.mma_items(lists, items, sKV, sP, base, (kv, s, p))
        elif cute.arch.block_idx_in_cluster() == 0:
            self.mma_items(lists, items, sKV, sP, base, (kv, s, p))

    @cute.jit
    def mma_items(self, lists: tuple, items: Items, sKV: Int32, sP: Int32, base: Int32, rings: tuple):
        """S of tile j + 1 goes out before P V of tile j, so that the softmax of a tile hides behind MMAs.

        The next item's Q goes to tensor memory, and its first S follows, behind P V of the last tile of this one, while
        the softmax warps read O. Q K^T of that tile, which read the Q before, is done then: its P was waited for. O
        needs no sign: the softmax warps hand over the first P of an item when they have read the O of the one before.
        """
        kv, s, p = rings
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        used = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        scores = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        weights = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        tiles = self.tiles_of(lists, items, items.first)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            tiles_after = self.tiles_of(lists, items, item + items.step)  # asked for a whole item ahead
            if tiles > 0:
                for part in cutlass.range_constexpr(self.q_stages):
                    self.take_q(base, sKV, kv, full, part)
                    full.advance()
                    used.advance()
            for tile in cutlass.range(tiles + 1, unroll=1):
                if tile < tiles:
                    s.producer_acquire(scores)
                    for part in cutlass.range_constexpr(self.tile_stages):
                        kv.consumer_wait(full)
                        umma.fence_after_thread_sync()
                        self.mma_qk(base, scores.index, sKV + full.index * self.stage_bytes, part)
                        full.advance()
                    s.producer_commit(scores)
                    scores.advance()
                if tile > 0:
                    p.consumer_wait(weights)
                    umma.fence_after_thread_sync()
                    for part in cutlass.range_constexpr(self.tile_stages):
                        stage = sKV + used.index * self.stage_bytes
                        self.mma_pv(base, sP + weights.index * P_BYTES, stage, tile > 1, part)
                        kv.consumer_release(used)
                        used.advance()
                    p.consumer_release(weights)
                    weights.advance()
            tiles = tiles_after

    @cute.jit
    def tiles_of(self, lists: tuple, items: Items, item: Int32):
        """How many tiles an item has."""
        work = self.work(lists, items, item)
        return work.end - work.first

    @cute.jit
    def take_q(
        self,
        base: Int32,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        full: pipeline.PipelineState,
        part: cutlass.Constexpr,
    ):
        """Wait for the ``part``-th stage of Q, copy it, and give it back when that is done."""
        kv.consumer_wait(full)
        umma.fence_after_thread_sync()
        self.place_q(base, sKV + full.index * self.stage_bytes, part)
        kv.consumer_release(full)

    @cute.jit
    def place_q(self, base: Int32, stage: Int32, part: cutlass.Constexpr):
        """Q from the ``part``-th of its stages to tensor memory: of each pair of chunks the first to lanes 0-63."""
        with cute.arch.elect_one():
            source = umma.at(self.k_descriptor, stage)
            pairs = self.chunks // 2 // self.q_stages
            for pair in cutlass.range_constexpr(pairs):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    column = base + self.q_column + (part * pairs + pair) * (CHUNK // 2) + k * 8
                    umma.copy_rows(column, umma.behind(source, pair * 2 * CHUNK_BYTES + k * 32), self.cluster)

    @cute.jit
    def mma_qk(self, base: Int32, slot: Int32, stage: Int32, part: cutlass.Constexpr):
        """S = Q K^T as two sums over half the head dimensions, in lanes 0-63 and in 64-127: what a stage has of it.

        N is 128. Alone: the 64 keys of an even chunk and, one chunk further in SMEM, the same keys of the odd one. A
        pair: the 64 keys of a chunk of each CTA, the first CTA's and the second CTA's half of the dimensions.
        """
        with cute.arch.elect_one():
            d = base + self.s_column + slot * TILE_N
            keys = umma.at(self.k_descriptor, stage)
            pairs = self.chunks // 2 // self.tile_stages
            for pair in cutlass.range_constexpr(pairs):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    a = base + self.q_column + (part * pairs + pair) * (CHUNK // 2) + k * 8
                    b = umma.behind(keys, pair * (2 // self.cluster * CHUNK_BYTES) + k * 32)
                    umma.mma(d, a, b, self.qk_instruction, part + pair + k > 0, **self.form)

    @cute.jit
    def mma_pv(self, base: Int32, weights: Int32, stage: Int32, accumulate: cutlass.Boolean, part: cutlass.Constexpr):
        """O += P V, the blocks whose dimensions the stage of ``part`` holds: read with the head dimension as N.

        A pair: half of N from each CTA.
        """
        blocks = self.head_dim // self.pv_n // self.tile_stages
        with cute.arch.elect_one():
            p, values = umma.at(self.k_descriptor, weights), umma.at(self.v_descriptor, stage)
            for block in cutlass.range_constexpr(blocks):
                o = base + (part * blocks + block) * (self.pv_n // 2)
                for k in cutlass.range_constexpr(TILE_N // 16):
                    a = umma.behind(p, k * 32)
                    b = umma.behind(values, block * (self.pv_n // self.cluster // CHUNK * CHUNK_BYTES) + k * (16 * 128))
                    add = accumulate if k == 0 else cutlass.Boolean(True)
                    umma.mma(o, a, b, self.pv_instruction, add, **self.form)
