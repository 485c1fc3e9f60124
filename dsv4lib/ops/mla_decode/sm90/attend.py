"""Compute O in registers from tiles in shared memory.

S = Q K^T, online softmax, P V, the end of a request.

The S of tile t is warpgroup t % 2's alone; by P both multiply, each for its half of the 512 columns of O. So while one
warpgroup weighs its tile, the tensor core has the other's S and both their products with the tile before.

    warpgroup w, tiles t = w, w + 2, ..
        S_t = Q K_t^T, first 4 chunks         in flight, chunk by chunk as they land
        P_(t-1), row_max of the other one     O *= exp2(old - new);  O += P_(t-1) V_(t-1), in flight, P in SMEM
        S_t += Q K_t^T, the other 5           in flight
        O there, S_t there                    its half of tile t - 1 is free
        weigh                                 row_max, P_t = exp2(scale S_t - row_max) -> SMEM, for the other one
        O *= ..;  O += P_t V_t                P in registers; its half of tile t is free

Half of S_t before the other's product keeps the tensor core busy while P_(t-1) is made; the rest comes after it, so
that tile t - 1 is free, and its successor on the way, before S_t is there.

P_t goes where K_t had its RoPE chunk: it is as large, and read no more when S_t is there.

Fragments. A thread's S and O are rows g and g + 8 of its warp's 16 heads, columns 8 i + 2 t and the next (lane
4 g + t): value 4 i + 2 j + l is row g + 8 j, column 8 i + 2 t + l. P has the same places, so S becomes the A operand
as it is.

The row_max follows the maximum only when that grew by more than 2^`RESCALE_LOG2`; both warpgroups use the same one, so
what they add up has one scale. Their row_sum are of their own tiles, and are added at the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import bulk, wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.mla_decode.sm90.config import (
    CHUNK_BYTES,
    CHUNKS,
    DIMS,
    GROUP_READY,
    HALF_CHUNKS,
    MATH_READY,
    ROPE_CHUNK,
    ROW_BYTES,
    STAGE_BYTES,
    STAGES,
    TILE_M,
    TILE_N,
    V_DIM,
    WARPGROUP,
)
from dsv4lib.ops.mla_decode.sm90.dequant import Dequant
from dsv4lib.ops.mla_decode.sm90.load import Ring, Work

RESCALE_LOG2 = 4.0
AHEAD = 4  # chunks of Q K^T before the product with the tile before (data/bench/mla_decode.md)
STEP = wgmma.STEP_BYTES
QK_STEPS = [(i * STEP, i * STEP) for i in range(ROW_BYTES // STEP)]  # of a chunk
PV_STEPS = [16 * ROW_BYTES * i for i in range(TILE_N // 16)]
P_STEPS = [(i * STEP, at) for i, at in enumerate(PV_STEPS)]
PIECE = 16  # bytes: a unit of the swizzle
ROWS = 2  # of a thread's fragments
HALF_BYTES = HALF_CHUNKS * CHUNK_BYTES


class Place(NamedTuple):
    """Where a math thread is. Its warpgroup, its first row of the tile (the second is 8 further), its columns' t."""

    group: Int32
    row: Int32
    pair: Int32


class State(NamedTuple):
    """What a math thread carries from tile to tile. O, row_max (times scale) and row_sum of its tiles."""

    rO: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor


class Outputs(NamedTuple):
    """O [B, H, 512] and LSE fp32 [B, H]; of a split kernel fp32, with splits in front."""

    o: cute.Tensor
    lse: cute.Tensor


