"""Compute C = A @ B^T with one output tile a CTA on SM100. This is the smallest complete Blackwell GEMM of the lab.

    C[m, n] = sum_k A[m, k] * B[n, k]      A [M, K], B [N, K]: fp16 or bf16, row-major; C [M, N]: fp32 or A's type

Products are exact and sums are kept in fp32 by the tensor core. Any M, N, K >= 1. Every row must start on a 16-byte
boundary (TMA's rule for strides): a ragged K or N needs a padded row stride, not padded data.

Tile picture (bf16, tile_n 128, 4 stages; `GemmTile.budget` computes the same numbers for any configuration)

    grid (ceil(M / 128), ceil(N / tile_n)): CTA (i, j) owns rows 128 i .. and columns tile_n j .. of C
    K is walked in steps of 64 elements = 128 bytes = one row of the 128-byte swizzle; a step is 4 MMAs of K 16

        one K step                       SMEM                   byte         TMEM: 128 lanes x 512 columns
      +------------+        +-------------------------------+ 0                 0           127 128       511
      | A 128 x 64 |--TMA-->| sA  stages 0..3   4 x 16384 B |                 0 +--------------+------------+
      +------------+        +-------------------------------+ 65536           . | C tile, fp32 | not        |
      | B  n  x 64 |--TMA-->| sB  stages 0..3   4 x 16384 B |-----UMMA------->. | lane = row   | allocated  |
      +------------+        +-------------------------------+ 131072          . | column = n   |            |
                            | 10 mbarriers, TMEM address    |               127 +--------------+------------+
                            +-------------------------------+ 131156, and up to 132096 to keep 1024-byte alignment

Roles (6 warps, 192 threads)

    warps 0-3   epilogue   allocate TMEM; wait for the accumulator; TMEM -> registers -> C (thread t owns row t)
    warp  4     mma        a K step: wait until the stage is full, issue 4 tcgen05.mma, hand the stage back
    warp  5     load       a K step: wait until the stage is empty, announce its bytes, issue two TMA boxes

Pipelines (an mbarrier "full" and an mbarrier "empty" a stage)

    ab    TMA -> UMMA        4 stages   full: both boxes have landed (bytes counted)      empty: tcgen05.commit
    acc   UMMA -> epilogue   1 stage    full: tcgen05.commit after the last K step        empty: never waited for

Ragged edges. TMA fills what lies outside A and B with zeros, so a partial K step adds nothing and needs no code. Rows
and columns outside C are computed from those zeros and not stored: one row test a thread, one column test a chunk of
32, and a test an element only in the chunk where C ends.

What limits it. Nothing overlaps the prologue (barriers, TMEM) and the epilogue of a tile but other CTAs, and a thread
stores a row of its own, so the 16-byte stores of a warp touch 32 rows. With few K steps launch and store dominate; with
many the tensor core does, fed at (128 + tile_n) x 128 bytes a step: tile_n 256 moves 3/4 of the bytes a flop of tile_n
128. The kernels of the model keep these roles and add persistence, a second accumulator and a store through SMEM.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers as sm100_utils

from dsv4lib.dsl.budget import SMEM_ALIGN, SMEM_LIMIT, TMEM_COLUMNS, BudgetRow
from dsv4lib.ops.gemm_tile.tile import TILE_M, TileGemm

EPILOGUE_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
THREADS = 32 * (len(EPILOGUE_WARPS) + 2)
TMEM_READY, TMEM_DONE = 1, 2  # named barriers: TMEM is allocated; all epilogue warps have read it (0 is __syncthreads)


class GemmTile(TileGemm):
    """Compute C = A @ B^T with one 128 x tile_n tile a CTA.

    See the module docstring for the picture.

    Args:
        in_dtype: "fp16" or "bf16", the type of A and B.
        out_dtype: "fp32" or the same as ``in_dtype``.
        tile_n: columns of the tile = N of the MMA; a multiple of 16 in 16..256.
        stages: depth of the A/B ring in SMEM; 1 or more, as many as fit.

    Raises:
        ConfigError: a size the hardware does not have, or a ring that does not fit SMEM.
    """

    outputs = {"fp16": ("fp32", "fp16"), "bf16": ("fp32", "bf16")}
    columns, columns_why = (16, 256), "N of a 1-CTA tcgen05.mma with M 128"

    def __init__(self, in_dtype: str = "bf16", out_dtype: str = "fp32", tile_n: int = 128, stages: int = 4):
        super().__init__(in_dtype, out_dtype, tile_n, stages)
        self.mma_k = 256 // self.ab_type.width  # every tcgen05.mma eats 32 bytes of K
        self.epilogue_n = 32 if tile_n % 32 == 0 else 16  # columns a thread holds in registers at once
        self.tmem_columns = max(32, 1 << (tile_n - 1).bit_length())  # allocation: a power of two of at least 32

    def _extra_bytes(self, stages: int) -> int:
        """Full and empty mbarriers (8 B each) of both pipelines, and the TMEM address."""
        return 16 * stages + 16 + 4

    def buffers(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM before the mbarriers, in order."""
        sizes = (("A", self.a_stage_bytes), ("B", self.b_stage_bytes))
        return [(f"{name} {stage}", size) for name, size in sizes for stage in range(self.stages)]

    def barriers(self) -> list[str]:
        """Names of the mbarriers (8 bytes each), in order."""
        return [*(f"{what} {i}" for what in ("full", "empty") for i in range(self.stages)), "acc full", "acc empty"]

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        s, n, control = self.stages, self.tile_n, self._extra_bytes(self.stages)
        why, columns = f"2 x ({s} + 1) mbarriers x 8 B + TMEM address 4 B", f"{n} fp32, up to a power of two"
        return self._budget(
            [BudgetRow("SMEM: control", control, SMEM_LIMIT, "B", why)],
            [
                BudgetRow("TMEM: C tile", self.tmem_columns, TMEM_COLUMNS, "columns", columns),
                BudgetRow("threads", THREADS, 1024, "threads", "4 epilogue + 1 MMA + 1 load warp"),
            ],
        )

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
        """Host side: build the MMA, the SMEM layouts and the TMA atoms, and launch.

        Args:
            mA: [M, K], stride (lda, 1).
            mB: [N, K], stride (ldb, 1).
            mC: [M, N], stride (ldc, 1).
        """
        tiled_mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                self.ab_type,
                self.acc_type,
                (TILE_M, self.tile_n, self.mma_k),
                tcgen05.CtaGroup.ONE,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        a_layout = sm100_utils.make_smem_layout_a(tiled_mma, self.tile_mnk, self.ab_type, self.stages)
        b_layout = sm100_utils.make_smem_layout_b(tiled_mma, self.tile_mnk, self.ab_type, self.stages)
        acc = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tile_mnk[:2]))
        self.layout_text = {  # for figures and checks: the layouts this kernel was compiled with
            "A": cute.pretty_str(cute.slice_(a_layout, (None, None, None, 0))),
            "B": cute.pretty_str(cute.slice_(b_layout, (None, None, None, 0))),
            "C": cute.pretty_str(acc.layout),
        }
        one_stage = [0, 1, 2]
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        tma_a, gA = cute.nvgpu.make_tiled_tma_atom_A(
            load, mA, cute.select(a_layout, mode=one_stage), self.tile_mnk, tiled_mma
        )
        tma_b, gB = cute.nvgpu.make_tiled_tma_atom_B(
            load, mB, cute.select(b_layout, mode=one_stage), self.tile_mnk, tiled_mma
        )

        @cute.struct
        class Storage:
            sA: cute.struct.Align[cute.struct.MemRange[self.ab_type, cute.cosize(a_layout)], SMEM_ALIGN]
            sB: cute.struct.Align[cute.struct.MemRange[self.ab_type, cute.cosize(b_layout)], SMEM_ALIGN]
            ab_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            acc_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            tmem_address: cutlass.Int32

        self.storage = Storage
        grid = cute.ceil_div((*mC.shape, 1), (TILE_M, self.tile_n, 1))
        self.kernel(tiled_mma, tma_a, gA, tma_b, gB, mC, a_layout, b_layout).launch(grid=grid, block=(THREADS, 1, 1))

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,  # (M, K) TMA coordinates
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,  # (N, K) TMA coordinates
        mC: cute.Tensor,  # (M, N)
        a_layout: cute.ComposedLayout,  # (MMA, MMA_M, MMA_K, STAGE)
        b_layout: cute.ComposedLayout,  # (MMA, MMA_N, MMA_K, STAGE)
    ):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m_tile, n_tile, _ = cute.arch.block_idx()
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)

        storage = memory.SmemAllocator().allocate(self.storage)
        sA = storage.sA.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.sB.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        epilogue = pipeline.CooperativeGroup(pipeline.Agent.Thread, 32 * len(EPILOGUE_WARPS))
        ab_producer, ab_consumer = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages,
            producer_group=one,
            consumer_group=one,
            tx_count=self.a_stage_bytes + self.b_stage_bytes,
            barrier_storage=storage.ab_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=epilogue,
            barrier_storage=storage.acc_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        tmem = memory.TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_READY, 32 * (len(EPILOGUE_WARPS) + 1)),
            allocator_warp_id=EPILOGUE_WARPS[0],
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        coord = (m_tile, n_tile, None)
        thr_mma = tiled_mma.get_slice(0)
        gA = cute.local_tile(mA, self.tile_mnk, coord, proj=(1, None, 1))  # (tile_m, tile_k, k steps)
        gB = cute.local_tile(mB, self.tile_mnk, coord, proj=(None, 1, 1))  # (tile_n, tile_k, k steps)
        tCgA, tCgB = thr_mma.partition_A(gA), thr_mma.partition_B(gB)  # (MMA, MMA_MN, MMA_K, k steps)
        k_steps = cute.size(gA, mode=[2])
        # (MMA, MMA_M, MMA_N): lane << 16 | column of every element of the C tile
        acc_layout = tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(self.tile_mnk[:2])).layout

        if warp == LOAD_WARP:
            self.load(tma_a, tCgA, sA, tma_b, tCgB, sB, ab_producer, k_steps)
        elif warp == MMA_WARP:
            self.mma(tiled_mma, sA, sB, tmem, acc_layout, ab_consumer, acc_producer, k_steps)
        else:
            self.epilogue(mC, (m_tile, n_tile), tmem, acc_layout, acc_consumer)

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
        """Fill the ring, one A box and one B box a K step, by one warp. It then waits until the last stage was read."""
        whole = cute.make_layout(1)  # no multicast: this CTA takes the whole box
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, whole, cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, whole, cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3))
        for _ in cutlass.range(k_steps, unroll=1):
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
        tmem: memory.TmemAllocator,
        acc_layout: cute.Layout,
        ab_consumer: pipeline.PipelineConsumer,
        acc_producer: pipeline.PipelineProducer,
        k_steps: cutlass.Int32,
    ):
        """MMA warp: one thread issues. The tensor core reads SMEM and adds into TMEM on its own."""
        tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)  # SMEM descriptors, not data
        tmem.wait_for_alloc()
        tCtAcc = cute.make_tensor(tmem.retrieve_ptr(self.acc_type), acc_layout)
        acc = acc_producer.acquire_and_advance()
        tiled_mma.set(tcgen05.Field.ACCUMULATE, False)  # the first MMA overwrites whatever TMEM held
        for _ in cutlass.range(k_steps, unroll=1):
            full = ab_consumer.wait_and_advance()
            for k_block in cutlass.range_constexpr(self.tile_k // self.mma_k):
                at = (None, None, k_block, full.index)
                cute.gemm(tiled_mma, tCtAcc, tCrA[at], tCrB[at], tCtAcc)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
            full.release()
        acc.commit()

    @cute.jit
    def epilogue(
        self,
        mC: cute.Tensor,
        tile: tuple[cutlass.Int32, cutlass.Int32],
        tmem: memory.TmemAllocator,
        acc_layout: cute.Layout,
        acc_consumer: pipeline.PipelineConsumer,
    ):
        """Epilogue warps: warp w reads TMEM lanes 32 w .. 32 w + 31; thread t converts and stores row t of the tile."""
        tmem.allocate(self.tmem_columns)
        tmem.relinquish_alloc_permit()
        tmem.wait_for_alloc()
        address = tmem.retrieve_ptr(self.acc_type)
        tCtAcc = cute.make_tensor(address, acc_layout)[(None, None), 0, 0]  # (128, tile_n)
        tidx, _, _ = cute.arch.thread_idx()

        chunk = (TILE_M, self.epilogue_n)
        tAcc = cute.flat_divide(tCtAcc, chunk)  # (128, n, 1, chunks)
        gC = cute.flat_divide(cute.local_tile(mC, self.tile_mnk[:2], tile), chunk)
        load_op = tcgen05.Ld32x32bOp(tcgen05.Repetition(self.epilogue_n))  # lane = thread, column = register
        t2r = tcgen05.make_tmem_copy(cute.make_copy_atom(load_op, self.acc_type), tAcc[None, None, 0, 0])
        thr_t2r = t2r.get_slice(tidx)
        tTR_tAcc = thr_t2r.partition_S(tAcc)  # (T2R, 1, 1, 1, chunks)
        tTR_gC = thr_t2r.partition_D(gC)
        tTR_rAcc = cute.make_rmem_tensor(tTR_gC[None, None, None, 0, 0].shape, self.acc_type)
        tTR_rC = cute.make_rmem_tensor(tTR_rAcc.shape, self.c_type)

        acc_consumer.wait_and_advance()
        row = tile[0] * TILE_M + tidx
        for i in cutlass.range(self.tile_n // self.epilogue_n, unroll=1):
            cute.copy(t2r, tTR_tAcc[None, None, None, 0, i], tTR_rAcc)
            cute.arch.fence_view_async_tmem_load()  # registers are valid only after this wait
            tTR_rC.store(tTR_rAcc.load().to(self.c_type))
            columns = mC.shape[1] - (tile[1] * self.tile_n + i * self.epilogue_n)  # of this chunk, inside C
            if row < mC.shape[0]:
                self.store_row(tTR_rC, tTR_gC[None, None, None, 0, i], columns)
            cute.arch.sync_warp()  # the next tcgen05.ld needs the warp converged
        pipeline.NamedBarrier(TMEM_DONE, 32 * len(EPILOGUE_WARPS)).arrive_and_wait()  # TMEM has been read
        tmem.free(address)

    @cute.jit
    def store_row(self, rC: cute.Tensor, gC: cute.Tensor, columns: cutlass.Int32):
        """Store one thread's chunk of a row in 16-byte vectors. Element by element where C ends inside the chunk."""
        if columns >= self.epilogue_n:
            cute.autovec_copy(rC, gC)
        else:
            for j in cutlass.range_constexpr(self.epilogue_n):
                if j < columns:
                    gC[j] = rC[j]
