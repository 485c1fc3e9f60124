"""How Q and keys reach shared memory: the rows of a tile and the warps that send the copies.

A tile of 64 consecutive rows (of the window, or of entries by range) is a box of 64 rows for each 64 dimensions, 8
copies. What is not consecutive or not full (an index list, the ends of ranges: rows behind them must arrive as zeros)
is gathered, 4 rows a copy, 128 copies.

Another source of keys (another format of rows) overrides these methods; the other roles see only full
and empty stages of ``kv`` and the work.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4lib.dsl import boxes, gather, pipelines
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, REGION, TILE_M, TILE_N
from dsv4lib.ops.fmha.work import Items, Plan, Work

GROUPS = TILE_N // REGION  # of four keys, a copy each for 64 dimensions


class Load(Plan):
    """The load warps: K and V are the same tile; Q is the first tile of an item.

    Each sends a share of every stage, so that none is a round behind the others: a stage is full with the bytes of all.
    """

    def key_sources(self, entries: tuple, window: tuple) -> tuple:
        """Host side: for each kind of keys TMA descriptors (of a row, of a box or None), of FP8 entries where their
        pages are, or None."""
        sources = []
        kinds = (
            (self.entries != "none", self.fp8_entries, self.box_entries, entries),
            (self.window, self.fp8_window, self.box_window, window),
        )
        for there, fp8, by_range, keys in kinds:
            if not there:
                sources.append(None)
            elif fp8:
                pages, *paging = keys[0]
                sources.append((pages.iterator.toint(), *paging, Uint32(pages.stride[0])))
            else:
                sources.append((gather.row_atom(keys[0]), tile_atom(keys[0]) if by_range else None))
        return tuple(sources)

    def queries(self, mQ: cute.Tensor, pitch: Int64) -> tuple:
        """Host side: (TMA descriptor, rows from token to token, rows from head to head) of Q as a matrix.

        Without groups a stage's rows are heads of one token: boxes of 64 heads x 64 dimensions, 8 copies and not 128.

        Args:
            pitch: elements from row to row of that matrix, a divisor of both strides; rows may overlap.
        """
        tokens, heads, depth = mQ.shape
        if cutlass.const_expr(not self.groups):
            of_token, of_head, _ = mQ.stride
            heads_first = cute.make_layout((depth, heads, tokens), stride=(1, of_head, of_token))
            q = cute.make_tensor(mQ.iterator, heads_first)
            return boxes.box_atom(q, (CHUNK, TILE_M, 1)), Int32(0), Int32(0)
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
                for atom in source:
                    if cutlass.const_expr(atom is not None):
                        cpasync.prefetch_descriptor(atom)

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
        loader: Int32,
    ):
        """A load warp: lane l < 16 has the rows of group l, 4 l .. 4 l + 3, of every tile, one lane sends the copies.

        Each CTA of a pair gathers its half of the dimensions of keys, and Q of its own heads. The next item's Q and
        tiles follow without a gap.
        """
        self.wait_for_inputs()
        column = 0 if self.cluster == 1 else cute.arch.block_idx_in_cluster() * (self.head_dim // 2)
        own = REGION * cute.arch.lane_idx()
        first, end = self.share(loader, GROUPS)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(lists, items, item)
            if work.end > work.first:
                rows = self.q_rows(mQ, queries, work, own) if cutlass.const_expr(self.groups) else None
                for part in cutlass.range_constexpr(self.q_stages):
                    barrier = self.claim(kv, state, Int32(self.stage_bytes * self.cluster), column, loader)
                    self.load_q(queries[0], rows, work, sKV + state.index * self.stage_bytes, barrier, part, loader)
                    state.advance()
            for tile in cutlass.range(work.first, work.end, unroll=1):
                place = tile * TILE_N + own
                rows = self.tile_rows(lists, work, place)
                before = cutlass.min(cutlass.max(work.window_at - tile * TILE_N, 0), TILE_N)  # places of entries
                nbytes = self.expected_bytes(before)
                middle = cutlass.min(cutlass.max(before // REGION, first), end)  # of this warp's groups
                row = self.first_row(work, tile)
                for part in cutlass.range_constexpr(self.tile_stages):
                    barrier = self.claim(kv, state, nbytes, column, loader)
                    stage = sKV + state.index * self.stage_bytes
                    dims = column + part * (self.stage_chunks * CHUNK)
                    if row >= 0:
                        self.load_tile(sources, before > 0, row, stage, barrier, dims, loader)
                    else:
                        self.gather_keys(sources, rows, (first, middle, end), stage, barrier, dims)
                    state.advance()
        if loader == 0:
            kv.producer_tail(state)  # stay until every stage is empty: MMAs signal in here

    @cute.jit
    def share(self, loader: Int32, count: cutlass.Constexpr):
        """(first, end) of a load warp's share of ``count`` copies or groups of them."""
        if cutlass.const_expr(self.load_warps == 1):
            return Int32(0), Int32(count)
        return loader * count // self.load_warps, (loader + 1) * count // self.load_warps

    @cute.jit
    def wait_for_inputs(self):
        """Everything that the load warp reads may come from the kernel before."""
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def claim(
        self,
        kv: pipeline.PipelineTmaUmma,
        state: pipeline.PipelineState,
        nbytes: Int32,
        column: Int32,
        loader: Int32,
    ):
        """Wait until a stage is empty and say how many bytes come; returns the barrier that counts them.

        Args:
            nbytes: of all load warps, the first of which says it.
            column: first dimension of keys that this CTA brings; 0: it is the first of a pair, or alone.
        """
        if loader == 0:
            kv.producer_acquire(state, expected_tx=nbytes)
        else:
            pipelines.wait_empty(kv, state)
        if cutlass.const_expr(self.cluster > 1):
            # Lanes that gather nothing wait too. In the first CTA the election of who says the bytes holds them
            # together; here they could come to the barrier a phase late, and wait for one that never comes.
            cute.arch.sync_warp()
        barrier = kv.producer_get_barrier(state)
        if cutlass.const_expr(self.follows):
            if (column > 0) | (loader > 0):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barrier, None if self.cluster == 1 else 0)
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
    def load_q(
        self,
        atom: cute.CopyAtom,
        rows: Any,
        work: Work,
        stage: Int32,
        barrier: cute.Pointer,
        part: cutlass.Constexpr,
        loader: Int32,
    ):
        """The ``part``-th stage of Q: its chunks in the order in which they go to tensor memory, all 64 heads each."""
        chunks, pair = self.stage_bytes // CHUNK_BYTES, self.cluster > 1
        columns = tuple(Int32(i * CHUNK) for i in self.q_order[part * chunks : (part + 1) * chunks])
        if cutlass.const_expr(self.groups):
            gather.gather_tile(atom, rows, self.share(loader, GROUPS), columns, stage, barrier, pair=pair)
        else:
            head = self.head_block() * TILE_M
            with cute.arch.elect_one():
                for i, column in enumerate(columns):
                    if loader == i % self.load_warps:
                        boxes.load_box(atom, stage + i * CHUNK_BYTES, barrier, (column, head, work.token), pair)

    @cute.jit
    def first_row(self, work: Work, tile: Int32):
        """Pool row of the first key of a tile whose 64 keys are consecutive rows for TMA; -1: gather the tile."""
        row, place = Int32(-1), tile * TILE_N
        if cutlass.const_expr(self.box_entries):
            if place + TILE_N <= work.entries:
                row = work.entry_row + place
        if cutlass.const_expr(self.box_window):
            behind = place - work.window_at
            if (behind >= 0) & (behind + TILE_N <= work.window):
                row = work.window_row + behind
        return row

    @cute.jit
    def load_tile(
        self,
        sources: tuple,
        of_entries: cutlass.Boolean,
        row: Int32,
        stage: Int32,
        barrier: cute.Pointer,
        column: Any,
        loader: Int32,
    ):
        """A stage's dimensions, from ``column`` on, of 64 rows from ``row`` on: the load warps take boxes in turns."""
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stage_chunks if self.box_entries or self.box_window else 0):
                if loader == i % self.load_warps:
                    place = stage + i * CHUNK_BYTES, barrier, (column + i * CHUNK, row), self.cluster > 1
                    if cutlass.const_expr(self.box_entries and self.box_window):
                        if of_entries:
                            boxes.load_box(sources[0][1], *place)
                        else:
                            boxes.load_box(sources[1][1], *place)
                    else:
                        boxes.load_box(sources[0 if self.box_entries else 1][1], *place)

    @cute.jit
    def gather_keys(self, sources: tuple, rows: tuple, groups: tuple, stage: Int32, barrier: cute.Pointer, column: Any):
        """A stage's dimensions of a load warp's share of a tile, four rows a copy.

        Args:
            groups: (first of entries, first of the window, end) of this warp's groups of four rows.
        """
        first, middle, end = groups
        if cutlass.const_expr(self.entries != "none" and not self.fp8_entries):
            self.gather(sources[0][0], rows, (first, middle), stage, barrier, column)
        if cutlass.const_expr(self.window and not self.fp8_window):
            self.gather(sources[1][0], rows, (middle, end), stage, barrier, column)

    @cute.jit
    def gather(self, atom: cute.CopyAtom, rows: tuple, groups: tuple, stage: Int32, barrier: cute.Pointer, column: Any):
        """A stage's dimensions, from ``column`` on, of the rows of some groups, (first, end)."""
        columns = tuple(Int32(column + i * CHUNK) for i in range(self.stage_chunks))
        gather.gather_tile(atom, rows, groups, columns, stage, barrier, pair=self.cluster > 1)

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """Bytes that TMA brings for a stage of a tile, to both CTAs of a pair: without keys that warps dequantise.

        Args:
            of_entries: places of the tile before the window.
        """
        rows = Int32(TILE_N)
        if cutlass.const_expr(self.fp8_entries != self.fp8_window):
            rows = of_entries
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
                listed, behind = self.window_list(lists), place - work.window_at
                rows = self.rows(listed, work.window_row, work.token, behind, work.window)
        return rows

    def window_list(self, lists: tuple) -> Any:
        """Rows of window keys by token, or None where they are consecutive."""
        return lists[1][0] if self.window_index else None

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


def tile_atom(rows: cute.Tensor) -> cute.CopyAtom:
    """A TMA atom for boxes of 64 of ``rows`` ([R, D], stride (ld, 1)) x 128 bytes, rows as `gather.row_atom`'s."""
    count, depth = rows.shape
    columns_first = cute.make_tensor(rows.iterator, cute.make_layout((depth, count), stride=(1, rows.stride[0])))
    return boxes.box_atom(columns_first, (CHUNK, TILE_N))
