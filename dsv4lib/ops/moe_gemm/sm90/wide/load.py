"""How weights and tokens of many tokens an expert reach shared memory.

A stage is 128 of K. Weights: of each of four blocks of 64 rows the codes of the stage and the scales of all K of its
tile, by bulk copies. Tokens are bf16 in shared memory, [64 of K][token][128 B], 16-byte piece p of token n at piece
p ^ (n % 8); rows that a group does not have are zeros and are not read.

Mode "w4a16": `cp.async`, as they are. Mode "w4a8": a warp reads 16 codes of E4M3 a lane and their scale a stage ahead,
into registers, and stores them as bf16 x 2^-20, exactly, from 2^-133 on; a scale above 2^27 gives infinity, a NaN
makes 16 NaN. In a step of 16 of K their order is that in which E2M1 words become A fragments:

    position 2 t + i      K 4 t + i               t = 0..3, i = 0, 1
    position 8 + 2 t + i  K 4 t + 2 + i
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4lib.dsl import bulk
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.umma import SCALE_BLOCK
from dsv4lib.ops.moe_gemm.sm90.config import ROW_BYTES
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile, Walk
from dsv4lib.ops.moe_gemm.sm90.layout import CHUNK_K, TILE_M
from dsv4lib.ops.moe_gemm.sm90.load import PIECE, PIECES, ROWS, Sources, Stages, copy
from dsv4lib.ops.moe_gemm.sm90.mma import CHUNK_BYTES, pure
from dsv4lib.ops.moe_gemm.sm90.wide.config import FIRST_LOAD_WARP, LOAD_WARPS, TILE_BLOCKS, X_SHIFT

LANE_ROWS = 8  # of a warp's pieces of 16 codes: lane 8 q + r has pieces q and q + 4 of row r
WORDS = 5  # of a piece in registers: 16 codes, the byte of their scale
TWO_BYTES = (0x1404, 0x3424)  # selectors of prmt: bytes 0 and 1, or 2 and 3, of a word become upper bytes of halves
NAN = 0x7FC0


class Codes(NamedTuple):
    """What a lane of a load warp reads of a tile in mode "w4a8".

    Attributes:
        x, scales: addresses of its first 16 codes, and of the scales of the 128 rows that its tile begins in.
        row: its first row, from the first of these 128. rows: how many of the tile there are from its first row on.
        pitch: bytes from its row to the eighth after it. line: bytes of the scales of 128 rows.
    """

    x: Int64
    scales: Int64
    row: Int32
    rows: Int32
    pitch: Int32
    line: Int32


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
            codes = self.codes_of(sources, tile, warp) if self.scaled else None
            raw = self.first_tokens(codes) if self.scaled else None
            for chunk in cutlass.range(chunks, unroll=1):
                full = stages.full + stage
                cute.arch.mbarrier_wait(stages.empty + stage, parity)
                if warp == 0:
                    self.load_weights(sources.w, tile, chunk, stages.w + stage * self.w_bytes, full)
                target = stages.x + stage * self.x_bytes
                if cutlass.const_expr(self.scaled):
                    self.expand_tokens(codes, warp, chunk, chunks, target, raw)
                    cute.arch.mbarrier_arrive(full)
                else:
                    self.load_tokens(sources.x, tile, warp, chunk, target)
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

    def pieces(self) -> list[tuple[int, int]]:
        """List (first of 8 rows, first of 4 pieces) of what a lane has of a stage in mode "w4a8"."""
        rows = self.tile_n // LOAD_WARPS
        return [(row, piece) for row in range(0, rows, LANE_ROWS) for piece in range(0, PIECES, 4)]

    def codes_of(self, sources: Sources, tile: Tile, warp: Int32) -> Codes:
        """Find what a lane reads of a tile."""
        lane = cute.arch.lane_idx()
        row, piece = warp * (self.tile_n // LOAD_WARPS) + lane % LANE_ROWS, lane // LANE_ROWS
        line = cute.ceil_div(sources.x.shape[1], CHUNK_K) * SCALE_BLOCK  # bytes of 128 rows' scales
        return Codes(
            sources.x[tile.row + row, None].iterator.toint() + piece * PIECE,
            sources.sfx.iterator.toint() + Int64(tile.row // 128) * line + piece // 2,
            tile.row % 128 + row,
            tile.rows - row,
            Int32(sources.x.stride[0]) * LANE_ROWS,
            line,
        )

    @cute.jit
    def first_tokens(self, codes: Codes):
        """Read the first pieces of a tile."""
        raw = cute.make_rmem_tensor(WORDS * self.ahead, Int32)
        for i in cutlass.range_constexpr(self.ahead):
            self.read_piece(codes, Int32(0), i, raw)
        return raw

    def read_piece(self, codes: Codes, chunk: Int32, i: int, raw: cute.Tensor) -> None:
        """Read 16 codes and their scale, zeros past the group's last row."""
        row, piece = self.pieces()[i]
        at = codes.row + row
        place = chunk * CHUNK_K + (row // LANE_ROWS * codes.pitch + piece * PIECE)
        scale = chunk * SCALE_BLOCK + (at // 128 * codes.line + at % 32 * 16 + at % 128 // 32 * 4 + piece // 2)
        there = cutlass.select_(row < codes.rows, Int32(1), Int32(0))
        text = (
            "{ .reg .pred p; setp.ne.b32 p, $7, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
            " mov.b32 $4, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$5]; @p ld.global.u8 $4, [$6]; }"
        )
        found = asm(text, [Int32] * WORDS, [codes.x + place, codes.scales + scale, there], early=True)
        for word, value in enumerate(found):
            raw[WORDS * (i % self.ahead) + word] = value

    @cute.jit
    def expand_tokens(self, codes: Codes, warp: Int32, chunk: Int32, chunks: Int32, target: Int32, raw: cute.Tensor):
        """Store a stage's tokens as bf16; read as many pieces ahead, of this stage or the tile's next."""
        lane, count = cute.arch.lane_idx(), len(self.pieces())
        first, row = lane // LANE_ROWS, lane % LANE_ROWS
        target = target + (warp * (self.tile_n // LOAD_WARPS) + row) * ROW_BYTES + ((first * 2 ^ row) << 4)
        for i in cutlass.range_constexpr(count):
            words = self.expanded_piece([raw[WORDS * (i % self.ahead) + j] for j in range(WORDS)])
            if cutlass.const_expr(i + self.ahead < count):
                self.read_piece(codes, chunk, i + self.ahead, raw)
            elif chunk + 1 < chunks:
                self.read_piece(codes, chunk + 1, i + self.ahead - count, raw)
            down, piece = self.pieces()[i]
            place = target + (piece // 4 * self.tile_n + down) * ROW_BYTES
            for j in cutlass.range_constexpr(2):  # the next 16 bytes: the lowest bit of their number changes
                asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [place ^ j << 4, *words[4 * j : 4 * j + 4]])

    def expanded_piece(self, raw: list) -> list:
        """Make 8 words of bf16, in the order of the MMA, of 4 words of E4M3 and their scale's byte."""
        *codes, scale = raw
        nans = [pure("and.b32 $0, $1, 0x7F7F7F7F;", word) for word in codes]
        nans = [pure("add.s32 $0, $1, 0x01010101;", word) for word in nans]  # bit 7 of a byte that was 0x7F
        text = "{ .reg .b32 a; .reg .pred p, q; or.b32 a, $1, $2; or.b32 a, a, $3; or.b32 a, a, $4;"
        text += f" and.b32 a, a, 0x80808080; add.s32 $0, $5, {120 - X_SHIFT}; min.s32 $0, $0, 255;"
        text += " shl.b32 $0, $0, 7; setp.ne.b32 p, a, 0; setp.eq.b32 q, $5, 255;"
        text += f" @p mov.b32 $0, {NAN:#x}; @q mov.b32 $0, {NAN:#x}; mad.lo.s32 $0, $0, 65536, $0; }}"
        factor = asm(text, [Int32], [*nans, scale], pure=True, early=True)
        found = []
        for selector in TWO_BYTES:
            for word in codes:
                found.append(pure("mul.bf16x2 $0, $1, $2;", bits_of(word, selector, 0x07F007F0), factor))
        return found


def bits_of(word: Int32, selector: int, magnitude: int) -> Int32:
    """Move two bytes, chosen by ``selector``, to bf16: signs to bits 15, what ``magnitude`` names 4 below its place."""
    halves = pure(f"prmt.b32 $0, $1, 0, {selector:#x};", word)
    moved = pure(f"{{ .reg .b32 a; shr.b32 a, $1, 4; and.b32 $0, a, {magnitude:#x}; }}", halves)
    return pure("lop3.b32 $0, $1, 0x80008000, $2, 0xEA;", halves, moved)
