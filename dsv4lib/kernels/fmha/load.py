"""How Q and keys reach shared memory: the rows of a tile and the warp that gathers them.

Another source of keys (another format of rows, more load warps) overrides these methods; the other roles see only full
and empty stages of ``kv`` and the work.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4lib.kernels.common import gather, pipelines
from dsv4lib.kernels.fmha.config import CHUNK, CHUNK_BYTES, TILE_M, TILE_N
from dsv4lib.kernels.fmha.work import Items, Plan, Work


class Load(Plan):
    """The load warp: K and V are the same tile; Q is the first tile of an item."""

    def key_sources(self, entries: tuple, window: tuple) -> tuple:
        """Host side: for each kind of keys a TMA descriptor, of FP8 entries where their pages are, or None."""
        sources = []
        kinds = (self.entries != "none", self.fp8_entries, entries), (self.window, self.fp8_window, window)
        for there, fp8, keys in kinds:
            if not there:
                sources.append(None)
            elif fp8:
                pages, *paging = keys[0]
                sources.append((pages.iterator.toint(), *paging, Uint32(pages.stride[0])))
            else:
                sources.append(gather.row_atom(keys[0]))
        return tuple(sources)

    def queries(self, mQ: cute.Tensor, pitch: Int64) -> tuple:
        """Host side: (TMA descriptor, rows from token to token, rows from head to head) of Q as a matrix.

        Args:
            pitch: elements from row to row of that matrix, a divisor of both strides; rows may overlap.
        """
        tokens, heads, depth = mQ.shape
        of_token, of_head = (Int32(mQ.stride[i] // pitch) for i in range(2))
        count = (tokens - 1) * of_token + (heads - 1) * of_head + 1
        rows = cute.make_tensor(mQ.iterator, cute.make_layout((count, depth), stride=(pitch, 1)))
        return gather.row_atom(rows), of_token, of_head

    @cute.jit
    def prefetch_maps(self, queries: tuple, sources: tuple):
        """Fetch the tensor maps, which are parameters of this launch: no kernel before wrote them."""
        cpasync.prefetch_descriptor(queries[0])
        for source, fp8 in zip(sources, (self.fp8_entries, self.fp8_window), strict=True):
            if cutlass.const_expr(source is not None and not fp8):
                cpasync.prefetch_descriptor(source)

    def kv_pipeline(self, barriers: cute.Pointer) -> pipeline.PipelineTmaUmma:
        """Stages of keys, or of Q: full when their bytes have landed, in both CTAs of a pair; empty when P V has read
        them, or when Q is in tensor memory."""
        return pipelines.tma_to_umma(self.kv_stages, self.stage_bytes, barriers, self.producers, self.cluster)

    @cute.jit
    def load(
        self,
        mQ: cute.Tensor,
        queries: tuple,
        sources: tuple,
        lists: tuple,
        items: Items,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
    ):
        """Load warp: lane l < 16 gathers rows 4 l .. 4 l + 3 of every tile, one 128-byte column chunk at a time.

        Each CTA of a pair gathers its half of the dimensions of keys, and Q of its own heads. The next item's Q and
        tiles follow without a gap.
        """
        self.wait_for_inputs()
        column = 0 if self.cluster == 1 else cute.arch.block_idx_in_cluster() * (self.head_dim // 2)
        own = 4 * cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(lists, items, item)
            if work.end > work.first:
                rows = self.q_rows(mQ, queries, work, own)
                for part in cutlass.range_constexpr(self.q_stages):
                    barrier = self.claim(kv, state, Int32(self.stage_bytes * self.cluster), column)
                    self.gather_q(queries[0], rows, sKV + state.index * self.stage_bytes, barrier, part)
                    state.advance()
            for tile in cutlass.range(work.first, work.end, unroll=1):
                place = tile * TILE_N + own
                rows = self.tile_rows(lists, work, place)
                nbytes = self.expected_bytes(work.window_at - tile * TILE_N)
                for part in cutlass.range_constexpr(self.tile_stages):
                    barrier = self.claim(kv, state, nbytes, column)
                    target = sKV + state.index * self.stage_bytes + own * gather.ROW_BYTES
                    dims = column + part * (self.stage_chunks * CHUNK)
                    if cutlass.const_expr(self.entries != "none" and not self.fp8_entries):
                        if place < work.window_at:
                            self.gather(sources[0], rows, target, barrier, dims)
                    if cutlass.const_expr(self.window and not self.fp8_window):
                        if place >= work.window_at:
                            self.gather(sources[1], rows, target, barrier, dims)
                    state.advance()
        kv.producer_tail(state)  # stay until every stage is empty: MMAs signal in here

    @cute.jit
    def wait_for_inputs(self):
        """Everything that the load warp reads may come from the kernel before."""
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def claim(self, kv: pipeline.PipelineTmaUmma, state: pipeline.PipelineState, nbytes: Int32, column: Int32):
        """Wait until a stage is empty and say how many bytes come; returns the barrier that counts them.

        Args:
            column: first dimension of keys that this CTA brings; 0: it is the first of a pair, or alone.
        """
        kv.producer_acquire(state, expected_tx=nbytes)
        if cutlass.const_expr(self.cluster > 1):
            # Lanes that gather nothing wait too. In the first CTA the election of who says the bytes holds them
            # together; here they could come to the barrier a phase late, and wait for one that never comes.
            cute.arch.sync_warp()
        barrier = kv.producer_get_barrier(state)
        if cutlass.const_expr(self.follows):
            if column > 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barrier, 0)
        return barrier

    @cute.jit
    def q_rows(self, mQ: cute.Tensor, queries: tuple, work: Work, own: Int32):
        """Rows of Q's matrix of four rows of this CTA's tile, from ``own`` on; -1 where there is no head."""
        _, of_token, of_head = queries
        block, rows = self.head_block(), ()
        for i in cutlass.range_constexpr(4):
            token, head, inside = self.member(mQ, work, block * TILE_M + own + i)
            rows = (*rows, cutlass.select_(inside, token * of_token + head * of_head, Int32(-1)))
        return rows

    @cute.jit
    def gather_q(self, atom: cute.CopyAtom, rows: tuple, stage: Int32, barrier: cute.Pointer, part: cutlass.Constexpr):
        """The ``part``-th stage of Q: its chunks in the order in which they go to tensor memory, all 64 heads each."""
        chunks = self.stage_bytes // CHUNK_BYTES
        lane = cute.arch.lane_idx()
        if lane < TILE_M // 4:
            for i in cutlass.range_constexpr(chunks):
                target = stage + i * CHUNK_BYTES + 4 * lane * gather.ROW_BYTES
                first = Int32(self.q_order[part * chunks + i] * CHUNK)
                gather.gather4(atom, target, barrier, first, rows, self.cluster > 1)

    @cute.jit
    def gather(self, atom: cute.CopyAtom, rows: tuple, target: Int32, barrier: cute.Pointer, column: Any):
        """A stage's dimensions, from ``column`` on, of four rows a lane."""
        gather.gather_tile(atom, rows, TILE_N, self.stage_chunks, target, barrier, column, self.cluster > 1)

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """Bytes that TMA brings for a stage of a tile, to both CTAs of a pair: without keys that warps dequantise.

        Args:
            of_entries: places of the tile before the window, below 0 or above 64: none, all.
        """
        rows = Int32(TILE_N)
        if cutlass.const_expr(self.fp8_entries != self.fp8_window):
            rows = cutlass.min(cutlass.max(of_entries, 0), TILE_N)
        if cutlass.const_expr(self.fp8_entries):
            rows = TILE_N - rows
        return rows * (self.key_bytes // TILE_N * self.cluster)

    @cute.jit
    def tile_rows(self, lists: tuple, work: Work, place: Int32):
        """Pool rows of the four keys from ``place`` on, of entries or of the window."""
        rows = tuple(Int32(-1) for _ in range(4))
        if cutlass.const_expr(self.entries != "none" and not self.fp8_entries):
            if place < work.window_at:
                rows = self.rows(lists[0][0], work.entry_row, work.token, place, work.entries)
        if cutlass.const_expr(self.window and not self.fp8_window):
            if place >= work.window_at:
                rows = self.rows(None, work.window_row, work.token, place - work.window_at, work.window)
        return rows

    @cute.jit
    def rows(self, mIndex: Any, first: Int32, token: Int32, position: Int32, count: Int32):
        """Pool rows of four keys; -1, which TMA fills with zeros, where there is none."""
        return tuple(self.row(mIndex, first, token, position + i, count) for i in range(4))

    @cute.jit
    def row(self, mIndex: Any, first: Int32, token: Int32, position: Int32, count: Int32):
        """Pool row of a key of a list, or of a range that starts at ``first``; -1 behind its end."""
        row = Int32(-1)
        if position < count:
            if cutlass.const_expr(mIndex is not None):
                row = mIndex[token, position]
            else:
                row = first + position
        return row
