"""Issue both products of a tile, S = Q @ K^T over 576 dims and O += P @ V over the first 512 of the same tile."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import umma
from dsv4lib.ops.mla_decode.config import (
    BLOCK,
    BLOCKS,
    CHUNK_BYTES,
    HALF,
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
    """Pipelines of the MMA warp."""

    load: Rings
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Mma(Plan):
    """The MMA warp. Both products are weight-stationary: the halves of N lie in the two halves of the lanes."""

    @cute.jit
    def mma(
        self,
        requests: Requests,
        items: Items,
        shared: Addresses,
        allocator: memory.TmemAllocator,
        rings: MmaRings,
    ):
        """Issue S of tile j + 1 before P V of tile j, so that the softmax of a tile overlaps MMAs.

        A block of O is waited for before an item's first P V: the softmax warps read what the item before left there.
        """
        allocator.wait_for_alloc()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        base = allocator.retrieve_ptr(Float32).toint()
        (q, kv, pe), s, p, o = rings
        consumer, producer = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        kv_state = pipeline.make_pipeline_state(consumer, self.kv_stages)
        kv_release_state = pipeline.make_pipeline_state(consumer, self.kv_stages)
        pe_state = pipeline.make_pipeline_state(consumer, PE_STAGES)
        s_state = pipeline.make_pipeline_state(producer, S_STAGES)
        p_state = pipeline.make_pipeline_state(consumer, P_STAGES)
        o_state = pipeline.make_pipeline_state(producer, BLOCKS)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(requests, items, item)
            tiles = work.end - work.first
            steps = cutlass.select_(tiles > 0, tiles + 1, Int32(0))
            for tile in cutlass.range(0, steps, unroll=1):  # S of this tile, P V of the one before
                if tile < tiles:
                    if tile == 0:
                        q.consumer_wait(q_state)
                    s.producer_acquire(s_state)
                    # S = Q @ K^T: the rotated dims, then a block of latents at a time
                    pe.consumer_wait(pe_state)
                    umma.fence_after_thread_sync()
                    d = base + self.s_column + s_state.index * HALF
                    self.mma_pe(d, shared.q, shared.pe + pe_state.index * self.pe_bytes)
                    pe.consumer_release(pe_state)
                    pe_state.advance()
                    for block in cutlass.range_constexpr(BLOCKS):
                        kv.consumer_wait(kv_state)
                        umma.fence_after_thread_sync()
                        self.mma_latents(d, shared.q, shared.kv + kv_state.index * self.stage_bytes, block)
                        kv_state.advance()
                    self.signal_keys(s, s_state)
                    s.producer_commit(s_state)
                    s_state.advance()
                    if tile + 1 == tiles:
                        q.consumer_release(q_state)
                        q_state.advance()
                if tile > 0:
                    p.consumer_wait(p_state)
                    umma.fence_after_thread_sync()
                    block_state = o_state.clone()
                    # O += P @ V, a block of dims at a time
                    for block in cutlass.range_constexpr(BLOCKS):
                        if tile == 1:
                            o.producer_acquire(block_state)
                            umma.fence_after_thread_sync()
                        stage = shared.kv + kv_release_state.index * self.stage_bytes
                        self.mma_pv(base + block * (BLOCK // 2), shared.p, stage, tile > 1)
                        kv.consumer_release(kv_release_state)
                        kv_release_state.advance()
                        if tile == tiles:
                            o.producer_commit(block_state)
                        block_state.advance()
                    p.consumer_release(p_state)
                    p_state.advance()
            if tiles > 0:
                for _ in cutlass.range_constexpr(BLOCKS):
                    o_state.advance()

    @cute.jit
    def signal_keys(self, s: pipeline.PipelineUmmaAsync, s_state: pipeline.PipelineState):
        """Signal landed tiles to the softmax warps: they may write to them, but did not wait for them."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.sync_object_full.get_barrier(s_state.index))

    @cute.jit
    def mma_pe(self, d: Int32, sQ: Int32, keys: Int32):
        """Issue S = Q @ K^T of the rotated dims: the first of a tile, so S is overwritten."""
        with cute.arch.elect_one():
            a = umma.at(self.pe_descriptor, sQ + self.latent_chunks * (HEADS * ROW))
            b = umma.at(self.pe_descriptor, keys)
            for k in cutlass.range_constexpr(self.pe_row // STEP):
                rows = umma.advanced(a, k * STEP), umma.advanced(b, k * STEP)
                umma.mma(d, *rows, self.qk_instruction, k > 0, ws=True, kind=self.kind)

    @cute.jit
    def mma_latents(self, d: Int32, sQ: Int32, stage: Int32, block: cutlass.Constexpr):
        """Issue S += Q @ K^T of a block of latents."""
        with cute.arch.elect_one():
            a = umma.at(self.row_descriptor, sQ + block * self.stage_chunks * (HEADS * ROW))
            b = umma.at(self.row_descriptor, stage)
            for chunk in cutlass.range_constexpr(self.stage_chunks):
                for k in cutlass.range_constexpr(ROW // STEP):
                    rows = (
                        umma.advanced(a, chunk * HEADS * ROW + k * STEP),
                        umma.advanced(b, chunk * CHUNK_BYTES + k * STEP),
                    )
                    umma.mma(d, *rows, self.qk_instruction, True, ws=True, kind=self.kind)

    @cute.jit
    def mma_pv(self, o: Int32, sP: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """Issue O (+)= P @ V of a block: the stage is read with its dims as N."""
        with cute.arch.elect_one():
            p, v = umma.at(self.p_descriptor, sP), umma.at(self.v_descriptor, stage)
            for k in cutlass.range_constexpr(self.p_row // STEP):
                add = accumulate if k == 0 else cutlass.Boolean(True)
                rows = umma.advanced(p, k * STEP), umma.advanced(v, k * self.v_step)
                umma.mma(o, *rows, self.pv_instruction, add, ws=True, kind=self.kind)
