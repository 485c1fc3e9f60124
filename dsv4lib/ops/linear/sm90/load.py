"""Bring weights, tokens and factors to shared memory. `cp.async`, 16 bytes a lane, from rows at any distance.

    weights    [128 B of K][row][128 B], piece p of row r at piece p ^ (r % 8): the 128-byte swizzle
    tokens     the same
    factors    [128 of K][token] fp32: scale of the token x scale of the weights' tile

Rows and pieces that do not exist are filled with zeros and are not read; their factors are 0. Four warps load weights:
they wait for no other kernel. Four load tokens and factors, after the kernels before this one. bf16 has no factors.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.linear.sm90.config import BLOCK, LOADERS, PIECE, Config
from dsv4lib.ops.quantize.kernel import divide

EVICT_FIRST = 0x12F0000000000000  # of a cache hint, as CUTLASS has it (`CacheHintSm90`)


class Sources(NamedTuple):
    """What is multiplied, in global memory. Scales are uint8 (E8M0) or fp32, None of bf16."""

    x: cute.Tensor  # uint8 [G, T, bytes of K]
    x_scales: cute.Tensor | None  # [G, T, K / 128]
    w: cute.Tensor  # uint8 [G, N, bytes of K]
    w_scales: cute.Tensor | None  # [G, N / 128, K / 128]
    across: Divisor  # tiles of tokens
    rows: Divisor  # tiles of N


class Stages(NamedTuple):
    """Addresses of the first stage of each ring in shared memory, and of the barriers."""

    w: Int32
    x: Int32
    factors: Int32
    full: cute.Pointer
    empty: cute.Pointer


class Tile(NamedTuple):
    """A tile of the output. It has rows of the weights from ``row`` on, tokens from ``token`` on."""

    group: Int32
    row: Int32
    token: Int32


class Load(Config):
    """The load warps, and which tiles and steps of K a CTA has."""

    def rank(self) -> Int32:
        """Return the number of this CTA in its cluster."""
        return cute.arch.block_idx()[0] % self.split

    def first_tile(self) -> Int32:
        """Return the number of this cluster's first tile."""
        return cute.arch.block_idx()[0] // self.split

    def tile_step(self) -> Int32:
        """Return the distance to the cluster's next tile."""
        return cute.arch.grid_dim()[0] // self.split

    @cute.jit
    def tiles(self, sources: Sources):
        """Count the tiles."""
        return sources.w.shape[0] * sources.rows.number * sources.across.number

    @cute.jit
    def tile(self, sources: Sources, index: Int32):
        """Return a tile; tiles of tokens come first, so that they share weights in L2."""
        place, token = divide(index, sources.across)
        group, row = divide(place, sources.rows)
        return Tile(group, row * self.tile_m, token * self.tile_n)

    @cute.jit
    def steps(self, sources: Sources):
        """Return the first step of K of this CTA, and the one after its last."""
        total, rank = cute.ceil_div(sources.x.shape[2], self.step_k), self.rank()
        return rank * total // self.split, (rank + 1) * total // self.split

    @cute.jit
    def load_weights(self, sources: Sources, stages: Stages):
        """Four warps: weights of every tile."""
        self.load_rows(sources, stages, True)
        cute.arch.griddepcontrol_launch_dependents()  # the next kernel may start where there is room

    @cute.jit
    def load_tokens(self, sources: Sources, stages: Stages):
        """Four warps: tokens of every tile, with factors where there are scales."""
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.scaled):
            self.load_with_factors(sources, stages)
        else:
            self.load_rows(sources, stages, False)

    @cute.jit
    def load_rows(self, sources: Sources, stages: Stages, weights: cutlass.Constexpr):
        """Four warps: weights of every tile, or its tokens."""
        first, end = self.steps(sources)
        stage, parity = Int32(0), Int32(1)
        for index in cutlass.range(self.first_tile(), self.tiles(sources), self.tile_step(), unroll=1):
            tile = self.tile(sources, index)
            for step in cutlass.range(first, end, unroll=1):
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                if cutlass.const_expr(weights):
                    target = stages.w + stage * self.w_bytes
                    self.copy_rows(sources.w, tile.group, tile.row, step, target, self.tile_m, True)
                else:
                    target = stages.x + stage * self.x_bytes
                    self.copy_rows(sources.x, tile.group, tile.token, step, target, self.tile_n, False)
                cute.arch.cp_async_mbarrier_arrive_noinc(stages.full + stage)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1

    @cute.jit
    def load_with_factors(self, sources: Sources, stages: Stages):
        """Four warps: tokens and factors of every tile. Scales of up to `ahead` steps are loaded one batch early."""
        first, end = self.steps(sources)
        stage, parity = Int32(0), Int32(1)
        rX = cute.make_rmem_tensor(self.held, sources.x_scales.element_type)
        rW = cute.make_rmem_tensor(self.held, sources.w_scales.element_type)
        rFactor = cute.make_rmem_tensor(self.held, Float32)
        index, batch = self.first_tile(), first
        total = self.tiles(sources)
        next_tile = tile = self.tile(sources, index)
        self.load_scales(sources, tile, batch, rX, rW)
        while index < total:
            tile, start, stop = next_tile, batch, cutlass.min(batch + self.ahead, end)
            for step in cutlass.range(start, stop, unroll=1):
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                target = stages.x + stage * self.x_bytes
                self.copy_rows(sources.x, tile.group, tile.token, step, target, self.tile_n, False)
                cute.arch.cp_async_mbarrier_arrive_noinc(stages.full + stage)
                if step == start:  # tokens are on their way: only now wait for scales
                    for i in cutlass.range_constexpr(self.held):
                        rFactor[i] = scale(rX[i]) * scale(rW[i])
                    batch = batch + self.ahead
                    if batch >= end:
                        index, batch = index + self.tile_step(), first
                        next_tile = self.tile(sources, index)
                    if index < total:
                        self.load_scales(sources, next_tile, batch, rX, rW)
                self.store_factors(rFactor, step - start, stages.factors + stage * self.factor_bytes)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(stages.full + stage)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1

    @cute.jit
    def copy_rows(
        self,
        mRows: cute.Tensor,
        group: Int32,
        first: Int32,
        step: Int32,
        target: Int32,
        rows: cutlass.Constexpr,
        once: cutlass.Constexpr,
    ):
        """Copy a step of K of ``rows`` rows from row ``first`` on, by four warps. ``once``: as `copy`."""
        tidx, _, _ = cute.arch.thread_idx()
        piece, row = tidx % self.pieces, tidx % LOADERS // self.pieces
        column = step * self.step_k + piece * PIECE
        left = cutlass.select_(column < mRows.shape[2], mRows.shape[1] - first, Int32(0))
        source = mRows[group, first + row, None].iterator.toint() + column
        target = target + (piece // 8 * rows + row) * BLOCK + ((piece ^ row) % 8 << 4)
        pitch = Int64(mRows.stride[1]) * self.rows_a_pass
        for i in cutlass.range_constexpr(-(-rows // self.rows_a_pass)):
            if cutlass.const_expr(rows % self.rows_a_pass == 0) or row < rows:
                size = cutlass.select_(row + i * self.rows_a_pass < left, Int32(PIECE), Int32(0))
                place = (target ^ (i * self.rows_a_pass % 8 << 4)) + i * self.rows_a_pass * BLOCK
                copy(place, source, size, once)
            source = source + pitch

    @cute.jit
    def load_scales(self, sources: Sources, tile: Tile, step: Int32, rX: cute.Tensor, rW: cute.Tensor):
        """Load scales of the `ahead` steps of a tile from ``step`` on. What does not exist is 0.

        A thread has those of one token, for blocks of 128 of K that are LOADERS / tile_n apart.
        """
        tidx, _, _ = cute.arch.thread_idx()
        token = tile.token + tidx % self.tile_n
        first = step * self.chunks + tidx % LOADERS // self.tile_n
        last = cutlass.select_(token < sources.x_scales.shape[1], sources.x_scales.shape[2], Int32(0))
        mX = sources.x_scales[tile.group, token, None]
        mW = sources.w_scales[tile.group, tile.row // BLOCK, None]
        for i in cutlass.range_constexpr(self.held):
            block = first + i * (LOADERS // self.tile_n)
            rX[i], rW[i] = mX.element_type(0), mW.element_type(0)
            if block < last:
                rX[i] = mX[block]
                rW[i] = mW[block]

    @cute.jit
    def store_factors(self, rFactor: cute.Tensor, since: Int32, target: Int32):
        """Store the factors of step ``since`` of those whose scales were loaded together."""
        tidx, _, _ = cute.arch.thread_idx()
        numbers = self.tile_n * self.chunks
        for i in cutlass.range_constexpr(self.held):
            at = tidx % LOADERS + i * LOADERS - since * numbers
            if at >= 0 and at < numbers:
                cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[target + 4 * at, rFactor[i]])


def scale(stored: Float32 | cutlass.Uint8) -> Float32:
    """Return a scale as fp32: E8M0 byte b is 2^(b - 127), 255 NaN."""
    if isinstance(stored, Float32):
        return stored
    byte = Int32(stored)
    bits = cutlass.select_(byte == 0, Int32(1 << 22), byte << 23)
    return Int32(cutlass.select_(byte == 255, Int32(0x7FC00000), bits)).bitcast(Float32)


def copy(target: Int32, source: Int64, size: Int32, once: bool) -> None:
    """Copy ``size`` bytes to shared memory, asynchronously. Zeros fill it up to 16.

    once: they are not read again soon: L2 gives their room away first, and writes back less of what others left there.
    """
    kind, last = ("L2::cache_hint ", ", p") if once else ("", "")
    text = f"cp.async.cg.shared.global{'.' * once}{kind} [{{$r0}}], [{{$r1}}], {PIECE}, {{$r2}}{last};"
    if once:
        text = f"{{ .reg .b64 p; mov.b64 p, {EVICT_FIRST:#x}; {text} }}"
    cute.arch.inline_ptx(text, read_only_args=[target, source, size])
