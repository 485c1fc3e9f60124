"""Compute the output from operands in shared memory. MMAs, sums in fp32, exchange within a cluster, stores.

    sum[n, t] += (MMAs over 128 bytes of K) x factor[t, K / 128]                in fp32, in the order of K

A thread's sums of its 64 rows, register c: row 16 w + g + 8 (c / 2 mod 2), token 8 (c / 4) + 2 t + c mod 2 (warp w,
lane 4 g + t). CTAs of a cluster have ranges of K. CTA w mod split finishes the sums of warp w: the others send it
theirs, fours of a thread (`st.async`, its mbarrier counts the bytes), and its own warp w adds them in the order of the
ranges and stores them. Fours without a token are not sent. Bits depend on no timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.linear.sm90.config import BLOCK, ROWS_M
from dsv4lib.ops.linear.sm90.load import Load, Sources, Stages, Tile

ATOM_BYTES = ROWS_M * BLOCK  # of a warpgroup's rows and 128 of K
MMAS = BLOCK // wgmma.STEP_BYTES


class Exchange(NamedTuple):
    """What a cluster's CTAs send each other their sums with."""

    slots: Any  # fp32 [4, lane, warp, four, CTA], or None without a cluster
    there: cute.Pointer  # mbarrier: the others' sums of a tile are there
    free: cute.Pointer  # mbarrier: what this CTA sent has been read


