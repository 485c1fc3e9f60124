"""Bring Q and tiles of the paged cache to shared memory by TMA, by one warp.

A chunk is 64 tokens x 64 dimensions, 8 KiB in the 128-byte swizzle, and has a full barrier of its own, so Q K^T starts
with the first that lands. A chunk is one box, or one of each page where pages are shorter than a tile. A box of a page
past the end of the request has the page number -1: TMA writes zeros and reads nothing. Tokens of the last page past the
end do arrive; math warps overwrite them (`attend`).

Halves of a stage become free one after the other, in this order: the half of V that the owner of its S multiplies by,
then the other one with the chunk of RoPE, where P was meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from dsv4lib.dsl import boxes
from dsv4lib.ops.mla_decode.sm90.config import (
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    HALF_CHUNKS,
    Q_BYTES,
    ROPE_CHUNK,
    ROW_BYTES,
    STAGE_BYTES,
    STAGES,
    TILE_M,
    TILE_N,
    Config,
)


class Sources(NamedTuple):
    """Q without and with RoPE, and the cache: TMA descriptors, or tensors of FP8."""

    q_nope: Any
    q_pe: Any
    cache: Any


class Work(NamedTuple):
    """What a CTA works on. Request, first head, its length, tiles ``first`` to ``end`` - 1 of 64 tokens."""

    request: Int32
    head: Int32
    length: Int32
    first: Int32
    end: Int32


class Ring(NamedTuple):
    """Shared memory by address, and barriers.

    Attributes:
        q: Q in 9 chunks. tiles: stages of 9 chunks.
        q_full: Q has landed. full: [stage, chunk] has. empty: [stage, half of V] is read no more.
        weighed: [stage] P of the tile is in its chunk of RoPE.
    """

    q: Int32
    tiles: Int32
    q_full: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    weighed: cute.Pointer


class Load(Config):
    """What the load warp does."""

    def sources(self, mQNope: cute.Tensor, mQPe: cute.Tensor, mCache: cute.Tensor) -> Sources:
        """Make TMA descriptors of what is not FP8, on the host."""
        made, fp8 = [], (self.fp8_queries, self.fp8_queries, self.fp8_cache)
        for tensor, rows, raw in zip((mQNope, mQPe, mCache), (TILE_M, TILE_M, self.box), fp8, strict=True):
            if raw:
                made.append(tensor)
                continue
            outer, inner, depth = tensor.shape
            of_outer, of_inner, _ = tensor.stride
            layout = cute.make_layout((depth, inner, outer), stride=(1, of_inner, of_outer))
            made.append(boxes.box_atom(cute.make_tensor(tensor.iterator, layout), (CHUNK, rows, 1)))
        return Sources(*made)

    @cute.jit
    def prefetch_maps(self, sources: Sources):
        """Fetch the tensor maps, which are parameters of this launch. No kernel before wrote them."""
        for source, raw in zip(sources, (self.fp8_queries, self.fp8_queries, self.fp8_cache), strict=True):
            if cutlass.const_expr(not raw):
                cpasync.prefetch_descriptor(source)

    @cute.jit
    def load_q(self, sources: Sources, work: Work, ring: Ring):
        """Load Q by TMA, by one warp."""
        if work.first < work.end:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.q_full, Q_BYTES)
                for chunk in cutlass.range_constexpr(CHUNKS):
                    atom, column = (sources.q_pe, 0) if chunk == ROPE_CHUNK else (sources.q_nope, chunk * CHUNK)
                    place = Int32(column), work.head, work.request
                    boxes.load_box(atom, ring.q + chunk * CHUNK_BYTES, ring.q_full, place)

    @cute.jit
    def load(self, sources: Sources, mTable: cute.Tensor, work: Work, ring: Ring):
        """Load warp: Q, then tile after tile."""
        pages = self.pages(mTable, work, work.first)
        self.load_q(sources, work, ring)
        for tile in cutlass.range(work.first, work.end, unroll=1):
            ahead = self.pages(mTable, work, tile + 1)
            number = tile - work.first
            owner, parity = number % STAGES, number // STAGES % 2 ^ 1
            offset = tile * TILE_N % self.page if cutlass.const_expr(self.page > TILE_N) else Int32(0)
            of_boxes = [cute.arch.shuffle_sync(pages, i) for i in range(self.boxes)]
            for half in (owner, 1 - owner):
                cute.arch.mbarrier_wait(ring.empty + (owner * 2 + half), parity)
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(HALF_CHUNKS):
                        self.load_chunk(sources.cache, ring, owner, half * HALF_CHUNKS + i, offset, of_boxes)
            with cute.arch.elect_one():
                self.load_chunk(sources.cache, ring, owner, Int32(ROPE_CHUNK), offset, of_boxes)
            pages = ahead

    def load_chunk(
        self,
        atom: cute.CopyAtom,
        ring: Ring,
        stage: Int32,
        chunk: Int32,
        offset: Int32,
        pages: list,
    ) -> None:
        """Announce one chunk and send its boxes."""
        full = ring.full + (stage * CHUNKS + chunk)
        cute.arch.mbarrier_arrive_and_expect_tx(full, CHUNK_BYTES)
        target = ring.tiles + stage * STAGE_BYTES + chunk * CHUNK_BYTES
        for i, page in enumerate(pages):
            boxes.load_box(atom, target + i * self.box * ROW_BYTES, full, (chunk * CHUNK, offset, page))

    @cute.jit
    def pages(self, mTable: cute.Tensor, work: Work, tile: Int32):
        """Return in lane l the page of box l of a tile; -1 past the end of the request."""
        page, token = Int32(-1), tile * TILE_N + cute.arch.lane_idx() * self.box
        if (cute.arch.lane_idx() < self.boxes) & (token < work.length):
            page = mTable[work.request, self.page_column(token)]
        return page

    # ---- what a fault may change

    def page_column(self, token: Int32) -> Int32:
        """Return where the page table has the page of a token."""
        return token // self.page
