"""Score CSA's compressed entries for the lightning indexer on SM100.

Tensor cores, FP8 or FP4, from paged keys.

    out[t, s] = sum_h weights[t, h] * ReLU(q[t, h] . k[s])         s < lengths[t]; what lies past it is not written

k[s] is entry s of the request of token t: page ``table[request, s / page_size]``, slot ``s % page_size``.
Source: DeepSeek-V4's released indexer; the oracle is `dsv4lib.reference.indexer.scores`.

    variant   queries                 keys                    MMA                               K of an MMA, of a tile
    fp8       E4M3, scale in weights  E4M3, fp32 / 128        kind::f8f6f4                      32, 128
    fp4       E2M1, UE8M0 / 32        E2M1, UE8M0 / 32        kind::mxf4.block_scale.block32    64, 128

Tile picture (fp8, 64 heads, 4 tokens). Keys are M, the lanes of the accumulator; heads of consecutive tokens are N, its
columns: a thread owns one key, sums over heads in its registers, and a warp stores 32 scores side by side.

    SMEM                                      TMEM: 128 lanes (keys) x 512 columns
  +-----------------------------------+       0                256               512
  | keys      6 x 128 x 128 B         |       +----------------+----------------+
  | queries   4 x 64 heads x 128 B    |       | 4 x 64 heads,  | 4 x 64 heads,  |   fp4: 3 tokens of 64 heads,
  | scales    6 x 128 x 4 B           |       | tiles 0, 2, .. | tiles 1, 3, .. |   then 4 columns of keys' and
  | weights   4 x 64 fp32             |       +----------------+----------------+   8 of queries' scales
  | runs, mbarriers, TMEM address     |
  +-----------------------------------+

Work. A CTA takes ``tokens`` consecutive tokens and one of ``splits`` equal parts of their keys' tiles. Neighbours of
one request are a run: they share the tiles of its keys, up to the longest of their lengths. A CTA with several runs
goes through them one after another and stores of each only its own tokens. Each score is computed alone, so neither
``tokens`` nor ``splits`` changes a bit.

Roles (10 warps, 320 threads)

    warps 0-7   epilogue  two warpgroups, every other tile each: TMEM -> registers, ReLU, weights, scale, store
    warp  8     mma       scales to TMEM (fp4), then 4 (fp4: 2) MMAs a tile
    warp  9     load      queries once; a tile: a box of each page's keys and one of their scales, a lane each

Pipelines

    keys      TMA -> UMMA        6 stages   full: boxes have landed   empty: commit after the MMAs; fp8: and 4 warps
                                                                             that have read the scales
    queries   TMA -> UMMA        1 stage
    acc       UMMA -> epilogue   2 tiles    full: commit after the MMAs   empty: 4 warps of one group

What limits it. A score takes 64 maxima and 32 packed FMAs of a lane, 0.75 clocks of an SM, beside 64 x 128 products,
1 clock in FP8 and half of that in FP4: prefill is near the tensor core's rate in FP8 and bound by the epilogue in FP4.
Decode (one token a request) reads 132 or 68 bytes a key once: memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import boxes, pipelines, tmem, umma
from dsv4lib.ops.indexer_logits.config import (
    GROUP_THREADS,
    GROUPS,
    HEAD_STEP,
    LOAD_WARP,
    MMA_WARP,
    SCALE_WORD,
    THREADS,
    TILE_KEYS,
    TMEM_READ,
    TMEM_READY,
    Config,
)

GROUP_WARPS = GROUP_THREADS // 32
NO_PAGE = -1  # a box there is outside of the pool: it arrives as zeros


class Tables(NamedTuple):
    """Which keys each token reads.

    Attributes:
        table: int32 [B, W], pages of a request. requests: int32 [T], row of `table`; negative: none.
        lengths: int32 [T], entries of a token.
    """

    table: cute.Tensor
    requests: cute.Tensor
    lengths: cute.Tensor


class Atoms(NamedTuple):
    """TMA atoms."""

    queries: cute.CopyAtom
    keys: cute.CopyAtom
    scales: cute.CopyAtom


class Work(NamedTuple):
    """What one CTA has to do: its first token, and its part of every run's tiles."""

    token: Int32
    split: Int32
    splits: Int32


