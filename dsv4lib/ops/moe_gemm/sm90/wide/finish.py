"""Finish a tile of E4M3 products: SwiGLU in registers and E4M3 codes, or rows in bf16.

Codes. Gate and up of a feature are rows g and g + 8 of a thread, so a value needs no other thread's sums. A scale does:
the largest magnitude of 128 features goes through shuffles of the eight lanes that share a token, then through shared
memory, where both warpgroups' warps meet. Codes go back through shared memory: a thread stores 16 bytes of a token.

    shared memory   codes [token][128 B, pitch 144]    inverse of the scale [token]    largest magnitude [warp][token]

A barrier of both warpgroups follows magnitudes, inverses and codes. The next tile's magnitudes lie apart from what slow
warps still read, which all have done before its first barrier is passed.

Rows in bf16. A warpgroup transposes 16 tokens x 128 features by `stmatrix` ([token][256 B, pitch 272]), and a thread
stores 16 bytes of a token, too.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import convert
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.warp_mma import stmatrix
from dsv4lib.ops.moe_gemm.sm90.config import HALF, PITCH, REDUCE
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Epilogue, Scales
from dsv4lib.ops.moe_gemm.sm90.groups import Tile
from dsv4lib.ops.moe_gemm.sm90.layout import TILE_M
from dsv4lib.ops.moe_gemm.sm90.mma import load
from dsv4lib.ops.moe_gemm.sm90.wide.config import BLOCKS, CODES_PITCH, GROUPS, TILE_BLOCKS, TOKENS

PIECE = 16  # bytes that a thread stores
PIECES = TILE_BLOCKS * HALF // PIECE  # of a token
WARPS = 4 * GROUPS
ROW_BYTES = 2 * BLOCKS * TILE_M  # of a token's bf16 of a warpgroup
ROW_PITCH = 4 * PITCH


class Room(NamedTuple):
    """Addresses in shared memory, see the module docstring."""

    codes: Int32
    inverses: Int32
    magnitudes: Int32


class Finish(Epilogue):
    """What the consumer warpgroups do with a tile's sums."""

    @cute.jit
    def finish_tile(
        self,
        blocks: Int32,
        tile: Tile,
        group: Int32,
        sSum: cute.Tensor,
        ends: Ends,
        factors: list[Scales],
        rSum: cute.Tensor,
    ):
        """Quantise the 128 features of a tile; both warpgroups call it.

        Args:
            blocks: of 64 rows of weights.
            sSum: room in shared memory.
            factors: of the sums of each block: of gates, of ups.
        """
        tidx, _, _ = cute.arch.thread_idx()
        codes = sSum.iterator.toint()
        inverses = codes + CODES_PITCH * self.tile_n
        room = Room(codes, inverses, inverses + 4 * self.tile_n)
        for part in cutlass.range_constexpr(self.tile_n // TOKENS):
            if part * TOKENS < tile.rows:
                self.activate_part(tile, part, room, ends, factors, rSum)
        self.sync_groups()
        if tidx < cute.round_up(tile.rows, TOKENS):
            self.find_scale(blocks, tile, tidx, room, ends)
        self.sync_groups()
        for part in cutlass.range_constexpr(self.tile_n // TOKENS):
            if part * TOKENS < tile.rows:
                self.encode_part(group, part, room, rSum)
        self.sync_groups()
        for i in cutlass.range(tidx, self.stored(tile) * PIECES, 32 * WARPS, unroll=1):
            token, piece = i // PIECES, i % PIECES
            column = tile.feature * (TILE_BLOCKS * HALF) + piece * PIECE
            if column < blocks * HALF:
                words = load(room.codes + token * CODES_PITCH + piece * PIECE, 4)
                target = ends.out[tile.row + token, None].iterator.toint() + column
                asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [target, *words])

    @cute.jit
    def activate_part(
        self,
        tile: Tile,
        part: cutlass.Constexpr,
        room: Room,
        ends: Ends,
        factors: list[Scales],
        rSum: cute.Tensor,
    ):
        """Make values of 16 tokens, in the registers of their gates, and a warp's largest magnitudes of them."""
        tidx, _, _ = cute.arch.thread_idx()
        for c in cutlass.range_constexpr(TOKENS // 8 * 2):
            token = part * TOKENS + c // 2 * 8 + tidx % 4 * 2 + c % 2
            weight, amax = Float32(1.0), Float32(0.0)
            if cutlass.const_expr(self.routed):
                weight = ends.routing[tile.row + cutlass.min(token, tile.rows - 1)]
            for own in cutlass.range_constexpr(BLOCKS):
                at = self.place_of(own, part, c)
                value = self.activate(rSum[at] * factors[own].low, rSum[at + 2] * factors[own].high, ends.limit)
                if cutlass.const_expr(self.routed):
                    value = value * weight
                rSum[at] = value
                amax = cute.arch.fmax(amax, convert.magnitude(value), nan=True)  # past the last block: it once more
            for i in cutlass.range_constexpr(2, 5):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << i), nan=True)
            if tidx % 32 < 4:
                place = room.magnitudes + (tidx // 32 * self.tile_n + token) * 4
                asm("st.shared.f32 [$0], $1;", [], [place, amax])

    def place_of(self, own: int, part: int, c: int) -> int:
        """Return the register of a gate: of block ``own``, of the part's token 8 (c / 2) + 2 t + c mod 2."""
        return own * (self.tile_n // 2) + part * (TOKENS // 2) + c // 2 * 4 + c % 2

    @cute.jit
    def find_scale(self, blocks: Int32, tile: Tile, token: Int32, room: Room, ends: Ends):
        """Find a token's scale of what the warps found; store it, four times, and its inverse."""
        amax = Float32(0.0)
        for warp in cutlass.range_constexpr(WARPS):
            place = room.magnitudes + (warp * self.tile_n + token) * 4
            amax = cute.arch.fmax(amax, asm("ld.shared.f32 $0, [$1];", [Float32], [place]), nan=True)
        code, inverse = convert.to_ue8m0(amax, convert.E4M3_MAX)
        asm("st.shared.f32 [$0], $1;", [], [room.inverses + 4 * token, inverse])
        row = tile.row + token
        at = row // 128 * cute.ceil_div(ends.out.shape[1], 128) + tile.feature
        for block in cutlass.range_constexpr(TILE_BLOCKS):
            if token < self.stored(tile) and tile.feature * TILE_BLOCKS + block < blocks:
                ends.scales[at, row % 32 * 16 + row % 128 // 32 * 4 + block] = cutlass.Uint8(code)

    @cute.jit
    def encode_part(self, group: Int32, part: cutlass.Constexpr, room: Room, rSum: cute.Tensor):
        """Store the codes of 16 tokens in shared memory."""
        tidx, _, _ = cute.arch.thread_idx()
        feature = group * (BLOCKS * HALF) + tidx % 128 // 32 * 8 + tidx % 32 // 4
        for c in cutlass.range_constexpr(TOKENS // 8 * 2):
            token = part * TOKENS + c // 2 * 8 + tidx % 4 * 2 + c % 2
            inverse = asm("ld.shared.f32 $0, [$1];", [Float32], [room.inverses + 4 * token])
            for own in cutlass.range_constexpr(BLOCKS):
                code = convert.to_e4m3(rSum[self.place_of(own, part, c)] * inverse)
                asm("st.shared.u8 [$0], $1;", [], [room.codes + token * CODES_PITCH + feature + own * HALF, code])

    def sync_groups(self) -> None:
        """Wait for both consumer warpgroups: what the others stored is there."""
        cute.arch.barrier(barrier_id=REDUCE, number_of_threads=32 * WARPS)

    @cute.jit
    def finish_rows(
        self,
        blocks: Int32,
        tile: Tile,
        group: Int32,
        sSum: cute.Tensor,
        ends: Ends,
        factors: list[Scales],
        rSum: cute.Tensor,
    ):
        """Store a warpgroup's 128 features in bf16, 16 tokens at a time; arguments as of `finish_tile`."""
        tidx, _, _ = cute.arch.thread_idx()
        thread, lane = tidx % 128, tidx % 32
        room = sSum.iterator.toint() + group * (TOKENS * ROW_PITCH)
        corner = room + lane // 16 * (8 * ROW_PITCH) + lane % 8 * ROW_PITCH + thread // 32 * 32 + lane // 8 % 2 * PIECE
        for part in cutlass.range_constexpr(self.tile_n // TOKENS):
            first = part * TOKENS
            if first < tile.rows:
                for own in cutlass.range_constexpr(BLOCKS):
                    stmatrix(corner + own * (2 * TILE_M), self.rounded(own, part, factors[own], rSum))
                self.sync_group(group)
                for i in cutlass.range_constexpr(TOKENS * ROW_BYTES // PIECE // 128):
                    place = i * 128 + thread
                    token, piece = place // (ROW_BYTES // PIECE), place % (ROW_BYTES // PIECE)
                    block = tile.feature * TILE_BLOCKS + group * BLOCKS + piece // (2 * TILE_M // PIECE)
                    if first + token < self.stored(tile) and block < blocks:
                        words = load(room + token * ROW_PITCH + piece * PIECE, 4)
                        features = (tile.feature * GROUPS + group) * ROW_BYTES  # bytes of those before
                        row = ends.out[tile.row + first + token, None].iterator.toint()
                        target = row + Int64(features + piece * PIECE)
                        asm("st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [target, *words])
                self.sync_group(group)

    def rounded(self, own: int, part: int, scales: Scales, rSum: cute.Tensor) -> list[Int32]:
        """Return sums of a block and 16 tokens in bf16: of rows g and g + 8 and tokens below 8, then of the others."""
        words = []
        for i in range(TOKENS // 8):
            at = self.place_of(own, part, 2 * i)
            for half, scale in enumerate(scales):
                low, high = (rSum[at + 2 * half + c] * scale for c in range(2))
                words.append(asm("cvt.rn.bf16x2.f32 $0, $1, $2;", [Int32], [high, low], pure=True))
        return words
