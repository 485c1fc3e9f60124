"""Dequantise 584-byte entries of a paged pool into bf16 tiles, without TMA.

Four warps take a tile of 64 keys, 16 keys each in two batches of 8. A batch lives in registers from its loads to its
conversion, and the batches alternate:

    a warp     convert batch 0 of j, load batch 0 of j + 1, convert batch 1 of j, load batch 1 of j + 1, commit j
    ahead      indices of tile j + 2; the loads of tile j + 1 are under way while stage j + 1 is waited for

So up to 36 KiB of a CTA are in flight without a byte of shared memory for raw entries: the ring of bf16 stages is as
deep as with TMA.

In a pair each CTA dequantises its half of the dimensions of all keys, nothing twice: CTA 0 four groups of 64, CTA 1
three and the RoPE dims. All warps arrive in CTA 0, whose MMA warp reads the stages of both.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline

from dsv4lib.dsl import kv_entry, pipelines
from dsv4lib.dsl.kv_entry import Chunks, LanePool
from dsv4lib.ops.fmha.config import CHUNK_BYTES, DEQUANT_WARPS, TILE_N
from dsv4lib.ops.fmha.load import KeySources, Load
from dsv4lib.ops.fmha.work import Items, KeyLists, Work

KEYS = TILE_N // len(DEQUANT_WARPS)  # of a warp
BATCHES = KEYS // kv_entry.ENTRIES_AT_ONCE


class LanePools(NamedTuple):
    """Locate this lane's share of FP8 entries of the pool and the window.

    None: not FP8.
    """

    entries: LanePool | None
    window: LanePool | None


class Registers(NamedTuple):
    """What a lane holds of its entries, a column for each batch.

    Attributes:
        index: Int32 [batches], the entry. raw: Int64 [words, batches]. scales: Int32 [2, batches].
    """

    index: cute.Tensor
    raw: cute.Tensor
    scales: cute.Tensor


class Dequant(Load):
    """The dequantising warps, beside the load warp or instead of it."""

    @cute.jit
    def dequantise(self, sources: KeySources, lists: KeyLists, items: Items, sKV: Int32, kv: pipeline.PipelineTmaUmma):
        """Run the dequantising warps: warp w has keys 16 w .. 16 w + 15 of every tile, 4 lanes a key."""
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.cluster == 1):
            self.dequantise_chunks(sources, lists, items, sKV, kv, Chunks())
        elif cute.arch.block_idx_in_cluster() == 0:
            self.dequantise_chunks(sources, lists, items, sKV, kv, Chunks(0, self.stage_chunks))
        else:
            self.dequantise_chunks(sources, lists, items, sKV, kv, Chunks(self.stage_chunks))

    @cute.jit
    def dequantise_chunks(
        self,
        sources: KeySources,
        lists: KeyLists,
        items: Items,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        chunks: cutlass.Constexpr,
    ):
        """Dequantise some `kv_entry.Chunks` of 64 dims of every key.

        The first loads of an item go out when the last tile of the one before is committed: as many tiles ahead of
        the MMAs as the ring is deep.
        """
        lane = cute.arch.lane_idx()
        first_key = (cute.arch.warp_idx() - DEQUANT_WARPS[0]) * KEYS
        own = first_key + lane % KEYS  # the key of a tile whose index this lane reads
        key = first_key + lane // 4  # the one of batch 0 of which it brings a quarter
        offset = sKV + kv_entry.smem_offset(key, lane)
        held = cute.make_rmem_tensor(BATCHES, Int32)  # this lane's entry of a batch, and what it fetched of it
        raw = cute.make_rmem_tensor((kv_entry.raw_words(chunks), BATCHES), Int64)
        scales = cute.make_rmem_tensor((2, BATCHES), Int32)
        raw.fill(0)  # a row of -1 converts what is there and overwrites it
        for i in cutlass.range_constexpr(2 * BATCHES):  # one by one: a vector of two would become one 64-bit register
            scales[i] = Int32(0)
        pools, registers = self.lane_pools(sources), Registers(held, raw, scales)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(lists, items, item)
            index = self.entry(lists, work, work.first, own)
            for batch in cutlass.range_constexpr(BATCHES):
                place = work.first * TILE_N + key + batch * kv_entry.ENTRIES_AT_ONCE
                self.fetch(pools, work, place, index, batch, registers, chunks)
            index = self.entry(lists, work, work.first + 1, own)
            if work.end > work.first:
                for _ in cutlass.range_constexpr(self.q_stages):  # the load warp brings Q
                    pipelines.wait_empty(kv, state)
                    self.commit_keys(kv, state)
                    state.advance()
            for tile in cutlass.range(work.first, work.end, unroll=1):
                ahead = self.entry(lists, work, tile + 2, own)
                pipelines.wait_empty(kv, state)
                stage = offset + state.index * self.stage_bytes
                for batch in cutlass.range_constexpr(BATCHES):
                    place = tile * TILE_N + key + batch * kv_entry.ENTRIES_AT_ONCE
                    if self.quantised(work, place):
                        rows = stage + batch * (kv_entry.ENTRIES_AT_ONCE * kv_entry.ROW_BYTES)
                        kv_entry.convert(held[batch], raw[None, batch], scales[None, batch], rows, CHUNK_BYTES, chunks)
                    self.fetch(pools, work, place + TILE_N, index, batch, registers, chunks)
                self.commit_keys(kv, state)
                index = ahead
                state.advance()
        if cutlass.const_expr(self.cluster > 1):
            for _ in cutlass.range_constexpr(self.kv_stages):  # stay while the other CTA's MMA warp signals in here
                pipelines.wait_empty(kv, state)
                state.advance()

    @cute.jit
    def lane_pools(self, sources: KeySources):
        """Locate this lane's share of an entry of pool and window, where they are FP8."""
        pools = []
        for source, fp8 in zip(sources, (self.fp8_entries, self.fp8_window), strict=True):
            pools.append(kv_entry.lane_of(source) if cutlass.const_expr(fp8) else None)
        return LanePools(*pools)

    @cute.jit
    def quantised(self, work: Work, place: Int32):
        """Return whether the key at ``place`` is a 584-byte entry, or none.

        TMA brings the others of a tile.
        """
        answer = cutlass.Boolean(True)
        if cutlass.const_expr(self.entries != "none" and self.window and self.fp8_entries != self.fp8_window):
            answer = (place < work.window_at) == self.fp8_entries
        return answer

    @cute.jit
    def entry(self, lists: KeyLists, work: Work, tile: Int32, key: Int32):
        """Return the index of the ``key``-th entry of a tile; -1: none."""
        index, place = Int32(-1), tile * TILE_N + key
        if tile < work.end:
            if cutlass.const_expr(self.fp8_entries):
                if place < work.window_at:
                    index = self.row(lists.entries.index, work.entry_row, work.token, place, work.entries)
            if cutlass.const_expr(self.fp8_window):
                if place >= work.window_at:
                    in_window = place - work.window_at
                    index = self.row(lists.window.index, work.window_row, work.token, in_window, work.window)
        return index

    @cute.jit
    def fetch(
        self,
        pools: LanePools,
        work: Work,
        place: Int32,
        index: Int32,
        batch: cutlass.Constexpr,
        registers: Registers,
        chunks: cutlass.Constexpr,
    ):
        """Start the loads of a batch. Lane l loads of the entry at ``place`` whose index lane 8 batch + l / 4 has."""
        held, raw, scales = registers
        lane = cute.arch.lane_idx()
        own = cute.arch.shuffle_sync(index, batch * kv_entry.ENTRIES_AT_ONCE + lane // 4)
        held[batch] = own
        if cutlass.const_expr(self.fp8_entries and self.fp8_window):
            if place < work.window_at:  # lanes may differ where the window begins
                kv_entry.fetch(pools.entries, own, raw[None, batch], scales[None, batch], chunks)
            else:
                kv_entry.fetch(pools.window, own, raw[None, batch], scales[None, batch], chunks)
        else:
            pool = pools.entries if self.fp8_entries else pools.window
            kv_entry.fetch(pool, own, raw[None, batch], scales[None, batch], chunks)

    @cute.jit
    def commit_keys(self, kv: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
        """Commit this warp's keys of a stage. Make them visible to the tensor core, then arrive once."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(kv.producer_get_barrier(state), None if self.cluster == 1 else 0)
