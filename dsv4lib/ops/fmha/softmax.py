"""Run the online softmax. It reads S in tensor memory and writes P to shared memory; O is rescaled to the same row_max.

    P = exp2(scale_log2 * S - row_max)            row_sum = row_sum * acc_scale + sum(P)
    O = O * acc_scale                             acc_scale = exp2(old row_max - row_max)

The row_max follows the maximum only when that grew by more than 2^4. Thread t of 128 owns lane t of tensor memory: head
t % 64, and half t / 64 of the 64 keys of a tile.

Groups: a token's P of its neighbour's key is 0, but 0 x NaN is NaN. A key with NaN or Inf makes S of all rows NaN or
Inf, so the warps see it, and write zeros over its NaN and Inf before the tile is read as V. The rows whose own key it
is have its score, and are NaN all the same.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import tmem, umma
from dsv4lib.ops.fmha.config import (
    CHUNK,
    CHUNK_BYTES,
    HALF_N,
    P_BYTES,
    P_STAGES,
    PAIR,
    RESCALE_LOG2,
    S_STAGES,
    TILE_M,
    TILE_N,
    TMEM_DONE,
)
from dsv4lib.ops.fmha.epilogue import Epilogue, EpilogueRings, multiply
from dsv4lib.ops.fmha.work import Items, KeyLists, Outputs, Row, Work


class SharedMemory(NamedTuple):
    """What the softmax warps use of shared memory."""

    p: Int32  # address of the first stage of P
    scores: cute.Tensor  # exchange of partial S
    rows: cute.Tensor  # exchange of row_max and row_sum: [thread, slot]
    kv: Int32  # address of the ring of keys


class SoftmaxRings(NamedTuple):
    """Pipelines of the softmax warps."""

    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync
    sums: pipeline.PipelineAsync


class SoftmaxStates(NamedTuple):
    """Where the softmax warps are in S and P."""

    s: pipeline.PipelineState
    p: pipeline.PipelineState


class Maxima(NamedTuple):
    """Maxima of a row in log2: row_max so far, and tile_max of this tile."""

    row_max: Float32
    tile_max: Float32


class Softmax(Epilogue):
    """Run the softmax warps; hand row_sum and row_max to the epilogue warps.

    They do so after the tiles of an item.
    """

    @cute.jit
    def softmax(
        self,
        mQ: cute.Tensor,
        lists: KeyLists,
        items: Items,
        outputs: Outputs,
        shared: SharedMemory,
        allocator: memory.TmemAllocator,
        rings: SoftmaxRings,
        scale_log2: Float32,
    ):
        """Run the softmax warps. Thread t owns head t % 64 and half t / 64 of the keys of a tile.

        Args:
            outputs: of this CTA, where these warps are the epilogue's too.
        """
        allocator.allocate(self.tmem_columns)
        allocator.relinquish_alloc_permit()
        address, work, row = self.begin(mQ, lists, items, allocator)
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        sums_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        stored, stage = self.epilogue_states(), Int32(0)  # of the ring of keys; only groups count it
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work_after = self.work(lists, items, item + items.step)  # asked for a whole item ahead
            row_after = self.tile_row(mQ, lists, work_after)
            pair = pipeline.NamedBarrier(PAIR + (row.tidx // 32) % 2, 64)
            states = SoftmaxStates(s_state, p_state)
            row_max, row_sum, s_state, p_state, stage = self.softmax_tiles(
                lists, work, row, address, shared, pair, rings, states, scale_log2, stage
            )
            if work.end > work.first:
                self.publish_sums(row, shared.rows, row_max, row_sum, rings.sums, sums_state)
                sums_state.advance()
            if cutlass.const_expr(not self.epilogue_warps):
                own = EpilogueRings(rings.o, rings.sums)
                stored = self.finish_item(outputs, work, row, address, shared.rows, own, stored)
            work, row = work_after, row_after
        pipeline.NamedBarrier(TMEM_DONE, self.tmem_threads).arrive_and_wait()
        allocator.free(address)

    @cute.jit
    def publish_sums(
        self,
        row: Row,
        sRow: cute.Tensor,
        row_max: Float32,
        row_sum: Float32,
        sums: pipeline.PipelineAsync,
        sums_state: pipeline.PipelineState,
    ):
        """Hand this thread's row_sum of an item and its row_max to the epilogue warps."""
        sums.producer_acquire(sums_state)
        sRow[row.tidx, self.sum_slot] = row_sum
        sRow[row.tidx, self.row_max_slot] = row_max
        self.commit(sums, sums_state)

    @cute.jit
    def softmax_tiles(
        self,
        lists: KeyLists,
        work: Work,
        row: Row,
        address: cute.Pointer,
        shared: SharedMemory,
        pair: pipeline.NamedBarrier,
        rings: SoftmaxRings,
        states: SoftmaxStates,
        scale_log2: Float32,
        stage: Int32,
    ):
        """Make P of all tiles of an item.

        Returns row_max (log2), this half's row_sum, and the pipelines' states.
        """
        (sP, sX, sRow, sKV), (s, p, _, _), tidx = shared, rings, row.tidx
        if cutlass.const_expr(self.groups):
            if work.end > work.first:
                stage = (stage + self.q_stages) % self.kv_stages
        s_state, p_state = (state.clone() for state in states)
        pieces = p_pieces(sP, tidx % TILE_M, row.half)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for tile in cutlass.range(work.first, work.end, unroll=1):
            valid = self.valid_keys(lists, work, row, tile)
            s.consumer_wait(s_state)
            rS = load_s(address, self.s_column + s_state.index * TILE_N, tidx, row.half, sX, pair)
            with cute.arch.elect_one():
                s.consumer_release(s_state)
            s_state.advance()
            if cutlass.const_expr(self.groups):
                self.clear_values(rS, sKV, stage, tidx // 32)
                stage = (stage + self.tile_stages) % self.kv_stages
            tile_max = tile_row_max(rS, valid, sRow, tidx, pair) * scale_log2

            p.producer_acquire(p_state)
            maxima = Maxima(row_max, tile_max)
            row_max, row_sum = self.correct(maxima, row_sum, tile > work.first, address, tidx, p, p_state)
            # P = exp2(scale_log2 * S - row_max)
            row_sum += store_p(rS, scale_log2, row_max, pieces, self.element, p_state.index)
            self.commit(p, p_state)
            p_state.advance()
        return row_max, row_sum, s_state, p_state, stage

    @cute.jit
    def correct(
        self,
        maxima: Maxima,
        row_sum: Float32,
        has_o: cutlass.Boolean,
        address: cute.Pointer,
        tidx: Int32,
        p: pipeline.PipelineAsyncUmma,
        p_state: pipeline.PipelineState,
    ):
        """Correct O and row_sum where the maximum grew by more than 2^4.

        Args:
            has_o: false in the first tile of an item, before O is there.

        Returns:
            row_max, to which P of this tile is relative, and row_sum.
        """
        row_max, tile_max = maxima
        new_max = row_max
        if tile_max > row_max + RESCALE_LOG2:
            new_max = tile_max
        if cute.arch.vote_any_sync(new_max != row_max):
            # O, row_sum *= acc_scale
            acc_scale = Float32(1.0)
            if new_max != row_max:
                acc_scale = cute.math.exp2(row_max - new_max, fastmath=True)
            row_sum *= acc_scale
            if has_o:
                self.wait_for_o(p, p_state)
                rescale(address, self.q_column, tidx, acc_scale)
            row_max = new_max
        return row_max, row_sum

    @cute.jit
    def clear_values(self, rS: cute.Tensor, sKV: Int32, stage: Int32, warp: Int32):
        """Write zeros over NaN and Inf of this warp's 16 keys, if a score is either.

        Q K^T has read the tile then, P V has not.
        """
        probe = Float32(0.0), Float32(0.0)
        for j in cutlass.range_constexpr(0, HALF_N, 2):
            probe = cute.arch.fma_packed_f32x2((rS[j], rS[j + 1]), (Float32(0.0), Float32(0.0)), probe)
        finite = probe[0] + probe[1] == 0.0  # 0 x NaN and 0 x Inf are NaN
        if cute.arch.vote_any_sync(not finite):
            keys = HALF_N // 2
            exponent = Int32(0x7F80 if self.element is cutlass.BFloat16 else 0x7C00)  # all ones: not a finite number
            chunks = self.tile_stages * self.stage_chunks
            words = keys * (CHUNK // 2)  # of a chunk; a lane looks at one at a time: registers are short
            for number in cutlass.range(cute.arch.lane_idx(), chunks * words, 32, unroll=1):
                chunk, piece = number // words, number % words
                slot = (stage + chunk // self.stage_chunks) % self.kv_stages
                place = sKV + slot * self.stage_bytes + chunk % self.stage_chunks * CHUNK_BYTES
                place += (warp * keys) * (2 * CHUNK) + piece * 4
                line = cute.make_tensor(cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=4), 1)
                word = line[0]
                word = cutlass.select_((word & exponent) == exponent, word & Int32(-0x10000), word)
                above = exponent << 16
                line[0] = cutlass.select_((word & above) == above, word & Int32(0xFFFF), word)

    @cute.jit
    def commit(self, ring: pipeline.PipelineAsync, state: pipeline.PipelineState):
        """Commit this warp's rows of P, or of the sums: one arrival."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ring.producer_commit(state)

    @cute.jit
    def wait_for_o(self, p: pipeline.PipelineAsyncUmma, p_state: pipeline.PipelineState):
        """Wait until P V of the tile before ``p_state`` is done. Its slot of P is free again."""
        before = p_state.clone()
        before.advance()
        p.producer_acquire(before)
        umma.fence_after_thread_sync()


@cute.jit
def load_s(
    address: cute.Pointer, column: Int32, tidx: Int32, half: Int32, sX: cute.Tensor, pair: pipeline.NamedBarrier
):
    """Load this thread's 32 scores. Each is its sum over half the dimensions plus that of the thread 64 lanes away."""
    umma.fence_after_thread_sync()
    rOther = cute.make_rmem_tensor((4, HALF_N // 4), Float32)
    rS = cute.make_rmem_tensor((4, HALF_N // 4), Float32)
    tmem.load(address, column + (1 - half) * HALF_N, tidx, rOther)
    tmem.load(address, column + half * HALF_N, tidx, rS)
    cute.arch.fence_view_async_tmem_load()
    umma.fence_before_thread_sync()
    cute.autovec_copy(rOther, sX[None, tidx, None])
    pair.arrive_and_wait()
    cute.autovec_copy(sX[None, tidx ^ TILE_M, None], rOther)
    rS.store(rS.load() + rOther.load())
    return rS


@cute.jit
def tile_row_max(rS: cute.Tensor, valid: Int32, sRow: cute.Tensor, tidx: Int32, pair: pipeline.NamedBarrier):
    """Return the largest score of a row over both halves of the tile.

    Keys that are not there become -inf.
    """
    if valid != -1:
        for j in cutlass.range_constexpr(HALF_N):
            rS[j] = cutlass.select_((valid >> j) & 1 == 1, rS[j], -Float32.inf)
    tile_max = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
    sRow[tidx, 0] = tile_max
    pair.arrive_and_wait()
    return cute.arch.fmax(tile_max, sRow[tidx ^ TILE_M, 0])


def p_pieces(sP: Int32, row: Int32, half: Int32) -> tuple[Int32, ...]:
    """Return the addresses of a thread's four 16-byte pieces of P in slot 0.

    They are swizzled once, not in every tile.
    """
    start = sP + row * (TILE_N * 2)
    count = HALF_N // 8
    return tuple(start + ((half * count + i) ^ (row % 8)) * 16 for i in range(count))


@cute.jit
def store_p(
    rS: cute.Tensor,
    scale_log2: Float32,
    row_max: Float32,
    pieces: tuple[Int32, ...],
    element: cutlass.Constexpr,
    slot: Int32,
):
    """Store P = exp2(scale_log2 * S - row_max) to SMEM; return this thread's sum.

    P is the A operand of P V.
    """
    shift = Float32(0.0)  # a row that has seen no key yet: every score is -inf, every P 0
    if row_max > -Float32.inf:
        shift = row_max
    rP32 = cute.make_rmem_tensor((8, HALF_N // 8), Float32)
    sums = Float32(0.0), Float32(0.0)  # of even and odd keys
    for j in cutlass.range_constexpr(0, HALF_N, 2):
        exponents = cute.arch.fma_packed_f32x2((rS[j], rS[j + 1]), (scale_log2, scale_log2), (-shift, -shift))
        rP32[j], rP32[j + 1] = (cute.math.exp2(x, fastmath=True) for x in exponents)
        sums = cute.arch.add_packed_f32x2(sums, (rP32[j], rP32[j + 1]))
    rP = cute.make_rmem_tensor((8, HALF_N // 8), element)
    rP.store(rP32.load().to(element))
    for i in cutlass.range_constexpr(HALF_N // 8):
        place = cute.make_ptr(element, pieces[i] + slot * P_BYTES, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(rP[None, i], cute.make_tensor(place, 8))
    cute.arch.fence_view_async_shared()
    umma.fence_before_thread_sync()
    return sums[0] + sums[1]


@cute.jit
def rescale(address: cute.Pointer, columns: cutlass.Constexpr, tidx: Int32, acc_scale: Float32):
    """Rescale O *= acc_scale: half a head's dimensions a thread."""
    rO = cute.make_rmem_tensor(32, Float32)
    for column in cutlass.range(0, columns, 32, unroll=1):
        tmem.load(address, column, tidx, rO)
        cute.arch.fence_view_async_tmem_load()
        multiply(rO, acc_scale)
        tmem.store(address, column, tidx, rO)
    cute.arch.fence_view_async_tmem_store()
