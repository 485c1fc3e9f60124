"""Issue both products of a tile, S = Q @ K^T and O += P @ V.

Of a pair the first CTA's warp issues for both.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import umma
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, P_BYTES, P_STAGES, S_STAGES, TILE_N
from dsv4lib.ops.fmha.work import Items, KeyLists, Plan


class MmaRings(NamedTuple):
    """Pipelines of the MMA warp."""

    kv: pipeline.PipelineTmaUmma
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Mma(Plan):
    """Run the MMA warp. S = Q @ K^T and O += P @ V are both weight-stationary, or of a pair of CTAs."""

    @cute.jit
    def mma(
        self,
        lists: KeyLists,
        items: Items,
        sKV: Int32,
        sP: Int32,
        allocator: memory.TmemAllocator,
        rings: MmaRings,
    ):
        """Run the MMA warp: one item after the other; of a pair only the first CTA's.

        Successors may start, where there is room, once tensor memory is allocated. One that started before and took
        some would wait for this kernel, which would wait for its columns.
        """
        allocator.wait_for_alloc()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        base = allocator.retrieve_ptr(Float32).toint()
        if cutlass.const_expr(self.cluster == 1):
            self.mma_items(lists, items, sKV, sP, base, rings)
        elif cute.arch.block_idx_in_cluster() == 0:
            self.mma_items(lists, items, sKV, sP, base, rings)

    @cute.jit
    def mma_items(self, lists: KeyLists, items: Items, sKV: Int32, sP: Int32, base: Int32, rings: MmaRings):
        """Issue S of tile j + 1 before P V of tile j.

        The softmax of a tile then overlaps MMAs.

        The next item's Q goes to tensor memory, and its first S follows, in a pair before P V of the last tile of this
        one (`q_ahead`), else after it. A block of O is waited for before an item's first P V: the epilogue warps read
        what the item before left there.
        """
        kv, s, p, o = rings
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        kv_release_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.kv_stages)
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        o_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.o_blocks)
        tiles, begun = self.tiles_of(lists, items, items.first), Int32(0)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            tiles_after = self.tiles_of(lists, items, item + items.step)  # asked for a whole item ahead
            follows = cutlass.Boolean(False)
            if cutlass.const_expr(self.q_ahead):
                follows = (tiles_after > 0) & (item + items.step < items.end)
            steps = cutlass.select_(tiles > 0, tiles + 1, Int32(0))
            for tile in cutlass.range(begun, steps, unroll=1):  # S of this tile, P V of the one before
                if (tile < tiles) | follows:
                    if (tile == 0) | (tile == tiles):
                        if cutlass.const_expr(self.q_ahead):
                            self.wait_for_s(s, s_state, tile)
                        for q_stage in cutlass.range_constexpr(self.q_stages):
                            self.take_q(base, sKV, kv, kv_state, q_stage)
                            kv_state.advance()
                    s.producer_acquire(s_state)
                    # S = Q @ K^T, over the dimensions of each stage
                    for k_stage in cutlass.range_constexpr(self.tile_stages):
                        kv.consumer_wait(kv_state)
                        umma.fence_after_thread_sync()
                        self.mma_qk(base, s_state.index, sKV + kv_state.index * self.stage_bytes, k_stage)
                        if cutlass.const_expr(self.tile_stages > self.o_blocks):
                            if self.dim_split() != k_stage:  # V that only other CTAs read
                                kv.consumer_release(kv_state)
                        kv_state.advance()
                    if cutlass.const_expr(self.groups):
                        self.signal_keys(s, s_state)
                    s.producer_commit(s_state)
                    s_state.advance()
                if tile > 0:
                    p.consumer_wait(p_state)
                    umma.fence_after_thread_sync()
                    if tile == 1:
                        for _ in cutlass.range_constexpr(self.q_stages):
                            kv_release_state.advance()  # `take_q` gave them back
                    block_state = o_state.clone()
                    # O += P @ V, a block of dimensions at a time
                    for block in cutlass.range_constexpr(self.o_blocks):
                        stage = self.v_address(sKV, kv_release_state)
                        if tile == 1:
                            o.producer_acquire(block_state)
                            umma.fence_after_thread_sync()
                        self.mma_pv(base, sP + p_state.index * P_BYTES, stage, tile > 1, block)
                        read = self.tile_stages // self.o_blocks  # 0: the next block is in the same stage
                        if cutlass.const_expr(read > 0 or block + 1 == self.o_blocks):
                            for v_stage in cutlass.range_constexpr(max(1, read)):
                                if (read < 2) | (self.dim_split() == v_stage):
                                    kv.consumer_release(kv_release_state)
                                kv_release_state.advance()
                        if tile == tiles:
                            o.producer_commit(block_state)
                        block_state.advance()
                    p.consumer_release(p_state)
                    p_state.advance()
            if tiles > 0:
                for _ in cutlass.range_constexpr(self.o_blocks):
                    o_state.advance()
            tiles, begun = tiles_after, cutlass.select_(follows & (tiles > 0), Int32(1), Int32(0))

    @cute.jit
    def signal_keys(self, s: pipeline.PipelineUmmaAsync, s_state: pipeline.PipelineState):
        """Signal landed keys to the softmax warps.

        They read the keys but did not wait for them.
        """
        with cute.arch.elect_one():
            barrier = s.sync_object_full.get_barrier(s_state.index)
            for cta in cutlass.range_constexpr(self.cluster):
                cute.arch.mbarrier_arrive(barrier, None if self.cluster == 1 else cta)

    @cute.jit
    def wait_for_s(self, s: pipeline.PipelineUmmaAsync, s_state: pipeline.PipelineState, tile: Int32):
        """Wait until the last Q K^T of this item, which reads its Q, is done. The next item's Q overwrites that."""
        if tile > 0:
            last = s_state.clone()
            last.reverse()
            s.sync_object_full.wait(last.index, last.phase ^ 1)  # a producer's phase is ahead of a consumer's by one
            umma.fence_after_thread_sync()

    @cute.jit
    def tiles_of(self, lists: KeyLists, items: Items, item: Int32):
        """Count the tiles of an item."""
        work = self.work(lists, items, item)
        return work.end - work.first

    @cute.jit
    def take_q(
        self,
        base: Int32,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        kv_state: pipeline.PipelineState,
        q_stage: cutlass.Constexpr,
    ):
        """Wait for stage ``q_stage`` of Q, copy it, release it when that is done."""
        kv.consumer_wait(kv_state)
        umma.fence_after_thread_sync()
        self.place_q(base, sKV + kv_state.index * self.stage_bytes, q_stage)
        kv.consumer_release(kv_state)

    @cute.jit
    def place_q(self, base: Int32, stage: Int32, q_stage: cutlass.Constexpr):
        """Copy Q from its ``q_stage``-th stage to tensor memory.

        Of each pair of chunks the first goes to lanes 0-63.
        """
        with cute.arch.elect_one():
            source = umma.at(self.k_descriptor, stage)
            pairs = self.chunks // 2 // self.q_stages
            for pair in cutlass.range_constexpr(pairs):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    column = base + self.q_column + (q_stage * pairs + pair) * (CHUNK // 2) + k * 8
                    umma.copy_rows(column, umma.advanced(source, pair * 2 * CHUNK_BYTES + k * 32), self.cluster)

    @cute.jit
    def mma_qk(self, base: Int32, slot: Int32, stage: Int32, k_stage: cutlass.Constexpr):
        """Issue S (+)= Q @ K^T of a stage. Two sums, each over half the head dimensions, go to lanes 0-63 and 64-127.

        N is 128. Alone: the 64 keys of an even chunk and, one chunk further in SMEM, the same keys of the odd one. A
        pair: the 64 keys of a chunk of each CTA, the first CTA's and the second CTA's half of the dimensions.
        """
        with cute.arch.elect_one():
            d = base + self.s_column + slot * TILE_N
            keys = umma.at(self.k_descriptor, stage)
            pairs = self.chunks // 2 // self.tile_stages
            for pair in cutlass.range_constexpr(pairs):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    a = base + self.q_column + (k_stage * pairs + pair) * (CHUNK // 2) + k * 8
                    b = umma.advanced(keys, pair * (2 // self.cluster * CHUNK_BYTES) + k * 32)
                    umma.mma(d, a, b, self.qk_instruction, k_stage + pair + k > 0, **self.variant)

    @cute.jit
    def v_address(self, sKV: Int32, kv_release_state: pipeline.PipelineState):
        """Return the SMEM address of V for the next block of O.

        With ``dim_splits`` > 1 this CTA's columns follow the other CTA's, in the same stage or in the next.
        """
        index, offset = kv_release_state.index, 0
        if cutlass.const_expr(self.dim_splits > 1):
            if cutlass.const_expr(self.tile_stages > 1):
                after = kv_release_state.clone()
                after.advance()
                index = cutlass.select_(self.dim_split() == 0, index, after.index)
            else:
                offset = self.dim_split() * (self.stage_chunks // self.dim_splits * CHUNK_BYTES)
        return sKV + index * self.stage_bytes + offset

    @cute.jit
    def mma_pv(self, base: Int32, sP: Int32, stage: Int32, accumulate: cutlass.Boolean, block: cutlass.Constexpr):
        """Issue O (+)= P @ V of a block, from the stage that holds its dimensions. It is read with the dimension as N.

        A pair: half of N from each CTA.
        """
        place = block % max(1, self.o_blocks // self.tile_stages)  # among the blocks of the stage
        with cute.arch.elect_one():
            p, v = umma.at(self.k_descriptor, sP), umma.at(self.v_descriptor, stage)
            o = base + block * (self.pv_n // 2)
            for k in cutlass.range_constexpr(TILE_N // 16):
                a = umma.advanced(p, k * 32)
                b = umma.advanced(v, place * (self.pv_n // self.cluster // CHUNK * CHUNK_BYTES) + k * (16 * 128))
                add = accumulate if k == 0 else cutlass.Boolean(True)
                umma.mma(o, a, b, self.pv_instruction, add, **self.variant)
