"""Attention of DeepSeek-V4 on SM100: all heads of a token against selected entries and window keys, one launch.

    s_j = scale * (q . kv_j)                          j over {selected compressed entries} u {window keys}
    o   = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})        K and V are the same vectors of 512
    lse = ln sum_j e^{s_j}                            without the sink

Source: DSV4 paper eq. 27 (sink in the denominator); `dsv4lib.reference.fmha`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline
from cutlass.cute.nvgpu import tcgen05

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.common import gather, umma

HEAD_DIM = 512
TILE_M = 64  # heads of one token: rows of the MMA
TILE_N = 64  # keys of one KV tile
CHUNK = 64  # head dimensions in one 128-byte swizzle row
CHUNKS = HEAD_DIM // CHUNK
CHUNK_BYTES = TILE_N * CHUNK * 2
STAGE_BYTES = CHUNKS * CHUNK_BYTES
KV_STAGES, S_STAGES, P_STAGES = 3, 2, 2
SMEM_LIMIT = 232_448
SOFTMAX_WARPS, MMA_WARP, LOAD_WARP = (0, 1, 2, 3), 4, 5
SOFTMAX_THREADS = 32 * len(SOFTMAX_WARPS)
THREADS = SOFTMAX_THREADS + 64
TMEM_READY, Q_READY, TMEM_DONE, PAIR = 1, 2, 3, 4  # named barriers; PAIR, PAIR + 1: the two warps of 32 heads
# Columns of tensor memory
O_COLUMN, Q_COLUMN, S_COLUMN = 0, 256, 384
LOG2_E = math.log2(math.e)
RESCALE_LOG2 = 8.0  # O is rescaled only when the row maximum grew by more than 2^8: exact, and rare


@dataclass(frozen=True)
class Keys:
    """Where the keys of a token are. Tensors on the device, in kernel order.

    rows [R, 512]; index [T, K] or None; start [T], length [T].
    """

    rows: Any
    index: Any
    start: Any
    length: Any


class Fmha:
    """One CTA: up to 64 heads of one token."""

    def __init__(self, dtype: str = "bf16", indexed: bool = True, window: bool = True, sink: bool = True):
        if dtype not in ("bf16", "fp16"):
            raise ConfigError("dtype", dtype, "bf16 or fp16")
        self.dtype, self.element = dtype, cutlass.BFloat16 if dtype == "bf16" else cutlass.Float16
        self.indexed, self.window, self.sink = indexed, window, sink
        self.qk_instruction = umma.instruction_descriptor(TILE_M, 2 * TILE_N, dtype)
        self.pv_instruction = umma.instruction_descriptor(TILE_M, 256, dtype, b_mn_major=True)
        self.k_descriptor = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)
        self.p_descriptor = umma.matrix_descriptor(0, umma.SWIZZLE_ATOM)
        self.v_descriptor = umma.matrix_descriptor(CHUNK_BYTES, umma.SWIZZLE_ATOM)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, H, 512]
        mC: cute.Tensor,  # [R, 512] compressed entries
        mI: cute.Tensor,  # [T, K]
        mCLen: cute.Tensor,  # [T]
        mW: cute.Tensor,  # [R2, 512]
        mWStart: cute.Tensor,  # [T]
        mWLen: cute.Tensor,  # [T]
        mSink: cute.Tensor,  # [H]
        mO: cute.Tensor,  # [T, H, 512]
        mLse: cute.Tensor,  # [T, H]
        scale: Float32,
    ):
        """Host side: TMA descriptors of both pools and the launch."""
        atom_c, atom_w = gather.row_atom(mC), gather.row_atom(mW)

        @cute.struct
        class Storage:
            sKV: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, KV_STAGES * STAGE_BYTES], umma.SWIZZLE_ATOM]
            sP: cute.struct.Align[
                cute.struct.MemRange[self.element, P_STAGES * TILE_M * TILE_N], umma.SWIZZLE_ATOM
            ]
            sX: cute.struct.Align[cute.struct.MemRange[Float32, SOFTMAX_THREADS * TILE_N // 2], 16]
            sRow: cute.struct.MemRange[Float32, SOFTMAX_THREADS]
            kv_barriers: cute.struct.MemRange[cutlass.Int64, 2 * KV_STAGES]
            s_barriers: cute.struct.MemRange[cutlass.Int64, 2 * S_STAGES]
            p_barriers: cute.struct.MemRange[cutlass.Int64, 2 * P_STAGES]
            tmem_address: cutlass.Int32

        self.storage = Storage
        grid = (mQ.shape[0], cute.ceil_div(mQ.shape[1], TILE_M), 1)
        self.kernel(mQ, atom_c, mI, mCLen, atom_w, mWStart, mWLen, mSink, mO, mLse, scale * LOG2_E).launch(
            grid=grid, block=(THREADS, 1, 1)
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        atom_c: cute.CopyAtom,
        mI: cute.Tensor,
        mCLen: cute.Tensor,
        atom_w: cute.CopyAtom,
        mWStart: cute.Tensor,
        mWLen: cute.Tensor,
        mSink: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale_log2: Float32,
    ):
        """Set-up shared by all warps, then one role each."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token, head_block, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        warps = pipeline.CooperativeGroup(pipeline.Agent.Thread, len(SOFTMAX_WARPS))
        kv = pipeline.PipelineTmaUmma.create(
            num_stages=KV_STAGES,
            producer_group=one,
            consumer_group=one,
            tx_count=STAGE_BYTES,
            barrier_storage=storage.kv_barriers.data_ptr(),
            defer_sync=True,
        )
        s = pipeline.PipelineUmmaAsync.create(
            num_stages=S_STAGES,
            producer_group=one,
            consumer_group=warps,
            barrier_storage=storage.s_barriers.data_ptr(),
            defer_sync=True,
        )
        p = pipeline.PipelineAsyncUmma.create(
            num_stages=P_STAGES,
            producer_group=warps,
            consumer_group=one,
            barrier_storage=storage.p_barriers.data_ptr(),
            defer_sync=True,
        )
        tmem = memory.TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_READY, SOFTMAX_THREADS + 32),
            allocator_warp_id=SOFTMAX_WARPS[0],
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        keys = (mCLen[token], mWLen[token])
        tiles = (cute.ceil_div(keys[0], TILE_N), cute.ceil_div(keys[1], TILE_N))
        sKV = storage.sKV.data_ptr().toint()
        if warp == LOAD_WARP:
            self.load(atom_c, mI, atom_w, mWStart, token, keys, tiles, sKV, kv)
        elif warp == MMA_WARP:
            self.mma(sKV, storage.sP.data_ptr().toint(), tmem, kv, s, p, tiles[0] + tiles[1])
        else:
            sP = storage.sP.get_tensor(
                cute.make_layout((TILE_M, TILE_N, P_STAGES), stride=(TILE_N, 1, TILE_M * TILE_N)),
                swizzle=cute.make_swizzle(3, 4, 3),
            )
            sX = storage.sX.get_tensor(cute.make_layout((4, SOFTMAX_THREADS, TILE_N // 8), stride=(1, 4, 512)))
            sRow = storage.sRow.get_tensor(cute.make_layout(SOFTMAX_THREADS))
            tile = (token, head_block)
            self.softmax(mQ, mI, mSink, mO, mLse, tile, keys, tiles, (sP, sX, sRow), tmem, s, p, scale_log2)

    @cute.jit
    def load(
        self,
        atom_c: cute.CopyAtom,
        mI: cute.Tensor,
        atom_w: cute.CopyAtom,
        mWStart: cute.Tensor,
        token: Int32,
        keys: tuple,
        tiles: tuple,
        sKV: Int32,
        kv: pipeline.PipelineTmaUmma,
    ):
        """Load warp: lane l < 16 gathers rows 4 l .. 4 l + 3 of every KV tile, one 128-byte column chunk at a time."""
        lane = cute.arch.lane_idx()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, KV_STAGES)
        window_start = mWStart[token]
        for tile in cutlass.range(tiles[0] + tiles[1], unroll=1):
            kv.producer_acquire(state)
            if tile < tiles[0]:
                rows = self.entry_rows(mI, token, tile * TILE_N + 4 * lane, keys[0])
                self.gather_tile(atom_c, rows, lane, sKV + state.index * STAGE_BYTES, kv.producer_get_barrier(state))
            else:
                rows = self.window_rows(window_start, (tile - tiles[0]) * TILE_N + 4 * lane, keys[1])
                self.gather_tile(atom_w, rows, lane, sKV + state.index * STAGE_BYTES, kv.producer_get_barrier(state))
            state.advance()
        kv.producer_tail(state)

    @cute.jit
    def entry_rows(self, mI: cute.Tensor, token: Int32, first: Int32, length: Int32):
        """Pool rows of four selected entries; -1 behind the end of the list."""
        rows = []
        for i in cutlass.range_constexpr(4):
            row = Int32(-1)
            if first + i < length:
                row = mI[token, first + i]
            rows.append(row)
        return tuple(rows)

    @cute.jit
    def window_rows(self, start: Int32, first: Int32, length: Int32):
        """Rows of four window keys; -1 behind the end of the window."""
        rows = []
        for i in cutlass.range_constexpr(4):
            row = Int32(-1)
            if first + i < length:
                row = start + first + i
            rows.append(row)
        return tuple(rows)

    @cute.jit
    def gather_tile(self, atom: cute.CopyAtom, rows: tuple, lane: Int32, stage: Int32, barrier: cute.Pointer):
        """Issue this lane's part of a KV tile: four rows, all column chunks."""
        if lane < TILE_N // 4:
            for chunk in cutlass.range_constexpr(CHUNKS):
                smem = stage + chunk * CHUNK_BYTES + lane * (4 * gather.ROW_BYTES)
                gather.gather4(atom, smem, barrier, Int32(chunk * CHUNK), rows)

    @cute.jit
    def mma(
        self,
        sKV: Int32,
        sP: Int32,
        tmem: memory.TmemAllocator,
        kv: pipeline.PipelineTmaUmma,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        tiles: Int32,
    ):
        """MMA warp: S of tile j + 1 goes out before P V of tile j, so that the softmax of a tile hides behind MMAs."""
        tmem.wait_for_alloc()
        base = tmem.retrieve_ptr(Float32).toint()
        pipeline.NamedBarrier(Q_READY, SOFTMAX_THREADS + 32).arrive_and_wait()
        umma.fence_after_thread_sync()
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, KV_STAGES)
        used = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, KV_STAGES)
        scores = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, S_STAGES)
        weights = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, P_STAGES)
        for tile in cutlass.range(tiles + 1, unroll=1):
            if tile < tiles:
                kv.consumer_wait(full)
                s.producer_acquire(scores)
                umma.fence_after_thread_sync()
                self.mma_qk(base, scores.index, sKV + full.index * STAGE_BYTES)
                s.producer_commit(scores)
                full.advance()
                scores.advance()
            if tile > 0:
                p.consumer_wait(weights)
                umma.fence_after_thread_sync()
                stage = sKV + used.index * STAGE_BYTES
                self.mma_pv(base, sP + weights.index * (TILE_M * TILE_N * 2), stage, tile > 1)
                kv.consumer_release(used)
                p.consumer_release(weights)
                used.advance()
                weights.advance()

    @cute.jit
    def mma_qk(self, base: Int32, slot: Int32, stage: Int32):
        """S = Q K^T as two sums over half the head dimensions: even chunks in lanes 0-63, odd chunks in 64-127."""
        with cute.arch.elect_one():
            d = base + S_COLUMN + slot * TILE_N
            for pair in cutlass.range_constexpr(CHUNKS // 2):
                for k in cutlass.range_constexpr(CHUNK // 16):
                    a = base + Q_COLUMN + pair * (CHUNK // 2) + k * 8
                    b = umma.at(self.k_descriptor, stage + pair * (2 * CHUNK_BYTES) + k * 32)
                    umma.mma_ws_ts(d, a, b, self.qk_instruction, pair + k > 0)

    @cute.jit
    def mma_pv(self, base: Int32, weights: Int32, stage: Int32, accumulate: cutlass.Boolean):
        """O += P V: the KV tile again, read with the head dimension as N."""
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(2):
                for k in cutlass.range_constexpr(TILE_N // 16):
                    a = umma.at(self.p_descriptor, weights + k * 32)
                    b = umma.at(self.v_descriptor, stage + half * (4 * CHUNK_BYTES) + k * (16 * 128))
                    add = accumulate if k == 0 else cutlass.Boolean(True)
                    umma.mma_ws_ss(base + O_COLUMN + half * 128, a, b, self.pv_instruction, add)

    @cute.jit
    def softmax(
        self,
        mQ: cute.Tensor,
        mI: cute.Tensor,
        mSink: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        tile: tuple,
        keys: tuple,
        tiles: tuple,
        shared: tuple,
        tmem: memory.TmemAllocator,
        s: pipeline.PipelineUmmaAsync,
        p: pipeline.PipelineAsyncUmma,
        scale_log2: Float32,
    ):
        """Softmax warps: thread t owns head t % 64 and half t / 64 of the keys of a tile."""
        tmem.allocate(512)
        tmem.relinquish_alloc_permit()
        tmem.wait_for_alloc()
        pointer = tmem.retrieve_ptr(Float32)
        tidx, _, _ = cute.arch.thread_idx()
        row, half = tidx % TILE_M, tidx // TILE_M
        head = tile[1] * TILE_M + row
        self.stage_q(mQ, pointer, tile[0], head, half, tidx)

        sP, sX, sRow = shared
        pair = pipeline.NamedBarrier(PAIR + (tidx // 32) % 2, 64)
        lane = cute.arch.lane_idx()
        scores = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, S_STAGES)
        weights = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, P_STAGES)
        reference, total = -Float32.inf, Float32(0.0)  # what exponents are relative to (log2), and this half's sum
        for i in cutlass.range(tiles[0] + tiles[1], unroll=1):
            valid = self.valid_keys(mI, tile[0], i, lane, half, keys, tiles)
            s.consumer_wait(scores)
            umma.fence_after_thread_sync()
            rS = self.row_scores(pointer, scores.index, tidx, half, sX, pair)
            umma.fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                s.consumer_release(scores)
            scores.advance()
            if valid != Int32(-1):
                for j in cutlass.range_constexpr(TILE_N // 2):
                    if (valid >> j) & 1 == 0:
                        rS[j] = -Float32.inf
            largest = rS[0]
            for j in cutlass.range_constexpr(1, TILE_N // 2):
                largest = cute.arch.fmax(largest, rS[j])
            sRow[tidx] = largest
            pair.arrive_and_wait()
            largest = cute.arch.fmax(largest, sRow[tidx ^ TILE_M]) * scale_log2

            p.producer_acquire(weights)
            new = reference
            if largest > reference + RESCALE_LOG2:
                new = largest
            if cute.arch.vote_any_sync(new != reference):
                factor = cute.arch.exp2(reference - new) if new != reference else Float32(1.0)
                total *= factor
                if i > 0:
                    following = weights.clone()
                    following.advance()
                    p.producer_acquire(following)  # P V of the tile before is done
                    umma.fence_after_thread_sync()
                    self.rescale(pointer, tidx, factor)
                reference = new
            safe = reference if reference > -Float32.inf else Float32(0.0)
            rP = cute.make_rmem_tensor((8, TILE_N // 16), self.element)
            for j in cutlass.range_constexpr(TILE_N // 2):
                weight = cute.arch.exp2(rS[j] * scale_log2 - safe)
                total += weight
                rP[j] = weight.to(self.element)
            sP_row = cute.local_tile(sP[row, None, weights.index], (TILE_N // 2,), (half,))
            sP_row = cute.logical_divide(sP_row, (8,))
            cute.autovec_copy(rP, sP_row)
            cute.arch.fence_view_async_shared()
            umma.fence_before_thread_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                p.producer_commit(weights)
            weights.advance()

        sRow[tidx] = total
        pair.arrive_and_wait()
        total += sRow[tidx ^ TILE_M]
        if tiles[0] + tiles[1] > 0:
            last = weights.clone()
            last.advance()
            p.producer_acquire(last)
            umma.fence_after_thread_sync()
        self.epilogue(mSink, mO, mLse, pointer, tile[0], head, half, tidx, reference, total, tiles[0] + tiles[1])
        pipeline.NamedBarrier(TMEM_DONE, SOFTMAX_THREADS).arrive_and_wait()
        tmem.free(pointer)

    @cute.jit
    def stage_q(self, mQ: cute.Tensor, tmem: cute.Pointer, token: Int32, head: Int32, half: Int32, tidx: Int32):
        """Q from global memory to tensor memory: lanes 0-63 take the even 64-wide chunks of a head, 64-127 the odd."""
        store = self.tmem_copy(tcgen05.St32x32bOp, tmem, Q_COLUMN, tidx)
        for pair in cutlass.range_constexpr(CHUNKS // 2):
            rQ = cute.make_rmem_tensor((8, CHUNK // 8), self.element)
            rQ.fill(0.0)
            if head < mQ.shape[1]:
                gQ = cute.local_tile(mQ[token, head, None], (CHUNK,), (2 * pair + half,))
                cute.autovec_copy(cute.logical_divide(gQ, (8,)), rQ)
            store(pair * (CHUNK // 2), cute.recast_tensor(rQ, Float32))
        cute.arch.fence_view_async_tmem_store()
        umma.fence_before_thread_sync()
        pipeline.NamedBarrier(Q_READY, SOFTMAX_THREADS + 32).arrive()

    def tmem_copy(self, operation: type, tmem: cute.Pointer, column: Int32, tidx: Int32):
        """A function (offset, registers) that copies 32 columns of this thread's lane from or to tensor memory."""
        atom = cute.make_copy_atom(operation(tcgen05.Repetition(32)), Float32)
        layout = cute.make_layout((128, 32), stride=(1 << 16, 1))

        def copy(offset: Int32, registers: cute.Tensor) -> None:
            tensor = cute.make_tensor(tmem + (column + offset), layout)
            tiled = tcgen05.make_tmem_copy(atom, tensor)
            thread = tiled.get_slice(tidx)
            whole = cute.make_identity_tensor(layout.shape)
            if issubclass(operation, tcgen05.St32x32bOp):
                own = cute.make_tensor(registers.iterator, thread.partition_S(whole).shape)
                cute.copy(tiled, own, thread.partition_D(tensor))
            else:
                own = cute.make_tensor(registers.iterator, thread.partition_D(whole).shape)
                cute.copy(tiled, thread.partition_S(tensor), own)

        return copy

    @cute.jit
    def row_scores(
        self, tmem: cute.Pointer, slot: Int32, tidx: Int32, half: Int32, sX: cute.Tensor, pair: pipeline.NamedBarrier
    ):
        """This thread's 32 scores: its own sum over half the dimensions plus that of the thread 64 lanes away."""
        load = self.tmem_copy(tcgen05.Ld32x32bOp, tmem, S_COLUMN, tidx)
        rOther = cute.make_rmem_tensor((4, TILE_N // 8), Float32)
        rS = cute.make_rmem_tensor((4, TILE_N // 8), Float32)
        load(slot * TILE_N + (1 - half) * (TILE_N // 2), rOther)
        load(slot * TILE_N + half * (TILE_N // 2), rS)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(rOther, sX[None, tidx, None])
        pair.arrive_and_wait()
        cute.autovec_copy(sX[None, tidx ^ TILE_M, None], rOther)
        rS.store(rS.load() + rOther.load())
        return rS

    @cute.jit
    def valid_keys(
        self, mI: cute.Tensor, token: Int32, tile: Int32, lane: Int32, half: Int32, keys: tuple, tiles: tuple
    ):
        """One bit for each of this thread's 32 keys of a tile: 1 where there is a key."""
        position = tile * TILE_N + half * (TILE_N // 2) + lane
        there = position - tiles[0] * TILE_N < keys[1]
        if tile < tiles[0]:
            there = position < keys[0]
            if there:
                there = mI[token, position] >= 0
        return cute.arch.vote_ballot_sync(there)

    @cute.jit
    def rescale(self, tmem: cute.Pointer, tidx: Int32, factor: Float32):
        """O *= factor, a row of 256 columns a thread."""
        load = self.tmem_copy(tcgen05.Ld32x32bOp, tmem, O_COLUMN, tidx)
        store = self.tmem_copy(tcgen05.St32x32bOp, tmem, O_COLUMN, tidx)
        rO = cute.make_rmem_tensor(32, Float32)
        for column in cutlass.range(0, 256, 32, unroll=1):
            load(column, rO)
            cute.arch.fence_view_async_tmem_load()
            rO.store(rO.load() * factor)
            store(column, rO)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def epilogue(
        self,
        mSink: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        tmem: cute.Pointer,
        token: Int32,
        head: Int32,
        half: Int32,
        tidx: Int32,
        reference: Float32,
        total: Float32,
        tiles: Int32,
    ):
        """Normalise O by the sum and the sink, convert and store; the first half's thread also writes the LSE."""
        load = self.tmem_copy(tcgen05.Ld32x32bOp, tmem, O_COLUMN, tidx)
        inside = head < mO.shape[1]
        denominator = total
        if inside:
            denominator = total + cute.arch.exp2(mSink[head] * LOG2_E - reference)
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = 1.0 / denominator
        rO = cute.make_rmem_tensor(32, Float32)
        rOut = cute.make_rmem_tensor((8, 4), self.element)
        for i in cutlass.range(8, unroll=1):
            rO.fill(0.0)
            if tiles > 0:
                load(32 * i, rO)
                cute.arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(32):
                rOut[j] = (rO[j] * inverse).to(self.element)
            if inside:
                gO = cute.local_tile(mO[token, head, None], (32,), (8 * (i // 4) + 4 * half + i % 4,))
                cute.autovec_copy(rOut, cute.logical_divide(gO, (8,)))
            cute.arch.sync_warp()
        if inside and half == 0:
            lse = -Float32.inf
            if total > 0.0:
                lse = (reference + cute.math.log2(total)) * math.log(2.0)
            mLse[token, head] = lse