class Sums(Load):
    """What the consumer warpgroups do."""

    @cute.jit
    def consume(self, sources: Sources, stages: Stages, exchange: Exchange, mOut: cute.Tensor):
        """Consumer warps: tile after tile."""
        first, end = self.steps(sources)
        stage, parity, turn = Int32(0), Int32(0), Int32(0)
        rSum = cute.make_rmem_tensor(self.sums, Float32)
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_wait()  # all mbarriers of the cluster are there
        last = self.tiles(sources) - self.tile_step()
        for index in cutlass.range(self.first_tile(), self.tiles(sources), self.tile_step(), unroll=1):
            rSum.fill(0.0)
            for _ in cutlass.range(first, end, unroll=1):
                cute.arch.mbarrier_wait(stages.full + stage, parity)
                self.copied_by_threads()
                self.multiply(stages, stage, rSum)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(stages.empty + stage)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1
            tile = self.tile(sources, index)
            if cutlass.const_expr(self.split > 1):
                self.exchange(exchange, turn, index < last, tile, mOut, rSum)
                turn = turn ^ 1
            else:
                for c in cutlass.range_constexpr(self.sums):
                    self.store(mOut, tile, c, rSum[c])

    def copied_by_threads(self) -> None:
        """Make what `cp.async` wrote visible to the tensor core. It reads through another proxy."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def multiply(self, stages: Stages, stage: Int32, rSum: cute.Tensor) -> None:
        """Add the products of a stage."""
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // 128)
        a = wgmma.operand(stages.w + stage * self.w_bytes + group * ATOM_BYTES)
        b = wgmma.operand(stages.x + stage * self.x_bytes)
        factors = stages.factors + stage * self.factor_bytes + tidx % 4 * 8 if self.scaled else None
        pending = None
        for chunk in range(self.chunks):
            at_a, at_b = chunk * self.tile_m * BLOCK, chunk * self.tile_n * BLOCK
            steps = [(at_a + i * wgmma.STEP_BYTES, at_b + i * wgmma.STEP_BYTES) for i in range(MMAS)]
            wgmma.fence()
            sums = wgmma.multiply_shared(a, b, steps, self.tile_n, self.operands)
            wgmma.commit()
            if pending is not None:
                wgmma.wait(1)
                self.promote(*pending, rSum)
            pending = sums, factors + self.factors_of(chunk) if self.scaled else None
        wgmma.wait(0)
        self.promote(*pending, rSum)

    def factors_of(self, chunk: int) -> int:
        """Return the bytes from a stage's factors to those of 128 of K."""
        return chunk * self.tile_n * 4

    def promote(self, sums: list, factors: Int32 | None, rSum: cute.Tensor) -> None:
        """Add the sums of 128 bytes of K, times their factors."""
        if factors is None:
            for c in range(self.sums):
                rSum[c] = wgmma.add(sums[c], rSum[c])
            return
        for i in range(self.tile_n // 8):
            pair = asm("ld.shared.v2.f32 {$0, $1}, [$2];", [Float32, Float32], [factors + 32 * i])
            for j in range(4):
                rSum[4 * i + j] = wgmma.multiply_add(sums[4 * i + j], pair[j % 2], rSum[4 * i + j])

    @cute.jit
    def exchange(
        self, exchange: Exchange, turn: Int32, more: cutlass.Boolean, tile: Tile, mOut: cute.Tensor, rSum: cute.Tensor
    ):
        """Send sums to the CTA that finishes them, or finish this warp's own.

        Args:
            turn: parity of the tiles before. more: the cluster has a further tile.
        """
        tidx, _, _ = cute.arch.thread_idx()
        rank, lane, warp = self.rank(), cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tokens = cutlass.min(mOut.shape[1] - tile.token, Int32(self.tile_n))
        to, place = warp % self.split, warp // self.split
        rFour = cute.make_rmem_tensor(4, Float32)
        if to != rank:
            self.await_free(exchange, turn)
            slot = exchange.slots[None, lane, place, 0, rank].iterator.toint()
            for i in cutlass.range_constexpr(self.tile_n // 8):
                if 8 * i + lane % 4 * 2 < tokens:
                    offset = i * self.four_bytes
                    send(slot, offset, exchange.there.toint(), to, [rSum[4 * i + c] for c in range(4)])
        else:
            if warp == rank and lane == 0:  # after the phase of the tile before, which this warp has seen end
                size = self.finishing() * ((tokens + 1) // 2) * (8 * 16 * (self.split - 1))
                cute.arch.mbarrier_arrive_and_expect_tx(exchange.there, size)
            cute.arch.mbarrier_wait(exchange.there, turn)
            for i in cutlass.range_constexpr(self.tile_n // 8):
                rTotal = cute.make_rmem_tensor(4, Float32)
                rTotal.fill(0.0)
                if 8 * i + lane % 4 * 2 < tokens:
                    for other in cutlass.range_constexpr(self.split):
                        for c in cutlass.range_constexpr(4):
                            rFour[c] = rSum[4 * i + c]
                        if other != rank:
                            cute.autovec_copy(exchange.slots[None, lane, place, i, other], rFour)
                        for c in cutlass.range_constexpr(4):
                            rTotal[c] = rTotal[c] + rFour[c]
                    for c in cutlass.range_constexpr(4):
                        self.store(mOut, tile, 4 * i + c, rTotal[c])
            if more:
                cute.arch.sync_warp()
                if lane < self.split and lane != rank:
                    cute.arch.mbarrier_arrive(exchange.free, lane)

    def finishing(self) -> Int32:
        """Count the warps whose sums this CTA finishes."""
        return (self.consumers // 32 - self.rank() + self.split - 1) // self.split

    def await_free(self, exchange: Exchange, turn: Int32) -> None:
        """Wait until all CTAs have read the sums of the tile before. The first tile does not wait."""
        cute.arch.mbarrier_wait(exchange.free, turn ^ 1)

    @cute.jit
    def store(self, mOut: cute.Tensor, tile: Tile, c: cutlass.Constexpr, value: Float32):
        """Store the sum of register ``c``, if its row and token exist."""
        tidx, _, _ = cute.arch.thread_idx()
        row = tile.row + tidx // 32 * 16 + tidx % 32 // 4 + c // 2 % 2 * 8
        token = tile.token + c // 4 * 8 + tidx % 4 * 2 + c % 2
        if row < mOut.shape[2] and self.is_token(token, mOut):
            mOut[tile.group, token, row] = value.to(mOut.element_type)

    def is_token(self, token: Int32, mOut: cute.Tensor) -> cutlass.Boolean:
        """Tell whether a column of the MMA is a token."""
        return token < mOut.shape[1]


def send(slot: Int32, offset: int, barrier: Int32, to: Int32, values: list) -> None:
    """Store four values ``offset`` bytes after this address of a CTA of the cluster. Its mbarrier counts the bytes."""
    text = (
        "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, {$r0}, {$r2}; mapa.shared::cluster.u32 b, {$r1}, {$r2}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        f"[a+{offset}], {{{{$r3}}, {{$r4}}, {{$r5}}, {{$r6}}}}, [b]; }}"
    )
    cute.arch.inline_ptx(text, read_only_args=[slot, barrier, to, *(one.bitcast(Int32) for one in values)])
