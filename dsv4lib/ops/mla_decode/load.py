"""Load queries and tiles of the cache to shared memory, by one warp.

Pages are boxes of TMA: 64 tokens of 128 bytes of dims, or as many as a page has; lane l has the l-th box of a tile.
Pages past a request's length are not read from the page table: their boxes lie outside of the cache, so zeros arrive.

Alone, a CTA's keys are its values. In a pair CTA r brings as keys all dims of 64 of the 128 tokens of a tile, and as
values a chunk of each two of all 128 tokens: the tensor core takes half of N from each CTA, of tokens and of dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from dsv4lib.dsl import boxes, pipelines
from dsv4lib.ops.mla_decode.config import CHUNK_BYTES, HEADS, LATENT, PE_STAGES, ROPE, ROW, SOFTMAX_WARPS
from dsv4lib.ops.mla_decode.work import Items, Plan, Requests, Work


class Sources(NamedTuple):
    """Hold TMA descriptors.

    Queries come in boxes of 64 heads, latents and rotated keys in boxes of a page's tokens. Queries of two limbs are
    no boxes (None): see `queries`.
    """

    q_nope: Any
    q_pe: Any
    latents: cute.CopyAtom
    pe: cute.CopyAtom


class Rings(NamedTuple):
    """Hold the pipelines of the load warp.

    They are of queries of an item, latents (some dims of a tile a stage), rotated keys of a tile.
    """

    q: Any  # PipelineTmaUmma; of two limbs PipelineAsyncUmma
    kv: pipeline.PipelineTmaUmma
    pe: pipeline.PipelineTmaUmma


class Addresses(NamedTuple):
    """Addresses of queries, the ring of latents, that of rotated keys, and P."""

    q: Int32
    kv: Int32
    pe: Int32
    p: Int32


class Load(Plan):
    """The load warp."""

    def sources(self, mQNope: cute.Tensor, mQPe: cute.Tensor, mCache: cute.Tensor) -> Sources:
        """Make TMA descriptors, on the host."""
        cache, queries = self.outwards(mCache), (None, None)
        if cutlass.const_expr(self.limbs == 1):
            sizes = (mQNope, self.chunk), (mQPe, ROPE)
            queries = tuple(boxes.box_atom(self.outwards(x), (dims, HEADS, 1)) for x, dims in sizes)
        return Sources(
            *queries,
            boxes.box_atom(cache, (self.chunk, self.box_tokens, 1)),
            boxes.box_atom(cache, (ROPE, self.box_tokens, 1)),
        )

    def outwards(self, x: cute.Tensor) -> cute.Tensor:
        """Order the modes of a row-major tensor from the contiguous one outwards."""
        (i, j, k), (of_i, of_j, _) = x.shape, x.stride
        return cute.make_tensor(x.iterator, cute.make_layout((k, j, i), stride=(1, of_j, of_i)))

    @cute.jit
    def prefetch_maps(self, sources: Sources):
        """Fetch the tensor maps, which are parameters of this launch."""
        for atom in sources:
            if cutlass.const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)

    def load_rings(self, q: cute.Pointer, kv: cute.Pointer, pe: cute.Pointer) -> Rings:
        """Make the pipelines; each argument points to the mbarriers of one."""
        queries = (
            pipelines.tma_to_umma(1, self.q_bytes, q, ctas=self.cluster)
            if self.limbs == 1
            else pipelines.warps_to_umma(1, len(SOFTMAX_WARPS), q, self.cluster)
        )
        return Rings(
            queries,
            pipelines.tma_to_umma(self.kv_stages, self.stage_bytes, kv, ctas=self.cluster),
            pipelines.tma_to_umma(PE_STAGES, self.pe_bytes, pe, ctas=self.cluster),
        )

    @cute.jit
    def load(self, requests: Requests, items: Items, sources: Sources, shared: Addresses, rings: Rings):
        """Run the load warp: queries of an item, then its tiles.

        They come in the order in which they are multiplied. Of a tile the rotated keys come first, then its latents.
        In a pair values follow the keys of the next tile.
        """
        q, kv, pe = rings
        cute.arch.griddepcontrol_wait()
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, 1)
        kv_state = pipeline.make_pipeline_state(producer, self.kv_stages)
        pe_state = pipeline.make_pipeline_state(producer, PE_STAGES)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(requests, items, item)
            if cutlass.const_expr(self.limbs == 1):
                if work.end > work.first:
                    self.load_q(sources, work, shared.q, self.claim(q, q_state))
                    q_state.advance()
            page, page_before = self.page_of(requests, work, work.first), Int32(-1)
            for tile in cutlass.range(work.first, work.end, unroll=1):
                page_after = self.page_of(requests, work, tile + 1)  # asked for a tile ahead
                barrier, keys = self.claim(pe, pe_state), shared.pe + pe_state.index * self.pe_bytes
                self.load_keys(sources.pe, keys, barrier, Int32(LATENT), page, tile, ROPE)
                pe_state.advance()
                for block in cutlass.range_constexpr(self.blocks):
                    barrier, stage = self.claim(kv, kv_state), shared.kv + kv_state.index * self.stage_bytes
                    for i in cutlass.range_constexpr(self.stage_chunks):
                        dim = Int32((block * self.stage_chunks + i) * self.chunk)
                        rows = stage + i * CHUNK_BYTES
                        self.load_keys(sources.latents, rows, barrier, dim, page, tile, self.chunk)
                    kv_state.advance()
                if cutlass.const_expr(self.cluster > 1):
                    if tile > work.first:
                        kv_state = self.load_values(sources, shared, kv, kv_state, page_before, tile - 1)
                page_before, page = page, page_after
            if cutlass.const_expr(self.cluster > 1):
                if work.end > work.first:
                    kv_state = self.load_values(sources, shared, kv, kv_state, page_before, work.end - 1)
        # stay until every stage is empty: MMAs signal in here
        kv.producer_tail(kv_state)
        pe.producer_tail(pe_state)
        if cutlass.const_expr(self.limbs == 1):
            q.producer_tail(q_state)

    @cute.jit
    def claim(self, ring: pipeline.PipelineTmaUmma, state: pipeline.PipelineState):
        """Wait until a stage is empty, announce its bytes, return its full barrier."""
        ring.producer_acquire(state)
        if cutlass.const_expr(self.cluster > 1):
            # Lanes that copy nothing wait too. In the first CTA the election of the lane that says the bytes keeps
            # them converged; here they could come to the barrier a phase late, and wait for one that never comes.
            cute.arch.sync_warp()
        return ring.producer_get_barrier(state)

    @cute.jit
    def load_q(self, sources: Sources, work: Work, sQ: Int32, barrier: cute.Pointer):
        """Load 64 heads of a request. Heads that are not there arrive as zeros."""
        pair = self.cluster > 1
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.latent_chunks):
                place = Int32(i * self.chunk), work.head, work.request
                boxes.load_box(sources.q_nope, sQ + i * (HEADS * ROW), barrier, place, pair)
            place = Int32(0), work.head, work.request
            boxes.load_box(sources.q_pe, sQ + self.latent_chunks * (HEADS * ROW), barrier, place, pair)

    @cute.jit
    def page_of(self, requests: Requests, work: Work, tile: Int32):
        """Return this lane's page of a tile; -1 past the length and if it has none."""
        page, lane = Int32(-1), cute.arch.lane_idx()
        token = tile * self.tile + lane * self.box_tokens
        if lane < self.boxes * self.cluster and token < work.tokens:
            page = requests.page_table[work.request, self.column_of(token)]
        return page

    def column_of(self, token: Int32) -> Int32:
        """Return where the page table names a token's page."""
        return token // self.page_size

    @cute.jit
    def load_keys(
        self,
        atom: cute.CopyAtom,
        rows: Int32,
        barrier: cute.Pointer,
        dim: Int32,
        page: Int32,
        tile: Int32,
        dims: cutlass.Constexpr,
    ):
        """Load some dims of the 64 tokens of a tile of which this CTA has the keys."""
        self.load_boxes(atom, rows, barrier, dim, page, tile, dims, self.rank() * self.boxes, self.boxes)

    @cute.jit
    def load_values(
        self,
        sources: Sources,
        shared: Addresses,
        kv: pipeline.PipelineTmaUmma,
        kv_state: pipeline.PipelineState,
        page: Int32,
        tile: Int32,
    ):
        """Load this CTA's chunks of all tokens of a tile. Returns the ring's state."""
        kv_state = kv_state.clone()
        for block in cutlass.range_constexpr(self.blocks):
            barrier, stage = self.claim(kv, kv_state), shared.kv + kv_state.index * self.stage_bytes
            dim = block * self.block + self.rank() * self.chunk
            count = self.boxes * self.cluster
            self.load_boxes(sources.latents, stage, barrier, dim, page, tile, self.chunk, Int32(0), count)
            kv_state.advance()
        return kv_state

    @cute.jit
    def load_boxes(
        self,
        atom: cute.CopyAtom,
        rows: Int32,
        barrier: cute.Pointer,
        dim: Int32,
        page: Int32,
        tile: Int32,
        dims: cutlass.Constexpr,
        first: Int32,
        count: cutlass.Constexpr,
    ):
        """Load ``count`` boxes of a tile from the ``first`` on.

        Each is loaded by the lane that has its page.
        """
        lane = cute.arch.lane_idx()
        if lane >= first and lane < first + count:
            slot = (tile * self.tile + lane * self.box_tokens) % self.page_size  # the first of the page
            place = rows + (lane - first) * (self.box_tokens * (dims * self.element.width // 8))
            boxes.load_box(atom, place, barrier, (dim, slot, page), self.cluster > 1)
        cute.arch.sync_warp()
