"""Score compressed entries on Hopper: FP8 keys go from memory to the registers of a wgmma, without shared memory.

    out[t, s] = scale[s] * sum_h weights[t, h] * ReLU(q[t, h] . k[s])        s < lengths[t]

Keys are M of m64n64k32, heads are N, so one MMA of four k32 scores 64 keys against 64 heads, and a thread's sums are of
two keys. A CTA is one warpgroup; it has one token's heads and a range of its keys.

    keys       64 x 128 B a tile   --ld.global.v4, 4 a thread, tiles ahead-->  A, 16 registers; scales with them
    queries    heads x 128 B       --once, 128-byte swizzle-->                  B, shared memory
    weights    16 of a thread's columns, in registers
    sums       32 fp32 a thread: ReLU, x weight, added up, then over 4 lanes; x the key's scale; one store a key

**Order of K.** A lane's fragment of A is 4 bytes here and 4 there of a row. What counts is that A and B have K in one
order, so each lane loads 16 bytes in a row at once, and the queries are stored in the order which that gives:

    byte 64 c + 16 t + 8 j + 4 e + b of a row   is   K = 64 c + 32 j + 16 e + 4 t + b        t: lane % 4

**Rows.** Warp w, lane 4 g + t has the keys 16 w + g and 16 w + g + 8 of a tile. They lie in one page, as pages have 32
keys or more. Keys from a token's length on are not read, their scores not written.

Source: DSV4's released code (`Indexer.forward`); PTX ISA, "wgmma"; the oracle is `dsv4lib.reference.indexer.scores`.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.indexer_logits.sm90.config import COLUMNS, DIM, PIECE, SCALE_BYTES, THREADS, TILE_KEYS, Config

WORDS = 16  # of A, of a thread: two keys x 32 bytes


class Tables(NamedTuple):
    """Which keys a token sees.

    Attributes:
        pages: int32 [B, W]. requests, lengths: int32 [T].
    """

    pages: cute.Tensor
    requests: cute.Tensor
    lengths: cute.Tensor


class HopperLogits(Config):
    """Score entries; options as `Config`."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mWeights: cute.Tensor,
        mPages: cute.Tensor,
        tables: Tables,
        mOut: cute.Tensor,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for each token and part of its keys.

        Args:
            mQ: uint8 [T, H, 128]. mWeights: fp32 [T, H].
            mPages: uint8 [P, bytes of a page].
            tables: see there.
            mOut: fp32 [T, L].
            splits: parts of the keys.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            queries: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.query_bytes], 1024]

        self.storage = Storage
        self.kernel(mQ, mWeights, mPages, tables, mOut).launch(
            grid=(splits, mQ.shape[0], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mWeights: cute.Tensor, mPages: cute.Tensor, tables: Tables, mOut: cute.Tensor):
        """Queries to shared memory, then tile after tile."""
        split, token, _ = cute.arch.block_idx()
        splits, _, _ = cute.arch.grid_dim()
        storage = memory.SmemAllocator().allocate(self.storage)
        queries = storage.queries.data_ptr().toint()
        cute.arch.griddepcontrol_wait()
        request, length = tables.requests[token], cutlass.min(tables.lengths[token], Int32(mOut.shape[1]))
        if request < 0:
            length = Int32(0)
        tiles = cute.ceil_div(cutlass.max(length, Int32(0)), TILE_KEYS)
        first, end = split * tiles // splits, (split + 1) * tiles // splits
        if first < end:
            table = tables.pages[request, None]
            rKeys = cute.make_rmem_tensor((WORDS, self.stages), Int32)
            rScales = cute.make_rmem_tensor((2, self.stages), Float32)
            for stage in cutlass.range_constexpr(self.stages):
                self.load_keys(mPages, table, first + stage, length, rKeys[None, stage], rScales[None, stage])
            self.load_queries(mQ, token, queries)
            rWeights = self.load_weights(mWeights, token)
            self.queries_written()
            cute.arch.barrier(barrier_id=0, number_of_threads=THREADS)
            for start in cutlass.range(first, end, self.stages, unroll=1):
                for stage in cutlass.range_constexpr(self.stages):
                    tile = start + stage
                    if tile < end:
                        scales = rScales[0, stage], rScales[1, stage]
                        votes = self.votes(rKeys[None, stage], rWeights, queries)
                        later = tile + self.stages
                        self.load_keys(mPages, table, later, length, rKeys[None, stage], rScales[None, stage])
                        self.store(tile, length, votes, scales, mOut[token, None])
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, token: Int32, queries: Int32):
        """Store a token's heads in the order of K that the keys have, swizzled."""
        thread, _, _ = cute.arch.thread_idx()
        rPiece = cute.make_rmem_tensor(PIECE, cutlass.Uint8)
        words = cute.recast_tensor(rPiece, Int32)
        pieces = DIM // PIECE
        for i in cutlass.range_constexpr(self.heads * pieces // THREADS):
            number = i * THREADS + thread
            head, chunk, lane = number // pieces, number % pieces // 4, number % 4
            cute.autovec_copy(cute.local_tile(mQ[token, head, None], (PIECE,), (number % pieces,)), rPiece)
            for word in cutlass.range_constexpr(4):
                piece = 4 * chunk + word  # j = word / 2, e = word % 2: K = 64 c + 16 word + 4 t
                place = queries + head * DIM + ((piece ^ head % 8) << 4) + 4 * lane
                cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[place, words[word]])

    def queries_written(self) -> None:
        """Make the stores visible to the tensor core, which reads through another proxy."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load_weights(self, mWeights: cute.Tensor, token: Int32) -> cute.Tensor:
        """Weights of the columns of this thread's sums, heads of a pass one after the other."""
        lane = cute.arch.lane_idx() % 4
        rWeights = cute.make_rmem_tensor(self.passes * COLUMNS // 4, Float32)
        for i in cutlass.range_constexpr(self.passes * COLUMNS // 8):
            for part in cutlass.range_constexpr(2):
                rWeights[2 * i + part] = mWeights[token, 8 * i + 2 * lane + part]
        return rWeights

    def key_of(self, tile: Int32) -> Int32:
        """The first of this thread's two keys of a tile; the other one is 8 further."""
        thread, _, _ = cute.arch.thread_idx()
        return tile * TILE_KEYS + thread // 32 * 16 + thread % 32 // 4

    def page_of(self, table: cute.Tensor, key: Int32) -> Int32:
        """The page that a key lies in."""
        return table[key // self.page_size]

    @cute.jit
    def load_keys(
        self,
        mPages: cute.Tensor,
        table: cute.Tensor,
        tile: Int32,
        length: Int32,
        rKeys: cute.Tensor,
        rScales: cute.Tensor,
    ):
        """Load 32 bytes of each of this thread's keys, and their scales; zeros where there is none."""
        key = self.key_of(tile)
        lane = cute.arch.lane_idx() % 4
        rKeys.fill(0)
        rScales.fill(0.0)
        pieces = cute.logical_divide(rKeys, cute.make_layout(4))
        if key < length:
            mPage = mPages[self.page_of(table, key), None]
            scales = cute.recast_tensor(mPage, Float32)
            for row in cutlass.range_constexpr(2):
                if key + 8 * row < length:
                    place = key % self.page_size + 8 * row
                    for chunk in cutlass.range_constexpr(2):
                        rPiece = cute.recast_tensor(pieces[None, 2 * row + chunk], cutlass.Uint8)
                        piece = cute.local_tile(mPage, (PIECE,), (place * (DIM // PIECE) + lane + 4 * chunk,))
                        cute.autovec_copy(piece, rPiece)
                    rScales[row] = scales[self.page_size * DIM // SCALE_BYTES + place]

    @cute.jit
    def store(self, tile: Int32, length: Int32, votes: list, scales: tuple, mRow: cute.Tensor):
        """Add the votes of the 4 lanes of a key, scale and store them."""
        for row in cutlass.range_constexpr(2):
            vote = votes[row]
            for step in cutlass.range_constexpr(2):
                vote = vote + cute.arch.shuffle_sync_bfly(vote, 1 << step)
            key = self.key_of(tile) + 8 * row
            if key < length and cute.arch.lane_idx() % 4 == 0:
                mRow[key] = vote * scales[row]

    def votes(self, rKeys: cute.Tensor, rWeights: cute.Tensor, queries: Int32) -> list:
        """Weighted sums over this thread's heads, of its two keys."""
        # MMA i has the words 2 (i % 2) and 2 (i % 2) + 1 of chunk i / 2, of both keys.
        a = [rKeys[8 * row + 4 * (i // 2) + 2 * (i % 2) + e] for i in range(4) for e in range(2) for row in range(2)]
        found = [Float32(0.0), Float32(0.0)]
        for number in range(self.passes):
            b = wgmma.operand(queries + number * COLUMNS * DIM)
            wgmma.fence()
            sums = wgmma.multiply(a, b, [wgmma.STEP_BYTES * i for i in range(4)], COLUMNS, "e4m3", False)
            wgmma.commit()
            sums = wgmma.wait_for(sums)
            for c, one in enumerate(sums):  # row c / 2 % 2, column 8 (c / 4) + 2 t + c % 2
                weight = rWeights[number * COLUMNS // 4 + 2 * (c // 4) + c % 2]
                found[c // 2 % 2] = found[c // 2 % 2] + self.relu(one) * weight
        return found

    def relu(self, x: Float32) -> Float32:
        """Return x where it is above 0, else 0; NaN passes."""
        return asm("max.NaN.f32 $0, $1, 0f00000000;", [Float32], [x], pure=True)
