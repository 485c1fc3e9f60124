"""Load Q and keys to shared memory. Describes the rows of a tile and the warps that send the copies.

A tile of 64 consecutive rows (of the window, or of entries by range) is a box of 64 rows for each 64 dimensions, 8
copies. What is not consecutive or not full (an index list, the ends of ranges: rows past them must arrive as zeros)
is gathered, 4 rows a copy, 128 copies.

Another source of keys (another format of rows) overrides these methods; the other roles see only full
and empty stages of ``kv`` and the work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4lib.dsl import boxes, gather, kv_entry, pipelines
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, REGION, TILE_M, TILE_N
from dsv4lib.ops.fmha.work import Items, KeyLists, KeyRows, Plan, Span, Work

GROUPS = TILE_N // REGION  # of four keys, a copy each for 64 dimensions


class RowSource(NamedTuple):
    """TMA descriptors of rows in 16 bits: of one row, and of a box of 64. None: rows are not consecutive."""

    row: cute.CopyAtom
    box: Any


class KeySources(NamedTuple):
    """Where keys come from, of entries and of the window. `RowSource`, `kv_entry.Pool` (FP8), or None."""

    entries: Any
    window: Any


class QSource(NamedTuple):
    """Q as a matrix. Its TMA descriptor, rows from token to token and from head to head."""

    atom: cute.CopyAtom
    token_rows: Int32
    head_rows: Int32


class Load(Plan):
    """The load warps: K and V are the same tile; Q is the first tile of an item.

    Each sends a share of every stage, so that none is a round late: a stage is full with the bytes of all.
    """

    def key_sources(self, entries: KeyRows, window: KeyRows) -> KeySources:
        """Make TMA descriptors of keys in 16 bits, on the host. It also finds the pages of FP8 keys."""
        sources = []
        kinds = (
            (self.entries != "none", self.fp8_entries, self.box_entries, entries),
            (self.window, self.fp8_window, self.box_window, window),
        )
        for there, fp8, by_range, keys in kinds:
            if not there:
                sources.append(None)
            elif fp8:
                pages, *paging = keys.pool
                sources.append(kv_entry.Pool(pages.iterator.toint(), *paging, Uint32(pages.stride[0])))
            else:
                sources.append(RowSource(gather.row_atom(keys.pool), tile_atom(keys.pool) if by_range else None))
        return KeySources(*sources)

    def q_source(self, mQ: cute.Tensor, pitch: Int64) -> QSource:
        """Host side: describe Q as a matrix.

        Without groups a stage's rows are heads of one token: boxes of 64 heads x 64 dimensions, 8 copies and not 128.

        Args:
            pitch: elements from row to row of that matrix, a divisor of both strides; rows may overlap.
        """
        tokens, heads, depth = mQ.shape
        if cutlass.const_expr(not self.groups):
            of_token, of_head, _ = mQ.stride
            heads_first = cute.make_layout((depth, heads, tokens), stride=(1, of_head, of_token))
            q = cute.make_tensor(mQ.iterator, heads_first)
            return QSource(boxes.box_atom(q, (CHUNK, TILE_M, 1)), Int32(0), Int32(0))
        of_token, of_head = (Int32(mQ.stride[i] // pitch) for i in range(2))
        count = (tokens - 1) * of_token + (heads - 1) * of_head + 1
        rows = cute.make_tensor(mQ.iterator, cute.make_layout((count, depth), stride=(pitch, 1)))
        return QSource(gather.row_atom(rows), of_token, of_head)

    @cute.jit
    def prefetch_maps(self, queries: QSource, sources: KeySources):
        """Fetch the tensor maps, which are parameters of this launch. No kernel before wrote them."""
        cpasync.prefetch_descriptor(queries.atom)
        for source, fp8 in zip(sources, (self.fp8_entries, self.fp8_window), strict=True):
            if cutlass.const_expr(source is not None and not fp8):
                for atom in source:
                    if cutlass.const_expr(atom is not None):
                        cpasync.prefetch_descriptor(atom)

    def kv_pipeline(self, barriers: cute.Pointer) -> pipeline.PipelineTmaUmma:
        """Make the ring of keys and Q.

        A stage is full when its bytes have landed, in both CTAs of a pair; empty when P V has read it, or when Q is
        in tensor memory.
        """
        return pipelines.tma_to_umma(self.kv_stages, self.stage_bytes, barriers, self.producers, self.cluster)

    @cute.jit
    def load(
        self,
        mQ: cute.Tensor,
        queries: QSource,
        sources: KeySources,
        lists: KeyLists,
        items: Items,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
        loader: Int32,
    ):
        """Run a load warp: lane l < 16 has rows 4 l .. 4 l + 3 (group l) of every tile, one lane sends the copies.

        Each CTA of a pair gathers its half of the dimensions of keys, and Q of its own heads. The next item's Q and
        tiles follow without a gap.
        """
        self.wait_for_inputs()
        column = 0 if self.cluster == 1 else cute.arch.block_idx_in_cluster() * (self.head_dim // 2)
        own = REGION * cute.arch.lane_idx()
        share = self.share(loader, GROUPS)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.kv_stages)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(lists, items, item)
            if work.end > work.first:
                rows = self.q_rows(mQ, queries, work, own) if cutlass.const_expr(self.groups) else None
                for q_stage in cutlass.range_constexpr(self.q_stages):
                    barrier = self.claim(kv, state, Int32(self.stage_bytes * self.cluster), column, loader)
                    stage = sKV + state.index * self.stage_bytes
                    self.load_q(queries.atom, rows, work, stage, barrier, q_stage, loader)
                    state.advance()
            for tile in cutlass.range(work.first, work.end, unroll=1):
                place = tile * TILE_N + own
                rows = self.tile_rows(lists, work, place)
                before = cutlass.min(cutlass.max(work.window_at - tile * TILE_N, 0), TILE_N)  # places of entries
                nbytes = self.expected_bytes(before)
                middle = cutlass.min(cutlass.max(before // REGION, share.first), share.end)  # of this warp's groups
                row = self.first_row(work, tile)
                for kv_stage in cutlass.range_constexpr(self.tile_stages):
                    barrier = self.claim(kv, state, nbytes, column, loader)
                    stage = sKV + state.index * self.stage_bytes
                    dims = column + kv_stage * (self.stage_chunks * CHUNK)
                    if row >= 0:
                        self.load_tile(sources, before > 0, row, stage, barrier, dims, loader)
                    else:
                        self.gather_keys(sources, rows, share, middle, stage, barrier, dims)
                    state.advance()
        if loader == 0:
            kv.producer_tail(state)  # stay until every stage is empty: MMAs signal in here

    @cute.jit
    def share(self, loader: Int32, count: cutlass.Constexpr):
        """Return the `Span` of a load warp's share of ``count`` copies or groups of them."""
        if cutlass.const_expr(self.load_warps == 1):
            return Span(Int32(0), Int32(count))
        return Span(loader * count // self.load_warps, (loader + 1) * count // self.load_warps)

    @cute.jit
    def wait_for_inputs(self):
        """Wait for the kernel before, which may write everything that the load warp reads."""
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
        """Wait until a stage is empty, announce its bytes, return its full barrier.

        Args:
            nbytes: of all load warps, the first of which says it.
            column: first dimension of keys that this CTA brings; 0: it is the first of a pair, or alone.
        """
        if loader == 0:
            kv.producer_acquire(state, expected_tx=nbytes)
        else:
            pipelines.wait_empty(kv, state)
        if cutlass.const_expr(self.cluster > 1):
            # Lanes that gather nothing wait too. In the first CTA the election of the lane that says the bytes keeps
            # them converged; here they could come to the barrier a phase late, and wait for one that never comes.
            cute.arch.sync_warp()
        barrier = kv.producer_get_barrier(state)
        if cutlass.const_expr(self.follows):
            if (column > 0) | (loader > 0):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(barrier, None if self.cluster == 1 else 0)
        return barrier

    @cute.jit
    def q_rows(self, mQ: cute.Tensor, queries: QSource, work: Work, own: Int32):
        """Return rows of Q's matrix for four rows of this CTA's tile.

        From ``own`` on; -1 where there is no head.
        """
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
        q_stage: cutlass.Constexpr,
        loader: Int32,
    ):
        """Load the ``q_stage``-th stage of Q. It is all 64 heads of its chunks, in the order of tensor memory."""
        chunks, pair = self.stage_bytes // CHUNK_BYTES, self.cluster > 1
        columns = tuple(Int32(i * CHUNK) for i in self.q_order[q_stage * chunks : (q_stage + 1) * chunks])
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
        """Return the pool row of the first of 64 consecutive rows; -1: gather.

        TMA loads the tile.
        """
        row, place = Int32(-1), tile * TILE_N
        if cutlass.const_expr(self.box_entries):
            if place + TILE_N <= work.entries:
                row = work.entry_row + place
        if cutlass.const_expr(self.box_window):
            place -= work.window_at
            if (place >= 0) & (place + TILE_N <= work.window):
                row = work.window_row + place
        return row

    @cute.jit
    def load_tile(
        self,
        sources: KeySources,
        of_entries: cutlass.Boolean,
        row: Int32,
        stage: Int32,
        barrier: cute.Pointer,
        column: Any,
        loader: Int32,
    ):
        """Load a stage's dimensions, from ``column`` on, of 64 rows from ``row`` on.

        Boxes go round robin over warps.
        """
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.stage_chunks if self.box_entries or self.box_window else 0):
                if loader == i % self.load_warps:
                    place = stage + i * CHUNK_BYTES, barrier, (column + i * CHUNK, row), self.cluster > 1
                    if cutlass.const_expr(self.box_entries and self.box_window):
                        if of_entries:
                            boxes.load_box(sources.entries.box, *place)
                        else:
                            boxes.load_box(sources.window.box, *place)
                    else:
                        boxes.load_box((sources.entries if self.box_entries else sources.window).box, *place)

    @cute.jit
    def gather_keys(
        self,
        sources: KeySources,
        rows: tuple[Int32, ...],
        share: Span,
        middle: Int32,
        stage: Int32,
        barrier: cute.Pointer,
        column: Any,
    ):
        """Gather a stage's dimensions of a load warp's share of a tile, four rows a copy.

        Args:
            rows: the four of this lane's group.
            share: this warp's groups of four rows, from ``middle`` on of the window.
        """
        if cutlass.const_expr(self.entries != "none" and not self.fp8_entries):
            self.gather(sources.entries.row, rows, Span(share.first, middle), stage, barrier, column)
        if cutlass.const_expr(self.window and not self.fp8_window):
            self.gather(sources.window.row, rows, Span(middle, share.end), stage, barrier, column)

    @cute.jit
    def gather(
        self,
        atom: cute.CopyAtom,
        rows: tuple[Int32, ...],
        groups: Span,
        stage: Int32,
        barrier: cute.Pointer,
        column: Any,
    ):
        """Gather a stage's dimensions, from ``column`` on, of the rows of some groups."""
        columns = tuple(Int32(column + i * CHUNK) for i in range(self.stage_chunks))
        gather.gather_tile(atom, rows, groups, columns, stage, barrier, pair=self.cluster > 1)

    @cute.jit
    def expected_bytes(self, of_entries: Int32):
        """Count the bytes that TMA brings for a stage, to both CTAs of a pair. Keys that warps dequantise do not count.

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
    def tile_rows(self, lists: KeyLists, work: Work, place: Int32):
        """Return pool rows of four keys, of entries or of the window.

        From ``place`` on.
        """
        rows = tuple(Int32(-1) for _ in range(4))
        if cutlass.const_expr(self.entries != "none" and not self.fp8_entries):
            if place < work.window_at:
                rows = self.rows(lists.entries.index, work.entry_row, work.token, place, work.entries)
        if cutlass.const_expr(self.window and not self.fp8_window):
            if place >= work.window_at:
                in_window = place - work.window_at
                rows = self.rows(lists.window.index, work.window_row, work.token, in_window, work.window)
        return rows

    @cute.jit
    def rows(self, mIndex: Any, first: Int32, token: Int32, position: Int32, count: Int32):
        """Return pool rows of four keys; -1 where there is none.

        TMA fills those with zeros.
        """
        return tuple(self.row(mIndex, first, token, position + i, count) for i in range(4))

    @cute.jit
    def row(self, mIndex: Any, first: Int32, token: Int32, position: Int32, count: Int32):
        """Return the pool row of a key of a list or a range; -1 past its end.

        A range starts at ``first``.
        """
        row = Int32(-1)
        if position < count:
            if cutlass.const_expr(mIndex is not None):
                row = mIndex[token, position]
            else:
                row = first + position
        return row


def tile_atom(rows: cute.Tensor) -> cute.CopyAtom:
    """Make a TMA atom for boxes of 64 of ``rows`` x 128 bytes, as `gather.row_atom`.

    ``rows`` is [R, D], stride (ld, 1).
    """
    count, depth = rows.shape
    columns_first = cute.make_tensor(rows.iterator, cute.make_layout((depth, count), stride=(1, rows.stride[0])))
    return boxes.box_atom(columns_first, (CHUNK, TILE_N))
