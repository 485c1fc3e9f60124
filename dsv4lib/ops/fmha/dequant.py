"""The warps that dequantise: 584-byte entries from a paged pool to a bf16 tile, past TMA.

Four warps take a tile of 64 keys, 16 keys each in two parts of 8. A part lives in registers from its loads to its
conversion, and the parts take turns:

    a warp     convert part 0 of j, load part 0 of j + 1, convert part 1 of j, load part 1 of j + 1, hand over j
    ahead      indices of tile j + 2; the loads of tile j + 1 are under way while stage j + 1 is waited for

So up to 36 KiB of a CTA are in flight without a byte of shared memory for raw entries: the ring of bf16 stages is as
deep as with TMA.

In a pair each CTA dequantises its half of the dimensions of all keys, nothing twice: CTA 0 four groups of 64, CTA 1
three and the RoPE dims. All warps arrive in CTA 0, whose MMA warp reads the stages of both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline

from dsv4lib.dsl import kv_entry, pipelines
from dsv4lib.ops.fmha.config import CHUNK_BYTES, DEQUANT_WARPS, TILE_N
from dsv4lib.ops.fmha.load import Load
from dsv4lib.ops.fmha.work import Items, Work

KEYS = TILE_N // len(DEQUANT_WARPS)  # of a warp
PARTS = KEYS // kv_entry.ENTRIES_AT_ONCE


class Dequant(Load):
    """The dequantising warps, beside the load warp or instead of it."""

    @cute.jit
    def dequantise(self, sources: tuple, lists: tuple, items: Items, sKV: Int32, kv: pipeline.PipelineTmaUmma):
        """Dequantising warps: warp w has keys 16 w .. 16 w + 15 of every tile, 4 lanes a key."""
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.cluster == 1):
            self.dequantise_chunks(sources, lists, items, sKV, kv, (0, kv_entry.CHUNKS))
        elif cute.arch.block_idx_in_cluster() == 0:
            self.dequantise_chunks(sources, lists, items, sKV, kv, (0, self.stage_chunks))
        else:
            self.dequantise_chunks(sources, lists, items, sKV, kv, (self.stage_chunks, kv_entry.CHUNKS))

    @cute.jit
    def dequantise_chunks(
        self,
        sources: tuple,
        lists: tuple,
        items: Items,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        chunks: cutlass.Constexpr,
    ):
        """``chunks`` (first, end) of 64 dims of every key.

        The first loads of an item go out when the last tile of the one before is handed over: as many tiles ahead of
        the MMAs as the ring is deep.
        """
        lane = cute.arch.lane_idx()
        first_key = (cute.arch.warp_idx() - DEQUANT_WARPS[0]) * KEYS
        own = first_key + lane % KEYS  # the key of a tile whose index this lane reads
        key = first_key + lane // 4  # the one of part 0 that it brings a part of
        offset = sKV + kv_entry.smem_offset(key, lane)
        held = cute.make_rmem_tensor(PARTS, Int32)  # this lane's entry of a part, and what it fetched of it
        raw = cute.make_rmem_tensor((kv_entry.raw_words(chunks), PARTS), Int64)
        scales = cute.make_rmem_tensor((2, PARTS), Int32)
        raw.fill(0)  # a row of -1 converts what is there and overwrites it
        for i in cutlass.range_constexpr(2 * PARTS):  # one by one: a vector of two would become one 64-bit register
            scales[i] = Int32(0)
        pools = self.own_parts(sources)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(lists, items, item)
            index = self.entry(lists, work, work.first, own)
            for part in cutlass.range_constexpr(PARTS):
                place = work.first * TILE_N + key + part * kv_entry.ENTRIES_AT_ONCE
                self.fetch(pools, work, place, index, part, (held, raw, scales), chunks)
            index = self.entry(lists, work, work.first + 1, own)
            if work.end > work.first:
                for _ in cutlass.range_constexpr(self.q_stages):  # the load warp brings Q
                    pipelines.wait_empty(kv, state)
                    self.hand_over(kv, state)
                    state.advance()
            for tile in cutlass.range(work.first, work.end, unroll=1):
                ahead = self.entry(lists, work, tile + 2, own)
                pipelines.wait_empty(kv, state)
                stage = offset + state.index * self.stage_bytes
                for part in cutlass.range_constexpr(PARTS):
                    place = tile * TILE_N + key + part * kv_entry.ENTRIES_AT_ONCE
                    if self.quantised(work, place):
                        rows = stage + part * (kv_entry.ENTRIES_AT_ONCE * kv_entry.ROW_BYTES)
                        kv_entry.convert(held[part], raw[None, part], scales[None, part], rows, CHUNK_BYTES, chunks)
                    self.fetch(pools, work, place + TILE_N, index, part, (held, raw, scales), chunks)
                self.hand_over(kv, state)
                index = ahead
                state.advance()
        if cutlass.const_expr(
            self.cluster > 1
        ):  # stay while the MMA warp, which may be the other CTA's, signals in here
            for _ in cutlass.range_constexpr(self.kv_stages):
                pipelines.wait_empty(kv, state)
                state.advance()

    @cute.jit
    def own_parts(self, sources: tuple):
        """For the entries and the window where they are FP8: what this lane needs to find its part of an entry."""
        pools = []
        for source, fp8 in zip(sources, (self.fp8_entries, self.fp8_window), strict=True):
            pools.append(kv_entry.lane_of(source) if cutlass.const_expr(fp8) else None)
        return tuple(pools)

    @cute.jit
    def quantised(self, work: Work, place: Int32):
        """Whether the key at ``place`` is a 584-byte entry, or none; TMA brings the others, of the same tile too."""
        answer = cutlass.Boolean(True)
        if cutlass.const_expr(self.entries != "none" and self.window and self.fp8_entries != self.fp8_window):
            answer = (place < work.window_at) == self.fp8_entries
        return answer

    @cute.jit
    def entry(self, lists: tuple, work: Work, tile: Int32, key: Int32):
        """Index of the entry that is the ``key``-th of a tile; -1 where there is none."""
        index, place = Int32(-1), tile * TILE_N + key
        if tile < work.end:
            if cutlass.const_expr(self.fp8_entries):
                if place < work.window_at:
                    index = self.row(lists[0][0], work.entry_row, work.token, place, work.entries)
            if cutlass.const_expr(self.fp8_window):
                if place >= work.window_at:
                    listed, behind = self.window_list(lists), place - work.window_at
                    index = self.row(listed, work.window_row, work.token, behind, work.window)
        return index

    @cute.jit
    def fetch(
        self,
        pools: tuple,
        work: Work,
        place: Int32,
        index: Int32,
        part: cutlass.Constexpr,
        registers: tuple,
        chunks: cutlass.Constexpr,
    ):
        """Start the loads of a part of a tile: of lane l the entry at ``place``; lane 8 part + l / 4 has its index."""
        held, raw, scales = registers
        lane = cute.arch.lane_idx()
        own = cute.arch.shuffle_sync(index, part * kv_entry.ENTRIES_AT_ONCE + lane // 4)
        held[part] = own
        if cutlass.const_expr(self.fp8_entries and self.fp8_window):
            if place < work.window_at:  # lanes may differ where the window begins
                kv_entry.fetch(pools[0], own, raw[None, part], scales[None, part], chunks)
            else:
                kv_entry.fetch(pools[1], own, raw[None, part], scales[None, part], chunks)
        else:
            pool = pools[0 if self.fp8_entries else 1]
            kv_entry.fetch(pool, own, raw[None, part], scales[None, part], chunks)

    @cute.jit
    def hand_over(self, kv: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
        """This warp's keys are in the stage: make them visible to the tensor core, then arrive once."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(kv.producer_get_barrier(state), None if self.cluster == 1 else 0)
