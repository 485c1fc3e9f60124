"""Inject one fault into `GemmTile` at a time.

They are of those that cost days on real kernels and compile without a word.

They exist to show what finds them. Each differs from `sm100.GemmTile` in the line marked WRONG.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from dsv4lib.ops.gemm_tile.sm100 import GemmTile


class PinnedTile(GemmTile):
    """A sliced TMA partition that keeps a fixed K tile: every step loads the first box of A."""

    @cute.jit
    def load(
        self,
        tma_a: cute.CopyAtom,
        tCgA: cute.Tensor,
        sA: cute.Tensor,
        tma_b: cute.CopyAtom,
        tCgB: cute.Tensor,
        sB: cute.Tensor,
        ab_producer: pipeline.PipelineProducer,
        k_steps: cutlass.Int32,
    ):
        """Load warp; see `GemmTile.load`."""
        whole = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, whole, cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, whole, cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3))
        for _ in cutlass.range(k_steps, unroll=1):
            free = ab_producer.acquire_and_advance()
            cute.copy(tma_a, tAgA[None, 0], tAsA[None, free.index], tma_bar_ptr=free.barrier)  # WRONG: free.count
            cute.copy(tma_b, tBgB[None, free.count], tBsB[None, free.index], tma_bar_ptr=free.barrier)
        ab_producer.tail()


class FirstAccumulates(GemmTile):
    """The first MMA adds to whatever tensor memory held before."""

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        tmem: memory.TmemAllocator,
        acc_layout: cute.Layout,
        ab_consumer: pipeline.PipelineConsumer,
        acc_producer: pipeline.PipelineProducer,
        k_steps: cutlass.Int32,
    ):
        """MMA warp; see `GemmTile.mma`."""
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tmem.wait_for_alloc()
        tCtAcc = cute.make_tensor(tmem.retrieve_ptr(self.acc_type), acc_layout)
        acc = acc_producer.acquire_and_advance()
        tiled_mma.set(tcgen05.Field.ACCUMULATE, True)  # WRONG: False
        for _ in cutlass.range(k_steps, unroll=1):
            full = ab_consumer.wait_and_advance()
            for k_block in cutlass.range_constexpr(self.tile_k // self.mma_k):
                at = (None, None, k_block, full.index)
                cute.gemm(tiled_mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
            full.release()
        acc.commit()


class ShiftedColumns(GemmTile):
    """The MMA writes 32 columns further right than the epilogue reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tmem_columns *= 2  # room for the shift

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        tmem: memory.TmemAllocator,
        acc_layout: cute.Layout,
        ab_consumer: pipeline.PipelineConsumer,
        acc_producer: pipeline.PipelineProducer,
        k_steps: cutlass.Int32,
    ):
        """MMA warp; see `GemmTile.mma`."""
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tmem.wait_for_alloc()
        tCtAcc = cute.make_tensor(tmem.retrieve_ptr(self.acc_type) + 32, acc_layout)  # WRONG: + 0
        acc = acc_producer.acquire_and_advance()
        tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(k_steps, unroll=1):
            full = ab_consumer.wait_and_advance()
            for k_block in cutlass.range_constexpr(self.tile_k // self.mma_k):
                at = (None, None, k_block, full.index)
                cute.gemm(tiled_mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
            full.release()
        acc.commit()


class ShortAllocation(GemmTile):
    """Half of the columns that the accumulator covers are allocated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tmem_columns = max(32, self.tmem_columns // 2)  # WRONG: tile_n columns are used


class EarlyRelease(GemmTile):
    """A stage is handed back before the MMAs that read it are issued."""

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        tmem: memory.TmemAllocator,
        acc_layout: cute.Layout,
        ab_consumer: pipeline.PipelineConsumer,
        acc_producer: pipeline.PipelineProducer,
        k_steps: cutlass.Int32,
    ):
        """MMA warp; see `GemmTile.mma`."""
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
        tmem.wait_for_alloc()
        tCtAcc = cute.make_tensor(tmem.retrieve_ptr(self.acc_type), acc_layout)
        acc = acc_producer.acquire_and_advance()
        tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(k_steps, unroll=1):
            full = ab_consumer.wait_and_advance()
            full.release()  # WRONG: after the MMAs
            for k_block in cutlass.range_constexpr(self.tile_k // self.mma_k):
                at = (None, None, k_block, full.index)
                cute.gemm(tiled_mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
        acc.commit()


FAULTS = {
    "pinned_tile": PinnedTile,
    "first_accumulates": FirstAccumulates,
    "shifted_columns": ShiftedColumns,
    "short_allocation": ShortAllocation,
    "early_release": EarlyRelease,
}
