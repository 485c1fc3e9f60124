"""How weights, tokens and their scales reach shared memory.

A stage of weights is one bulk copy: the bytes lie in global memory as the consumers read them. Tokens come in 16-byte
pieces by `cp.async`, each lane a piece of four rows: rows that a group does not have are filled with zeros and are not
read, and any row may be any token (``gather``: by a list of them, read once a tile), which boxes of TMA and their
descriptors would not allow.

    tokens     [128 bytes of K][token][128 B], piece p of token n at piece p ^ (n % 8): the 128-byte swizzle
    scales     [128 K][token] words of 4 E8M0 bytes, a byte for 32 K

With ``early`` the copies of the first stages' weights start before the wait for the launch before.

All writes into a stage arrive at its full barrier: the bytes of the bulk copy, and `cp.async` of 32 lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4lib.dsl import bulk
from dsv4lib.dsl.umma import SCALE_BLOCK
from dsv4lib.ops.moe_gemm.sm90.config import ROW_BYTES
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile, Walk

LANES, PIECE = 32, 16
PIECES = ROW_BYTES // PIECE
ROWS = LANES // PIECES  # that a warp copies at a time


class Tokens(NamedTuple):
    """Hold tokens: uint8 [T, bytes of K]; scales, uint8 [blocks, 512] or None; and which are the rows of groups.

    These are int32 [R], or None: rows and tokens are the same.
    """

    x: cute.Tensor
    sfx: Any
    rows: Any = None


class Sources(NamedTuple):
    """What is multiplied, in global memory."""

    w: cute.Tensor  # uint8 [E, N / 64, K / step_k, bytes]
    x: cute.Tensor  # uint8 [T, bytes of K]
    sfx: Any  # uint8 [blocks, 512] or None
    rows: Any  # int32 [R] or None


class Stages(NamedTuple):
    """Addresses of the first stage of each ring in shared memory, and of the barriers."""

    x: Int32
    w: cute.Pointer
    sfx: Int32
    full: cute.Pointer
    empty: cute.Pointer


class Load(Walk):
    """The load warp."""

    @cute.jit
    def load(self, sources: Sources, groups: Groups, total: Int32, stages: Stages):
        """Load warp: tile after tile, stage after stage.

        Args:
            total: number of tiles.
        """
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        steps = sources.w.shape[2]
        stage, parity, ahead = Int32(0), Int32(1), Int32(0)
        if cutlass.const_expr(self.early):
            ahead = self.load_ahead(sources, groups, total, stages)
            self.wait_for_tokens()
        for index in cutlass.range(block, total, grid, unroll=1):
            tile = self.tile(groups, index)
            rows, scaled_rows = self.rows_of(sources, tile)
            for step in cutlass.range(steps, unroll=1):
                full = stages.full + stage
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                if ahead == 0:
                    self.load_weights(sources, tile, step, stages, stage)
                else:
                    ahead = ahead - 1
                self.load_tokens(sources.x, tile, rows, step, stages.x + stage * self.x_bytes)
                if cutlass.const_expr(self.scaled):
                    self.load_scales(sources, tile, scaled_rows, step, stages.sfx + stage * self.sfx_bytes)
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1
        cute.arch.griddepcontrol_launch_dependents()  # the next kernel may start where there is room

    @cute.jit
    def load_ahead(self, sources: Sources, groups: Groups, total: Int32, stages: Stages) -> Int32:
        """Ask for the weights of the first stages; return how many have theirs."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        steps = sources.w.shape[2]
        ahead = Int32(0)
        for index in cutlass.range(block, cutlass.min(total, block + grid * self.stages), grid, unroll=1):
            tile = self.tile(groups, index)
            for step in cutlass.range(cutlass.min(steps, self.stages - ahead), unroll=1):
                self.load_weights(sources, tile, step, stages, ahead)
                ahead = ahead + 1
        return ahead

    def wait_for_tokens(self) -> None:
        """Wait for the launch before, which may have written tokens."""
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def load_weights(self, sources: Sources, tile: Tile, step: Int32, stages: Stages, stage: Int32):
        """Start the copy of a stage's weights."""
        if cute.arch.lane_idx() == 0:
            full = stages.full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.w_bytes)
            source = sources.w[tile.expert, tile.feature, step, None].iterator
            bulk.load_bulk(stages.w + stage * self.w_bytes, source, Int32(self.w_bytes), full, once=True)

    @cute.jit
    def rows_of(self, sources: Sources, tile: Tile):
        """Read which tokens a lane copies of a tile, and of which it copies scales: int32, -1 where there is none."""
        lane = cute.arch.lane_idx()
        rRows = cute.make_rmem_tensor(self.tile_n // ROWS, Int32)
        for i in cutlass.range_constexpr(self.tile_n // ROWS):
            rRows[i] = self.token(sources, tile, lane // PIECES + i * ROWS)
        rScaled = cute.make_rmem_tensor(cute.ceil_div(self.tile_n * self.chunks, LANES), Int32)
        if cutlass.const_expr(self.scaled):
            for i in cutlass.range_constexpr(cute.size(rScaled)):
                rScaled[i] = self.token(sources, tile, (i * LANES + lane) % self.tile_n)
        return rRows, rScaled

    @cute.jit
    def token(self, sources: Sources, tile: Tile, place: Int32) -> Int32:
        """Return the token in a place of a tile, -1 past its last one."""
        found = Int32(-1)
        if place < tile.rows:
            found = tile.row + place
            if cutlass.const_expr(self.gather):
                found = sources.rows[found]
                if found.bitcast(Uint32) >= sources.x.shape[0].bitcast(Uint32):
                    found = Int32(-1)
        return found

    @cute.jit
    def load_tokens(self, mX: cute.Tensor, tile: Tile, rows: cute.Tensor, step: Int32, target: Int32):
        """Tokens of a stage; lane 8 r + p has piece p of rows r, r + 4, .."""
        lane = cute.arch.lane_idx()
        piece, row = lane % PIECES, lane // PIECES
        offset = step * self.row_bytes + piece * PIECE
        target = target + row * ROW_BYTES + ((piece ^ row) << 4)
        for i in cutlass.range_constexpr(self.tile_n // ROWS):
            size = cutlass.select_(rows[i] >= 0, Int32(PIECE), Int32(0))
            source = mX[cutlass.max(rows[i], 0), None].iterator.toint() + offset
            place = (target ^ (i % 2 * ROWS << 4)) + i * ROWS * ROW_BYTES
            for chunk in cutlass.range_constexpr(self.row_chunks):
                copy(place + chunk * self.tile_n * ROW_BYTES, source + chunk * ROW_BYTES, PIECE, size)

    @cute.jit
    def load_scales(self, sources: Sources, tile: Tile, rows: cute.Tensor, step: Int32, target: Int32):
        """Load scales of a stage. Word i is that of token i mod tile_n, 128 K i div tile_n."""
        lane = cute.arch.lane_idx()
        blocks = cute.ceil_div(sources.x.shape[1], ROW_BYTES)  # of 128 rows x 4 scales, a row has of them
        words = self.tile_n * self.chunks
        for i in cutlass.range_constexpr(0, words, LANES):
            word = i + lane
            chunk = word // self.tile_n
            row = cutlass.max(rows[i // LANES], 0)
            at = row // 128 * blocks + step * self.chunks + chunk
            source = sources.sfx.iterator.toint() + Int64(at) * SCALE_BLOCK + (row % 32 * 16 + row % 128 // 32 * 4)
            size = cutlass.select_(rows[i // LANES] >= 0, Int32(4), Int32(0))
            if word < words:
                copy(target + 4 * word, source, 4, size)


def copy(target: Int32, source: Int64, width: int, size: Int32) -> None:
    """Copy ``size`` bytes to SMEM asynchronously; zeros up to ``width``."""
    kind = "cg" if width == PIECE else "ca"
    text = f"cp.async.{kind}.shared.global [{{$r0}}], [{{$r1}}], {width}, {{$r2}};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, size])