class Shared(NamedTuple):
    """Shared memory: addresses for TMA and the tensor core, tensors of the rest.

    Attributes:
        keys, scales, queries, query_scales: addresses; of the first stage of rings.
        words: int32 [128, stages], the same scales. query_words: int32 [words], or None.
        weights: fp32 [4, columns / 4].
        runs: int32 [4, tokens]: request, longest length (0: no run begins here), first token of the run that token i
            belongs to, its own length.
    """

    keys: Int32
    scales: Int32
    queries: Int32
    query_scales: Any
    words: cute.Tensor
    query_words: Any
    weights: cute.Tensor
    runs: cute.Tensor


class IndexerLogits(Config):
    """Scores of the indexer: options as `Config`. See the module docstring for the picture."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mQs: Any,
        mWeights: cute.Tensor,
        pages: cute.Tensor,
        tables: Tables,
        mOut: cute.Tensor,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: TMA descriptors and the launch.

        Args:
            mQ: [T, H, row bytes] uint8. mQs: [T, H] int32, 4 scales a word, or None.
            mWeights: [T, H] fp32.
            pages: [P, page bytes] uint8, on 16 bytes.
            tables: of the requests and tokens.
            mOut: [T, L] fp32.
            splits: CTAs that share the keys of a tile's tokens.
            stream: where the launch is queued.
        """
        row, size = self.variant.row_bytes, self.page_size
        page_bytes, count = pages.stride[0], pages.shape[0]
        queries = cute.make_tensor(
            mQ.iterator,
            cute.make_layout((row, self.heads, mQ.shape[0]), stride=(1, mQ.stride[1], mQ.stride[0])),
        )
        keys = cute.make_tensor(pages.iterator, cute.make_layout((row, size, count), stride=(1, row, page_bytes)))
        scales = cute.make_tensor(
            cute.recast_ptr(pages.iterator + size * row, dtype=Int32),
            cute.make_layout((size, count), stride=(1, page_bytes // SCALE_WORD)),
        )
        atoms = Atoms(
            boxes.box_atom(queries, (row, self.heads, self.tokens)),
            boxes.box_atom(keys, (row, self.box_keys, 1)),
            boxes.box_atom(scales, (self.box_keys, 1), swizzle=False),
        )

        @cute.struct
        class Storage:
            keys: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.key_bytes], 1024]
            queries: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.query_bytes], 1024]
            scales: cute.struct.Align[cute.struct.MemRange[Int32, self.stages * TILE_KEYS], 128]
            query_scales: cute.struct.Align[cute.struct.MemRange[Int32, self.query_blocks * 128], 128]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.columns], 16]
            runs: cute.struct.Align[cute.struct.MemRange[Int32, 4 * self.tokens], 16]
            key_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            acc_barriers: cute.struct.MemRange[cutlass.Int64, 2 * GROUPS]
            query_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            tmem_address: Int32

        self.storage = Storage
        groups = cute.ceil_div(mQ.shape[0], self.tokens)
        self.kernel(atoms, mQs, mWeights, tables, mOut, splits).launch(
            grid=(groups * splits, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, atoms: Atoms, mQs: Any, mWeights: cute.Tensor, tables: Tables, mOut: cute.Tensor, splits: Int32):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        readers = 0 if self.variant.scaled else GROUP_WARPS
        keys = pipelines.tma_to_umma(self.stages, self.stage_bytes, storage.key_barriers.data_ptr(), readers=readers)
        queries = pipelines.tma_to_umma(1, self.query_bytes, storage.query_barriers.data_ptr())
        acc = pipelines.umma_to_warps(GROUPS, GROUP_WARPS, storage.acc_barriers.data_ptr())
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, THREADS - 32, 0)
        pipeline.pipeline_init_arrive(is_relaxed=True)
        allocator.allocate(self.tmem_columns)  # by its warp
        allocator.relinquish_alloc_permit()
        work = Work(block // splits * self.tokens, block % splits, splits)
        shared = self.shared(storage)
        cute.arch.griddepcontrol_wait()
        self.fetch_weights(mWeights, work, shared)
        if warp == LOAD_WARP:
            self.find_runs(tables, work, mOut, shared)
        pipeline.pipeline_init_wait()
        cute.arch.sync_threads()

        if warp == LOAD_WARP:
            self.load(atoms, tables, work, shared, queries, keys)
        elif warp == MMA_WARP:
            self.mma(mQs, work, shared, allocator, queries, keys, acc)
        else:
            self.epilogue(mOut, work, shared, allocator, keys, acc)

    def shared(self, storage: Any) -> Shared:
        """Addresses and tensors of shared memory."""
        return Shared(
            storage.keys.data_ptr().toint(),
            storage.scales.data_ptr().toint(),
            storage.queries.data_ptr().toint(),
            storage.query_scales.data_ptr().toint() if self.variant.scaled else None,
            storage.scales.get_tensor(cute.make_layout((TILE_KEYS, self.stages))),
            storage.query_scales.get_tensor(cute.make_layout(self.query_blocks * 128)) if self.variant.scaled else None,
            storage.weights.get_tensor(cute.make_layout((4, self.columns // 4))),
            storage.runs.get_tensor(cute.make_layout((4, self.tokens))),
        )

    @cute.jit
    def fetch_weights(self, mWeights: cute.Tensor, work: Work, shared: Shared):
        """Copy the weights of the CTA's tokens to SMEM; 0 past the last token."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < self.columns:
            token, head = work.token + tidx // self.heads, tidx % self.heads
            weight = Float32(0.0)
            if token < mWeights.shape[0]:
                weight = mWeights[token, head]
            shared.weights[tidx % 4, tidx // 4] = weight

    @cute.jit
    def find_runs(self, tables: Tables, work: Work, mOut: cute.Tensor, shared: Shared):
        """Find the runs of one request among the CTA's tokens.

        One lane writes the table of `Shared.runs`.
        """
        requests = [Int32(NO_PAGE)] * self.tokens
        lengths = [Int32(0)] * self.tokens
        for i in cutlass.range_constexpr(self.tokens):
            if work.token + i < mOut.shape[0]:
                requests[i] = tables.requests[work.token + i]
                lengths[i] = cutlass.min(tables.lengths[work.token + i], mOut.shape[1])
            if requests[i] < 0 or lengths[i] < 0:
                lengths[i] = Int32(0)
        owner = [Int32(0)] * self.tokens
        longest = [*lengths]
        for i in cutlass.range_constexpr(1, self.tokens):
            owner[i] = cutlass.select_(requests[i] == requests[i - 1], owner[i - 1], Int32(i))
        for i in cutlass.range_constexpr(self.tokens):
            for j in cutlass.range_constexpr(i + 1, self.tokens):
                longest[i] = cutlass.select_(owner[j] == i, cutlass.max(longest[i], lengths[j]), longest[i])
            longest[i] = cutlass.select_(owner[i] == i, longest[i], Int32(0))
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.tokens):
                shared.runs[0, i], shared.runs[1, i] = requests[i], longest[i]
                shared.runs[2, i], shared.runs[3, i] = owner[i], lengths[i]

    @cute.jit
    def tiles(self, work: Work, shared: Shared, run: Int32):
        """First tile and end of this CTA's part of a run."""
        count = cute.ceil_div(shared.runs[1, run], TILE_KEYS)
        return count * work.split // work.splits, count * (work.split + 1) // work.splits

    @cute.jit
    def load(
        self,
        atoms: Atoms,
        tables: Tables,
        work: Work,
        shared: Shared,
        queries: pipeline.PipelineTmaUmma,
        keys: pipeline.PipelineTmaUmma,
    ):
        """Load queries once, then tile after tile, by one warp. Lane l takes the l-th page of a tile."""
        lane = cute.arch.lane_idx()
        first = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        queries.producer_acquire(first)
        with cute.arch.elect_one():
            boxes.load_box(atoms.queries, shared.queries, queries.producer_get_barrier(first), (0, 0, work.token))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for run in cutlass.range(self.tokens, unroll=1):
            request, length = shared.runs[0, run], shared.runs[1, run]
            start, end = self.tiles(work, shared, run)
            for tile in cutlass.range(start, end, unroll=1):
                page, slot = Int32(NO_PAGE), Int32(0)
                key = tile * TILE_KEYS + lane * self.box_keys
                if lane < self.boxes and key < length:
                    page, slot = self.place_of(tables.table, request, key)
                keys.producer_acquire(state)
                barrier = keys.producer_get_barrier(state)
                if lane < self.boxes:
                    target = (
                        shared.keys + state.index * self.key_bytes + lane * (self.box_keys * self.variant.row_bytes)
                    )
                    boxes.load_box(atoms.keys, target, barrier, (0, slot, page))
                    target = shared.scales + state.index * self.scale_bytes + lane * (self.box_keys * SCALE_WORD)
                    boxes.load_box(atoms.scales, target, barrier, (slot, page))
                state.advance()
        cute.arch.griddepcontrol_launch_dependents()
        keys.producer_tail(state)

    @cute.jit
    def place_of(self, table: cute.Tensor, request: Int32, key: Int32):
        """Page and slot of a key."""
        return table[request, key // self.page_size], key % self.page_size

    @cute.jit
    def mma(
        self,
        mQs: Any,
        work: Work,
        shared: Shared,
        allocator: memory.TmemAllocator,
        queries: pipeline.PipelineTmaUmma,
        keys: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """MMA warp: tile after tile into alternating accumulators."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        if cutlass.const_expr(self.variant.scaled):
            self.arrange_query_scales(mQs, work, shared)
        queries.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        sums = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, GROUPS)
        fresh = cutlass.Boolean(True)
        for run in cutlass.range(self.tokens, unroll=1):
            start, end = self.tiles(work, shared, run)
            for _ in cutlass.range(start, end, unroll=1):
                keys.consumer_wait(full)
                if cutlass.const_expr(self.variant.scaled):
                    self.arrange_key_scales(shared, full.index)
                acc.producer_acquire(sums)
                umma.fence_after_thread_sync()
                with cute.arch.elect_one():
                    self.multiply(base, sums.index, shared, full.index, fresh)
                fresh = cutlass.Boolean(False)
                keys.consumer_release(full)
                acc.producer_commit(sums)
                full.advance()
                sums.advance()
        acc.producer_tail(sums)

    @cute.jit
    def arrange_query_scales(self, mQs: cute.Tensor, work: Work, shared: Shared):
        """Fetch the scales of the CTA's heads as `tcgen05.cp` reads them. Row r at row r % 32, word r / 32."""
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(4 * self.query_blocks):
            row, word = i * 32 + lane, Int32(0)
            token = work.token + row // self.heads
            if row < self.columns and token < mQs.shape[0]:
                word = mQs[token, row % self.heads]
            shared.query_words[i // 4 * 128 + lane * 4 + i % 4] = word
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def arrange_key_scales(self, shared: Shared, stage: Int32):
        """Rearrange a stage's 128 words in place to what `tcgen05.cp` reads. Key r at row r % 32, word r / 32."""
        lane = cute.arch.lane_idx()
        rWords = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(4):
            rWords[i] = shared.words[i * 32 + lane, stage]
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(4):
            shared.words[lane * 4 + i, stage] = rWords[i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def multiply(self, base: Int32, accumulator: Int32, shared: Shared, stage: Int32, fresh: cutlass.Boolean):
        """Compute S = K @ Q^T of a tile.

        With the first one the scales of the queries come to tensor memory, to stay.
        """
        d = base + accumulator * self.columns
        k = umma.at(self.operand, shared.keys + stage * self.key_bytes)
        q = umma.at(self.operand, shared.queries)
        sfa, sfb = base + self.key_column, base + self.query_column
        if cutlass.const_expr(self.variant.scaled):
            source = umma.at(umma.scales_descriptor(), shared.scales + stage * self.scale_bytes)
            umma.copy_scales(sfa, source)
            if fresh:
                for i in cutlass.range_constexpr(self.query_blocks):
                    source = umma.at(umma.scales_descriptor(), shared.query_scales + i * umma.SCALE_BLOCK)
                    umma.copy_scales(sfb + i * umma.SCALE_COLUMNS, source)
        for i in cutlass.range_constexpr(self.variant.mmas):
            a, b = umma.advanced(k, 32 * i), umma.advanced(q, 32 * i)
            if cutlass.const_expr(self.variant.scaled):
                umma.scaled_mma(d, a, b, self.instructions[i], sfa, sfb, i > 0, self.variant.kind)
            else:
                umma.mma(d, a, b, self.instructions[i], i > 0, kind=self.variant.kind)

    @cute.jit
    def epilogue(
        self,
        mOut: cute.Tensor,
        work: Work,
        shared: Shared,
        allocator: memory.TmemAllocator,
        keys: pipeline.PipelineTmaUmma,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """Epilogue warps: every other tile; a thread owns a key."""
        allocator.wait_for_alloc()
        address = allocator.retrieve_ptr(Float32)
        tidx, _, _ = cute.arch.thread_idx()
        lane, group = tidx % GROUP_THREADS, cute.arch.make_warp_uniform(tidx // GROUP_THREADS)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        sums = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, GROUPS)
        for run in cutlass.range(self.tokens, unroll=1):
            start, end = self.tiles(work, shared, run)
            for tile in cutlass.range(start, end, unroll=1):
                if sums.index == group:
                    scale = Float32(1.0)
                    if cutlass.const_expr(not self.variant.scaled):
                        keys.consumer_wait(full)
                        scale = self.key_scale(shared, lane, keys, full)
                    acc.consumer_wait(sums)
                    umma.fence_after_thread_sync()
                    column = sums.index * self.columns
                    for i in cutlass.range(self.tokens, unroll=1):
                        score = self.score(address, column + i * self.heads, lane, shared, i) * scale
                        self.store(mOut, work, shared, run, i, tile * TILE_KEYS + lane, score)
                        cute.arch.sync_warp()  # tcgen05.ld needs all threads of a warp
                    umma.fence_before_thread_sync()
                    with cute.arch.elect_one():
                        acc.consumer_release(sums)
                full.advance()
                sums.advance()
        pipeline.NamedBarrier(TMEM_READ, GROUPS * GROUP_THREADS).arrive_and_wait()
        allocator.free(address)

    def key_scale(
        self, shared: Shared, lane: Int32, keys: pipeline.PipelineTmaUmma, full: pipeline.PipelineState
    ) -> Float32:
        """Read the scale of the thread's key, then give the stage back."""
        scale = shared.words[lane, full.index].bitcast(Float32)
        cute.arch.sync_warp()
        self.release(keys, full)
        return scale

    @cute.jit
    def release(self, keys: pipeline.PipelineTmaUmma, full: pipeline.PipelineState):
        """Arrive once for the warp: the stage's scales have been read."""
        with cute.arch.elect_one():
            pipelines.arrive_empty(keys, full)

    @cute.jit
    def score(self, address: cute.Pointer, column: Int32, lane: Int32, shared: Shared, token: Int32):
        """Compute sum_h weights[h] * ReLU(S[key, h]) of a token's heads.

        In four partial sums; NaN stays NaN.
        """
        partial = [(Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))]
        rS = cute.make_rmem_tensor(self.heads, Float32)
        for i in cutlass.range_constexpr(self.heads // HEAD_STEP):
            part = cute.make_tensor(rS.iterator + i * HEAD_STEP, cute.make_layout(HEAD_STEP))
            tmem.load(address, column + i * HEAD_STEP, lane, part)
        cute.arch.fence_view_async_tmem_load()
        rW = cute.make_rmem_tensor(4, Float32)
        for i in cutlass.range_constexpr(self.heads // 4):
            cute.autovec_copy(shared.weights[None, token * (self.heads // 4) + i], rW)
            for j in cutlass.range_constexpr(2):
                at = 4 * i + 2 * j
                both = self.relu(rS[at]), self.relu(rS[at + 1])
                partial[j] = cute.arch.fma_packed_f32x2(both, (rW[2 * j], rW[2 * j + 1]), partial[j])
        low, high = cute.arch.add_packed_f32x2(*partial)
        return low + high

    def relu(self, x: Float32) -> Float32:
        """max(x, 0), NaN of NaN."""
        return cute.arch.fmax(x, Float32(0.0), nan=True)

    @cute.jit
    def store(
        self, mOut: cute.Tensor, work: Work, shared: Shared, run: Int32, token: Int32, key: Int32, score: Float32
    ):
        """Store a score, if the token belongs to this run and has the key."""
        if shared.runs[2, token] == run and key < shared.runs[3, token]:
            mOut[work.token + token, key] = score
