"""How weights and tokens of many tokens an expert reach shared memory.

A stage is 128 of K. Weights: of each of four blocks of 64 rows the codes of the stage and the scales of all K of its
tile, by bulk copies. Tokens are bf16 in shared memory, [64 of K][token][128 B], 16-byte piece p of token n at piece
p ^ (n % 8); rows that a group does not have are zeros and are not read. They come by `cp.async`. E4M3 tokens have
a scale for the 128 of K, four times the same byte in the image: a lane of a load warp makes fp32 of a token's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import bulk
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.umma import SCALE_BLOCK
from dsv4lib.ops.moe_gemm.sm90.config import ROW_BYTES
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile, Walk
from dsv4lib.ops.moe_gemm.sm90.layout import CHUNK_K, TILE_M
from dsv4lib.ops.moe_gemm.sm90.load import LANES, PIECE, PIECES, ROWS, Sources, Stages, copy
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
            scale = Float32(0.0)
            if cutlass.const_expr(self.scaled):
                scale = self.token_scale(sources, tile, warp, Int32(0))
            for chunk in cutlass.range(chunks, unroll=1):
                full = stages.full + stage
                next_scale = scale
                if cutlass.const_expr(self.scaled):  # in flight during all of this stage
                    next_scale = self.token_scale(sources, tile, warp, cutlass.min(chunk + 1, chunks - 1))
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                if warp == 0:
                    self.load_weights(sources.w, tile, chunk, stages.w + stage * self.w_bytes, full)
                self.load_tokens(sources.x, tile, warp, chunk, stages.x + stage * self.x_bytes)
                cute.arch.cp_async_mbarrier_arrive_noinc(full)
                if cutlass.const_expr(self.scaled):
                    self.store_scale(stages.sfx + stage * self.sfx_bytes, warp, scale)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(full)
                scale = next_scale
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
    def token_scale(self, sources: Sources, tile: Tile, warp: Int32, chunk: Int32) -> Float32:
        """Load the scale of this lane's token and 128 of K; 0 past the last token, and for byte 0."""
        token = warp * LANES + cute.arch.lane_idx()
        word = Int32(0)
        if token < tile.rows:
            row = tile.row + token
            at = row // 128 * cute.ceil_div(sources.x.shape[1], ROW_BYTES) + chunk
            place = sources.sfx.iterator.toint() + Int64(at) * SCALE_BLOCK + (row % 32 * 16 + row % 128 // 32 * 4)
            word = asm("ld.global.b32 $0, [$1];", [Int32], [place])
        return asm("{ .reg .b32 a; shr.b32 a, $1, 1; and.b32 $0, a, 0x7F800000; }", [Float32], [word], pure=True)

    @cute.jit
    def store_scale(self, target: Int32, warp: Int32, scale: Float32):
        """Store the scale of this lane's token in a stage."""
        token = warp * LANES + cute.arch.lane_idx()
        place = token // 16 * 16 + token % 8 // 2 * 4 + token // 8 % 2 * 2 + token % 2  # a thread's four are neighbours
        if token < self.tile_n:
            asm("st.shared.f32 [$0], $1;", [], [target + 4 * place, scale])

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
