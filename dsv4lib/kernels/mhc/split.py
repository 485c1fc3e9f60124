"""`stream` with fn split once into three bf16: the projection's operands are words that are there already.

fn = a + b + c, a = bf16(fn), b = bf16(fn - a), c = bf16(fn - a - b): 3 x 8 bits hold the 24 of fp32, and products with
X', which is bf16, are exact. Where `stream` unpacks X' and cuts fn into two with every use, here is nothing to do.

Machine instructions of a worker's loop, a tile of 16 tokens of d 4096 (in it, MMAs): `stream` 1490 (116) on sm_90a and
1585 (116) on sm_100a, this form 1201 (100) and 1280 (100).

fn is what an MMA has as A, 16 rows at a time, X' as B, eight tokens at a time, as a lane has it: two neighbouring
words. Of the 24 rows, 16 to 23 have an MMA together with their own second part, and their third part has half a one:

    A of an MMA    rows 0-15 a | rows 0-15 b | rows 0-15 c | rows 16-23 a and b | rows 16-23 c and nothing
                   (`head`: the last two, for rows 0-3)
    fn in SMEM     [warp, stream, four of a lane's eight columns][A's 16 or 8 bytes a lane]

Not timed yet, so no call chooses this form by itself (`forms`). What may speak against it: fn takes half as much
shared memory again, which leaves less L1 for loads in flight, and every CTA splits its slice before its first tile.

    SMEM (d 4096, 16 CTAs)   fn 147,456, the rest as in `stream`; d 7168 does not fit

Source: as `simt`; PTX ISA, "mma.m16n8k16" (bf16 fragments).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4lib.kernels.mhc.config import COLUMNS, FOURS, LANES, ROWS_N, UNIT, N, SplitConfig
from dsv4lib.kernels.mhc.stream import MhcStream
from dsv4lib.kernels.mhc.words import floats, multiply, pair

PARTS = 3  # of bf16 in a value of fp32
PLACE = 4 * FOURS - N  # of sum v of post and comb, less v


class MhcSplit(SplitConfig, MhcStream):
    """A site boundary as a stream with fn in parts; see the module docstring. Settings: `config.SplitConfig`."""

    @cute.jit
    def roles(self, warp: Int32, given: tuple, storage: Any, shared: tuple, barriers: list, place: tuple, eps: tuple):
        """All warps split fn, then each does what it does in `stream`."""
        self.split_fn(given[2], self.in_parts(shared[0]), place[0])
        cute.arch.barrier()
        MhcStream.roles(self, warp, given, storage, shared, barriers, place, eps)

    @cute.jit
    def in_parts(self, sFn: cute.Tensor) -> cute.Tensor:
        """The memory of fn as words of two columns, [warp, stream, half of a lane's columns, word of a block]."""
        block = self.fn_block
        layout = cute.make_layout((self.warps, N, 2, block), stride=(2 * N * block, 2 * block, block, 1))
        return cute.make_tensor(cute.recast_ptr(sFn.iterator, dtype=Uint32), layout)

    @cute.jit
    def split_fn(self, mFn: cute.Tensor, sParts: cute.Tensor, rank: Int32):
        """This CTA's columns of fn into shared memory: what a lane reads of four of its columns at a time."""
        tidx, _, _ = cute.arch.thread_idx()
        rRows = cute.make_rmem_tensor((2 * PARTS, 2), Uint32)
        rWords = cute.make_rmem_tensor(4, Uint32)
        for item in cutlass.range(tidx, self.workers * N * 2, self.threads, unroll=1):
            lane, half, i, warp = item % LANES, item // LANES % 2, item // (2 * LANES) % N, item // (2 * LANES * N)
            column = i * self.d + rank * self.columns + warp * UNIT + COLUMNS * (lane % 4) + 4 * half
            sBlock, row = sParts[warp, i, half, None], lane // 4
            if cutlass.const_expr(not self.head):
                for k in cutlass.range_constexpr(2):
                    self.parts_of(mFn, row + ROWS_N * k, column, rRows[None, k])
                for part in cutlass.range_constexpr(PARTS):
                    for k in cutlass.range_constexpr(4):
                        rWords[k] = rRows[2 * part + k // 2, k % 2]
                    cute.autovec_copy(rWords, cute.local_tile(sBlock, (4,), (LANES * part + lane,)))
            last = cutlass.min(row, Int32(self.values - 1)) if self.head else row + 2 * ROWS_N
            self.parts_of(mFn, last, column, rRows[None, 0])
            for k in cutlass.range_constexpr(4):
                rWords[k] = rRows[2 * (k % 2) + k // 2, 0]
            cute.autovec_copy(rWords, cute.local_tile(sBlock, (4,), (LANES * (self.quads - 1) + lane,)))
            third = cute.local_tile(sBlock, (2,), (2 * LANES * self.quads + lane,))
            for k in cutlass.range_constexpr(2):
                third[k] = rRows[4 + k, 0]

    @cute.jit
    def parts_of(self, mFn: cute.Tensor, row: Int32, column: Int32, rParts: cute.Tensor):
        """The parts of four values, two words each."""
        rValues = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.local_tile(mFn[row, None], (4,), (column // 4,)), rValues)
        for part in cutlass.range_constexpr(PARTS):
            for w in cutlass.range_constexpr(2):
                rParts[2 * part + w] = pair(rValues[2 * w], rValues[2 * w + 1])
                for k, taken in enumerate(floats(rParts[2 * part + w])):
                    rValues[2 * w + k] = rValues[2 * w + k] - taken

    @cute.jit
    def fetch_fn(self, mFn: cute.Tensor, rank: Int32, sFn: cute.Tensor, barrier: cute.Pointer):
        """Nothing is on its way: `split_fn` is done."""
        self.arrive(barrier)

    @cute.jit
    def project(self, rZ: cute.Tensor, sFn: cute.Tensor, sSum: cute.Tensor, warp: Int32):
        """This warp's part of fn z, for all 16 tokens.

        A: rows of fn lane / 4 (+ 8), columns of the words w and w + 1 of this lane's four; B: the same words of token
        lane / 4 of eight; sums: tokens 2 (lane mod 4) and the next.
        """
        group, four, lane = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4, cute.arch.lane_idx()
        sParts = self.in_parts(sFn)
        rC = cute.make_rmem_tensor((4, 2), Float32)  # rows 0 to 15
        rLast = cute.make_rmem_tensor((4, 2), Float32)  # rows 16 to 23: the first and the third part, and the second
        rC.fill(0.0)
        rLast.fill(0.0)
        rA = cute.make_rmem_tensor((4, self.quads), Uint32)
        rThird = cute.make_rmem_tensor(2, Uint32)
        for i in cutlass.range(N, unroll_full=True):
            for half in cutlass.range_constexpr(2):
                cute.arch.sync_warp()  # or all of fn comes at once, and registers spill
                sBlock = sParts[warp, i, half, None]
                for q in cutlass.range_constexpr(self.quads):
                    cute.autovec_copy(cute.local_tile(sBlock, (4,), (LANES * q + lane,)), rA[None, q])
                cute.autovec_copy(cute.local_tile(sBlock, (2,), (2 * LANES * self.quads + lane,)), rThird)
                third = [rThird[0], Uint32(0), rThird[1], Uint32(0)]
                for h in cutlass.range_constexpr(2):
                    b = [rZ[2 * half, i, h], rZ[2 * half + 1, i, h]]
                    for q in cutlass.range_constexpr(self.quads):
                        sums = rC[None, h] if q + 1 < self.quads else rLast[None, h]
                        multiply([rA[k, q] for k in range(4)], b, sums, pairs=True)
                    multiply(third, b, rLast[None, h], pairs=True)
        first = cutlass.select_(group < N, 4 * group, PLACE + group)
        for h in cutlass.range_constexpr(2):
            for k in cutlass.range_constexpr(2):
                line, last = sSum[8 * h + 2 * four + k, None], rLast[k, h] + rLast[2 + k, h]
                if cutlass.const_expr(self.head):
                    if group < N:
                        line[4 * group] = last
                else:
                    line[first] = rC[k, h]
                    line[PLACE + ROWS_N + group] = rC[2 + k, h]
                    line[PLACE + 2 * ROWS_N + group] = last
