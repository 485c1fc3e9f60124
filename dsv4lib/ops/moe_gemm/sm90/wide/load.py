"""How weights and tokens of many tokens an expert reach shared memory.

A stage is 128 of K. Weights: of each of four blocks of 64 rows the codes of the stage and the scales of all K of its
tile, by bulk copies. Tokens are bf16 in shared memory, [64 of K][token][128 B], 16-byte piece p of token n at piece
p ^ (n % 8); rows that a group does not have are zeros and are not read. They come by `cp.async`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4lib.dsl import bulk
from dsv4lib.ops.moe_gemm.sm90.config import ROW_BYTES
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile, Walk
from dsv4lib.ops.moe_gemm.sm90.layout import CHUNK_K, TILE_M
from dsv4lib.ops.moe_gemm.sm90.load import PIECE, PIECES, ROWS, Sources, Stages, copy
from dsv4lib.ops.moe_gemm.sm90.mma import CHUNK_BYTES
from dsv4lib.ops.moe_gemm.sm90.wide.config import FIRST_LOAD_WARP, LOAD_WARPS, TILE_BLOCKS


class Load(Walk):
    """The load warps."""

    @cute.jit
    def load(self, sources: Sources, groups: Groups, total: Int32, stages: Stages):
        """Load warps: tile after tile, 128 of K after 128 of K."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - FIRST_LOAD_WARP
        chunks = sources.w.shape[2] * (self.step_k // CHUNK_K)
        stage, parity = Int32(0), Int32(1)
        for index in cutlass.range(block, total, grid, unroll=1):
            tile = self.tile(groups, index)
            for chunk in cutlass.range(chunks, unroll=1):
                full = stages.full + stage
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                if warp == 0:
                    self.load_weights(sources.w, tile, chunk, stages.w + stage * self.w_bytes, full)
                self.load_tokens(sources.x, tile, warp, chunk, stages.x + stage * self.x_bytes)
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
                stage = stage + 1
                if stage == self.stages:
                    stage, parity = Int32(0), parity ^ 1
        cute.arch.griddepcontrol_launch_dependents()  # the next kernel may start where there is room

    @cute.jit
    def load_weights(self, mW: cute.Tensor, tile: Tile, chunk: Int32, target: cute.Pointer, full: cute.Pointer):
        """Start the copies of a stage's weights; past the last block of rows the last one comes again."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.w_bytes)
            step, inside = chunk // (self.step_k // CHUNK_K), chunk % (self.step_k // CHUNK_K)
            for i in cutlass.range_constexpr(TILE_BLOCKS):
                own = cutlass.min(tile.feature * TILE_BLOCKS + i, mW.shape[1] - 1)
                source = mW[tile.expert, own, step, None].iterator.toint()
                place = target + i * self.block_bytes
                bulk.load_bulk(place, source + inside * CHUNK_BYTES, Int32(CHUNK_BYTES), full)
                scales = source + TILE_M * self.step_k // 2
                bulk.load_bulk(place + CHUNK_BYTES, scales, Int32(self.scale_bytes), full)

    @cute.jit
    def load_tokens(self, mX: cute.Tensor, tile: Tile, warp: Int32, chunk: Int32, target: Int32):
        """A warp's quarter of a stage's tokens; lane 8 r + p has piece p of rows r, r + 4, .."""
        lane = cute.arch.lane_idx()
        piece, row = lane % PIECES, lane // PIECES + warp * (self.tile_n // LOAD_WARPS)
        source = mX[tile.row + row, None].iterator.toint() + (chunk * self.row_bytes + piece * PIECE)
        target = target + row * ROW_BYTES + ((piece ^ row % 8) << 4)
        pitch = Int64(mX.stride[0]) * ROWS
        for i in cutlass.range_constexpr(self.tile_n // LOAD_WARPS // ROWS):
            size = cutlass.select_(row + i * ROWS < tile.rows, Int32(PIECE), Int32(0))
            place = (target ^ (i % 2 * ROWS << 4)) + i * ROWS * ROW_BYTES
            for half in cutlass.range_constexpr(self.row_bytes // ROW_BYTES):
                copy(place + half * self.tile_n * ROW_BYTES, source + half * ROW_BYTES, PIECE, size)
            source = source + pitch
