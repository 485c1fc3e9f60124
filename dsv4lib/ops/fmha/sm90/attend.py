"""Compute O in registers from tiles of keys in shared memory. Q K^T, online softmax, P V, the end of a token.

Both math warpgroups weigh all 64 keys of a tile for all 64 heads; warpgroup w multiplies by dimensions 256 w .. 256 w +
255 of them. So they share no number: while one waits for its MMAs the other works out its P. The tile is the B operand
of both products, in Q K^T with the dimensions as K, in P V with its rows as K (`wgmma.rows_of_k`).

Fragments. A thread's S and O are rows g and g + 8 of its warp's 16 heads, columns 8 i + 2 t and the next (lane
4 g + t): value 4 i + 2 j + l is row g + 8 j, column 8 i + 2 t + l. P has the same places, so S becomes the A operand
as it is.

The row_max follows the maximum only when that grew by more than 2^4; see `ops.fmha.sm100`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import bulk, wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.kv_entry import ROW_BYTES
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, LOG2_E, RESCALE_LOG2, TILE_M, TILE_N
from dsv4lib.ops.fmha.sm90.config import CHUNKS, DIMS, HEAD_DIM, Q_READY, STAGE_BYTES, STAGES, WARPGROUP
from dsv4lib.ops.fmha.sm90.keys import Keys, Ring
from dsv4lib.ops.fmha.work import Outputs, Work

STEP = wgmma.STEP_BYTES
QK_STEPS = [(c * CHUNK_BYTES + i * STEP,) * 2 for c in range(CHUNKS) for i in range(ROW_BYTES // STEP)]
PV_STEPS = [16 * ROW_BYTES * i for i in range(TILE_N // 16)]
COLUMNS = 128  # of O that an MMA adds to
PIECE = 16  # bytes of a cp.async
ROWS = 2  # of a thread's fragments


class Place(NamedTuple):
    """Where a math thread is: its first row of the tile, its token. Also its block of heads and its columns."""

    group: Int32  # warpgroup
    row: Int32  # of the tile, and row + 8
    pair: Int32  # t: columns 8 i + 2 t
    token: Int32
    head: Int32  # of the block's first row


class Attend(Keys):
    """What the math warpgroups do."""

    @cute.jit
    def attend(self, mQ: cute.Tensor, work: Work, ring: Ring, sQ: Int32, outputs: Outputs, scale_log2: Float32):
        """Math warps: Q, the tiles of the token, O."""
        place = self.place(work.token)
        sinks = None
        if cutlass.const_expr(self.early):
            sinks = self.sinks_of(outputs.sink, place.head + place.row, mQ.shape[1])
        else:
            self.load_q(mQ, place, sQ)
        self.wait_for_q()
        q = wgmma.operand(sQ)
        rO = cute.make_rmem_tensor(DIMS // 2, Float32)
        row_max = cute.make_rmem_tensor(ROWS, Float32)
        row_sum = cute.make_rmem_tensor(ROWS, Float32)
        rO.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        stage, parity = Int32(0), Int32(0)
        for _ in cutlass.range(work.first, work.end, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, parity)
            self.visible_to_mma()
            keys = ring.keys + stage * STAGE_BYTES
            wgmma.fence()
            s = wgmma.multiply_shared(q, wgmma.operand(keys), QK_STEPS, TILE_N, "bf16")
            wgmma.commit()
            s = wgmma.wait_for(s)
            rS = cute.make_rmem_tensor(TILE_N // 2, Float32)
            for i in cutlass.range_constexpr(TILE_N // 2):
                rS[i] = s[i]
            self.weigh(ring.valid, stage, scale_log2, rS, rO, row_max, row_sum)
            self.multiply_values(rS, keys + place.group * (DIMS // CHUNK * CHUNK_BYTES), rO)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
            stage = stage + 1
            if stage == STAGES:
                stage, parity = Int32(0), parity ^ 1
        self.finish(outputs, place, mQ.shape[1], sQ, sinks, rO, row_max, row_sum)

    @cute.jit
    def place(self, token: Int32):
        """Return the `Place` of this thread."""
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        row = tidx % WARPGROUP // 32 * 16 + tidx % 32 // 4
        return Place(group, row, tidx % 4, token, self.head_block() * TILE_M)

    def visible_to_mma(self) -> None:
        """Make stores that this thread knows of visible to the tensor core. It reads through another proxy.

        The producer could say so of its own, but the fence waits for loads, too: for those of the next tile.
        """
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load_q(self, mQ: cute.Tensor, place: Place, sQ: Int32):
        """Start the copies of 64 heads of Q, as rows of the 128-byte swizzle. Rows that are no heads are zeros."""
        tidx, _, _ = cute.arch.thread_idx()
        pieces = HEAD_DIM * 2 // PIECE
        piece = tidx % pieces
        chunk, column = piece // 8, piece % 8
        for i in cutlass.range_constexpr(TILE_M * pieces // (2 * WARPGROUP)):
            row = i * (2 * WARPGROUP // pieces) + tidx // pieces
            head = place.head + row
            size = cutlass.select_(head < mQ.shape[1], Int32(PIECE), Int32(0))
            source = mQ[place.token, cutlass.min(head, mQ.shape[1] - 1), None].iterator.toint() + piece * PIECE
            target = sQ + chunk * CHUNK_BYTES + row * ROW_BYTES + ((column ^ row) % 8 << 4)
            copy(target, source, size)

    def wait_for_q(self) -> None:
        """Wait until both math warpgroups' copies of Q are there."""
        asm("cp.async.wait_all;", [], [])
        self.visible_to_mma()
        self.sync_math()

    @cute.jit
    def sinks_of(self, mSink: Any, head: Int32, heads: Int32):
        """Load the sinks of a thread's rows, times log2 e; without them -inf."""
        found = cute.make_rmem_tensor(ROWS, Float32)
        found.fill(-Float32.inf)
        if cutlass.const_expr(self.sink):
            for j in cutlass.range_constexpr(ROWS):
                found[j] = mSink[cutlass.min(head + 8 * j, heads - 1)] * LOG2_E
        return found

    @cute.jit
    def weigh(
        self,
        valid: cute.Tensor,
        stage: Int32,
        scale_log2: Float32,
        rS: cute.Tensor,
        rO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
    ):
        """Make P of S, and O, row_sum and row_max follow.

        P = exp2(scale_log2 * S - row_max); O, row_sum *= exp2(old row_max - row_max).
        """
        self.mask(valid, stage, rS)
        new_max = self.new_maxima(scale_log2, rS, row_max)
        if cute.arch.vote_any_sync((new_max[0] != row_max[0]) | (new_max[1] != row_max[1])):
            for j in cutlass.range_constexpr(ROWS):
                acc_scale = Float32(1.0)
                if new_max[j] != row_max[j]:
                    acc_scale = cute.math.exp2(row_max[j] - new_max[j], fastmath=True)
                row_sum[j] = row_sum[j] * acc_scale
                self.rescale(rO, j, acc_scale)
                row_max[j] = new_max[j]
        self.exponentiate(scale_log2, rS, row_max, row_sum)

    @cute.jit
    def mask(self, valid: cute.Tensor, stage: Int32, rS: cute.Tensor):
        """Give keys that are not there a score of -inf."""
        words = valid[0, stage], valid[1, stage]
        if words[0] != -1 or words[1] != -1:
            own = [word >> (2 * (cute.arch.lane_idx() % 4)) for word in words]
            for c in cutlass.range_constexpr(TILE_N // 2):  # bit 8 i + l: key 8 i + 2 t + l of half a tile
                bit = own[c // 16] >> (8 * (c // 4 % 4) + c % 2)
                rS[c] = cutlass.select_(bit & 1 == 1, rS[c], -Float32.inf)

    @cute.jit
    def new_maxima(self, scale_log2: Float32, rS: cute.Tensor, row_max: cute.Tensor):
        """Return what row_max becomes: the maximum of a row where it grew by more than 2^4."""
        new_max = cute.make_rmem_tensor(ROWS, Float32)
        for j in cutlass.range_constexpr(ROWS):
            tile_max = rS[2 * j]
            for c in columns_of(j, TILE_N):
                tile_max = cute.arch.fmax(tile_max, rS[c])
            tile_max = self.over_quad(tile_max, cute.arch.fmax) * scale_log2
            new_max[j] = row_max[j]
            if tile_max > row_max[j] + RESCALE_LOG2:
                new_max[j] = tile_max
        return new_max

    def exponentiate(self, scale_log2: Float32, rS: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
        """P = exp2(scale_log2 * S - row_max), added to row_sum."""
        for j in range(ROWS):
            shift = cutlass.select_(row_max[j] > -Float32.inf, row_max[j], Float32(0.0))
            total = Float32(0.0)
            for c in columns_of(j, TILE_N):
                rS[c] = cute.math.exp2(rS[c] * scale_log2 - shift, fastmath=True)
                total = total + rS[c]
            row_sum[j] = row_sum[j] + total

    def rescale(self, rO: cute.Tensor, j: int, acc_scale: Float32) -> None:
        """O *= acc_scale in row g + 8 j."""
        for c in columns_of(j, DIMS):
            rO[c] = rO[c] * acc_scale

    def over_quad(self, value: Float32, combine: Any) -> Float32:
        """Combine the numbers of the 4 lanes that share a row."""
        for step in (1, 2):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, step))
        return value

    def multiply_values(self, rP: cute.Tensor, values: Int32, rO: cute.Tensor) -> None:
        """O += P V of this warpgroup's dimensions."""
        a = []
        for step in range(TILE_N // 16):
            for i in (2 * step, 2 * step + 1):
                a += [packed(rP[4 * i + 2 * j], rP[4 * i + 2 * j + 1]) for j in range(ROWS)]
        self.keep(wgmma.wait_for(self.start_values(rO, a, values)), rO)

    def start_values(self, rO: cute.Tensor, a: list, values: Int32) -> list:
        """Issue O += P V, P a fragment. Return the sums, to be read after `wgmma.wait_for`.

        MMAs of 128 columns: ptxas refuses more sums than the registers that a thread starts with.
        """
        wgmma.fence()
        sums = []
        for first in range(0, DIMS, COLUMNS):
            own = [rO[c] for c in range(first // 2, (first + COLUMNS) // 2)]
            b = wgmma.rows_of_k(values + first // CHUNK * CHUNK_BYTES, CHUNK_BYTES)
            sums += wgmma.accumulate(own, a, b, PV_STEPS)
        wgmma.commit()
        return sums

    def keep(self, sums: list, registers: cute.Tensor) -> None:
        """Write sums of MMAs to registers."""
        for i, value in enumerate(sums):
            registers[i] = value

    @cute.jit
    def finish(
        self,
        outputs: Outputs,
        place: Place,
        heads: Int32,
        sQ: Int32,
        sinks: Any,
        rO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
    ):
        """Normalise, rotate back and store O and LSE; zeros and -inf without keys.

        Rows of O meet where Q was, from both warpgroups, and leave in one copy each.
        """
        mSink, rope, mO, mLse = outputs
        tidx, _, _ = cute.arch.thread_idx()
        size = mO.element_type.width // 8
        pitch = HEAD_DIM * size + 8 * size  # stores of a warp fall into all banks
        self.sync_math()  # Q and keys are read no more
        for j in cutlass.range_constexpr(ROWS):
            head = place.head + place.row + 8 * j
            total = self.over_quad(row_sum[j], lambda a, b: a + b)
            denominator = total
            if cutlass.const_expr(self.sink):
                if cutlass.const_expr(self.early):
                    sink = sinks[j]
                else:
                    sink = mSink[cutlass.min(head, heads - 1)] * LOG2_E
                denominator = total + cute.math.exp2(sink - row_max[j], fastmath=True)
            o_scale = cutlass.select_(total != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # NaN stays
            if head < heads and place.group == 0 and place.pair == 0:
                lse = (row_max[j] + cute.math.log2(total)) * math.log(2.0)
                mLse[place.token, head] = cutlass.select_(total != 0.0, lse, -Float32.inf)
            target = sQ + (place.row + 8 * j) * pitch + (place.group * DIMS + 2 * place.pair) * size
            for i in cutlass.range_constexpr(DIMS // 8):
                two = [rO[4 * i + 2 * j + k] * o_scale for k in range(2)]
                if cutlass.const_expr(self.inverse_rope and 8 * i >= DIMS - 64):
                    two = self.rotated(rope, place, 4 * (i - (DIMS - 64) // 8), total, two)
                store_pair(target + 8 * size * i, two, size)
        self.visible_to_mma()  # and to copies
        self.sync_math()
        head = place.head + tidx
        if tidx < TILE_M and head < heads:
            row = mO[place.token, head, None].iterator.toint()
            bulk.store_bulk(row, sQ + tidx * pitch, Int32(HEAD_DIM * size))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must live until it was read

    def sync_math(self) -> None:
        """Wait for both math warpgroups."""
        cute.arch.barrier(barrier_id=Q_READY, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def rotated(self, rope: Any, place: Place, first: cutlass.Constexpr, total: Float32, two: list):
        """Rotate a pair of the last 64 dimensions back. (a, b) -> (a cos + b sin, b cos - a sin); others stay."""
        a, b = two
        if place.group == 1 and total != 0.0:
            cos, sin = (table[place.token, first + place.pair] for table in rope)
            a, b = a * cos + b * sin, b * cos - a * sin
        return a, b


def columns_of(j: int, columns: int) -> list[int]:
    """Return the values of row g + 8 j of a thread's fragment of so many columns."""
    return [c for c in range(columns // 2) if c // 2 % 2 == j]


def packed(low: Float32, high: Float32) -> Int32:
    """Round two numbers to bf16, in one word."""
    return asm("cvt.rn.bf16x2.f32 $0, $2, $1;", [Int32], [low, high], pure=True)


def store_pair(target: Int32, two: list, size: int) -> None:
    """Store two neighbours in shared memory, as bf16 (size 2) or fp32."""
    if size == 2:
        asm("st.shared.b32 [$0], $1;", [], [target, packed(*two)])
    else:
        asm("st.shared.v2.f32 [$0], {$1, $2};", [], [target, *two])


def copy(target: Int32, source: Int64, size: Int32) -> None:
    """Copy ``size`` bytes to shared memory asynchronously; zeros up to 16."""
    text = f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {PIECE}, {{$r2}};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, size])
