"""Build an attention kernel on SM100 in three steps. One class, one 128-row tile a CTA, a new idea a stage.

    stage A    S = scale * Q K^T                        the scores, fp32                       out [M, N]
    stage B    O = P V,  P = S (no softmax yet)         two chained MMAs over KV tiles         out [M, D]
    stage C    O = softmax(S) V, lse                    online softmax, O rescaled in TMEM     out [M, D], lse [M]

K and V are the same rows (multi-query attention of DeepSeek-V4): kv [N, D]. Any M and N >= 1; D 64, 128, 192 or 256.

Tile picture (D 128). A CTA owns 128 rows of Q and walks over kv in tiles of 128 rows.

    SMEM                              byte         TMEM: 128 lanes x 512 columns
  +--------------------------------+ 0                0        127 128      255 256        383     511
  | Q   2 chunks x 128 rows x 128 B|              0 +-------------+-------------+--------------+------+
  +--------------------------------+ 32,768         |  S of even  |  S of odd   |  O, fp32     |      |   lane = row
  | KV ring  2 stages x 2 chunks   |                |  tiles      |  tiles      |  128 columns |      |
  +--------------------------------+ 98,304         |  P: columns 0-63 of its S |              |      |
  | mbarriers, TMEM address        |            127 +-------------+-------------+--------------+------+

A chunk is 64 dimensions = one 128-byte row of the swizzle. Read K-major (rows of kv are N) it is the B operand of
Q K^T; read MN-major (dimensions are N, rows of kv are K) the same bytes are the B operand of P V.

P takes the place of S. A softmax thread owns a lane: it holds its whole row of S in registers before it writes the row
of P, half as wide, over it. P is the A operand of the second MMA straight from tensor memory.

Roles (6 warps, 192 threads)

    warps 0-3   softmax   allocate TMEM; a tile: S -> registers, P -> TMEM; store S (A) or O (B, C)
    warp  4     mma       a tile: D / 16 MMAs 128 x 128 x 16 (S), 8 MMAs 128 x D x 16 (O)
    warp  5     load      Q once; a tile: D / 64 boxes of 64 x 128

Pipelines

    q    TMA -> UMMA       1 stage
    kv   TMA -> UMMA       2 stages   empty: commit after the last MMA that reads the tile
    s    UMMA -> softmax   2 stages   full: commit after Q K^T; empty: see p
    p    softmax -> UMMA   2 stages   full: a warp has read S and, in B and C, written P; empty: commit after P V

The tensor pipe executes MMAs in order, so S of tile j + 2 cannot overwrite P of tile j before P V of j has read it.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from dsv4lib.dsl import pipelines, tmem, umma
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS, BudgetRow, whole_atoms
from dsv4lib.errors import ConfigError

TILE_M, TILE_N = 128, 128
CHUNK = 64  # dimensions in one 128-byte swizzle row
CHUNK_BYTES = 128 * CHUNK * 2  # 128 rows of Q or kv
KV_STAGES, S_STAGES = 2, 2
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
SOFTMAX_THREADS = 32 * len(SOFTMAX_WARPS)
THREADS = SOFTMAX_THREADS + 64
TMEM_READY, TMEM_DONE = 1, 2  # named barriers
O_COLUMN = 256
LOG2_E = math.log2(math.e)
STAGES = ("a", "b", "c")
HEAD_DIMS = (64, 128, 192, 256)


class Ladder:
    """Attention step by step; see the module docstring for the picture.

    Args:
        stage: "a", "b" or "c".
        head_dim: D, one of `HEAD_DIMS`.
        dtype: "bf16" or "fp16", the type of Q and kv; O has it too.

    Raises:
        ConfigError: a value that is not one of these.
    """

    def __init__(self, stage: str = "c", head_dim: int = 128, dtype: str = "bf16"):
        if stage not in STAGES:
            raise ConfigError("stage", stage, "one of " + ", ".join(STAGES))
        if head_dim not in HEAD_DIMS:
            raise ConfigError("head_dim", head_dim, "one of " + ", ".join(map(str, HEAD_DIMS)))
        if dtype not in ("bf16", "fp16"):
            raise ConfigError("dtype", dtype, "bf16 or fp16")
        self.stage, self.head_dim, self.dtype = stage, head_dim, dtype
        self.element = cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.chunks = head_dim // CHUNK
        self.tile_bytes = self.chunks * CHUNK_BYTES  # of Q, and of one stage of kv
        # ---- instructions ----
        self.qk_instruction = umma.instruction_descriptor(TILE_M, TILE_N, dtype)
        self.pv_instruction = umma.instruction_descriptor(TILE_M, head_dim, dtype, b_mn_major=True)
        self.k_descriptor = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)  # 8 rows to the next 8
        self.v_descriptor = umma.matrix_descriptor(CHUNK_BYTES, umma.SWIZZLE_ATOM)  # chunk to chunk, 8 rows to 8 rows

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        return f"Ladder({self.stage}, {self.head_dim}, {self.dtype})"

    def buffers(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of what is in SMEM before the mbarriers, in order."""
        return [("Q", self.tile_bytes), *((f"kv {i}", self.tile_bytes) for i in range(KV_STAGES))]

    def barriers(self) -> list[str]:
        """Names of the mbarriers (8 bytes each), in order."""
        pipelines = (("Q", 1), ("kv", KV_STAGES), ("S", S_STAGES), ("P", S_STAGES))
        return [f"{name} {what} {i}" for name, n in pipelines for what in ("full", "empty") for i in range(n)]

    def budget(self) -> list[BudgetRow]:
        """Compute shared memory, tensor memory and threads of one CTA."""
        data, control = sum(size for _, size in self.buffers()), 8 * len(self.barriers()) + 4
        rows = f"128 rows x {self.head_dim} x 2 B"
        columns = O_COLUMN + (0 if self.stage == "a" else self.head_dim)
        return [
            BudgetRow("SMEM: Q", self.tile_bytes, SMEM_LIMIT, "B", rows),
            BudgetRow("SMEM: kv ring", KV_STAGES * self.tile_bytes, SMEM_LIMIT, "B", f"{KV_STAGES} stages x {rows}"),
            BudgetRow("SMEM: control", control, SMEM_LIMIT, "B", f"{len(self.barriers())} mbarriers + TMEM address"),
            BudgetRow("SMEM: total", whole_atoms(data + control), SMEM_LIMIT, "B", "sum, up to a multiple of 1024 B"),
            BudgetRow("TMEM: S and P", O_COLUMN, TMEM_COLUMNS, "columns", f"{S_STAGES} tiles x {TILE_N}; P over S"),
            BudgetRow("TMEM: used", columns, TMEM_COLUMNS, "columns", "S" if self.stage == "a" else "S + O, fp32"),
            BudgetRow("threads", THREADS, 1024, "threads", "4 softmax + 1 MMA + 1 load warp"),
        ]

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mKV: cute.Tensor, mOut: cute.Tensor, mLse: Any, scale: Float32):
        """Host side: TMA atoms and the launch.

        Args:
            mQ: [M, D].
            mKV: [N, D].
            mOut: stage A [M, N] fp32; B, C [M, D] in ``dtype``.
            mLse: [M] fp32 in stage C, else None.
            scale: of the dot products.
        """
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        box = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((128, CHUNK), stride=(CHUNK, 1))
        )
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, mQ, box, (TILE_M, CHUNK))
        tma_kv, gKV = cpasync.make_tiled_tma_atom(load, mKV, box, (TILE_N, CHUNK))

        @cute.struct
        class Storage:
            sQ: cute.struct.Align[cute.struct.MemRange[self.element, self.tile_bytes // 2], umma.SWIZZLE_ATOM]
            sKV: cute.struct.Align[
                cute.struct.MemRange[self.element, KV_STAGES * self.tile_bytes // 2], umma.SWIZZLE_ATOM
            ]
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * KV_STAGES]
            s_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            tmem_address: cutlass.Int32

        self.storage = Storage
        grid = (cute.ceil_div(mQ.shape[0], TILE_M), 1, 1)
        self.kernel(tma_q, gQ, tma_kv, gKV, mOut, mLse, scale).launch(grid=grid, block=(THREADS, 1, 1))

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,  # (M, D) TMA coordinates
        tma_kv: cute.CopyAtom,
        mKV: cute.Tensor,  # (N, D) TMA coordinates
        mOut: cute.Tensor,
        mLse: Any,
        scale: Float32,
    ):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        q = pipelines.tma_to_umma(1, self.tile_bytes, storage.q_barriers.data_ptr())
        kv = pipelines.tma_to_umma(KV_STAGES, self.tile_bytes, storage.kv_barriers.data_ptr())
        s = pipelines.umma_to_warps(S_STAGES, len(SOFTMAX_WARPS), storage.s_barriers.data_ptr())
        p = pipelines.warps_to_umma(S_STAGES, len(SOFTMAX_WARPS), storage.p_barriers.data_ptr())
        allocator = tmem.allocator(storage.tmem_address.ptr, TMEM_READY, SOFTMAX_THREADS + 32, SOFTMAX_WARPS[0])
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        rows = mKV.shape[0]
        if warp == LOAD_WARP:
            self.load(tma_q, mQ, tma_kv, mKV, storage, q, kv)
        elif warp == MMA_WARP:
            sQ, sKV = storage.sQ.data_ptr().toint(), storage.sKV.data_ptr().toint()
            self.mma(sQ, sKV, allocator, q, kv, s, p, cute.ceil_div(rows, TILE_N))
        else:
            self.softmax(mOut, mLse, allocator, s, p, scale, rows)

    @cute.jit
    def load(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_kv: cute.CopyAtom,
        mKV: cute.Tensor,
        storage: Any,
        q: pipeline.PipelineTmaUmma,
        kv: pipeline.PipelineTmaUmma,
    ):
        """Load Q once, then a ring of kv tiles, by one warp. One box of 64 dimensions comes after the other."""
        block, _, _ = cute.arch.block_idx()
        swizzle = cute.make_swizzle(3, 4, 3)
        shape = (128, CHUNK, self.chunks)  # (row, dimension, chunk)
        stride = (CHUNK, 1, 128 * CHUNK)
        sQ = storage.sQ.get_tensor(cute.make_layout(shape, stride=stride), swizzle=swizzle)
        ring = cute.make_layout((*shape, KV_STAGES), stride=(*stride, 128 * CHUNK * self.chunks))
        sKV = storage.sKV.get_tensor(ring, swizzle=swizzle)
        gQ = cute.local_tile(mQ, (TILE_M, CHUNK), (block, None))  # (128, 64, chunks)
        gKV = cute.local_tile(mKV, (TILE_N, CHUNK), (None, None))  # (128, 64, tiles, chunks)
        whole = cute.make_layout(1)  # no multicast
        tQsQ, tQgQ = cpasync.tma_partition(tma_q, 0, whole, cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2))
        tKsK, tKgK = cpasync.tma_partition(tma_kv, 0, whole, cute.group_modes(sKV, 0, 2), cute.group_modes(gKV, 0, 2))

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        q.producer_acquire(state)
        for chunk in cutlass.range_constexpr(self.chunks):
            cute.copy(tma_q, tQgQ[None, chunk], tQsQ[None, chunk], tma_bar_ptr=q.producer_get_barrier(state))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, KV_STAGES)
        for tile in cutlass.range(cute.size(gKV, mode=[2]), unroll=1):
            kv.producer_acquire(state)
            for chunk in cutlass.range_constexpr(self.chunks):
                source, target = self.kv_box(tKgK, tile, chunk), tKsK[None, chunk, state.index]
                cute.copy(tma_kv, source, target, tma_bar_ptr=kv.producer_get_barrier(state))
            state.advance()
        kv.producer_tail(state)

    def kv_box(self, tKgK: cute.Tensor, tile: Int32, chunk: int) -> cute.Tensor:
        """Return the box of a tile and a chunk.

        ``tKgK`` is (box, tiles, chunks), both left free by `local_tile`.
        """
        return tKgK[None, tile, chunk]

    @cute.jit
    def mma(
        self,
        sQ: Int32,
        sKV: Int32,
        allocator: memory.TmemAllocator,
        q: pipeline.PipelineTmaUmma,
        kv: pipeline.PipelineTmaUmma,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        tiles: Int32,
    ):
        """Run the MMA warp. S of tile j + 1 comes before P V of tile j, so that the softmax of a tile overlaps MMAs."""
        allocator.wait_for_alloc()
        base = allocator.retrieve_ptr(Float32).toint()
        self.wait_for_q(q)
        kv_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, KV_STAGES)
        kv_release_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, KV_STAGES)
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        for tile in cutlass.range(tiles + 1, unroll=1):
            if tile < tiles:
                kv.consumer_wait(kv_state)
                umma.fence_after_thread_sync()
                # S = Q @ K^T
                self.mma_qk(base + s_state.index * TILE_N, sQ, sKV + kv_state.index * self.tile_bytes)
                s.producer_commit(s_state)
                kv_state.advance()
                s_state.advance()
            if tile > 0:
                p.consumer_wait(p_state)
                umma.fence_after_thread_sync()
                # O += P @ V
                if cutlass.const_expr(self.stage != "a"):
                    self.mma_pv(base, p_state.index * TILE_N, sKV + kv_release_state.index * self.tile_bytes, tile > 1)
                kv.consumer_release(kv_release_state)
                p.consumer_release(p_state)
                kv_release_state.advance()
                p_state.advance()

    @cute.jit
    def wait_for_q(self, q: pipeline.PipelineTmaUmma):
        """Wait until all of Q is in shared memory."""
        q.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))

    @cute.jit
    def mma_qk(self, d: Int32, sQ: Int32, stage: Int32):
        """Issue S = Q @ K^T: 16 dimensions an instruction. The first overwrites what the slot held."""
        with cute.arch.elect_one():
            for chunk in cutlass.range_constexpr(self.chunks):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    offset = chunk * CHUNK_BYTES + k * 32
                    a, b = umma.at(self.k_descriptor, sQ + offset), umma.at(self.k_descriptor, stage + offset)
                    umma.mma(d, a, b, self.qk_instruction, chunk + k > 0)

    @cute.jit
    def mma_pv(self, base: Int32, slot: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """Issue O += P @ V: 16 rows of kv an instruction. P is in the columns of S; the first tile overwrites O."""
        with cute.arch.elect_one():
            for k in cutlass.range_constexpr(TILE_N // 16):
                b = umma.at(self.v_descriptor, stage + k * (16 * 128))
                add = accumulate if k == 0 else cutlass.Boolean(True)
                umma.mma(base + O_COLUMN, base + slot + k * 8, b, self.pv_instruction, add)

    @cute.jit
    def softmax(
        self,
        mOut: cute.Tensor,
        mLse: Any,
        allocator: memory.TmemAllocator,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        scale: Float32,
        rows: Int32,
    ):
        """Run the softmax warps. Thread t owns row t of the tile, all its scores and its row of O."""
        allocator.allocate(TMEM_COLUMNS)
        allocator.relinquish_alloc_permit()
        allocator.wait_for_alloc()
        address = allocator.retrieve_ptr(Float32)
        lane, _, _ = cute.arch.thread_idx()
        s_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        p_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        row_max, row_sum = -Float32.inf, Float32(0.0)
        for tile in cutlass.range(cute.ceil_div(rows, TILE_N), unroll=1):
            s.consumer_wait(s_state)
            umma.fence_after_thread_sync()
            column = s_state.index * TILE_N
            if cutlass.const_expr(self.stage == "a"):
                self.store_s(address, column, mOut, tile, lane, scale)
            elif cutlass.const_expr(self.stage == "b"):
                rS = self.load_s(address, column, lane)
                self.store_p(rS, address, column, lane, scale, Float32(0.0))
            else:
                rS = self.load_s(address, column, lane)
                tile_max = self.tile_row_max(rS, rows - tile * TILE_N, scale)
                new_max = cute.arch.fmax(row_max, tile_max)
                # O, row_sum *= acc_scale
                acc_scale = cute.math.exp2(row_max - new_max, fastmath=True)
                if tile > 0:
                    self.wait_for_o(p, p_state)
                    self.rescale(address, lane, acc_scale)
                row_max = new_max
                # P = exp2(S - row_max)
                row_sum = row_sum * acc_scale + self.store_p(rS, address, column, lane, scale * LOG2_E, row_max)
            umma.fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                p.producer_commit(p_state)
            s_state.advance()
            p_state.advance()

        if cutlass.const_expr(self.stage != "a"):
            self.wait_for_o(p, p_state)
            self.epilogue(mOut, mLse, address, lane, row_max, row_sum)
        pipeline.NamedBarrier(TMEM_DONE, SOFTMAX_THREADS).arrive_and_wait()
        allocator.free(address)

    @cute.jit
    def load_s(self, address: cute.Pointer, column: Int32, lane: Int32):
        """Load 128 scores, not scaled yet."""
        rS = cute.make_rmem_tensor((32, 4), Float32)
        for i in cutlass.range_constexpr(4):
            tmem.load(address, column + 32 * i, lane, rS[None, i])
        cute.arch.fence_view_async_tmem_load()
        return rS

    @cute.jit
    def store_s(
        self, address: cute.Pointer, column: Int32, mOut: cute.Tensor, tile: Int32, lane: Int32, scale: Float32
    ):
        """Store the row of S to global memory (stage A), 32 columns at a time.

        As far as there is one.
        """
        block, _, _ = cute.arch.block_idx()
        row = block * TILE_M + lane
        rS = cute.make_rmem_tensor(tmem.COLUMNS, Float32)
        for i in cutlass.range(TILE_N // tmem.COLUMNS, unroll=1):
            tmem.load(address, column + tmem.COLUMNS * i, lane, rS)
            cute.arch.fence_view_async_tmem_load()
            first = tile * TILE_N + tmem.COLUMNS * i
            for j in cutlass.range_constexpr(tmem.COLUMNS):
                if row < mOut.shape[0] and first + j < mOut.shape[1]:
                    mOut[row, first + j] = rS[j] * scale
            cute.arch.sync_warp()  # the next tcgen05.ld needs the warp converged

    @cute.jit
    def tile_row_max(self, rS: cute.Tensor, left: Int32, scale: Float32):
        """Return the largest score of the row, in log2.

        Rows of kv past the end become -inf.
        """
        if left < TILE_N:
            for j in cutlass.range_constexpr(TILE_N):
                rS[j] = cutlass.select_(j < left, rS[j], -Float32.inf)
        tile_max = rS.load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        return tile_max * (scale * LOG2_E)

    @cute.jit
    def store_p(
        self, rS: cute.Tensor, address: cute.Pointer, column: Int32, lane: Int32, scale: Float32, row_max: Float32
    ):
        """Store P over the first 64 columns of S; return the sum of the row's P.

        P has two values to a column.
        """
        rP = cute.make_rmem_tensor((TILE_N // 2, 2), self.element)
        p = rS.load() * scale
        row_sum = Float32(0.0)
        if cutlass.const_expr(self.stage == "c"):
            p = cute.math.exp2(p - row_max, fastmath=True)
            row_sum = p.reduce(cute.ReductionOp.ADD, row_sum, 0)
        rP.store(p.reshape((TILE_N // 2, 2)).to(self.element))
        for i in cutlass.range_constexpr(2):
            tmem.store(address, column + 32 * i, lane, cute.recast_tensor(rP[None, i], Float32))
        cute.arch.fence_view_async_tmem_store()
        return row_sum

    @cute.jit
    def wait_for_o(self, p: pipeline.PipelineAsyncUmma, p_state: pipeline.PipelineState):
        """Wait until P V of the tile before ``p_state`` is done. Its slot of P is free again."""
        before = p_state.clone()
        before.advance()
        p.producer_acquire(before)
        umma.fence_after_thread_sync()

    @cute.jit
    def rescale(self, address: cute.Pointer, lane: Int32, acc_scale: Float32):
        """Rescale O *= acc_scale, the row of a thread."""
        rO = cute.make_rmem_tensor(32, Float32)
        for column in cutlass.range(O_COLUMN, O_COLUMN + self.head_dim, 32, unroll=1):
            tmem.load(address, column, lane, rO)
            cute.arch.fence_view_async_tmem_load()
            rO.store(rO.load() * acc_scale)
            tmem.store(address, column, lane, rO)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def epilogue(
        self, mOut: cute.Tensor, mLse: Any, address: cute.Pointer, lane: Int32, row_max: Float32, row_sum: Float32
    ):
        """Store O to global memory; stage C divides by row_sum and writes the log-sum-exp."""
        block, _, _ = cute.arch.block_idx()
        row = block * TILE_M + lane
        o_scale = Float32(1.0)
        if cutlass.const_expr(self.stage == "c"):
            o_scale = cute.arch.rcp_approx(row_sum)
        rO = cute.make_rmem_tensor(32, Float32)
        rOut = cute.make_rmem_tensor((8, 4), self.element)
        for i in cutlass.range(self.head_dim // 32, unroll=1):
            tmem.load(address, O_COLUMN + 32 * i, lane, rO)
            cute.arch.fence_view_async_tmem_load()
            rOut.store((rO.load() * o_scale).reshape((8, 4)).to(self.element))
            if row < mOut.shape[0]:
                gO = cute.local_tile(mOut[row, None], (32,), (i,))
                cute.autovec_copy(rOut, cute.logical_divide(gO, (8,)))
            cute.arch.sync_warp()
        if cutlass.const_expr(self.stage == "c"):
            if row < mOut.shape[0]:
                mLse[row] = (row_max + cute.math.log2(row_sum)) * math.log(2.0)
