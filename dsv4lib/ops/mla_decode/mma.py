"""Issue both products of a tile.

S = Q @ K^T is over 576 dims, O += P @ V over the first 512 of them.
Alone both are weight-stationary, in a pair `cta_group::2`: either way the halves of N lie in the two halves of the
lanes. Of a pair the first CTA's warp issues for both.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import umma
from dsv4lib.ops.mla_decode.config import (
    CHUNK_BYTES,
    HEADS,
    P_STAGES,
    PE_STAGES,
    ROW,
    S_STAGES,
)
from dsv4lib.ops.mla_decode.load import Addresses, Rings
from dsv4lib.ops.mla_decode.work import Items, Plan, Requests

STEP = 32  # bytes of K of an MMA


class MmaRings(NamedTuple):
    """Pipelines of the MMA warp; those of the load warp among them."""

    load: Rings
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Mma(Plan):
    """The MMA warp."""

    @cute.jit
    def mma(
        self,
        requests: Requests,
        items: Items,
        shared: Addresses,
        allocator: memory.TmemAllocator,
        rings: MmaRings,
    ):
        """Run the MMA warp; of a pair only the first CTA's has something to do."""
        allocator.wait_for_alloc()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        base = allocator.retrieve_ptr(Float32).toint()
        if cutlass.const_expr(self.cluster == 1):
            self.mma_items(requests, items, shared, base, rings)
        elif cute.arch.block_idx_in_cluster() == 0:
            self.mma_items(requests, items, shared, base, rings)

    @cute.jit
    def mma_items(self, requests: Requests, items: Items, shared: Addresses, base: Int32, rings: MmaRings):
        """Issue S of tile j + 1 before P V of tile j.

        The softmax of a tile then overlaps MMAs.

        An item's first P V waits for its P alone: softmax warps make that after they have read O of the item before.
        """
        (q, kv, pe), s, p, o = rings
        consumer, producer = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        kv_state = pipeline.make_pipeline_state(consumer, self.kv_stages)
        kv_release_state = pipeline.make_pipeline_state(consumer, self.kv_stages)  # of values that were keys before
        pe_state = pipeline.make_pipeline_state(consumer, PE_STAGES)
        s_state = pipeline.make_pipeline_state(producer, S_STAGES)
        p_state = pipeline.make_pipeline_state(consumer, P_STAGES)
        o_state = pipeline.make_pipeline_state(producer, self.blocks)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(requests, items, item)
            tiles = work.end - work.first
            steps = cutlass.select_(tiles > 0, tiles + 1, Int32(0))
            for tile in cutlass.range(0, steps, unroll=1):  # S of this tile, P V of the one before
                if tile < tiles:
                    if tile == 0:
                        q.consumer_wait(q_state)
                    s.producer_acquire(s_state)
                    # S = Q @ K^T: the rotated dims, then a stage of latents at a time
                    pe.consumer_wait(pe_state)
                    umma.fence_after_thread_sync()
                    d = base + self.s_column + s_state.index * self.half
                    self.mma_pe(d, shared.q, shared.pe + pe_state.index * self.pe_bytes)
                    pe.consumer_release(pe_state)
                    pe_state.advance()
                    for block in cutlass.range_constexpr(self.blocks):
                        kv.consumer_wait(kv_state)
                        umma.fence_after_thread_sync()
                        self.mma_latents(d, shared.q, shared.kv + kv_state.index * self.stage_bytes, block)
                        if cutlass.const_expr(self.cluster > 1):
                            kv.consumer_release(kv_state)
                        kv_state.advance()
                    if cutlass.const_expr(self.cluster == 1):
                        self.signal_values(s, s_state)
                    elif tile + 1 < tiles:
                        self.signal_values(s, s_state)
                    s.producer_commit(s_state)
                    s_state.advance()
                    if tile + 1 == tiles:
                        q.consumer_release(q_state)
                        q_state.advance()
                if tile > 0:
                    if cutlass.const_expr(self.cluster > 1):
                        if tile == tiles:
                            self.signal_last(kv, kv_state, s, s_state)
                    p.consumer_wait(p_state)
                    umma.fence_after_thread_sync()
                    block_state = o_state.clone()
                    # O += P @ V, a block of dims at a time
                    for block in cutlass.range_constexpr(self.blocks):
                        column = base + block * (self.block // 2)
                        if cutlass.const_expr(self.cluster == 1):
                            stage = shared.kv + kv_release_state.index * self.stage_bytes
                            self.mma_pv(column, shared.p, stage, tile > 1)
                            kv.consumer_release(kv_release_state)
                            kv_release_state.advance()
                        else:
                            kv.consumer_wait(kv_state)
                            umma.fence_after_thread_sync()
                            self.mma_pv(column, shared.p, shared.kv + kv_state.index * self.stage_bytes, tile > 1)
                            kv.consumer_release(kv_state)
                            kv_state.advance()
                        if tile == tiles:
                            o.producer_commit(block_state)
                        block_state.advance()
                    p.consumer_release(p_state)
                    p_state.advance()
            if tiles > 0:
                for _ in cutlass.range_constexpr(self.blocks):
                    o_state.advance()

    @cute.jit
    def signal_values(self, s: pipeline.PipelineUmmaAsync, s_state: pipeline.PipelineState):
        """Signal landed values to the softmax warps.

        They may write to them, but did not wait for them. In a pair this is about the last tile of an item alone; the
        others are not written to.
        """
        with cute.arch.elect_one():
            barrier = s.sync_object_full.get_barrier(s_state.index)
            for cta in cutlass.range_constexpr(self.cluster):
                cute.arch.mbarrier_arrive(barrier, None if self.cluster == 1 else cta)

    @cute.jit
    def signal_last(
        self,
        kv: pipeline.PipelineTmaUmma,
        kv_state: pipeline.PipelineState,
        s: pipeline.PipelineUmmaAsync,
        s_state: pipeline.PipelineState,
    ):
        """Wait for the values of the last tile of an item, and signal them."""
        state, last = kv_state.clone(), s_state.clone()
        for _ in cutlass.range_constexpr(self.blocks):
            kv.consumer_wait(state)
            state.advance()
        last.reverse()
        self.signal_values(s, last)

    @cute.jit
    def mma_pe(self, d: Int32, sQ: Int32, keys: Int32):
        """Issue S = Q @ K^T of the rotated dims: the first of a tile, so S is overwritten."""
        with cute.arch.elect_one():
            a = umma.at(self.pe_descriptor, sQ + self.latent_chunks * (HEADS * ROW))
            b = umma.at(self.pe_descriptor, keys)
            for limb in cutlass.range_constexpr(self.limbs):
                for k in cutlass.range_constexpr(self.pe_row // STEP):
                    rows = umma.advanced(a, limb * self.q_limb + k * STEP), umma.advanced(b, k * STEP)
                    umma.mma(d, *rows, self.qk_instruction, limb + k > 0, **self.variant)

    @cute.jit
    def mma_latents(self, d: Int32, sQ: Int32, stage: Int32, block: cutlass.Constexpr):
        """Issue S += Q @ K^T of a stage of latents."""
        with cute.arch.elect_one():
            a = umma.at(self.row_descriptor, sQ + block * self.stage_chunks * (HEADS * ROW))
            b = umma.at(self.row_descriptor, stage)
            for chunk in cutlass.range_constexpr(self.stage_chunks):
                for limb in cutlass.range_constexpr(self.limbs):
                    for k in cutlass.range_constexpr(ROW // STEP):
                        q = limb * self.q_limb + chunk * HEADS * ROW + k * STEP
                        rows = umma.advanced(a, q), umma.advanced(b, chunk * CHUNK_BYTES + k * STEP)
                        umma.mma(d, *rows, self.qk_instruction, True, **self.variant)

    @cute.jit
    def mma_pv(self, o: Int32, sP: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """Issue O (+)= P @ V of a block: the stage is read with its dims as N."""
        with cute.arch.elect_one():
            p, v = umma.at(self.p_descriptor, sP), umma.at(self.v_descriptor, stage)
            for limb in cutlass.range_constexpr(self.limbs):
                for k in cutlass.range_constexpr(self.p_limb // HEADS // STEP):
                    add = accumulate if limb + k == 0 else cutlass.Boolean(True)
                    chunk, inside = k * STEP // self.p_row, k * STEP % self.p_row
                    weights = umma.advanced(p, limb * self.p_limb + chunk * HEADS * self.p_row + inside)
                    umma.mma(o, weights, umma.advanced(v, k * self.v_step), self.pv_instruction, add, **self.variant)
