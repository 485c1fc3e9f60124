"""Run the online softmax and store out. It reads S in tensor memory, writes P to shared memory and rescales O there.

    P = exp2(scale_log2 * S - row_max)            row_sum = row_sum * acc_scale + sum(P)
    O = O * acc_scale                             acc_scale = exp2(old row_max - row_max)
    out = O / row_sum                             LSE = (row_max + log2(row_sum)) * ln 2

Thread t of 128 owns lane t of tensor memory: head t % 64, and half t / 64 of the tokens of a tile and of the dims of a
block of O. The row_max follows the maximum only when that grew by more than 2^4, as in `ops.fmha`.

The last page of a request may hold anything past its end. Scores there are masked; but 0 x NaN is NaN in P V, so the
warps write zeros over these entries, after Q K^T has read them and before P V does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline

from dsv4lib.dsl import convert, tmem, umma
from dsv4lib.ops.fmha.epilogue import multiply
from dsv4lib.ops.fmha.softmax import rescale
from dsv4lib.ops.fmha.work import Span, bits_of
from dsv4lib.ops.mla_decode.config import (
    CHUNK_BYTES,
    COLUMNS,
    HEADS,
    P_STAGES,
    PIECE,
    RESCALE_LOG2,
    ROW,
    S_STAGES,
    SOFTMAX_THREADS,
    SUM_SLOT,
    TMEM_DONE,
)
from dsv4lib.ops.mla_decode.load import Addresses
from dsv4lib.ops.mla_decode.queries import Queries
from dsv4lib.ops.mla_decode.work import Items, Outputs, Requests, Row, Work


class SoftmaxRings(NamedTuple):
    """Pipelines of the softmax warps. q: of queries of two limbs, else not theirs."""

    q: Any
    s: pipeline.PipelineUmmaAsync
    p: pipeline.PipelineAsyncUmma
    o: pipeline.PipelineUmmaAsync


class Tensors(NamedTuple):
    """What the softmax warps use.

    That is tensor memory, the row exchange [thread, slot] and addresses of shared memory.
    """

    tmem: cute.Pointer
    rows: cute.Tensor
    shared: Addresses


class Counts(NamedTuple):
    """Where the softmax warps are: in S, in P, and tiles since the kernel began."""

    s: pipeline.PipelineState
    p: pipeline.PipelineState
    tiles: Int32


class Softmax(Queries):
    """The softmax warps. They also make the limbs of queries, where there are two."""

    @cute.jit
    def softmax(
        self,
        heads: Int32,
        queries: Any,
        requests: Requests,
        items: Items,
        outputs: Outputs,
        shared: Addresses,
        sRow: cute.Tensor,
        allocator: memory.TmemAllocator,
        rings: SoftmaxRings,
        scale_log2: Float32,
    ):
        """Run the softmax warps: tiles of an item, then its out and LSE.

        Args:
            queries: `QueryTensors`, where they have two limbs, else None.
        """
        allocator.allocate(self.tmem_columns)
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        cute.arch.griddepcontrol_wait()
        tensors = Tensors(allocator.retrieve_ptr(Float32), sRow, shared)
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        o_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.blocks)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        done = Int32(0)
        for item in cutlass.range(items.first, items.end, items.step, unroll=1):
            work = self.work(requests, items, item)
            row = self.row(heads, work)
            counts = Counts(s_state, p_state, done)
            own_scale = scale_log2
            if cutlass.const_expr(self.limbs > 1):
                if work.end > work.first:
                    own_scale *= self.hand_over_q(queries, work, row, tensors, rings.q, q_state)
                    q_state.advance()
            row_max, row_sum, s_state, p_state, done = self.tiles(work, row, tensors, rings, counts, own_scale)
            o_state = self.finish(work, row, outputs, tensors, rings.o, o_state, row_max, row_sum)
        pipeline.NamedBarrier(TMEM_DONE, SOFTMAX_THREADS).arrive_and_wait()
        allocator.free(tensors.tmem)

    @cute.jit
    def tiles(self, work: Work, row: Row, tensors: Tensors, rings: SoftmaxRings, counts: Counts, scale_log2: Float32):
        """Make P of all tiles of an item.

        Returns row_max (log2), this half's row_sum, and `Counts`.
        """
        (_, s, p, _), address, tidx = rings, tensors.tmem, row.tidx
        s_state, p_state, done = counts.s.clone(), counts.p.clone(), counts.tiles
        pieces = self.p_pieces(tensors.shared.p, tidx % HEADS, row.half)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        rS, rP = cute.make_rmem_tensor((COLUMNS, self.half // COLUMNS), Float32), self.p_registers()
        for tile in cutlass.range(work.first, work.end, unroll=1):
            s.consumer_wait(s_state)
            umma.fence_after_thread_sync()
            for i in cutlass.range_constexpr(self.half // COLUMNS):
                tmem.load(address, self.s_column + s_state.index * self.half + i * COLUMNS, tidx, rS[None, i])
            cute.arch.fence_view_async_tmem_load()
            umma.fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                s.consumer_release(s_state)
            s_state.advance()
            left = work.tokens - tile * self.tile
            self.mask(rS, left - row.half * self.half)
            tile_max = self.tile_max(rS, row, tensors.rows, done % 2) * scale_log2 - self.p_shift
            # row_max = tile_max where that is more than 2^4 above it
            new_max = row_max
            if tile_max > row_max + RESCALE_LOG2:
                new_max = tile_max
            acc_scale, changed = Float32(1.0), new_max != row_max
            if changed:
                acc_scale = cute.math.exp2(row_max - new_max, fastmath=True)
            row_max = new_max
            # P = exp2(scale_log2 * S - row_max)
            row_sum = row_sum * acc_scale + self.weigh(rS, rP, scale_log2, row_max)
            p.producer_acquire(p_state)  # P V of the tile before is done: P is free, O is up to date
            umma.fence_after_thread_sync()
            if cute.arch.vote_any_sync(changed):
                if tile > work.first:
                    self.rescale_o(address, tidx, acc_scale)
            if left < self.tile:
                self.clear_past_end(tensors.shared.kv, done, left, tidx)
            self.store_p(rP, pieces)
            self.commit(p, p_state)
            p_state.advance()
            done += 1
        return row_max, row_sum, s_state, p_state, done

    @cute.jit
    def hand_over_q(
        self,
        queries: Any,
        work: Work,
        row: Row,
        tensors: Tensors,
        q: pipeline.PipelineAsyncUmma,
        q_state: pipeline.PipelineState,
    ):
        """Make the limbs of this thread's queries. Returns the scale of its head."""
        q.producer_acquire(q_state)
        scale = self.split_q(queries, work, row, tensors.shared.q, tensors.rows)
        self.commit(q, q_state)
        return scale

    @cute.jit
    def commit(self, ring: pipeline.PipelineAsyncUmma, state: pipeline.PipelineState):
        """Commit this warp's rows of P or of queries: one arrival."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ring.producer_commit(state)

    @cute.jit
    def rescale_o(self, address: cute.Pointer, tidx: Int32, acc_scale: Float32):
        """Rescale O *= acc_scale: half a head's dims a thread."""
        rescale(address, self.s_column, tidx, acc_scale)

    @cute.jit
    def mask(self, rS: cute.Tensor, left: Int32):
        """Make scores past the end -inf; ``left``: tokens from this thread's first on."""
        if left < self.half:
            for i in cutlass.range_constexpr(self.half // COLUMNS):
                valid = bits_of(Span(Int32(0), left), Int32(i * COLUMNS))
                for j in cutlass.range_constexpr(COLUMNS):
                    rS[j, i] = cutlass.select_((valid >> j) & 1 == 1, rS[j, i], -Float32.inf)

    @cute.jit
    def tile_max(self, rS: cute.Tensor, row: Row, sRow: cute.Tensor, slot: Int32):
        """Return the largest score of a row over both halves of the tile.

        Slots of even and odd tiles differ: one is written again only after the barrier of the next tile.
        """
        half_max = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        sRow[row.tidx, slot] = half_max
        self.pair(row).arrive_and_wait()
        return cute.arch.fmax(half_max, sRow[row.tidx ^ HEADS, slot])

    @cute.jit
    def weigh(self, rS: cute.Tensor, rP: cute.Tensor, scale_log2: Float32, row_max: Float32):
        """Make P = exp2(scale_log2 * S - row_max). Returns this thread's sum, of fp32."""
        shift = Float32(0.0)  # a row that has seen no token yet: every score is -inf, every P 0
        if row_max > -Float32.inf:
            shift = row_max
        sums = Float32(0.0), Float32(0.0)  # of even and odd tokens
        for j in cutlass.range_constexpr(0, self.half, 2):
            exponents = cute.arch.fma_packed_f32x2((rS[j], rS[j + 1]), (scale_log2, scale_log2), (-shift, -shift))
            rS[j], rS[j + 1] = (cute.math.exp2(x, fastmath=True) for x in exponents)
            sums = cute.arch.add_packed_f32x2(sums, (rS[j], rS[j + 1]))
        if cutlass.const_expr(self.dtype == "e4m3"):
            for j in cutlass.range_constexpr(0, self.half, 4):
                for limb, word in enumerate(convert.to_e4m3_limbs([rS[j + i] for i in range(4)], self.limbs)):
                    rP[j // 4 + limb * (self.half // 4)] = word
        else:
            rP.store(rS.load().reshape((PIECE // 2, self.half * 2 // PIECE)).to(self.element))
        return sums[0] + sums[1]

    def p_registers(self) -> Any:
        """Make registers [elements of a piece, pieces] for a thread's P.

        They are of its type, in FP8 words of four. Limbs follow each other.
        """
        kind, own = Int32 if self.dtype == "e4m3" else self.element, self.half * self.element.width // 8
        return cute.make_rmem_tensor((PIECE * 8 // kind.width, self.limbs * own // PIECE), kind)

    def p_pieces(self, sP: Int32, head: Int32, half: Int32) -> tuple[Int32, ...]:
        """Return the addresses of a thread's 16-byte pieces of P.

        They are swizzled as its rows of 128 or 64 bytes are. Tokens of a head that do not fit into a row are in
        further chunks of 64 rows.
        """
        own = self.half * self.element.width // 8  # bytes
        chunk, first = half * own // self.p_row, half * own % self.p_row // PIECE
        row = sP + (chunk * HEADS + head) * self.p_row
        turn = head % 8 if self.p_row == ROW else head // 2 % 4
        pieces = [row + ((first + i) ^ turn) * PIECE for i in range(own // PIECE)]
        return tuple(piece + limb * self.p_limb for limb in range(self.limbs) for piece in pieces)

    @cute.jit
    def store_p(self, rP: cute.Tensor, pieces: tuple[Int32, ...]):
        """Store P to shared memory, the A operand of P V."""
        for i, piece in enumerate(pieces):
            place = cute.make_ptr(rP.element_type, piece, cute.AddressSpace.smem, assumed_align=PIECE)
            cute.autovec_copy(rP[None, i], cute.make_tensor(place, rP.shape[0]))
        self.publish_p()

    @cute.jit
    def publish_p(self):
        """Let the tensor core see what this thread stored."""
        cute.arch.fence_view_async_shared()
        umma.fence_before_thread_sync()

    @cute.jit
    def clear_past_end(self, sKV: Int32, done: Int32, left: Int32, tidx: Int32):
        """Write zeros over values past a request's end, in the stages of tile ``done``.

        In a pair stages of keys alternate with those of values, and the last tile's values are the last before those
        of the next item.
        """
        chunks = self.stage_chunks if self.cluster == 1 else 1  # of values in a stage
        pieces = self.blocks * chunks * (ROW // PIECE)  # of an entry
        first = done * self.blocks if self.cluster == 1 else (2 * done + 1) * self.blocks
        zeros = cute.make_rmem_tensor(PIECE // 4, Int32)
        zeros.fill(0)
        for number in cutlass.range(left * pieces + tidx, self.tile * pieces, SOFTMAX_THREADS, unroll=1):
            token, piece = number // pieces, number % pieces
            chunk, inside = piece // (ROW // PIECE), piece % (ROW // PIECE)
            stage = (first + chunk // chunks) % self.kv_stages
            place = sKV + stage * self.stage_bytes + chunk % chunks * CHUNK_BYTES
            place += token * ROW + inside * PIECE
            target = cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=PIECE)
            cute.autovec_copy(zeros, cute.make_tensor(target, PIECE // 4))

    @cute.jit
    def finish(
        self,
        work: Work,
        row: Row,
        outputs: Outputs,
        tensors: Tensors,
        o: pipeline.PipelineUmmaAsync,
        o_state: pipeline.PipelineState,
        row_max: Float32,
        row_sum: Float32,
    ):
        """Store LSE and out of an item: -inf and zeros without tokens. Return the state of O's pipeline."""
        mOut, mLse, _ = outputs
        if cutlass.const_expr(self.partial):
            mOut, mLse = mOut[work.split, None, None, None], mLse[work.split, None, None]
        o_state, any_tile = o_state.clone(), work.end > work.first
        if any_tile:
            tensors.rows[row.tidx, SUM_SLOT] = row_sum
            self.pair(row).arrive_and_wait()
            row_sum += tensors.rows[row.tidx ^ HEADS, SUM_SLOT]
        if row.inside and row.half == 0:
            mLse[work.request, row.head] = (row_max + cute.math.log2(row_sum)) * math.log(2.0)
        o_scale = cutlass.select_(row_sum != 0.0, cute.arch.rcp_approx(row_sum), Float32(0.0))  # NaN stays
        o_scale *= outputs.scale
        rO = cute.make_rmem_tensor(32, Float32)
        rOut = cute.make_rmem_tensor((8, 4), self.out_element)
        for block in cutlass.range_constexpr(self.blocks):
            if any_tile:
                o.consumer_wait(o_state)
                umma.fence_after_thread_sync()
            for line in cutlass.range_constexpr(self.block // 2 // COLUMNS):
                if any_tile:
                    tmem.load(tensors.tmem, block * (self.block // 2) + COLUMNS * line, row.tidx, rO)
                    cute.arch.fence_view_async_tmem_load()
                    multiply(rO, o_scale)
                else:
                    rO.fill(0.0)
                rOut.store(rO.load().reshape((8, 4)).to(self.out_element))
                if row.inside:
                    first = cute.assume(block * self.block + row.half * (self.block // 2), divby=32)
                    gRow = cute.domain_offset((first,), mOut[work.request, row.head, None])
                    cute.autovec_copy(rOut, cute.logical_divide(cute.local_tile(gRow, (32,), (line,)), (8,)))
                cute.arch.sync_warp()
            if any_tile:
                o_state.advance()
        return o_state