class Attend(Dequant):
    """What the math warpgroups do."""

    @cute.jit
    def attend(
        self, work: Work, ring: Ring, sMax: cute.Tensor, outputs: Outputs, scale_log2: Float32, v_scale: Float32
    ):
        """Math warps: the tiles of the CTA, O."""
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(group, tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4, tidx % 4)
        state = State(cute.make_rmem_tensor(DIMS // 2, Float32), *(cute.make_rmem_tensor(ROWS, Float32) for _ in "ms"))
        state.rO.fill(0.0)
        state.row_max.fill(-Float32.inf)
        state.row_sum.fill(0.0)
        tiles = work.end - work.first
        if tiles > 0:
            cute.arch.mbarrier_wait(ring.q_full, 0)
            if cutlass.const_expr(self.fp8_queries):
                self.visible_to_mma()
            if group == 0:
                self.own_tile(work, ring, place, sMax, state, Int32(0), scale_log2, False)
            for number in cutlass.range(2 - group, tiles, STAGES, unroll=1):
                self.own_tile(work, ring, place, sMax, state, number, scale_log2, True)
            if tiles % 2 == group:  # the last one is the other's
                self.follow(ring, place, sMax, state, tiles - 1)
                self.clear_tail(work, ring, place, tiles - 1)
                sums = self.add_others(ring, place, state, tiles - 1)
                self.keep(state, wgmma.wait_for(sums))
        self.finish(outputs, work, place, ring.q, sMax, state, v_scale)

    @cute.jit
    def own_tile(
        self,
        work: Work,
        ring: Ring,
        place: Place,
        sMax: cute.Tensor,
        state: State,
        number: Int32,
        scale_log2: Float32,
        follows: cutlass.Constexpr,
    ):
        """Do all with a tile whose S is this warpgroup's.

        Args:
            follows: and the product with the tile before.
        """
        chunks = self.chunks(place.group)
        ahead = AHEAD if follows else len(chunks)
        s = self.scores(ring, place.group, number, chunks[:ahead], None)
        if cutlass.const_expr(follows):
            self.follow(ring, place, sMax, state, number - 1)
            sums = self.add_others(ring, place, state, number - 1)
            s = self.scores(ring, place.group, number, chunks[ahead:], s)
            self.keep(state, wgmma.wait_for(sums, len(chunks) - ahead))
            self.release(ring, place, 1 - place.group)
        s = wgmma.wait_for(s)
        rS = cute.make_rmem_tensor(TILE_N // 2, Float32)
        for i in cutlass.range_constexpr(TILE_N // 2):
            rS[i] = s[i]
        left = work.length - (work.first + number) * TILE_N
        acc_scale = self.weigh(place, state, rS, left, scale_log2)
        words = self.words(rS)
        self.sync_group(place)  # S is there in all warps: the RoPE chunk, and V of no token, are read no more
        self.publish(ring, place, sMax, state, words)
        self.rescale(state, acc_scale)
        self.clear_tail(work, ring, place, number)
        values = ring.tiles + place.group * (STAGE_BYTES + HALF_BYTES)
        wgmma.fence()
        old = [state.rO[c] for c in range(DIMS // 2)]
        sums = wgmma.accumulate(old, words, wgmma.rows_of_k(values, CHUNK_BYTES), PV_STEPS, kind=self.dtype)
        wgmma.commit()
        self.keep(state, wgmma.wait_for(sums))
        self.release(ring, place, place.group)

    def scores(self, ring: Ring, group: Int32, number: Int32, chunks: list, s: list | None) -> list | None:
        """S += Q K^T over some chunks of a tile, each a group. Each waits until it has landed; ``s`` None: S is 0."""
        parity = number // STAGES % 2
        for slot, chunk in chunks:
            self.wait_full(ring.full + group * CHUNKS, slot, chunk, parity)
            q = wgmma.operand(ring.q + chunk * CHUNK_BYTES)
            k = wgmma.operand(ring.tiles + group * STAGE_BYTES + chunk * CHUNK_BYTES)
            if s is None:
                wgmma.fence()
                s = wgmma.multiply_shared(q, k, QK_STEPS, TILE_N, self.dtype)
            else:
                s = wgmma.accumulate_shared(s, q, k, QK_STEPS, self.dtype, rows_are_k=False)
            wgmma.commit()
        return s

    def chunks(self, group: Int32) -> list:
        """List (place, chunk) of a tile's chunks as they arrive."""
        return [(slot, self.chunk(slot, group)) for slot in range(CHUNKS)]

    def wait_full(self, full: cute.Pointer, slot: int, chunk: Int32, parity: Int32) -> None:
        """Wait for a chunk. Those of FP8 arrive by halves, RoPE with the second, and this thread fences the proxies."""
        if not self.fp8_cache:
            cute.arch.mbarrier_wait(full + chunk, parity)
        elif slot % HALF_CHUNKS == 0 and slot != ROPE_CHUNK:
            cute.arch.mbarrier_wait(full + chunk, parity)
            self.visible_to_mma()

    @cute.jit
    def follow(self, ring: Ring, place: Place, sMax: cute.Tensor, state: State, number: Int32):
        """Wait for P of the other warpgroup's tile, and take over its row_max."""
        other = 1 - place.group
        cute.arch.mbarrier_wait(ring.weighed + other, number // STAGES % 2)
        if cutlass.const_expr(self.fp8_cache):
            self.visible_to_mma()  # V, whose stores the other warpgroup has seen
        acc_scale = cute.make_rmem_tensor(ROWS, Float32)
        for j in cutlass.range_constexpr(ROWS):
            new_max = sMax[place.row + 8 * j, other]
            acc_scale[j] = Float32(1.0)
            if new_max != state.row_max[j]:
                acc_scale[j] = cute.math.exp2(state.row_max[j] - new_max, fastmath=True)
            state.row_max[j] = new_max
            state.row_sum[j] = state.row_sum[j] * acc_scale[j]
        self.rescale(state, acc_scale)

    def add_others(self, ring: Ring, place: Place, state: State, number: Int32) -> list:
        """O += P V of the other warpgroup's tile, in flight."""
        other = 1 - place.group
        tile = ring.tiles + other * STAGE_BYTES
        p = wgmma.operand(tile + ROPE_CHUNK * CHUNK_BYTES)
        v = wgmma.rows_of_k(tile + place.group * HALF_BYTES, CHUNK_BYTES)
        wgmma.fence()
        old = [state.rO[c] for c in range(DIMS // 2)]
        sums = wgmma.accumulate_shared(old, p, v, P_STEPS, self.dtype, rows_are_k=True)
        wgmma.commit()
        return sums

    def keep(self, state: State, sums: list) -> None:
        """Take sums for O."""
        for c in range(DIMS // 2):
            state.rO[c] = sums[c]

    @cute.jit
    def release(self, ring: Ring, place: Place, stage: Int32):
        """Hand this warpgroup's half of a stage back."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + (stage * 2 + place.group))

    @cute.jit
    def clear_tail(self, work: Work, ring: Ring, place: Place, number: Int32):
        """Write zeros over V of tokens past the end of the request. This warpgroup's half: 0 x NaN is not 0."""
        left = work.length - (work.first + number) * TILE_N
        if cutlass.const_expr(self.fp8_cache):
            left = Int32(TILE_N)  # they are zeros already
        if left < TILE_N:
            tidx, _, _ = cute.arch.thread_idx()
            thread = tidx % WARPGROUP
            base = ring.tiles + number % STAGES * STAGE_BYTES + place.group * HALF_BYTES
            pieces = ROW_BYTES // PIECE
            for row in cutlass.range(left + thread // (HALF_CHUNKS * pieces), TILE_N, 4, unroll=1):
                piece = thread % (HALF_CHUNKS * pieces)
                at = base + piece // pieces * CHUNK_BYTES + row * ROW_BYTES + piece % pieces * PIECE
                asm("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", [], [at, Int32(0)])
            self.visible_to_mma()
            self.sync_group(place)

    def sync_group(self, place: Place) -> None:
        """Wait for this warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_READY + place.group, number_of_threads=WARPGROUP)

    def visible_to_mma(self) -> None:
        """Make this thread's stores visible to the tensor core and to copies. They read through another proxy."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def weigh(self, place: Place, state: State, rS: cute.Tensor, left: Int32, scale_log2: Float32):
        """Make P of S, row_sum and row_max follow; return what O is to be multiplied by.

        P = exp2(scale_log2 * S - row_max); row_sum *= exp2(old row_max - row_max).

        Args:
            left: tokens of the request from the tile's first on.
        """
        if left < TILE_N:
            for c in cutlass.range_constexpr(TILE_N // 2):
                column = 8 * (c // 4) + 2 * place.pair + c % 2
                rS[c] = cutlass.select_(column < left, rS[c], -Float32.inf)
        acc_scale = cute.make_rmem_tensor(ROWS, Float32)
        for j in cutlass.range_constexpr(ROWS):
            columns = columns_of(j, TILE_N)
            tile_max = rS[columns[0]]
            for c in columns[1:]:
                tile_max = cute.arch.fmax(tile_max, rS[c])
            tile_max = self.over_quad(tile_max, cute.arch.fmax) * scale_log2
            acc_scale[j] = Float32(1.0)
            if tile_max > state.row_max[j] + RESCALE_LOG2:
                acc_scale[j] = cute.math.exp2(state.row_max[j] - tile_max, fastmath=True)
                state.row_max[j] = tile_max
            shift = cutlass.select_(state.row_max[j] > -Float32.inf, state.row_max[j], Float32(0.0))
            total = state.row_sum[j] * acc_scale[j]
            for c in columns:
                rS[c] = cute.math.exp2(rS[c] * scale_log2 - shift, fastmath=True)
                total = total + rS[c]
            state.row_sum[j] = total
        return acc_scale

    @cute.jit
    def rescale(self, state: State, acc_scale: cute.Tensor):
        """O *= acc_scale, where that is not 1 for some row of the warp."""
        if cute.arch.vote_any_sync((acc_scale[0] != 1.0) | (acc_scale[1] != 1.0)):
            for j in cutlass.range_constexpr(ROWS):
                for c in columns_of(j, DIMS):
                    state.rO[c] = state.rO[c] * acc_scale[j]

    def over_quad(self, value: Float32, combine: Any) -> Float32:
        """Combine the numbers of the 4 lanes that share a row."""
        for step in (1, 2):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, step))
        return value

    def words(self, rP: cute.Tensor) -> list:
        """Round P, as the A operand: 4 words for every 16 tokens."""
        found = []
        for i in range(TILE_N // 8):
            found += [packed(self.dtype, rP[4 * i + 2 * j], rP[4 * i + 2 * j + 1]) for j in range(ROWS)]
        return found

    @cute.jit
    def publish(self, ring: Ring, place: Place, sMax: cute.Tensor, state: State, words: list):
        """Store P and row_max for the other warpgroup."""
        p = ring.tiles + place.group * STAGE_BYTES + ROPE_CHUNK * CHUNK_BYTES
        for j in cutlass.range_constexpr(ROWS):
            row = place.row + 8 * j
            at = p + row * ROW_BYTES + 4 * place.pair
            for i in cutlass.range_constexpr(TILE_N // 8):
                asm("st.shared.b32 [$0], $1;", [], [at + ((i ^ row % 8) * PIECE), words[2 * i + j]])
            if place.pair == 0:
                sMax[row, place.group] = state.row_max[j]
        self.visible_to_mma()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.weighed + place.group)

    @cute.jit
    def finish(
        self,
        outputs: Outputs,
        work: Work,
        place: Place,
        sOut: Int32,
        sSum: cute.Tensor,
        state: State,
        v_scale: Float32,
    ):
        """Normalise and store O and LSE; zeros and -inf without tokens.

        Rows of O meet where Q was, from both warpgroups, and leave in one copy each.
        """
        mO, mLse = outputs
        heads = mO.shape[1]
        tidx, _, _ = cute.arch.thread_idx()
        size = mO.element_type.width // 8
        pitch = V_DIM * size + 8 * size  # stores of a warp fall into all banks
        self.sync_math()  # Q, tiles and row_max are read no more
        for j in cutlass.range_constexpr(ROWS):
            total = self.over_quad(state.row_sum[j], lambda a, b: a + b)
            if place.pair == 0:
                sSum[place.row + 8 * j, place.group] = total
        self.sync_math()
        for j in cutlass.range_constexpr(ROWS):
            row = place.row + 8 * j
            total, head = sSum[row, 0] + sSum[row, 1], work.head + row
            o_scale = cutlass.select_(total != 0.0, cute.arch.rcp_approx(total) * v_scale, Float32(0.0))  # NaN stays
            if (head < heads) & (place.group == 0) & (place.pair == 0):
                lse = (state.row_max[j] + cute.math.log2(total)) * math.log(2.0)
                mLse[work.request, head] = cutlass.select_(total != 0.0, lse, -Float32.inf)
            target = sOut + row * pitch + (place.group * DIMS + 2 * place.pair) * size
            for i in cutlass.range_constexpr(DIMS // 8):
                two = [state.rO[4 * i + 2 * j + k] * o_scale for k in range(2)]
                if cutlass.const_expr(size == 2):
                    asm("st.shared.b32 [$0], $1;", [], [target + 8 * size * i, packed(self.out, *two)])
                else:
                    asm("st.shared.v2.f32 [$0], {$1, $2};", [], [target + 8 * size * i, *two])
        self.visible_to_mma()
        self.sync_math()
        head = work.head + tidx
        if (tidx < TILE_M) & (head < heads):
            target_row = mO[work.request, head, None].iterator.toint()
            bulk.store_bulk(target_row, sOut + tidx * pitch, Int32(V_DIM * size))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must live until it was read

    def sync_math(self) -> None:
        """Wait for both math warpgroups."""
        cute.arch.barrier(barrier_id=MATH_READY, number_of_threads=2 * WARPGROUP)


def columns_of(j: int, columns: int) -> list[int]:
    """Return the values of row g + 8 j of a thread's fragment of so many columns."""
    return [c for c in range(columns // 2) if c // 2 % 2 == j]


def packed(dtype: str, low: Float32, high: Float32) -> Int32:
    """Round two numbers to 16 bits, in one word."""
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[dtype]
    return asm(f"cvt.rn.{kind}.f32 $0, $2, $1;", [Int32], [low, high], pure=True)
