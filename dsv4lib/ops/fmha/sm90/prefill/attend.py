"""Compute O of many tokens: two warpgroups, a tile of keys each, half of O's dimensions each.

Tiles of a token come in pairs. Warpgroup w computes S of tile w of a pair and makes P of it; of P V with both tiles it
has dimensions 256 w .. 256 w + 255. So no product is computed twice, and P goes through shared memory once:

    warpgroup 0     S0 = Q K0^T | P0 = exp2(S0 - row_max) ->| O += P0 V0        |         O += P1 V1
    warpgroup 1                 | S1 = Q K1^T               | O += P0 V0, and meanwhile P1 ->| O += P1 V1
    producer        K1          | waits                     | waits             | K0 of the next pair ..

row_max and row_sum go along with P (`Rows`): warpgroup 1 goes on from those of tile 0, warpgroup 0 from those of tile
1. Threads of the same number have the same rows and columns in both, so order and rounding of all sums are those of
`DecodeFmha`, and so is every bit of O.

O is rescaled where the row_max moved, by both warpgroups at the same place of the order. It leaves as rows of 64 bytes
from registers: lanes of a quad exchange words (`across_quad`), and stages are free for the next token meanwhile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.kv_entry import ROW_BYTES
from dsv4lib.ops.fmha.config import CHUNK, CHUNK_BYTES, P_BYTES, TILE_M, TILE_N
from dsv4lib.ops.fmha.sm90.attend import (
    COLUMNS,
    QK_STEPS,
    ROWS,
    Attend,
    Place,
    packed,
)
from dsv4lib.ops.fmha.sm90.config import DIMS, STAGE_BYTES, WARPGROUP
from dsv4lib.ops.fmha.sm90.keys import Ring
from dsv4lib.ops.fmha.sm90.prefill.config import P_READY, ROWS_BYTES
from dsv4lib.ops.fmha.sm90.prefill.keys import HALVES, PrefillKeys, Queries
from dsv4lib.ops.fmha.work import Items, Outputs

SHARED_STEPS = [(wgmma.STEP_BYTES * i, 16 * ROW_BYTES * i) for i in range(TILE_N // 16)]
HALF = DIMS // CHUNK * CHUNK_BYTES  # from the first dimension of a tile to those of warpgroup 1


class Exchange(NamedTuple):
    """Where P and `Rows` of both tiles of a pair are in shared memory."""

    p: Int32
    rows: Int32


class Softmax(NamedTuple):
    """What a math thread keeps of its two rows."""

    row_max: cute.Tensor
    row_sum: cute.Tensor


class PrefillAttend(PrefillKeys, Attend):
    """What the math warpgroups do."""

    @cute.jit
    def attend_all(
        self,
        heads: Int32,
        items: Items,
        ring: Ring,
        queries: Queries,
        exchange: Exchange,
        outputs: Outputs,
        scale_log2: Float32,
    ):
        """Math warps: the pairs of a token, O, the next token."""
        tidx, _, _ = cute.arch.thread_idx()
        group, tidx = cute.arch.make_warp_uniform(tidx // WARPGROUP), tidx % WARPGROUP
        rO = cute.make_rmem_tensor(DIMS // 2, Float32)
        softmax = Softmax(cute.make_rmem_tensor(ROWS, Float32), cute.make_rmem_tensor(ROWS, Float32))
        row = tidx // 32 * 16 + tidx % 32 // 4
        first = self.head_block() * TILE_M
        sinks = self.sinks_of(outputs.sink, first + row, heads)
        parity, q_parity = Int32(0), Int32(0)
        for token in cutlass.range(items.first, items.end, items.step, unroll=1):
            cute.arch.mbarrier_wait(queries.full, q_parity)
            q_parity = q_parity ^ 1
            self.visible_to_mma()
            pairs = queries.pairs[0]
            rO.fill(0.0)
            softmax.row_max.fill(-Float32.inf)
            softmax.row_sum.fill(0.0)
            for pair in cutlass.range(pairs, unroll=1):
                last = pair == pairs - 1
                if group == 0:
                    self.first_of_pair(ring, parity, last, queries, exchange, scale_log2, rO, softmax)
                else:
                    self.second_of_pair(ring, parity, last, queries, exchange, scale_log2, rO, softmax)
                parity = parity ^ 1
            self.finish_token(outputs, sinks, Place(group, row, tidx % 4, token, first), heads, rO, softmax)

    @cute.jit
    def first_of_pair(
        self,
        ring: Ring,
        parity: Int32,
        last: cutlass.Boolean,
        queries: Queries,
        exchange: Exchange,
        scale_log2: Float32,
        rO: cute.Tensor,
        softmax: Softmax,
    ):
        """Warpgroup 0: S and P of tile 0, then P V of both."""
        rS = self.scores(ring, 0, parity, queries)
        self.release_queries(queries, last)
        self.mask(ring.valid, 0, rS)
        moved, acc_scale = self.follow_max(scale_log2, rS, softmax)
        if moved:
            self.rescale_rows(rO, acc_scale)
        self.exponentiate(scale_log2, rS, *softmax)
        a = self.send(exchange, 0, rS, softmax)
        self.arrive(P_READY)
        self.keep(wgmma.wait_for(self.start_values(rO, a, ring.keys)), rO)
        self.release(ring, 0, 0)
        self.wait_for_keys(ring, 1, 0, parity)
        self.wait(P_READY + 1)
        moved, acc_scale = self.receive(exchange, 1, softmax)
        if moved:
            self.rescale_rows(rO, acc_scale)
        self.keep(wgmma.wait_for(self.start_sent(exchange, 1, ring.keys + STAGE_BYTES, rO)), rO)
        self.release(ring, 1, 0)

    @cute.jit
    def second_of_pair(
        self,
        ring: Ring,
        parity: Int32,
        last: cutlass.Boolean,
        queries: Queries,
        exchange: Exchange,
        scale_log2: Float32,
        rO: cute.Tensor,
        softmax: Softmax,
    ):
        """Warpgroup 1: S of tile 1, then P V of tile 0 while it makes P of tile 1."""
        rS = self.scores(ring, 1, parity, queries)
        self.release_queries(queries, last)
        self.wait_for_keys(ring, 0, 1, parity)
        self.wait(P_READY)
        moved, acc_scale = self.receive(exchange, 0, softmax)
        if moved:
            self.rescale_rows(rO, acc_scale)
        sums = self.start_sent(exchange, 0, ring.keys + HALF, rO)
        self.mask(ring.valid, 1, rS)
        moved, acc_scale = self.follow_max(scale_log2, rS, softmax)
        self.exponentiate(scale_log2, rS, *softmax)
        a = self.send(exchange, 1, rS, softmax)
        self.keep(wgmma.wait_for(sums), rO)
        self.release(ring, 0, 1)
        self.arrive(P_READY + 1)
        if moved:
            self.rescale_rows(rO, acc_scale)
        self.keep(wgmma.wait_for(self.start_values(rO, a, ring.keys + (STAGE_BYTES + HALF))), rO)
        self.release(ring, 1, 1)

    def scores(self, ring: Ring, stage: int, parity: Int32, queries: Queries) -> cute.Tensor:
        """S = Q K^T of a tile: the first half of its dimensions when that has come, then the others."""
        q, keys = wgmma.operand(queries.smem), wgmma.operand(ring.keys + stage * STAGE_BYTES)
        half = len(QK_STEPS) // HALVES
        self.wait_for_keys(ring, stage, 0, parity)
        wgmma.fence()
        found = wgmma.multiply_shared(q, keys, QK_STEPS[:half], TILE_N, "bf16")
        wgmma.commit()
        self.wait_for_keys(ring, stage, 1, parity)
        found = wgmma.accumulate_shared(found, q, keys, QK_STEPS[half:], "bf16", rows_are_k=False)
        wgmma.commit()
        rS = cute.make_rmem_tensor(TILE_N // 2, Float32)
        self.keep(wgmma.wait_for(found), rS)
        return rS

    def wait_for_keys(self, ring: Ring, stage: int, half: int, parity: Int32) -> None:
        """Wait for half of a tile."""
        cute.arch.mbarrier_wait(ring.full + (HALVES * stage + half), parity)

    def start_sent(self, exchange: Exchange, tile: int, values: Int32, rO: cute.Tensor) -> list:
        """Issue O += P V with P of the other warpgroup. As `start_values`."""
        wgmma.fence()
        sums, p = [], wgmma.operand(exchange.p + tile * P_BYTES)
        for first in range(0, DIMS, COLUMNS):
            own = [rO[c] for c in range(first // 2, (first + COLUMNS) // 2)]
            b = wgmma.rows_of_k(values + first // CHUNK * CHUNK_BYTES, CHUNK_BYTES)
            sums += wgmma.accumulate_shared(own, p, b, SHARED_STEPS, "bf16", rows_are_k=True)
        wgmma.commit()
        return sums

    @cute.jit
    def release(self, ring: Ring, stage: cutlass.Constexpr, half: cutlass.Constexpr):
        """Say that this warp's MMAs have read half of a stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + (HALVES * stage + half))

    @cute.jit
    def release_queries(self, queries: Queries, last: cutlass.Boolean):
        """Say that this warp's MMAs have read Q for the last time."""
        if last:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(queries.empty)

    def arrive(self, barrier: int) -> None:
        """Arrive at a named barrier of both warpgroups. What was stored is visible to their MMAs."""
        self.visible_to_mma()
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    def wait(self, barrier: int) -> None:
        """Wait at a named barrier for the other warpgroup."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    def send(self, exchange: Exchange, tile: int, rP: cute.Tensor, softmax: Softmax) -> list:
        """Store P in bf16 as an operand, and what is known of its rows; return P as a fragment."""
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        row, t = tidx // 32 * 16 + tidx % 32 // 4, tidx % 4
        words, a = {}, []
        for i in range(TILE_N // 8):
            for j in range(ROWS):
                words[i, j] = packed(rP[4 * i + 2 * j], rP[4 * i + 2 * j + 1])
                target = exchange.p + tile * P_BYTES + (row + 8 * j) * ROW_BYTES + ((row ^ i) % 8 << 4) + 4 * t
                asm("st.shared.b32 [$0], $1;", [], [target, words[i, j]])
        for step in range(TILE_N // 16):
            a += [words[i, j] for i in (2 * step, 2 * step + 1) for j in range(ROWS)]
        numbers = [softmax.row_max[0], softmax.row_max[1], softmax.row_sum[0], softmax.row_sum[1]]
        target = exchange.rows + tile * ROWS_BYTES + 16 * tidx
        asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", [], [target, *numbers])
        return a

    @cute.jit
    def receive(self, exchange: Exchange, tile: cutlass.Constexpr, softmax: Softmax):
        """Go on from the other warpgroup's rows. Return whether a row_max of the warp moved, and 2 factors of O."""
        source = exchange.rows + tile * ROWS_BYTES + 16 * (cute.arch.thread_idx()[0] % WARPGROUP)
        found = asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [source])
        acc_scale = cute.make_rmem_tensor(ROWS, Float32)
        acc_scale.fill(1.0)
        moved = cute.arch.vote_any_sync((found[0] != softmax.row_max[0]) | (found[1] != softmax.row_max[1]))
        if moved:
            for j in cutlass.range_constexpr(ROWS):
                if found[j] != softmax.row_max[j]:
                    acc_scale[j] = cute.math.exp2(softmax.row_max[j] - found[j], fastmath=True)
        for j in cutlass.range_constexpr(ROWS):
            softmax.row_max[j], softmax.row_sum[j] = found[j], found[2 + j]
        return moved, acc_scale

    @cute.jit
    def follow_max(self, scale_log2: Float32, rS: cute.Tensor, softmax: Softmax):
        """Let row_max and row_sum follow the maxima of S. Return as `receive`."""
        new_max = self.new_maxima(scale_log2, rS, softmax.row_max)
        acc_scale = cute.make_rmem_tensor(ROWS, Float32)
        acc_scale.fill(1.0)
        moved = cute.arch.vote_any_sync((new_max[0] != softmax.row_max[0]) | (new_max[1] != softmax.row_max[1]))
        if moved:
            for j in cutlass.range_constexpr(ROWS):
                if new_max[j] != softmax.row_max[j]:
                    acc_scale[j] = cute.math.exp2(softmax.row_max[j] - new_max[j], fastmath=True)
                softmax.row_sum[j] = softmax.row_sum[j] * acc_scale[j]
                softmax.row_max[j] = new_max[j]
        return moved, acc_scale

    def rescale_rows(self, rO: cute.Tensor, acc_scale: cute.Tensor) -> None:
        """O *= acc_scale."""
        for j in range(ROWS):
            self.rescale(rO, j, acc_scale[j])

    @cute.jit
    def finish_token(
        self,
        outputs: Outputs,
        sinks: cute.Tensor,
        place: Place,
        heads: Int32,
        rO: cute.Tensor,
        softmax: Softmax,
    ):
        """Normalise, rotate back and store O and LSE; zeros and -inf without keys."""
        _, rope, mO, mLse = outputs
        for j in cutlass.range_constexpr(ROWS):
            row_max = softmax.row_max[j]
            head = place.head + place.row + 8 * j
            total = self.over_quad(softmax.row_sum[j], lambda a, b: a + b)
            denominator = total
            if cutlass.const_expr(self.sink):
                denominator = total + cute.math.exp2(sinks[j] - row_max, fastmath=True)
            o_scale = cutlass.select_(total != 0.0, cute.arch.rcp_approx(denominator), Float32(0.0))  # NaN stays
            if head < heads and place.group == 0 and place.pair == 0:
                lse = (row_max + cute.math.log2(total)) * math.log(2.0)
                mLse[place.token, head] = cutlass.select_(total != 0.0, lse, -Float32.inf)
            words = []
            for i in cutlass.range_constexpr(DIMS // 8):
                two = [rO[4 * i + 2 * j + k] * o_scale for k in range(2)]
                if cutlass.const_expr(self.inverse_rope and 8 * i >= DIMS - 64):
                    two = self.rotated(rope, place, 4 * (i - (DIMS - 64) // 8), total, two)
                if cutlass.const_expr(self.partial):
                    if head < heads:
                        store_two(mO[place.token, head, None].iterator.toint(), place, i, two)
                else:
                    words.append(packed(*two))
            target = mO[place.token, cutlass.min(head, heads - 1), None].iterator.toint()
            target = target + 2 * (place.group * DIMS + 8 * place.pair)
            for four in cutlass.range_constexpr(len(words) // 4):
                own = across_quad(words[4 * four : 4 * four + 4], place.pair)
                if head < heads:
                    store16(target + 64 * four, own)


def across_quad(words: list, t: Int32) -> list:
    """Give lane t of a quad the t-th word of each of its 4 lanes."""
    for step in (1, 2):
        upper = t & step != 0
        for low in (0, 1) if step == 2 else (0, 2):
            high = low + step
            sent = cutlass.select_(upper, words[low], words[high])
            found = cute.arch.shuffle_sync_bfly(sent, step)
            words[low] = cutlass.select_(upper, found, words[low])
            words[high] = cutlass.select_(upper, words[high], found)
    return words


def store_two(row: Int64, place: Place, i: int, two: list) -> None:
    """Store columns 8 i + 2 t and the next of a warpgroup's dimensions in fp32."""
    target = row + 4 * (place.group * DIMS + 2 * place.pair)
    asm(f"st.global.v2.f32 [$0 + {32 * i}], {{$1, $2}};", [], [target, *two])


def store16(target: Int64, words: list) -> None:
    """Store 4 words in global memory."""
    asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [target, *words])
