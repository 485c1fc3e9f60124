"""Compute C = A @ B^T with one output tile a CTA on SM90. This is the Hopper twin of `sm100.GemmTile`.

    C[m, n] = sum_k A[m, k] * B[n, k]      A [M, K], B [N, K]: fp16, bf16 or e4m3, row-major; C [M, N]: fp32, fp16, bf16

Any M, K >= 1. Every row must start on a 16-byte boundary (TMA's rule for strides): a ragged K needs a padded row
stride, not padded data. Rows of C must fill whole 16-byte units: a TMA store overwrites what lies past a row up to
the next such boundary. Sums of fp16 and bf16 are kept in fp32. For e4m3 Hopper's tensor core keeps 13 fraction bits
below the largest addend of an instruction: long sums are good to about three decimal digits.

Tile picture (bf16, C bf16, tile_n 128, 4 stages; `GemmTile.budget` computes the same numbers for any configuration)

    grid (ceil(M / 128), ceil(N / tile_n)): CTA (i, j) owns rows 128 i .. and columns tile_n j .. of C
    K is walked in steps of 128 bytes = one row of the 128-byte swizzle; a step is 4 wgmma a warpgroup, of K 32 bytes

        one K step                       SMEM                   byte          registers           SMEM            C
      +------------+        +-------------------------------+ 0
      | A 128 x 64 |--TMA-->| sA  stages 0..3   4 x 16384 B |          +------------------+   +---------+
      +------------+        +-------------------------------+ 65536    | warps 0-3: rows  |   | sC, 2   |
      | B  n  x 64 |--TMA-->| sB  stages 0..3   4 x 16384 B |--wgmma-->| 0..63 of C, fp32 |-->| x 16384 |--TMA-->
      +------------+        +-------------------------------+ 131072   | warps 4-7: 64..  |   | B       |
                            | sC, 64 columns a part         |          +------------------+   +---------+
                            | 8 mbarriers                   | 163840
                            +-------------------------------+ 163904, and up to 164864 to keep 1024-byte alignment

Roles (9 warps, 288 threads)

    warps 0-7   mma        a K step: wait until the stage is full, 4 wgmma, hand the stage back; then registers ->
                           SMEM (stmatrix for 16-bit C) -> C by one TMA box for 128 bytes of columns
    warp  8     load       a K step: wait until the stage is empty, announce its bytes, issue two TMA boxes

Pipeline ab: TMA -> wgmma; full: both boxes have landed (bytes counted); empty: one arrival a consumer warp.

Ragged edges. TMA fills what lies outside A and B with zeros and drops units that lie outside C: no test in the code.

What limits it. The wgmmas of a step are waited for before the next is issued; only the other warpgroup covers the gap.
Kernels of the model keep one step in flight, and overlap the epilogue with the next tile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90_utils

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, BudgetRow
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.gemm_tile.tile import TILE_M, TileGemm

WARPGROUPS = 2  # each owns 64 rows of the tile: M of a wgmma
CONSUMER_WARPS, LOAD_WARP = 4 * WARPGROUPS, 4 * WARPGROUPS
THREADS = 32 * (CONSUMER_WARPS + 1)
STORE_READY = 1  # named barrier: all of C's tile is in SMEM (0 is __syncthreads)
STORE_BYTES = 128  # columns of C in one TMA box, in bytes: one row of the swizzle


class GemmTile(TileGemm):
    """Compute C = A @ B^T with one 128 x tile_n tile a CTA.

    See the module docstring for the picture.

    Args:
        in_dtype: "fp16", "bf16" or "e4m3", the type of A and B.
        out_dtype: "fp32" or the input type; of e4m3 "fp32", "bf16" or "fp16".
        tile_n: columns of the tile = N of the wgmma; a multiple of 64 in 64..256.
        stages: depth of the A/B ring in SMEM; 1 or more, as many as fit.

    Raises:
        ConfigError: a size the hardware does not have, or buffers that do not fit SMEM.
    """

    outputs = {"fp16": ("fp32", "fp16"), "bf16": ("fp32", "bf16"), "e4m3": ("fp32", "bf16", "fp16")}
    columns, columns_why = (64, 256), "N of a wgmma, whole 128-byte parts of C"

    def __init__(self, in_dtype: str = "bf16", out_dtype: str = "fp32", tile_n: int = 128, stages: int = 4):
        super().__init__(in_dtype, out_dtype, tile_n, stages)
        self.store_n = STORE_BYTES * 8 // self.c_type.width  # columns of C in one TMA box

    def _c_bytes(self) -> int:
        return TILE_M * self.tile_n * self.c_type.width // 8

    def _extra_bytes(self, stages: int) -> int:
        """C's tile, full and empty mbarriers (8 B each)."""
        return self._c_bytes() + 16 * stages

    def budget(self) -> list[BudgetRow]:
        """Shared memory and threads of one CTA, computed from the configuration."""
        s, why = self.stages, f"{TILE_M} x {self.tile_n} x {self.c_type.width // 8} B"
        return self._budget(
            [
                BudgetRow("SMEM: C tile", self._c_bytes(), SMEM_LIMIT, "B", why),
                BudgetRow("SMEM: control", 16 * s, SMEM_LIMIT, "B", f"2 x {s} mbarriers x 8 B"),
            ],
            [BudgetRow("threads", THREADS, 1024, "threads", f"{CONSUMER_WARPS} MMA + 1 load warp")],
        )

    def launch_args(self, a: Any, b: Any, c: Any) -> tuple:
        """See `TileGemm.launch_args`.

        Raises:
            ArgumentError: as there, and rows of ``c`` that do not end on 16 bytes.
        """
        args = super().launch_args(a, b, c)
        if c.shape[1] * c.element_size() % 16:
            allowed = f"a multiple of {16 // c.element_size()} columns: TMA stores whole 16-byte units"
            raise ArgumentError("c", tuple(c.shape), allowed)
        return args

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
        """Host side: build the MMA, the SMEM layouts and the TMA atoms, and launch.

        Args:
            mA: [M, K], stride (lda, 1).
            mB: [N, K], stride (ldb, 1).
            mC: [M, N], stride (ldc, 1).
        """
        major = OperandMajorMode.K
        tiled_mma = sm90_utils.make_trivial_tiled_mma(
            self.ab_type, self.ab_type, major, major, self.acc_type, (WARPGROUPS, 1, 1), (64, self.tile_n)
        )
        row_major = LayoutEnum.ROW_MAJOR
        a_layout = sm90_utils.make_smem_layout_a(row_major, self.tile_mnk, self.ab_type, self.stages)
        b_layout = sm90_utils.make_smem_layout_b(row_major, self.tile_mnk, self.ab_type, self.stages)
        parts = self.tile_n // self.store_n
        c_part = (TILE_M, self.store_n)
        c_layout = sm90_utils.make_smem_layout_epi(self.c_type, row_major, c_part, parts)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        stage = (None, None, 0)
        tma_a, gA = cpasync.make_tiled_tma_atom(load, mA, cute.slice_(a_layout, stage), (TILE_M, self.tile_k))
        tma_b, gB = cpasync.make_tiled_tma_atom(load, mB, cute.slice_(b_layout, stage), (self.tile_n, self.tile_k))
        tma_c, gC = cpasync.make_tiled_tma_atom(store, mC, cute.slice_(c_layout, stage), c_part)

        @cute.struct
        class Storage:
            sA: cute.struct.Align[cute.struct.MemRange[self.ab_type, cute.cosize(a_layout)], SMEM_ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[self.ab_type, cute.cosize(b_layout)], SMEM_ALIGN]
            sC: cute.struct.Align[cute.struct.MemRange[self.c_type, cute.cosize(c_layout)], SMEM_ALIGN]
            barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]

        self.storage = Storage
        grid = cute.ceil_div((*mC.shape, 1), (TILE_M, self.tile_n, 1))
        kernel = self.kernel(tiled_mma, tma_a, gA, tma_b, gB, tma_c, gC, a_layout, b_layout, c_layout)
        kernel.launch(grid=grid, block=(THREADS, 1, 1))

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,  # (M, K) TMA coordinates
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,  # (N, K) TMA coordinates
        tma_c: cute.CopyAtom,
        mC: cute.Tensor,  # (M, N) TMA coordinates
        a_layout: cute.ComposedLayout,  # (tile_m, tile_k, STAGE)
        b_layout: cute.ComposedLayout,  # (tile_n, tile_k, STAGE)
        c_layout: cute.ComposedLayout,  # (tile_m, store_n, PART)
    ):
        """Set-up shared by all warps, then one role each."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m_tile, n_tile, _ = cute.arch.block_idx()
        if warp_idx == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_c)

        storage = memory.SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sC = storage.sC.get_tensor(c_layout.outer, swizzle=c_layout.inner)
        ab_producer, ab_consumer = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMER_WARPS),
            tx_count=self.a_stage_bytes + self.b_stage_bytes,
            barrier_storage=storage.barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        ).make_participants()
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        coord = (m_tile, n_tile, None)
        gA = cute.local_tile(mA, self.tile_mnk, coord, proj=(1, None, 1))  # (tile_m, tile_k, k steps)
        gB = cute.local_tile(mB, self.tile_mnk, coord, proj=(None, 1, 1))  # (tile_n, tile_k, k steps)
        gC = cute.local_tile(mC, self.tile_mnk[:2], coord[:2])  # (tile_m, tile_n)
        if warp_idx == LOAD_WARP:
            self.load(tma_a, gA, sA, tma_b, gB, sB, ab_producer)
        else:
            acc = self.mma(tiled_mma, sA, sB, ab_consumer, cute.size(gA, mode=[2]))
            self.store(tiled_mma, acc, sC, tma_c, gC, warp_idx)

    @cute.jit
    def load(
        self,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        sA: cute.Tensor,
        tma_b: cute.CopyAtom,
        gB: cute.Tensor,
        sB: cute.Tensor,
        ab_producer: pipeline.PipelineProducer,
    ):
        """Fill the ring, one A box and one B box a K step, by one warp. It then waits until the last stage was read."""
        whole = cute.make_layout(1)  # no multicast: this CTA takes the whole box
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, whole, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, whole, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        for _ in cutlass.range(cute.size(gA, mode=[2]), unroll=1):
            free = ab_producer.acquire_and_advance()
            cute.copy(tma_a, tAgA[None, free.count], tAsA[None, free.index], tma_bar_ptr=free.barrier)
            cute.copy(tma_b, tBgB[None, free.count], tBsB[None, free.index], tma_bar_ptr=free.barrier)
        ab_producer.tail()

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ab_consumer: pipeline.PipelineConsumer,
        k_steps: cutlass.Int32,
    ) -> cute.Tensor:
        """MMA warps: each warpgroup adds its 64 rows in registers. Returns (MMA, MMA_M, MMA_N), fp32."""
        tidx, _, _ = cute.arch.thread_idx()
        thr_mma = tiled_mma.get_slice(tidx)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))  # SMEM descriptors, not data
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C(self.tile_mnk[:2]), self.acc_type)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)  # the first wgmma overwrites whatever the registers held
        for _ in cutlass.range(k_steps, unroll=1):
            full = ab_consumer.wait_and_advance()
            warpgroup.fence()
            for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                at = (None, None, k_block, full.index)
                cute.gemm(tiled_mma, acc, tCrA[at], tCrB[at], acc)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            full.release()
        return acc

    @cute.jit
    def store(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        sC: cute.Tensor,
        tma_c: cute.CopyAtom,
        gC: cute.Tensor,
        warp_idx: cutlass.Int32,
    ):
        """MMA warps: registers -> SMEM, part by part. Then one warp issues a TMA box a part."""
        tidx, _, _ = cute.arch.thread_idx()
        row_major = LayoutEnum.ROW_MAJOR
        order = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.c_type)
        atom = sm90_utils.get_smem_store_op(row_major, self.c_type, self.acc_type)
        r2s = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(order, tiled_mma))
        tRS_sC = r2s.get_slice(tidx).partition_D(sC)  # (R2S, R2S_M, R2S_N, PART)
        tRS_rAcc = r2s.retile(acc)
        rC = cute.make_rmem_tensor(cute.make_layout(tRS_sC.shape[:3]), self.c_type)
        for part in cutlass.range_constexpr(self.tile_n // self.store_n):
            for i in cutlass.range_constexpr(cute.size(rC)):  # a part is contiguous in the accumulators
                rC[i] = self.c_type(tRS_rAcc[part * cute.size(rC) + i])
            cute.copy(r2s, rC, tRS_sC[None, None, None, part])
        cute.arch.fence_proxy("async.shared", space="cta")
        pipeline.NamedBarrier(STORE_READY, 32 * CONSUMER_WARPS).arrive_and_wait()
        if warp_idx == 0:
            parts = cute.zipped_divide(gC, (TILE_M, self.store_n))  # ((tile_m, store_n), (1, PART))
            tCsC, tCgC = cpasync.tma_partition(tma_c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), parts)
            for part in cutlass.range_constexpr(self.tile_n // self.store_n):
                cute.copy(tma_c, tCsC[None, part], tCgC[None, (0, part)])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # SMEM must live until it was read
