"""Spread rows of 512 dims, one a head, over warps. Kernels that stream [T, H, 512] share it.

A warp takes several heads of one token, all their loads in flight before the first is used. Lane l has dims
8 l .. 8 l + 7 and 256 + 8 l .. of a row: two loads of 16 bytes, each 512 bytes of a warp in a row. The last 64 dims are
the second piece of lanes 24 to 31, which fetch the cosines and sines of their 4 pairs once for all heads of the warp.
A group of 64 or 128 dims is 8 or 16 neighbouring lanes of a piece.

CTAs are counted through blocks of ``heads x warps`` heads, then through tokens.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from dsv4lib.dsl import rope
from dsv4lib.errors import ConfigError

DIM, PIECE, LANES = 512, 8, 32
HALVES = DIM // (PIECE * LANES)  # pieces of a lane
FIRST_ROPE_LANE = LANES - rope.PIECES  # in the second piece


class HeadRows:
    """How many heads a warp and warps a CTA takes; see the module docstring.

    Args:
        heads: of a warp, 1, 2, 4 or 8.
        warps: of a CTA, 1 to 16.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, heads: int = 4, warps: int = 8):
        if heads not in (1, 2, 4, 8):
            raise ConfigError("heads", heads, "1, 2, 4 or 8")
        if not 1 <= warps <= 16:
            raise ConfigError("warps", warps, "1 to 16")
        self.heads, self.warps = heads, warps
        self.threads = LANES * warps

    def blocks(self, heads: int) -> int:
        """CTAs a token."""
        return -(-heads // (self.heads * self.warps))

    @cute.jit
    def first_head(self, block: Int32) -> Int32:
        """Return the first head of this warp in a block of a token."""
        return (block * self.warps + cute.arch.warp_idx()) * self.heads

    @cute.jit
    def fetch(self, mX: cute.Tensor, token: Int32, first: Int32):
        """Start the loads of this warp's heads; those that do not exist are zeros.

        Returns:
            bf16 registers [8, 2, heads].
        """
        rX = cute.make_rmem_tensor((PIECE, HALVES, self.heads), BFloat16)
        rX.fill(0.0)
        mine = cute.domain_offset((token, first, 0), mX)
        for i in cutlass.range_constexpr(self.heads):
            if first + i < mX.shape[1]:
                fetch_row(mine[0, i, None], rX[None, None, i])
        return rX

    @cute.jit
    def angles(self, mTable: cute.Tensor, mPositions: Any, token: Int32):
        """Return (cosines, sines) of a token in the lanes that rotate, see `rope.angles`."""
        lane = cute.arch.lane_idx()
        return rope.angles(mTable, mPositions, token, lane - FIRST_ROPE_LANE, lane >= FIRST_ROPE_LANE)


@cute.jit
def fetch_row(line: cute.Tensor, rRow: cute.Tensor):
    """Start the loads of this lane's pieces of a row [512] to registers [8, 2]."""
    for half in cutlass.range_constexpr(HALVES):
        place = half * LANES + cute.arch.lane_idx()
        cute.autovec_copy(cute.local_tile(line, (PIECE,), (place,)), rRow[None, half])
