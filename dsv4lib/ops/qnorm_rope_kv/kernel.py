"""Make a token's queries and its cache entry from its projections, in one launch.

    q'[t, h] = bf16(rope(q[t, h] / sqrt(mean(q[t, h]^2) + eps)))               fp32 until the one rounding
    c        = kv[t], or bf16(weight * kv[t] / sqrt(mean(kv[t]^2) + eps))      `normed`: by the kernel
    entry at indices[t] = quantised(bf16(rope(c)))                             584 bytes; -1 drops it

RoPE rotates the last 64 dims by the token's angles. Mean and scaling have the bits of `ops.rmsnorm` on rows of 512,
the rotation those of `reference.rope` in fp32, the entry those of `formats.kv_entry`: the launch equals the chain of
`rmsnorm`, a rotation and `quantize_kv_entries`, each with its rounding to bf16 where that chain stores bf16.

**Threads** as in `dsl.head_rows`. The first CTAs take KV vectors, a warp each, because their chain is the longest
(index, page, scale); the others take heads. A sum of squares: 8 elements in order, 32 lanes by a butterfly, the halves
of a row in order; no shared memory, no barrier.

**Bytes** 2048 a head and 1608 a token; about 140 machine instructions a head of a warp, where memory leaves time for
400 on an H200: limited by memory.

Source: DSV4 paper, attention section; FlashMLA's DSV4 layout; DSV4 released inference code (which norms q in bf16).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsv4lib.dsl import rope
from dsv4lib.dsl.head_rows import DIM, FIRST_ROPE_LANE, HALVES, LANES, PIECE, HeadRows, fetch_row
from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.quantize.entries import KvEntries
from dsv4lib.ops.quantize.kernel import divide, in_fp32


class Pool(NamedTuple):
    """Where entries go.

    Attributes:
        mIndex: int32 [T], entry of a token; -1: none.
        mWords, mBytes: the same pages, int32 [P, S / 4] and uint8 [P, S]. page: entries of a page.
    """

    mIndex: cute.Tensor
    mWords: cute.Tensor
    mBytes: cute.Tensor
    page: Divisor


class QnormRopeKv(HeadRows):
    """Norm, rotate, append; see the module docstring.

    Args:
        heads, warps: as in `HeadRows`.
        gathered: rows of the table are chosen by positions; else row t is token t's.
        normed: kv comes as the projection left it, and is normed with a weight.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, heads: int = 4, warps: int = 8, gathered: bool = True, normed: bool = False):
        super().__init__(heads, warps)
        self.gathered, self.normed, self.entries = gathered, normed, KvEntries()

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        flags = [name for name in ("gathered", "normed") if vars(self)[name]]
        return f"QnormRopeKv({', '.join([str(self.heads), str(self.warps), *flags])})"

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mKv: cute.Tensor,
        mWeight: Any,
        mPositions: Any,
        mTable: cute.Tensor,
        mOut: cute.Tensor,
        pool: Pool,
        eps: Float32,
        blocks: Divisor,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mQ: [T, H, 512] bf16. mKv: [T, 512] bf16.
            mWeight: [512] fp32, or None unless ``normed``.
            mPositions: [T] int64, or None unless ``gathered``.
            mTable: [P, 64] fp32, 32 cosines and 32 sines a row.
            mOut: [T, H, 512] bf16; may be ``mQ`` itself.
            pool: where entries go.
            eps: added to means.
            blocks: CTAs of a token.
            stream: where the launch is queued.
        """
        ctas = cute.ceil_div(mQ.shape[0], self.warps) + mQ.shape[0] * blocks.number
        self.kernel(mQ, mKv, mWeight, mPositions, mTable, mOut, pool, eps, blocks).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mKv: cute.Tensor,
        mWeight: Any,
        mPositions: Any,
        mTable: cute.Tensor,
        mOut: cute.Tensor,
        pool: Pool,
        eps: Float32,
        blocks: Divisor,
    ):
        """KV vectors in the first CTAs, heads in the others."""
        cta, _, _ = cute.arch.block_idx()
        kv_ctas = cute.ceil_div(mQ.shape[0], self.warps)
        if cta < kv_ctas:
            self.append(mKv, mWeight, mPositions, mTable, pool, eps, cta * self.warps + cute.arch.warp_idx())
        else:
            token, block = divide(cta - kv_ctas, blocks)
            first = self.first_head(block)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()  # who waits for this kernel waits for the one before too
            rQ = self.fetch(mQ, token, first)
            angles = self.angles(mTable, mPositions, token)
            mine = cute.domain_offset((token, first, 0), mOut)
            for i in cutlass.range_constexpr(self.heads):
                if first + i < mQ.shape[1]:
                    self.head(rQ[None, None, i], angles, eps, mine[0, i, None])

    @cute.jit
    def head(self, rRow: cute.Tensor, angles: tuple[list, list], eps: Float32, line: cute.Tensor):
        """Norm, rotate and store one head."""
        halves = [in_fp32(rRow[None, half]) for half in range(HALVES)]
        scale = scale_of(halves, eps)
        for half in cutlass.range_constexpr(HALVES):
            rX = halves[half]
            rX.store(rX.load() * scale)
            self.rotate(rX, angles, half)
            rOut = cute.make_rmem_tensor(PIECE, BFloat16)
            rOut.store(rX.load().to(BFloat16))
            cute.autovec_copy(rOut, cute.local_tile(line, (PIECE,), (half * LANES + cute.arch.lane_idx(),)))

    @cute.jit
    def append(
        self,
        mKv: cute.Tensor,
        mWeight: Any,
        mPositions: Any,
        mTable: cute.Tensor,
        pool: Pool,
        eps: Float32,
        token: Int32,
    ):
        """Make and store the entry of one token. Not if there is no such token, or its index is none of the pool's."""
        rWeight = cute.make_rmem_tensor((PIECE, HALVES), Float32)
        if cutlass.const_expr(self.normed):
            fetch_row(mWeight, rWeight)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # who waits for this kernel waits for the one before too
        if token < mKv.shape[0]:
            index = pool.mIndex[token]
            if cutlass.const_expr(mPositions is not None):
                index = Int32(cutlass.select_(mPositions[token] < 0, Int32(-1), index))
            rRow = cute.make_rmem_tensor((PIECE, HALVES), BFloat16)
            fetch_row(mKv[token, None], rRow)
            angles = self.angles(mTable, mPositions, token)
            if cutlass.const_expr(self.normed):
                halves = [in_fp32(rRow[None, half]) for half in range(HALVES)]
                scaled = rRow.load().to(Float32) * scale_of(halves, eps)
                rRow.store((scaled * rWeight.load()).to(BFloat16))
            if Uint32(index) < Uint32(pool.mWords.shape[0] * pool.page.number):  # neither -1 nor outside the pool
                for half in cutlass.range_constexpr(HALVES):
                    rX = in_fp32(rRow[None, half])
                    self.rotate(rX, angles, half)
                    rPiece = cute.make_rmem_tensor(PIECE, BFloat16)
                    rPiece.store(rX.load().to(BFloat16))
                    piece = half * LANES + cute.arch.lane_idx()
                    self.entries.convert(*pool[1:], index, piece, rPiece)

    @cute.jit
    def rotate(self, rX: cute.Tensor, angles: tuple[list, list], half: cutlass.Constexpr):
        """Rotate a piece in place, in the lanes whose dims rotate."""
        if cutlass.const_expr(half == HALVES - 1):
            if cute.arch.lane_idx() >= FIRST_ROPE_LANE:
                found = rope.rotate([rX[i] for i in range(PIECE)], *angles, False)
                for i in cutlass.range_constexpr(PIECE):
                    rX[i] = found[i]


@cute.jit
def scale_of(halves: list, eps: Float32) -> Float32:
    """Return 1 / sqrt(mean of squares + eps) of a row in pieces, in all lanes. It has the bits of `ops.rmsnorm`."""
    total = Float32(0.0)
    for half in cutlass.range_constexpr(HALVES):
        mine = Float32(0.0)
        for i in cutlass.range_constexpr(PIECE):
            mine = cute.math.fma(halves[half][i], halves[half][i], mine)
        total += cute.arch.warp_reduction_sum(mine)
    return cute.math.rsqrt(total * (1.0 / DIM) + eps, fastmath=True)
