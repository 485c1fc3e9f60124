"""`bulk` whose CTAs meet in global memory: all SMs take part, and as many as fn needs share a token."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, memory

from dsv4lib.kernels.mhc.bulk import MhcBulk
from dsv4lib.kernels.mhc.config import (
    COLUMNS,
    FOURS,
    IN_FLIGHT,
    LANES,
    MIX,
    OWNED,
    PIECES,
    RING,
    TILE,
    UNIT,
    WORDS,
    GridConfig,
    N,
)

_PUBLISH = "st.relaxed.gpu.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
_LOOK = "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"


class MhcGrid(GridConfig, MhcBulk):
    """A site boundary by groups of CTAs; see the module docstring. Settings: `config.GridConfig`."""

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mF: Any,
        mPost: Any,
        mComb: Any,
        mFn: cute.Tensor,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        mWeight: cute.Tensor,
        mNew: Any,
        mY: cute.Tensor,
        mPostNew: Any,
        mCombNew: Any,
        mSpace: cute.Tensor,
        rows: Int32,
        groups: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
        stream: cuda.CUstream,
    ):
        """Launch ``groups`` groups. As `Mhc.__call__`, and mSpace: [`space`] fp32, zeros before and after."""

        @cute.struct
        class Storage:
            fn: cute.struct.Align[cute.struct.MemRange[Float32, self.fn_floats], 128]
            held: cute.struct.Align[cute.struct.MemRange[Float32, self.held_floats], 64]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sum_floats], 16]
            mix: cute.struct.Align[cute.struct.MemRange[Float32, self.mix_floats], 16]
            coefficients: cute.struct.Align[cute.struct.MemRange[Float32, self.coefficient_floats], 16]
            trace: cute.struct.Align[cute.struct.MemRange[Float32, self.trace_floats], 8]
            barriers: cute.struct.MemRange[Int64, self.barriers]

        self.storage = Storage
        before, after = (mF, mPost, mComb), (mNew, mY, mPostNew, mCombNew)
        self.kernel(mX, before, mFn, mScale, mBase, mWeight, after, mSpace, rows, hc_eps, rms_eps).launch(
            grid=(self.cluster, groups, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        before: tuple,
        mFn: cute.Tensor,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        mWeight: cute.Tensor,
        after: tuple,
        mSpace: cute.Tensor,
        rows: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
    ):
        """Set-up and roles."""
        rank, first, _ = cute.arch.block_idx()
        _, step, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        shape, pitch = (self.warps, self.tile, self.sum_pitch), self.sum_pitch
        sSums = storage.sums.get_tensor(cute.make_layout(shape, stride=(self.tile * pitch, pitch, 1)))
        barriers = [storage.barriers.data_ptr() + k for k in range(self.barriers)]
        if tidx == 0:
            for barrier, arrivals in zip(barriers, self.arrivals(), strict=True):
                cute.arch.mbarrier_init(barrier, arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        inbox = mSpace.iterator.toint() + Int64(first * (4 * RING * TILE * self.cluster * pitch))
        letters = step * (4 * RING * TILE * self.cluster * pitch) + first * (4 * RING * TILE * self.cluster * MIX)
        space = inbox, mSpace.iterator.toint() + Int64(letters)
        place = rank, first * rows, step * rows, rows, mX.shape[0]
        given = mX, before, mFn, mScale, mBase, mWeight, after
        self.meet_roles(warp, given, storage, sSums, barriers, space, place, (hc_eps, rms_eps))

    def arrivals(self) -> list[int]:
        """How many arrivals each barrier waits for: projected, taken, weighed, mixed, full, written, sent, read."""
        return [self.warps, 1] + [1] * (2 * IN_FLIGHT) + [1] * 2 + [self.warps] * 2 + [1] * 4

    @cute.jit
    def meet_roles(
        self,
        warp: Int32,
        given: tuple,
        storage: Any,
        sSums: cute.Tensor,
        barriers: list,
        space: tuple,
        place: tuple,
        eps: tuple,
    ):
        """What each warp does."""
        (mX, (mF, mPost, mComb), mFn, mScale, mBase, mWeight, (mNew, mY, mPostNew, mCombNew)) = given
        projected, taken, weighed = barriers[:3]
        mixed = barriers[2 + IN_FLIGHT]
        full, written, sent, read = (barriers[2 + 2 * IN_FLIGHT + 2 * k] for k in range(4))
        sMix = storage.mix.get_tensor(cute.make_layout((IN_FLIGHT, TILE, MIX), stride=(TILE * MIX, MIX, 1)))
        sTrace = storage.trace.get_tensor(cute.make_layout((2, self.slots), stride=(self.slots, 1)))
        layout = cute.make_ordered_layout((2, LANES, self.tiles, 2 * N, self.warps), order=(0, 1, 2, 3, 4))
        sThird = cute.make_tensor(cute.recast_ptr(storage.fn.data_ptr(), dtype=Uint32), layout)
        layout = cute.make_layout((4, 2 * TILE * PIECES // 4), stride=(1, 4))
        sParts = cute.make_tensor(cute.recast_ptr(storage.coefficients.data_ptr(), dtype=Uint32), layout)
        if warp == self.warps:
            self.send_sums(sSums, space[0], (projected, taken, mixed), place)
        elif warp == self.warps + 1:
            self.weigh_parts(mScale, mBase, sTrace, sMix, (weighed, mixed, sent, read), space, place, eps)
        elif warp == self.warps + 2:
            if cutlass.const_expr(not self.head):
                self.balance_parts(mScale, mBase, (mPostNew, mCombNew), sTrace, (sent, read), space[0], place, eps)
        elif warp == self.warps + 3:
            if cutlass.const_expr(self.post):
                self.split_coefficients(mPost, mComb, sParts, (full, written), place)
        else:
            small = sThird, sSums, sMix, storage.held.data_ptr().toint(), sParts.iterator.toint()
            waits = projected, taken, weighed, full, written
            self.follow_late((mX, mF), mFn, mWeight, (mNew, mY), small, waits, place)

    @cute.jit
    def follow_late(
        self, given: tuple, mFn: cute.Tensor, mWeight: cute.Tensor, out: tuple, small: tuple, waits: tuple, place: tuple
    ):
        """Role of the workers: a tile's write-back and projection, and the mixture of one before."""
        (mX, mF), (mNew, mY) = given, out
        sThird, sSums, sMix, stages, parts = small
        projected, taken, weighed, full, written = waits
        rank, first, step, rows, tokens = place
        warp, four = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx() % 4
        column = (rank * self.columns + warp * UNIT) // COLUMNS + four  # in units of 8
        rFn = cute.make_rmem_tensor((2, self.tiles, 2 * N, 2), Uint32)
        rOne = cute.make_rmem_tensor((WORDS, N), Uint32)
        rWeight = cute.make_rmem_tensor(COLUMNS, Float32)
        weights = cute.local_tile(mWeight, (COLUMNS,), (column,))
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weights.iterator])
        sThird = sThird[None, cute.arch.lane_idx(), None, None, warp]
        self.split_fn(mFn, rank, warp, rFn, sThird)
        stages = stages + self.stage_bytes * self.stages * warp
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range_constexpr(2):
            self.fetch_tile(mX, mF, first + k * step, tokens, column, stages + self.stage_bytes * k)
        tile, begin, here, behind = Int32(0), first, stages, stages + self.stage_bytes * 2
        while begin < tokens + self.lag * step:
            if begin < tokens:
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_warp()
                if cutlass.const_expr(self.post):
                    cute.arch.mbarrier_wait(full + (tile & 1), (tile >> 1) & 1)
                    self.write_back_tile(here, parts + (tile & 1) * (4 * TILE * PIECES))
                    self.arrive(written + (tile & 1))
                if tile > 0:
                    cute.arch.mbarrier_wait(taken, (tile + 1) & 1)
                self.project_tile(here, rFn, sThird, sSums[warp, None, None])
                for h in cutlass.range_constexpr(2):
                    if rows > TILE // 2 * h:
                        self.multiply_tokens(here, sSums[warp, None, None], h)
                self.arrive(projected)
            if tile >= self.lag:
                before, buffer = begin - self.lag * step, (tile - self.lag) & (IN_FLIGHT - 1)
                cute.autovec_copy(weights, rWeight)
                cute.arch.mbarrier_wait(weighed + buffer, ((tile - self.lag) // IN_FLIGHT) & 1)
                for h in cutlass.range_constexpr(2):
                    cute.arch.sync_warp()  # or both tokens come at once, and registers spill
                    self.take_own(behind, rOne, h)
                    self.mix_weighed(mY, rOne, rWeight, sMix[buffer, None, None], h, before, rows, tokens, column)
                    if cutlass.const_expr(self.keep):
                        self.store_token(mNew, rOne, h, before, rows, tokens, column)
                cute.arch.sync_warp()
            self.fetch_tile(mX, mF, begin + 2 * step, tokens, column, behind)
            tile = tile + 1
            begin = begin + step
            end = stages + self.stages * self.stage_bytes
            here = here + self.stage_bytes
            here = cutlass.select_(here == end, stages, here)
            behind = behind + self.stage_bytes
            behind = cutlass.select_(behind == end, stages, behind)

    @cute.jit
    def send_sums(self, sSums: cute.Tensor, inbox: Int64, barriers: tuple, place: tuple):
        """Role of the sender: what the workers left of a tile, to the CTAs that own its tokens."""
        rank, first, step, rows, tokens = place
        projected, taken, mixed = barriers
        lane, pieces = cute.arch.lane_idx(), FOURS + (0 if self.head else OWNED // N)
        rounds = -(-pieces * TILE // LANES)
        rSum = cute.make_rmem_tensor((N, rounds), Float32)
        cute.arch.griddepcontrol_wait()
        tile, begin = Int32(0), first
        while begin < tokens:
            cute.arch.mbarrier_wait(projected, tile & 1)
            for k in cutlass.range_constexpr(rounds):
                item = lane + LANES * k
                if item < pieces * rows:
                    self.over_warps(sSums[None, item // pieces, None], item % pieces, rSum[None, k])
            self.arrive(taken)
            self.arrive(mixed + (tile & (IN_FLIGHT - 1)))
            for k in cutlass.range_constexpr(rounds):
                item = lane + LANES * k
                if item < pieces * rows:
                    there = self.sums_of(inbox, tile, item // pieces) + Int64(4 * self.sum_pitch * rank)
                    self.publish(there + Int64(16 * (item % pieces)), [rSum[v, k] for v in range(N)])
            tile = tile + 1
            begin = begin + step

    def sums_of(self, inbox: Int64, tile: Int32, token: Int32) -> Int64:
        """Where the sums of a tile's token arrive, of the first CTA."""
        return inbox + Int64(((tile & (RING - 1)) * TILE + token) * (4 * self.cluster * self.sum_pitch))

    def weights_of(self, letters: Int64, tile: Int32, reader: Int32, token: Int32) -> Int64:
        """Where the weights of a tile's token arrive."""
        return letters + Int64((((tile & (RING - 1)) * self.cluster + reader) * TILE + token) * (4 * MIX))

    def publish(self, place: Int64, values: list) -> None:
        """Four numbers, -0 for 0: not the bits of an empty word."""
        marked = [cutlass.select_(value == 0.0, Float32(-0.0), value) for value in values]
        cute.arch.inline_ptx(_PUBLISH, read_only_args=[place, *marked])

    @cute.jit
    def collect(self, first: Int64, apart: cutlass.Constexpr, there: cutlass.Boolean, rFours: cute.Tensor):
        """Fours of this lane, ``apart`` bytes from each other, once they are there."""
        count = rFours.shape[1]
        rLack = cute.make_rmem_tensor(count, Int32)
        rLack.fill(cutlass.select_(there, Int32(1), Int32(0)))
        rFours.fill(0.0)
        missing = there
        while cute.arch.vote_any_sync(missing):
            for k in cutlass.range_constexpr(count):
                if rLack[k] != 0:
                    four = cute.arch.inline_ptx(
                        _LOOK, write_only_types=[Float32] * 4, read_only_args=[first + Int64(apart * k)]
                    )
                    for v in cutlass.range_constexpr(N):
                        rFours[v, k] = four[v]
            lacks = Int32(0)
            for k in cutlass.range_constexpr(count):
                lack = Int32(0)
                for v in cutlass.range_constexpr(N):
                    lack = cutlass.select_(rFours[v, k].bitcast(Int32) == 0, Int32(1), lack)
                rLack[k] = cutlass.select_(there, lack, Int32(0))
                lacks = lacks | rLack[k]
            missing = lacks != 0

    @cute.jit
    def clear(self, first: Int64, apart: cutlass.Constexpr, there: cutlass.Boolean, count: cutlass.Constexpr):
        """Empty again what `collect` found."""
        if there:
            for k in cutlass.range_constexpr(count):
                cute.arch.inline_ptx(_PUBLISH, read_only_args=[first + Int64(apart * k), *[Float32(0.0)] * N])

    @cute.jit
    def weigh_parts(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        sTrace: cute.Tensor,
        sMix: cute.Tensor,
        barriers: tuple,
        space: tuple,
        place: tuple,
        eps: tuple,
    ):
        """Role of the owner: weights of its tokens to every CTA, and those of all for the workers."""
        rank, first, step, rows, tokens = place
        weighed, mixed, sent, read = barriers
        inbox, letters = space
        lane, group, pitch = cute.arch.lane_idx(), cute.arch.lane_idx() // 4, 4 * self.sum_pitch
        count, apart = max(1, self.cluster // 8), 8 * pitch
        rFours = cute.make_rmem_tensor((N, count), Float32)
        rSum = cute.make_rmem_tensor(N, Float32)
        rPre = cute.make_rmem_tensor(N, Float32)
        rMix = cute.make_rmem_tensor((N, 1), Float32)
        cute.arch.griddepcontrol_wait()
        scale, base = mScale[0], mBase[lane % 4]
        tile, begin = Int32(0), first
        while begin < tokens:
            buffer, turned = tile & (IN_FLIGHT - 1), (rank + TILE * tile) & (self.cluster - 1)
            if cutlass.const_expr(not self.head):
                if tile > 1:
                    cute.arch.mbarrier_wait(read + (tile & 1), (tile >> 1) + 1 & 1)
            for s in cutlass.range_constexpr(self.slots):
                t = s * self.cluster + turned
                if t < rows:
                    mine = self.sums_of(inbox, tile, t) + Int64(group * pitch + lane % 4 * 16)
                    self.collect(mine, apart, group < self.cluster, rFours)
                    for v in cutlass.range_constexpr(N):
                        total = rFours[v, 0]
                        for k in cutlass.range_constexpr(1, count):
                            total = total + rFours[v, k]
                        for lanes in (4, 8, 16):
                            total = total + cute.arch.shuffle_sync_bfly(total, lanes)
                        rSum[v] = total
                    norm = self.weights(rSum, scale, base, eps, rPre)
                    if lane < self.cluster:
                        self.publish(self.weights_of(letters, tile, lane, t), [rPre[i] * norm for i in range(N)])
                    if lane == 3:
                        sTrace[tile & 1, s] = rSum[3]
                    self.clear(mine, apart, group < self.cluster, count)
            if cutlass.const_expr(not self.head):
                self.arrive(sent + (tile & 1))
            mine = self.weights_of(letters, tile, rank, lane)
            self.collect(mine, 0, lane < rows, rMix)
            cute.arch.mbarrier_wait(mixed + buffer, (tile // IN_FLIGHT) & 1)
            if lane < rows:
                cute.autovec_copy(rMix[None, 0], sMix[buffer, lane, None])
            self.arrive(weighed + buffer)
            self.clear(mine, 0, lane < rows, 1)
            cute.arch.fence_acq_rel_gpu()
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def balance_parts(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        after: tuple,
        sTrace: cute.Tensor,
        barriers: tuple,
        inbox: Int64,
        place: tuple,
        eps: tuple,
    ):
        """Role of the balancer: post and comb of this CTA's tokens, behind the owner."""
        rank, first, step, rows, tokens = place
        (mPostNew, mCombNew), (sent, read) = after, barriers
        pieces, parts, pitch = OWNED // N, 4, 4 * self.sum_pitch
        lane, count, apart = cute.arch.lane_idx(), self.cluster // 4, 4 * 4 * self.sum_pitch
        piece, there = lane % pieces, lane < pieces * parts
        rFours = cute.make_rmem_tensor((N, count), Float32)
        rLogit = cute.make_rmem_tensor(self.slots, Float32)
        rC = cute.make_rmem_tensor((N, N), Float32)
        rLogit.fill(0.0)
        value = cutlass.min(lane, Int32(OWNED - 1))
        cute.arch.griddepcontrol_wait()
        scale, base = mScale[cutlass.select_(value < N, Int32(1), Int32(2))], mBase[N + value]
        tile, begin = Int32(0), first
        while begin < tokens:
            turned = (rank + TILE * tile) & (self.cluster - 1)
            cute.arch.mbarrier_wait(sent + (tile & 1), (tile >> 1) & 1)
            for s in cutlass.range_constexpr(self.slots):
                t = s * self.cluster + turned
                if t < rows:
                    mine = self.sums_of(inbox, tile, t) + Int64(lane // pieces * pitch + 16 * (FOURS + piece))
                    self.collect(mine, apart, there, rFours)
                    self.clear(mine, apart, there, count)
                    found = Float32(0.0)
                    for v in cutlass.range_constexpr(N):
                        total = rFours[v, 0]
                        for k in cutlass.range_constexpr(1, count):
                            total = total + rFours[v, k]
                        p = [cute.arch.shuffle_sync(total, piece + pieces * k) for k in range(parts)]
                        total = (p[0] + p[1]) + (p[2] + p[3])
                        other = cute.arch.shuffle_sync(total, value // N)
                        found = cutlass.select_(value % N == v, other, found)
                    norm = cute.math.rsqrt(sTrace[tile & 1, s] * (1.0 / (N * self.d)) + eps[1], fastmath=True)
                    rLogit[s] = cute.math.fma(scale, found * norm, base)
            self.arrive(read + (tile & 1))
            if turned < rows:
                self.store_post(mPostNew, rLogit, begin, turned, rows, tokens)
                self.sinkhorn(rLogit, rC, eps[0])
                self.store_comb(mCombNew, rC, begin, turned, rows, tokens)
            tile = tile + 1
            begin = begin + step
