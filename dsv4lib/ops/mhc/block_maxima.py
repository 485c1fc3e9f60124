"""Find the largest |weight x| of blocks of y, in the few_tokens variant.

A block shares a scale.

    store_maximum    a warp's 32 columns of each token, to shared memory: with exchange 2's sums of squares
    send_maxima      where blocks have columns of several CTAs: of a CTA's first and last block, to the CTAs beside it
    block_maximum    of this lane's block, after exchange 2

A block of 128 columns is four units of 32, a unit a warp; a CTA has `warps` units in a row. CTAs of 3.5 blocks (d
7168 over 16) share every second one with a neighbour, CTAs of a quarter (d 256 over 8) with three others. Lines of what
other CTAs send: of those before this one, the nearest first, then of those after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.mhc.config import COLUMNS, WORDS
from dsv4lib.ops.mhc.kernel import Cta, Mhc
from dsv4lib.ops.mhc.ptx import send_to_cta, unpack
from dsv4lib.ops.quantize import codes


class Smem(NamedTuple):
    """Tensors in shared memory, fp32 unless said; a leading 2 is two tiles.

    Attributes:
        fn: [values, 4 columns]. held: [4 words, 5, thread] 32-bit, streams and f of a thread.
        sums: [warp, token, values] of this CTA. coefficients: [2, token, 20] of the site before.
        pre: [2, token, CTA, 4]. squares: [2, token, CTA], of X'. owned: [2, owned token, CTA, 20].
        x_squares: [2, token, CTA], of x. warp_squares: [X' or x, warp, token].
        maxima: [warp, token], bits of the largest |weight x| of 32 columns, in the padding of ``sums``.
        others: [2, line, token], the same of what other CTAs have of this one's first and last block; or None.
    """

    fn: cute.Tensor
    held: cute.Tensor
    sums: cute.Tensor
    coefficients: cute.Tensor
    pre: cute.Tensor
    squares: cute.Tensor
    owned: cute.Tensor
    x_squares: cute.Tensor
    warp_squares: cute.Tensor
    maxima: cute.Tensor
    others: Any


class Lane(NamedTuple):
    """Work of a worker's lane.

    Attributes:
        part: 32 columns of the CTA's. group: eight tokens of the tile. t: token of the tile.
        column: first column over 8.
    """

    part: Int32
    group: Int32
    t: Int32
    column: Int32


class BlockMaxima(Mhc):
    """Find maxima; see the module docstring."""

    def products(self, rMix: cute.Tensor, rWeight: cute.Tensor) -> list:
        """Return weight x of this lane's columns."""
        x = [value for w in range(WORDS) for value in unpack(rMix[w])]
        return [x[i] * rWeight[i] for i in range(COLUMNS)]

    @cute.jit
    def store_maximum(self, smem: Smem, mine: Lane, rMix: cute.Tensor, rWeight: cute.Tensor):
        """Store the largest |weight x| of this warp's columns of each token."""
        amax = self.largest_of_unit(self.products(rMix, rWeight))
        if cute.arch.lane_idx() % 4 == 0:
            smem.maxima[mine.part, mine.t] = amax.bitcast(Float32)

    def before(self, rank: Int32) -> Int32:
        """Return how many CTAs before this one have columns of its first block."""
        return rank - rank * self.warps // self.units * self.units // self.warps

    def after(self, rank: Int32) -> Int32:
        """Return how many CTAs after this one have columns of its last block."""
        last = (rank + 1) * self.warps - 1
        return (last // self.units * self.units + self.units - 1) // self.warps - rank

    def lines(self, rank: Int32) -> Int32:
        """Return how many other CTAs have columns of this one's blocks."""
        return self.before(rank) + self.after(rank)

    @cute.jit
    def send_maxima(self, cta: Cta, smem: Smem, sTarget: cute.Tensor):
        """Send maxima of the first and last block to the CTAs that share them.

        Four tokens a thread; those CTAs have the blocks' other columns.
        """
        tidx, _, _ = cute.arch.thread_idx()
        fours, near = self.tile // 4, self.neighbours
        rMax = cute.make_rmem_tensor(4, Int32)
        rFour = cute.make_rmem_tensor(4, Float32)
        for item in cutlass.range(tidx, 2 * near * fours, self.workers, unroll=1):
            four, line = item % fours, item // fours
            ahead = line >= near  # the other CTA comes after this one
            distance = line % near + 1
            there = cutlass.select_(ahead, self.after(cta.rank), self.before(cta.rank)) >= distance
            if there and 4 * four < cta.rows:
                unit = cta.rank * self.warps + cutlass.select_(ahead, Int32(self.warps - 1), Int32(0))
                rMax.fill(0)
                for w in cutlass.range(self.warps, unroll=1):
                    if (cta.rank * self.warps + w) // self.units == unit // self.units:
                        for v in cutlass.range_constexpr(4):
                            rMax[v] = codes.larger(rMax[v], smem.maxima[w, 4 * four + v].bitcast(Int32))
                for v in cutlass.range_constexpr(4):
                    rFour[v] = rMax[v].bitcast(Float32)
                # the receiver's line of this CTA: it comes from the other side
                target = cute.domain_offset((cutlass.select_(ahead, line - near, line + near), 4 * four), sTarget)
                peer = cta.rank + cutlass.select_(ahead, distance, -distance)
                send_to_cta(target.iterator, peer, [rFour[v] for v in range(4)], cta.bar.squares)

    @cute.jit
    def block_maximum(self, cta: Cta, smem: Smem, mine: Lane, buffer: Int32) -> Int32:
        """Return the bits of the largest |weight x| of the block of this lane's columns."""
        first = (cta.rank * self.warps + mine.part) // self.units * self.units
        amax = Int32(0)
        for k in cutlass.range_constexpr(self.units):
            unit = first + k
            if cutlass.const_expr(self.neighbours == 0):
                amax = codes.larger(amax, smem.maxima[unit - cta.rank * self.warps, mine.t].bitcast(Int32))
            else:
                owner = unit // self.warps
                if owner == cta.rank:
                    amax = codes.larger(amax, smem.maxima[unit % self.warps, mine.t].bitcast(Int32))
                else:
                    line = cutlass.select_(owner < cta.rank, cta.rank - owner, owner - cta.rank + self.neighbours) - 1
                    amax = codes.larger(amax, smem.others[buffer, line, mine.t].bitcast(Int32))
        return amax
