"""Bring FP8 queries and tiles of an FP8 cache to shared memory as 16-bit numbers.

A warpgroup does. E4M3 is exact in bf16 and in fp16; scales of the tensors are left to the logits and to O.

A warp has 16 rows of 64, in two batches of 8: 4 lanes a row, 16 bytes of each chunk a lane. The bytes of a whole tile
are in registers while its stage is waited for, and those of a chunk are followed by the next tile's when they are
stored. Math threads fence the proxies (`attend`): a fence in here would wait for the loads of the next tile.

Tokens past the end of a request are zeros, whatever memory holds, and so are heads past the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.ops.mla_decode.sm90.config import (
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    HALF_CHUNKS,
    MATH_WARPS,
    ROPE_CHUNK,
    ROW_BYTES,
    STAGE_BYTES,
    STAGES,
    TILE_N,
    V_DIM,
)
from dsv4lib.ops.mla_decode.sm90.load import Load, Ring, Sources, Work

PIECE = 16  # bytes of a load: of the 64 of a chunk
LANES = CHUNK // PIECE  # of a row
ROWS = 32 // LANES  # of a batch
BATCHES = TILE_N // 4 // ROWS


class Row(NamedTuple):
    """Addresses of this lane's bytes of a row, without and with RoPE; 0: no such row."""

    latent: Int64
    rope: Int64


