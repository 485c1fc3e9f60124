"""Run the epilogue: warpgroups' sums to global memory.

They are added, scaled and converted, with SwiGLU, routing weight.

Every warpgroup stores the sums of its steps of K, [token][64 rows, those of rows g before those of rows g + 8]. When
all have, a warp takes a token and adds the four, in an order that depends on the steps alone: bits do not depend on
which warpgroup had which. With gate and up alternating by 8, lane f then has both of feature f of 32, and a warp has a
whole block of MXFP8: its scale is a maximum over the lanes.

Warps of their own do so, during the MMAs of the next tile: no warpgroup waits for another, unless that is two tiles
late (one, where there is room for one buffer of sums), and none for a latency of global memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import convert
from dsv4lib.ops.moe_gemm.epilogue import swiglu
from dsv4lib.ops.moe_gemm.sm90.config import (
    CONSUMERS,
    FINISH_WARPS,
    HALF,
    LOAD_WARP,
)
from dsv4lib.ops.moe_gemm.sm90.groups import Tile, Walk


class Outputs(NamedTuple):
    """What a call writes: rows [R, F] bf16 or fp32, or codes uint8. Scales [blocks, 512] uint8 or None."""

    out: cute.Tensor
    scales: Any


class Pair(NamedTuple):
    """Two sums of a lane: gate and up of a feature, or of rows that follow one another."""

    low: Float32
    high: Float32


class Scales(NamedTuple):
    """What both sums of a lane are multiplied by."""

    low: Float32
    high: Float32


class Sums(NamedTuple):
    """Where the sums of warpgroups meet."""

    sums: cute.Tensor  # fp32 [position, token, warpgroup, buffer]
    stored: cute.Pointer  # an mbarrier a buffer: all consumer warps have stored
    free: cute.Pointer  # the same: all finish warps have read


class Ends(NamedTuple):
    """What the epilogue reads and writes in global memory."""

    alpha: Any  # fp32 [E] or None
    alpha_up: Any
    routing: Any  # fp32 [R] or None
    out: cute.Tensor  # [R, F]
    scales: Any  # uint8 [blocks, 512] or None
    limit: Float32


class Epilogue(Walk):
    """What consumer and finish warps do with a tile's sums."""

    @cute.jit
    def finish(self, tile: Tile, first: Int32, buffer: Int32, sSum: cute.Tensor, ends: Ends, scales: Scales):
        """Add up and store a tile.

        Args:
            first: warpgroup that had the tile's first step.
            sSum: fp32 [position, token, warpgroup, buffer].
        """
        tidx, _, _ = cute.arch.thread_idx()
        for token in cutlass.range(tidx // 32 - (LOAD_WARP + 1), self.stored(tile), FINISH_WARPS, unroll=1):
            self.finish_token(tile, token, self.added(token, first, buffer, sSum), ends, scales)

    @cute.jit
    def store_sums(self, buffer: Int32, sSum: cute.Tensor, rSum: cute.Tensor):
        """Store the sums of this warpgroup's steps of a tile."""
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // 32, cute.arch.lane_idx()
        place, column = warp % 4 * 8 + lane // 4, lane % 4 * 2
        for c in cutlass.range_constexpr(self.tile_n // 2):
            sSum[place + c // 2 % 2 * HALF, c // 4 * 8 + column + c % 2, warp // 4, buffer] = rSum[c]

    def scales_of(self, tile: Tile, ends: Ends) -> Scales:
        """Return the scales of a tile."""
        low = high = Float32(self.sums_factor)
        if self.alpha:
            low = low * ends.alpha[tile.expert]
            high = high * (ends.alpha_up if self.swiglu else ends.alpha)[tile.expert]
        return Scales(low, high)

    def stored(self, tile: Tile) -> Int32:
        """Count the tokens of a tile that are stored. Columns of the MMA past the last are not."""
        return tile.rows

    def activate(self, gate: Float32, up: Float32, limit: Float32) -> Float32:
        """Combine gate and up of a feature."""
        return swiglu(gate, up, limit)

    def places(self) -> tuple[Int32, Int32]:
        """Return the two positions of a lane: gate and up of feature ``lane``, or rows that follow one another."""
        lane = cute.arch.lane_idx()
        return (lane, lane + HALF) if self.swiglu else (2 * lane, 2 * lane + 1)

    def added(self, token: Int32, first: Int32, buffer: Int32, sSum: cute.Tensor) -> Pair:
        """Add the warpgroups' sums of a token, at the two positions of a lane."""
        places = self.places()
        low, high = Float32(0.0), Float32(0.0)
        for i in range(CONSUMERS):
            group = (first + i) % CONSUMERS
            low = low + sSum[places[0], token, group, buffer]
            high = high + sSum[places[1], token, group, buffer]
        return Pair(low, high)

    @cute.jit
    def finish_token(self, tile: Tile, token: Int32, sums: Pair, ends: Ends, scales: Scales):
        """Finish all 64 sums of a token, by one warp, two of them a lane."""
        lane, row = cute.arch.lane_idx(), tile.row + token
        low, high = sums.low * scales.low, sums.high * scales.high
        if cutlass.const_expr(not self.swiglu):
            self.store_pair(ends.out, row, tile.feature * (2 * HALF), low, high)
        else:
            value = self.activate(low, high, ends.limit)
            if cutlass.const_expr(self.routed):
                value = value * ends.routing[row]
            if cutlass.const_expr(self.quantised):
                self.store_mxfp8(ends, row, tile.feature, value)
            else:
                ends.out[row, tile.feature * HALF + lane] = value.to(ends.out.element_type)

    @cute.jit
    def store_pair(self, mOut: cute.Tensor, row: Int32, feature: Int32, low: Float32, high: Float32):
        """Store positions 2 l and 2 l + 1 of lane l. They are neighbours of the same 8 rows of a warp's 16."""
        lane = cute.arch.lane_idx()
        feature = feature + lane // 4 % 4 * 16 + lane // 16 * 8 + lane % 4 * 2
        rPair = cute.make_rmem_tensor(2, mOut.element_type)
        rPair[0], rPair[1] = low.to(mOut.element_type), high.to(mOut.element_type)
        cute.autovec_copy(rPair, cute.local_tile(mOut[row, None], (2,), (feature // 2,)))

    @cute.jit
    def store_mxfp8(self, ends: Ends, row: Int32, column: Int32, value: Float32):
        """Store a block of 32: codes and scale.

        The scale goes where the next GEMM reads it (`formats.scale_swizzle`).
        """
        lane = cute.arch.lane_idx()
        amax = convert.magnitude(value)
        for i in cutlass.range_constexpr(5):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << i), nan=True)
        code, inverse = convert.to_ue8m0(amax, convert.E4M3_MAX)
        ends.out[row, column * HALF + lane] = cutlass.Uint8(convert.to_e4m3(value * inverse))
        if lane == 0:
            block = row // 128 * cute.ceil_div(ends.out.shape[1], 128) + column // 4
            ends.scales[block, row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = cutlass.Uint8(code)
