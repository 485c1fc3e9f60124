"""Score compressed entries on Hopper. FP8 keys go through shared memory to the registers of a wgmma.

    out[t, s] = scale[s] * sum_h weights[t, h] * ReLU(q[t, h] . k[s])        s < lengths[t]

Keys are M of m64n64k32, heads are N, so one MMA of four k32 scores 64 keys against 64 heads, and a thread's sums are of
two keys. A CTA is one warpgroup; it has one token's heads and a range of its keys.

    keys       64 x 128 B a tile   --bulk copies of pages-->  ring of stages  --lds.v4, 4 a thread-->  A, 16 registers
    scales     64 x 4 B            --with them, or apart--->                  --lds----------------->  2 registers
    queries    heads x 128 B       --once, swizzled-------->  B, shared memory: rows of the 128-byte swizzle
    weights    16 of a thread's columns, in registers
    sums       32 fp32 a thread: ReLU, x weight, added up, then over 4 lanes; x the key's scale; one store a key

**Order of K.** A lane's fragment of A is 4 bytes here and 4 there of a row. What counts is that A and B have K in one
order, so each lane loads 16 bytes in a row at once, and the queries are stored in the order which that gives:

    byte 64 c + 16 t + 8 j + 4 e + b of a row   is   K = 64 c + 32 j + 16 e + 4 t + b        t: lane % 4

**Rows.** Warp w, lane 4 g + t has the keys 16 w + g and 16 w + g + 8 of a tile. They lie in one page, as pages have 32
keys or more; a page of 32 is half a tile. Pages are read to their end; scores from a token's length on are not written.

**Ring.** Thread 0 asks for the tile that will replace the one before the current one, once all warps have that one in
registers: `full` counts bytes, `empty` has an arrival a warp.

What was tried: keys from global memory straight to registers, two or three tiles ahead, with or without bulk requests
into L2, in `data/bench/indexer_logits.md`.

Source: DSV4's released code (`Indexer.forward`); PTX ISA, "wgmma"; the oracle is `dsv4lib.reference.indexer.scores`.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl import bulk, wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.indexer_logits.sm90.config import (
    COLUMNS,
    DIM,
    PIECE,
    SCALE_BYTES,
    THREADS,
    TILE_KEYS,
    Config,
)

WARPS = THREADS // 32


class Tables(NamedTuple):
    """Which keys a token sees.

    Attributes:
        pages: int32 [B, W]. requests, lengths: int32 [T].
    """

    pages: cute.Tensor
    requests: cute.Tensor
    lengths: cute.Tensor


class Ring(NamedTuple):
    """The stages of keys, and their barriers."""

    keys: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class HopperLogits(Config):
    """Score entries; options as `Config`."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mScales: cute.Tensor | None,
        mWeights: cute.Tensor,
        mPages: cute.Tensor,
        tables: Tables,
        mOut: cute.Tensor,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for each token and part of its keys.

        Args:
            mQ: uint8 [T, H, bytes of a head]. mScales: int32 [T, H], four of FP4's scales a word, else None.
            mWeights: fp32 [T, H].
            mPages: uint8 [P, bytes of a page].
            tables: see there.
            mOut: fp32 [T, L].
            splits: parts of the keys.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            queries: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.query_bytes], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.stage_bytes], 128]
            full: cute.struct.MemRange[cutlass.Int64, self.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.stages]

        self.storage = Storage
        self.kernel(mQ, mScales, mWeights, mPages, tables, mOut).launch(
            grid=(splits, mWeights.shape[0], 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mScales: cute.Tensor | None,
        mWeights: cute.Tensor,
        mPages: cute.Tensor,
        tables: Tables,
        mOut: cute.Tensor,
    ):
        """Ask for the first keys, queries to shared memory, then tile after tile."""
        split, token, _ = cute.arch.block_idx()
        splits, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        ring = Ring(storage.keys.data_ptr(), storage.full.data_ptr(), storage.empty.data_ptr())
        if thread == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(ring.full + i, 1)
                cute.arch.mbarrier_init(ring.empty + i, WARPS)
            cute.arch.mbarrier_init_fence()
        queries = storage.queries.data_ptr().toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        request, length = tables.requests[token], cutlass.min(tables.lengths[token], Int32(mOut.shape[1]))
        if request < 0:
            length = Int32(0)
        tiles = cute.ceil_div(cutlass.max(length, Int32(0)), TILE_KEYS)
        first, end = split * tiles // splits, (split + 1) * tiles // splits
        if first < end:
            table = tables.pages[request, None]
            if thread == 0:
                for i in cutlass.range_constexpr(self.stages - 1):
                    if first + i < end:
                        self.load_keys(mPages, table, first + i, length, ring, Int32(i))
            self.load_queries(mQ, mScales, token, queries)
            rWeights = self.load_weights(mWeights, token)
            self.queries_written()
            cute.arch.barrier(barrier_id=0, number_of_threads=THREADS)
            stage, parity = Int32(0), Int32(0)
            for tile in cutlass.range(first, end, unroll=1):
                if thread == 0 and tile + (self.stages - 1) < end:
                    free, phase = stage - 1, parity  # of the tile before; the first one's phase counts as over
                    if stage == 0:
                        free, phase = Int32(self.stages - 1), parity ^ 1
                    self.wait_for_room(ring.empty + free, phase)
                    self.load_keys(mPages, table, tile + (self.stages - 1), length, ring, free)
                cute.arch.mbarrier_wait(ring.full + stage, parity)
                words, scales = self.take(ring, stage)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty + stage)
                self.store(tile, length, self.votes(words, rWeights, queries), scales, mOut[token, None])
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, mScales: cute.Tensor | None, token: Int32, queries: Int32):
        """Store a token's heads in the order of K that the keys have, swizzled. FP8 heads have no scales here."""
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
        """Load weights of the columns of this thread's sums. Heads of a pass come one after the other."""
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

    def wait_for_room(self, barrier: cute.Pointer, parity: Int32) -> None:
        """Wait until all warps have a stage in registers."""
        cute.arch.mbarrier_wait(barrier, parity)

    @cute.jit
    def load_keys(self, mPages: cute.Tensor, table: cute.Tensor, tile: Int32, length: Int32, ring: Ring, stage: Int32):
        """Start the copies of a tile, by one thread: keys and scales, part after part.

        A part without keys gets those of the last page again.
        """
        parts, keys = TILE_KEYS // self.part, self.part
        full, size = ring.full + stage, keys * (self.key_bytes + SCALE_BYTES)
        cute.arch.mbarrier_arrive_and_expect_tx(full, parts * size)
        for part in cutlass.range_constexpr(parts):
            key = tile * TILE_KEYS + part * keys
            page = mPages[self.page_of(table, cutlass.min(key, length - 1)), None].iterator.toint()
            target = ring.keys + (stage * self.stage_bytes + part * size)
            if cutlass.const_expr(keys == self.page_size):
                bulk.load_bulk(target, page, Int32(size), full)
            else:
                place = key % self.page_size
                bulk.load_bulk(target, page + place * self.key_bytes, Int32(keys * self.key_bytes), full)
                scales = page + (self.page_size * self.key_bytes + place * SCALE_BYTES)
                bulk.load_bulk(target + keys * self.key_bytes, scales, Int32(keys * SCALE_BYTES), full)

    def take(self, ring: Ring, stage: Int32) -> tuple[list, list]:
        """Load this thread's words of A and its keys' scales."""
        thread, _, _ = cute.arch.thread_idx()
        row = thread // 32 * 16 + thread % 32 // 4
        base = ring.keys.toint() + stage * self.stage_bytes + row // self.part * (self.part * (DIM + SCALE_BYTES))
        place = row % self.part
        words = []
        for half in range(2):
            for chunk in range(2):
                source = base + (place + 8 * half) * DIM + chunk * (DIM // 2) + thread % 4 * PIECE
                words += asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [source])
        source = base + self.part * DIM + place * SCALE_BYTES
        scales = [asm("ld.shared.f32 $0, [$1];", [Float32], [source + 8 * SCALE_BYTES * half]) for half in range(2)]
        return words, scales

    @cute.jit
    def store(self, tile: Int32, length: Int32, votes: list, scales: list, mRow: cute.Tensor):
        """Add the votes of the 4 lanes of a key, scale and store them."""
        for row in cutlass.range_constexpr(2):
            vote = votes[row]
            for step in cutlass.range_constexpr(2):
                vote = vote + cute.arch.shuffle_sync_bfly(vote, 1 << step)
            key = self.key_of(tile) + 8 * row
            if key < length and cute.arch.lane_idx() % 4 == 0:
                mRow[key] = vote * scales[row]

    def votes(self, words: list, rWeights: cute.Tensor, queries: Int32) -> list:
        """Weighted sums over this thread's heads, of its two keys."""
        # MMA i has the words 2 (i % 2) and 2 (i % 2) + 1 of chunk i / 2, of both keys.
        a = [words[8 * row + 4 * (i // 2) + 2 * (i % 2) + e] for i in range(4) for e in range(2) for row in range(2)]
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