class Dequant(Load):
    """What the producer warpgroup does with FP8."""

    @cute.jit
    def produce(self, sources: Sources, mTable: cute.Tensor, work: Work, ring: Ring):
        """Producer warps: Q where it is FP8, then tile after tile."""
        if work.first < work.end:
            raw = cute.make_rmem_tensor((2, CHUNKS, BATCHES), Int64)
            raw.fill(0)
            if cutlass.const_expr(self.fp8_queries):
                for batch in cutlass.range_constexpr(BATCHES):
                    row = self.query_row(sources.q_nope, sources.q_pe, work, batch)
                    self.fetch(row, raw, batch, Int32(0), 0, CHUNKS)
                    self.store(row, raw, ring.q, batch, Int32(0), 0, CHUNKS)
                cute.arch.mbarrier_arrive(ring.q_full)
            pages = self.pages_of_rows(mTable, work, work.first)
            for batch in cutlass.range_constexpr(BATCHES):
                self.fetch(
                    self.token_row(sources.cache, work, pages, work.first, batch), raw, batch, Int32(0), 0, CHUNKS
                )
            ahead = self.pages_of_rows(mTable, work, work.first + 1)
            for tile in cutlass.range(work.first, work.end, unroll=1):
                number = tile - work.first
                owner, parity = number % STAGES, number // STAGES % 2 ^ 1
                stage = ring.tiles + owner * STAGE_BYTES
                for part, (first, end) in enumerate(((0, HALF_CHUNKS), (HALF_CHUNKS, CHUNKS))):
                    half = owner ^ part
                    cute.arch.mbarrier_wait(ring.empty + (owner * 2 + half), parity)
                    for batch in cutlass.range_constexpr(BATCHES):
                        now = self.token_row(sources.cache, work, pages, tile, batch)
                        self.store(now, raw, stage, batch, owner, first, end)
                        after = self.token_row(sources.cache, work, ahead, tile + 1, batch)
                        self.fetch(after, raw, batch, 1 - owner, first, end)
                    cute.arch.mbarrier_arrive(ring.full + (owner * CHUNKS + half * HALF_CHUNKS))
                pages, ahead = ahead, self.pages_of_rows(mTable, work, tile + 2)

    def row_of(self, batch: int) -> Int32:
        """Return the row of a tile of which this lane brings a quarter."""
        warp = cute.arch.warp_idx() - MATH_WARPS
        return warp * (ROWS * BATCHES) + batch * ROWS + cute.arch.lane_idx() // LANES

    @cute.jit
    def pages_of_rows(self, mTable: cute.Tensor, work: Work, tile: Int32):
        """Return the page of a warp's 16 tokens, which one page holds; -1 past the end."""
        page, token = Int32(-1), tile * TILE_N + (cute.arch.warp_idx() - MATH_WARPS) * (ROWS * BATCHES)
        if (tile < work.end) & (token < work.length):
            page = mTable[work.request, self.page_column(token)]
        return page

    @cute.jit
    def token_row(self, mCache: cute.Tensor, work: Work, page: Int32, tile: Int32, batch: cutlass.Constexpr):
        """Find a token."""
        latent, token = Int64(0), tile * TILE_N + self.row_of(batch)
        if (page >= 0) & (token < work.length):
            latent = mCache[page, token % self.page, None].iterator.toint() + self.piece()
        return Row(latent, latent + V_DIM)

    @cute.jit
    def query_row(self, mQNope: cute.Tensor, mQPe: cute.Tensor, work: Work, batch: cutlass.Constexpr):
        """Find a head."""
        latent, rope, head = Int64(0), Int64(0), work.head + self.row_of(batch)
        if head < mQNope.shape[1]:
            latent = mQNope[work.request, head, None].iterator.toint() + self.piece()
            rope = mQPe[work.request, head, None].iterator.toint() + self.piece()
        return Row(latent, rope)

    def piece(self) -> Int64:
        """Return this lane's first byte of a chunk."""
        return Int64(cute.arch.lane_idx() % LANES * PIECE)

    def chunk(self, slot: int, owner: Int32) -> Int32:
        """Return the chunk that a slot of registers holds: the owner's half of V first."""
        return Int32(slot) if slot == ROPE_CHUNK else (owner ^ (slot // HALF_CHUNKS)) * HALF_CHUNKS + slot % HALF_CHUNKS

    @cute.jit
    def fetch(
        self,
        row: Row,
        raw: cute.Tensor,
        batch: cutlass.Constexpr,
        owner: Int32,
        first: cutlass.Constexpr,
        end: cutlass.Constexpr,
    ):
        """Start the loads of a row. Slots ``first`` to ``end`` - 1, for a stage of ``owner``."""
        if row.latent != 0:
            for slot in cutlass.range_constexpr(first, end):
                at = row.rope if slot == ROPE_CHUNK else row.latent + Int64(self.chunk(slot, owner) * CHUNK)
                raw[0, slot, batch], raw[1, slot, batch] = load(at)

    @cute.jit
    def store(
        self,
        row: Row,
        raw: cute.Tensor,
        tile: Int32,
        batch: cutlass.Constexpr,
        owner: Int32,
        first: cutlass.Constexpr,
        end: cutlass.Constexpr,
    ):
        """Convert what `fetch` brought into a tile; zeros where there is no row."""
        index = self.row_of(batch)
        at = tile + index * ROW_BYTES + ((2 * (cute.arch.lane_idx() % LANES) ^ index % 8) << 4)
        for slot in cutlass.range_constexpr(first, end):
            two = [Int64(cutlass.select_(row.latent != 0, raw[i, slot, batch], Int64(0))) for i in range(2)]
            target = at + self.chunk(slot, owner) * CHUNK_BYTES
            convert(*two, target, target ^ PIECE, self.dtype)


@dsl_user_op
def load(address: Int64, *, loc: Any = None, ip: Any = None) -> list:
    """Load 16 bytes that are read once."""
    text = "ld.global.nc.L1::no_allocate.v2.b64 {{$w0}, {$w1}}, [{$r0}];"
    return list(cute.arch.inline_ptx(text, write_only_types=[Int64] * 2, read_only_args=[address], loc=loc, ip=ip))


@dsl_user_op
def convert(
    low: Int64, high: Int64, first: Int32, second: Int32, dtype: str, *, loc: Any = None, ip: Any = None
) -> None:
    """Store 16 numbers of E4M3 as 16-bit ones, 8 at each address."""
    lines = ["{ .reg .b16 a<8>, x, y; .reg .b32 d<8>, h; .reg .f32 f, g;"]
    lines += ["mov.b64 {a0, a1, a2, a3}, {$r0};", "mov.b64 {a4, a5, a6, a7}, {$r1};"]
    for j in range(8):
        if dtype == "fp16":
            lines.append(f"cvt.rn.f16x2.e4m3x2 d{j}, a{j};")
        else:
            lines += [f"cvt.rn.f16x2.e4m3x2 h, a{j};", "mov.b32 {x, y}, h;", "cvt.f32.f16 f, x;", "cvt.f32.f16 g, y;"]
            lines.append(f"cvt.rn.bf16x2.f32 d{j}, g, f;")
    lines += ["st.shared.v4.b32 [{$r2}], {d0, d1, d2, d3};", "st.shared.v4.b32 [{$r3}], {d4, d5, d6, d7};", "}"]
    cute.arch.inline_ptx("\n".join(lines), read_only_args=[low, high, first, second], loc=loc, ip=ip)
