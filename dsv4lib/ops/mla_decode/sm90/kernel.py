"""MLA decode on Hopper over a paged cache of 576 dimensions. 64 heads of a request a CTA.

    s_j = scale * (q_nope . c_j + q_pe . r_j)        o = sum_j e^{s_j} c_j / sum_j e^{s_j}        row j: (c_j, r_j)

Tile picture (`budget` computes the numbers)

                                   SMEM                               2 math warpgroups
    Q 64 x 576 --------TMA--->  | Q 73,728 B                 | ---> S 64 x 64 of every other tile each
    64 tokens x 576 ---TMA--->  | tiles 2 x 73,728 B         |  |       P = exp2(S - row_max), 16 bits
      9 boxes of 64 x 64        |   P over the RoPE chunk    | -+-> O 64 x 256 each, fp32, of all tiles
                                | row_max 2 x 64, 25 mbarriers

Roles (3 warpgroups, 384 threads)

    warps 0-7    math    S of its tiles, softmax, P V of all tiles with 256 of the columns (`attend`)
    warp  8      load    Q and tiles by TMA, the page table one tile ahead (`load`)
    warps 8-11   load    FP8: 16 tokens of a tile each, to 16 bits on the way (`dequant`); Q too if it is FP8

Pipelines, 2 stages

    full       a barrier a chunk: its bytes have landed; FP8: an arrival a thread, of two barriers a stage
    empty      a barrier a half of V: an arrival a warp of the warpgroup whose columns these are
    weighed    P and row_max of a tile are stored: an arrival a warp of the one whose S it is

Heads past the last are rows of zeros in Q, from TMA: they cost MMAs (16 heads as much as 64) and are not stored.

Registers. The launch names a minimum of one CTA an SM, so that ptxas heeds setmaxnreg: 168 at the start, then 232 a
math thread (128 of O, 32 of S, 16 of P) and 40 a load thread; of an FP8 cache 200 and 104 (72 of raw bytes).

A grid of blocks of 64 heads x splits of the tokens x requests; `ops.fmha.combine` adds splits up. Blocks of heads are
neighbours: they read the same tiles, the second from L2. Launches overlap: a CTA makes its barriers, then waits for the
kernel before.

Source: `dsv4lib.reference.mla_decode`; FlashMLA's documentation for two tiles in turns; PTX ISA, "wgmma".
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.mla_decode.sm90.attend import Attend, Outputs
from dsv4lib.ops.mla_decode.sm90.config import (
    CHUNKS,
    MATH_WARPS,
    Q_BYTES,
    STAGE_BYTES,
    STAGES,
    THREADS,
    TILE_M,
    TILE_N,
)
from dsv4lib.ops.mla_decode.sm90.load import Ring, Sources, Work

LOG2_E = 1.4426950408889634


class MlaDecode(Attend):
    """MLA decode on Hopper. Options as `Config`, a role of the module docstring a base class."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQNope: cute.Tensor,
        mQPe: cute.Tensor,
        mCache: cute.Tensor,
        mLens: cute.Tensor,
        mTable: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        v_scale: Float32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Host side: the launch.

        Args:
            mQNope, mQPe: [B, H, 512] and [B, H, 64].
            mCache: [P, page, 576].
            mLens: int32 [B]. mTable: int32 [B, N].
            mO: [B, H, 512]; partial: fp32 [splits, B, H, 512].
            mLse: fp32 [B, H]; partial: [splits, B, H].
            scale: of the dot products. v_scale: of O.
            splits: of the tokens; one unless partial.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, Q_BYTES], SMEM_ALIGN]
            tiles: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * STAGE_BYTES], SMEM_ALIGN]
            row_max: cute.struct.MemRange[Float32, STAGES * TILE_M]
            full: cute.struct.MemRange[cutlass.Int64, STAGES * CHUNKS]
            empty: cute.struct.MemRange[cutlass.Int64, STAGES * 2]
            weighed: cute.struct.MemRange[cutlass.Int64, STAGES]
            q_full: cute.struct.MemRange[cutlass.Int64, 1]

        self.storage = Storage
        sources = self.sources(mQNope, mQPe, mCache)
        self.kernel(sources, mLens, mTable, Outputs(mO, mLse), scale * LOG2_E, v_scale, splits).launch(
            grid=(cute.ceil_div(mQNope.shape[1], TILE_M), splits, mQNope.shape[0]),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        sources: Sources,
        mLens: cute.Tensor,
        mTable: cute.Tensor,
        outputs: Outputs,
        scale_log2: Float32,
        v_scale: Float32,
        splits: Int32,
    ):
        """Set-up shared by all warps, then one role each."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        ring = Ring(
            storage.q.data_ptr().toint(),
            storage.tiles.data_ptr().toint(),
            storage.q_full.data_ptr(),
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.weighed.data_ptr(),
        )
        if tidx == 0:
            cute.arch.mbarrier_init(ring.q_full, self.q_producers)
            for i in cutlass.range_constexpr(STAGES * CHUNKS):
                cute.arch.mbarrier_init(ring.full + i, self.producers)
            for i in cutlass.range_constexpr(STAGES * 2):
                cute.arch.mbarrier_init(ring.empty + i, MATH_WARPS // 2)
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(ring.weighed + i, MATH_WARPS // 2)
            cute.arch.mbarrier_init_fence()
        if warp == MATH_WARPS:
            self.prefetch_maps(sources)
        cute.arch.barrier(barrier_id=0, number_of_threads=THREADS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        block, split, request = cute.arch.block_idx()
        work = self.work(mLens, mTable, request, block, split, splits)
        if warp >= MATH_WARPS:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if cutlass.const_expr(self.fp8_cache):
                if cutlass.const_expr(not self.fp8_queries):
                    if warp == MATH_WARPS:
                        self.load_q(sources, work, ring)
                self.produce(sources, mTable, work, ring)
            elif warp == MATH_WARPS:
                self.load(sources, mTable, work, ring)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            mO, mLse = outputs
            if cutlass.const_expr(self.partial):
                mO, mLse = mO[split, None, None, None], mLse[split, None, None]
            sMax = storage.row_max.get_tensor(cute.make_layout((TILE_M, STAGES)))
            self.attend(work, ring, sMax, Outputs(mO, mLse), scale_log2, v_scale)

    @cute.jit
    def work(self, mLens: cute.Tensor, mTable: cute.Tensor, request: Int32, block: Int32, split: Int32, splits: Int32):
        """Find the CTA's tiles: splits have equally many, but for the last ones."""
        length = cutlass.min(mLens[request], mTable.shape[1] * self.page)
        tiles = cutlass.max(cute.ceil_div(length, TILE_N), 0)
        share = cute.ceil_div(tiles, splits)
        first = cutlass.min(split * share, tiles)
        return Work(request, block * TILE_M, length, first, cutlass.min(first + share, tiles))
