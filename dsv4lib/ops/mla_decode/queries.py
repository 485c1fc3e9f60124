"""Make bf16 queries sums of two E4M3 numbers, for entries in FP8.

`kind::f8f6f4` multiplies no bf16:

    q = s (hi + lo)        s a power of two a head, hi = e4m3(q / s), lo = e4m3(q / s - hi)

With the largest |q| / s in [128, 256), what is lost of a number is at most 2^-9 of it or 2^-17 of the largest of its
head, whichever is more. The softmax warps do so once an item; s joins the scale of the logits. P is two limbs as well.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import convert, umma
from dsv4lib.ops.mla_decode.config import HEADS, LATENT, PIECE, Q_SLOT, ROPE, ROW
from dsv4lib.ops.mla_decode.work import Plan, Row, Work

TOP = 7  # exponent of the largest number of a head, after scaling
BIAS, LARGEST, SHIFT = 127, 255, 23  # of fp32: of exponents, of Inf and NaN, and where they are
LEAST = 11  # exponent field of a head's maximum below which the scale stays: its inverse must be a finite number
NAN = 0x7FC00000


class QueryTensors(NamedTuple):
    """Queries in memory: [B, H, 512] and [B, H, 64]."""

    nope: cute.Tensor
    pe: cute.Tensor


class Queries(Plan):
    """Queries of two limbs. Thread t of 128 has head t % 64, and half t / 64 of each chunk of its dims."""

    @cute.jit
    def split_q(self, queries: QueryTensors, work: Work, row: Row, sQ: Int32, sRow: cute.Tensor):
        """Store both limbs of this thread's dims. Returns the scale of its head.

        Heads that are not there are zeros.
        """
        amax = Float32(0.0)
        if row.inside:
            latents, pe = (x[work.request, row.head, None] for x in queries)
            for piece in cutlass.range(0, LATENT // 2 // PIECE, unroll=1):
                amax = self.largest(latents, self.place_of(row.half, piece), amax)
            for piece in cutlass.range_constexpr(ROPE // 2 // PIECE):
                amax = self.largest(pe, row.half * (ROPE // 2) + piece * PIECE, amax)
        sRow[row.tidx, Q_SLOT] = amax
        self.pair(row).arrive_and_wait()
        exponent = convert.bits(cute.arch.fmax(amax, sRow[row.tidx ^ HEADS, Q_SLOT])) >> SHIFT
        small = cutlass.max(exponent, LEAST)
        inverse = convert.from_bits((2 * BIAS + TOP - small) << SHIFT)
        if exponent == LARGEST:
            inverse = convert.from_bits(Int32(NAN))
        head = row.tidx % HEADS
        for piece in cutlass.range(0, LATENT // 2 // PIECE, unroll=1):
            dim = self.place_of(row.half, piece)
            inside = (dim % ROW // PIECE) ^ (head % 8)
            place = sQ + dim // ROW * (HEADS * ROW) + head * ROW + inside * PIECE
            self.store_limbs(queries.nope, work, row, dim, inverse, place)
        for piece in cutlass.range_constexpr(ROPE // 2 // PIECE):
            dim = row.half * (ROPE // 2) + piece * PIECE
            inside = (dim // PIECE) ^ (head // 2 % 4)
            place = sQ + LATENT // ROW * (HEADS * ROW) + head * self.pe_row + inside * PIECE
            self.store_limbs(queries.pe, work, row, dim, inverse, place)
        cute.arch.fence_view_async_shared()
        umma.fence_before_thread_sync()
        return convert.from_bits((small - TOP) << SHIFT)

    def place_of(self, half: Int32, piece: Int32) -> Int32:
        """Return the first dim of a thread's piece of 16. It has half of each chunk of 128."""
        pieces = ROW // 2 // PIECE
        return piece // pieces * ROW + half * (ROW // 2) + piece % pieces * PIECE

    @cute.jit
    def largest(self, gQ: cute.Tensor, dim: Int32, amax: Float32):
        """Return the largest magnitude of 16 dims and ``amax``."""
        for x in self.fetch(gQ, dim):
            amax = cute.arch.fmax(amax, convert.magnitude(x))
        return amax

    def fetch(self, gQ: cute.Tensor, dim: Int32) -> list:
        """Load 16 dims of a head from global memory, as fp32."""
        gPiece = cute.domain_offset((cute.assume(dim, divby=PIECE),), gQ)
        rQ = cute.make_rmem_tensor((8, 2), self.q_element)
        cute.autovec_copy(cute.logical_divide(cute.local_tile(gPiece, (16,), (0,)), (8,)), rQ)
        return [Float32(rQ[i]) for i in range(16)]

    @cute.jit
    def store_limbs(self, mQ: cute.Tensor, work: Work, row: Row, dim: Int32, inverse: Float32, place: Int32):
        """Store 16 dims of a head as limbs, 16 bytes of each."""
        rQ = cute.make_rmem_tensor((4, self.limbs), Int32)
        rQ.fill(0)
        if row.inside:
            values = self.fetch(mQ[work.request, row.head, None], dim)
            for word in cutlass.range_constexpr(4):
                four = [x * inverse for x in values[4 * word : 4 * word + 4]]
                for limb, codes in enumerate(convert.to_e4m3_limbs(four, self.limbs)):
                    rQ[word, limb] = codes
        for limb in cutlass.range_constexpr(self.limbs):
            target = cute.make_ptr(Int32, place + limb * self.q_limb, cute.AddressSpace.smem, assumed_align=PIECE)
            cute.autovec_copy(rQ[None, limb], cute.make_tensor(target, 4))
