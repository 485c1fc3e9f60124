"""`bulk` whose CTAs meet in global memory: all SMs take part, and as many as fn needs share a token."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, memory

from dsv4lib.kernels.mhc.bulk import INPUTS, PARTS, MhcBulk
from dsv4lib.kernels.mhc.config import (
    COLUMNS,
    FOURS,
    IN_FLIGHT,
    LANES,
    MIX,
    OWNED,
    PIECES,
    RING,
    ROW_BYTES,
    TILE,
    UNIT,
    WORDS,
    GridConfig,
    N,
)
from dsv4lib.kernels.mhc.words import copy_four, load_matrices, load_words, multiply, store_matrices

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
            held: cute.struct.Align[cute.struct.MemRange[Float32, self.held_floats], 256]
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
            self.weigh_parts(mScale, mBase, sTrace, (sent, read), space, place, eps)
        elif warp == self.warps + 2:
            if cutlass.const_expr(not self.head):
                self.balance_parts(mScale, mBase, (mPostNew, mCombNew), sTrace, (sent, read), space[0], place, eps)
        elif warp == self.warps + 3:
            waits = weighed, mixed, full, written
            self.provide(mPost, mComb, sParts, sMix, waits, space[1], place)
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
        givens = stages + self.stage_bytes * (self.stages * self.warps + 2 * (warp // N))
        stages = stages + self.stage_bytes * self.stages * warp
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range_constexpr(2):
            there = stages + self.stage_bytes * k, givens + self.stage_bytes * k
            self.fetch_both(mX, mF, first + k * step, tokens, column, there)
        tile, begin, here, end = Int32(0), first, stages, stages + self.stages * self.stage_bytes
        while begin < tokens + self.lag * step:
            if begin < tokens:
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_warp()
                if cutlass.const_expr(self.post):
                    cute.arch.mbarrier_wait(full + (tile & 1), (tile >> 1) & 1)
                    both = here, givens + (tile & 1) * self.stage_bytes
                    self.write_back_both(*both, parts + (tile & 1) * (4 * TILE * PIECES))
                    self.arrive(written + (tile & 1))
                if tile > 0:
                    cute.arch.mbarrier_wait(taken, (tile + 1) & 1)
                self.project_tile(here, rFn, sThird, sSums[warp, None, None])
                for h in cutlass.range_constexpr(2):
                    if rows > TILE // 2 * h:
                        self.multiply_tokens(here, sSums[warp, None, None], h)
                self.arrive(projected)
            behind = here + 2 * self.stage_bytes
            behind = cutlass.select_(behind >= end, behind - self.stages * self.stage_bytes, behind)
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
            there = behind, givens + (tile & 1) * self.stage_bytes
            self.fetch_both(mX, mF, begin + 2 * step, tokens, column, there)
            tile = tile + 1
            begin = begin + step
            here = here + self.stage_bytes
            here = cutlass.select_(here == end, stages, here)

    def place_of(self, here: Int32, token: Int32, given: Int32, piece: Int32) -> Int32:
        """Where 16 bytes of a token's stream lie in the stage ``here``, or of f, of warp ``given`` mod 4.

        Stages begin at multiples of 256 bytes, so other pieces, streams and tokens are at ``place ^ 16 piece``,
        `behind` and `tokens_behind`.
        """
        line = N * token + (given ^ (token & 1))
        return here + ROW_BYTES * line + 16 * ((piece ^ (token // 2) ^ (given // 2)) & 3)

    def behind(self, place: Int32, streams: int) -> Int32:
        """Where the piece of the stream lies whose number differs in these bits."""
        return place ^ (ROW_BYTES * streams + 16 * (streams // 2))

    def tokens_behind(self, place: Int32, tokens: int) -> Int32:
        """Where the piece lies so many tokens further, at most 7 (from token 0, or at most 3 from token 4)."""
        return (place ^ (ROW_BYTES * (tokens % 2) + 16 * (tokens // 2))) + ROW_BYTES * N * tokens

    def given_place(self, given: Int32, token: Int32, piece: Int32) -> Int32:
        """Where 16 bytes of f of this warp lie: not in the banks of its streams 0 and 2, or 1 and 3."""
        mine = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % N
        return self.place_of(given, token, mine, piece ^ (mine // 2) ^ 2)

    @cute.jit
    def fetch_both(self, mX: cute.Tensor, mF: Any, begin: Int32, tokens: Int32, column: Int32, there: tuple):
        """This lane's columns of its two tokens into stages, a group of copies; the last token for what is behind."""
        stage, given = there
        if begin < tokens:
            group, four = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
            target = self.place_of(stage, group, Int32(0), four)
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(begin + group + 8 * h, tokens - 1)
                source = cute.domain_offset((COLUMNS * column,), mX[token, None]).iterator
                for i in cutlass.range_constexpr(N):
                    copy_four(self.behind(target, i) + self.half_bytes * h, source + i * self.d)
                if cutlass.const_expr(self.post):
                    source = cute.domain_offset((COLUMNS * column,), mF[token, None]).iterator
                    copy_four(self.given_place(given, group, four) + self.half_bytes * h, source)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def write_back_both(self, here: Int32, given: Int32, parts: Int32):
        """X' over X, this warp's columns of all 16 tokens.

        A: column lane / 4 (+ 8), inputs 2 (lane mod 4) and the next (of eight: the first three again, times nothing).
        B: a part of their coefficients, of stream lane / 4 mod 4: of one token where lane < 16, of the other elsewhere.
        Sums: streams 2 (lane mod 4) and the next of both; those of the first token are right where lane mod 4 < 2, of
        the second elsewhere.
        """
        lane, zero = cute.arch.lane_idx(), Int32(0)
        parts, one_of = parts + 4 * PIECES * N * (lane // TILE) + 16 * (lane % TILE), lane % 8 % INPUTS
        source = self.place_of(here, zero, one_of % N, lane // 8)
        source = cutlass.select_(one_of == N, self.given_place(given, zero, lane // 8), source)
        target = self.place_of(here, lane % 8 // N * N, lane % N, lane // 8)
        first = lane % 4 < 2
        for _ in cutlass.range(2, unroll=1):
            for half in cutlass.range_constexpr(2):
                ones = [2 * half, 2 * half + 1]  # and the tokens four further: their rows are in different banks
                words = [load_words(parts + 4 * PIECES * one) for one in ones]
                places = [self.tokens_behind(source, one + N * t) for one in ones for t in range(2)]
                columns = [load_matrices(place, turned=True) for place in places]
                for k, one in enumerate(ones):
                    rSums = cute.make_rmem_tensor((4, 2, 2), Float32)
                    rSums.fill(0.0)
                    for part in cutlass.range_constexpr(PARTS):
                        for t in cutlass.range_constexpr(2):
                            for c in cutlass.range_constexpr(2):
                                two = columns[2 * k + t][2 * c : 2 * c + 2]
                                multiply(two, words[k][part : part + 1], rSums[None, c, t])
                    both = [rSums[None, None, t] for t in range(2)]
                    store_matrices(self.tokens_behind(target, one), self.packed(both, first))
            source, target = source + self.half_bytes, target + self.half_bytes
            parts = parts + 4 * PIECES * (TILE // 2)
        cute.arch.sync_warp()

    @cute.jit
    def send_sums(self, sSums: cute.Tensor, inbox: Int64, barriers: tuple, place: tuple):
        """Role of the sender: what the workers left of a tile, to the CTAs that own its tokens."""
        rank, first, step, rows, tokens = place
        projected, taken, mixed = barriers
        mine = inbox + Int64(4 * self.sum_pitch * rank)
        cute.arch.griddepcontrol_wait()
        tile, begin = Int32(0), first
        while begin < tokens:
            cute.arch.mbarrier_wait(projected, tile & 1)
            self.send_pieces(sSums, mine, tile, rows, (0, FOURS))  # what a mixture waits for first
            if cutlass.const_expr(not self.head):
                self.send_pieces(sSums, mine, tile, rows, (FOURS, OWNED // N))
            self.arrive(taken)
            self.arrive(mixed + (tile & (IN_FLIGHT - 1)))
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def send_pieces(self, sSums: cute.Tensor, mine: Int64, tile: Int32, rows: Int32, part: cutlass.Constexpr):
        """Fours of sums, (first, count) of each token."""
        from_, count = part
        rounds = -(-count * TILE // LANES)
        rSum = cute.make_rmem_tensor((N, rounds), Float32)
        for k in cutlass.range_constexpr(rounds):
            item = cute.arch.lane_idx() + LANES * k
            if item < count * rows:
                self.over_warps(sSums[None, item // count, None], from_ + item % count, rSum[None, k])
        for k in cutlass.range_constexpr(rounds):
            item = cute.arch.lane_idx() + LANES * k
            if item < count * rows:
                there = self.sums_of(mine, tile, item // count) + Int64(16 * (from_ + item % count))
                self.publish(there, [rSum[v, k] for v in range(N)])

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
    def provide(
        self, mPost: Any, mComb: Any, sParts: cute.Tensor, sMix: cute.Tensor, waits: tuple, letters: Int64, place: tuple
    ):
        """Role of the provider: B of the write-backs, and the weights of what the workers mix next."""
        rank, first, step, rows, tokens = place
        weighed, mixed, full, written = waits
        lane = cute.arch.lane_idx()
        rFour = cute.make_rmem_tensor((N, INPUTS), Float32)
        rWords = cute.make_rmem_tensor((4, 8), Uint32)
        rMix = cute.make_rmem_tensor((N, 1), Float32)
        rWords.fill(0)
        cute.arch.griddepcontrol_wait()
        self.take_coefficients(mPost, mComb, first, tokens, rFour)
        tile, begin = Int32(0), first
        while begin < tokens + self.lag * step:
            if cutlass.const_expr(self.post):
                if begin < tokens:
                    self.split_pairs(rFour, rWords)
                    self.take_coefficients(mPost, mComb, begin + step, tokens, rFour)
                    if tile > 1:
                        cute.arch.mbarrier_wait(written + (tile & 1), (tile >> 1) + 1 & 1)
                    for k in cutlass.range_constexpr(8):
                        at = (tile & 1) * (TILE * PIECES // 4) + 8 * lane + k
                        cute.autovec_copy(rWords[None, k], sParts[None, at])
                    self.arrive(full + (tile & 1))
            if tile >= self.lag:
                before = tile - self.lag
                buffer, mine = before & (IN_FLIGHT - 1), self.weights_of(letters, before, rank, lane)
                self.collect(mine, 0, lane < rows, rMix)
                cute.arch.mbarrier_wait(mixed + buffer, (before // IN_FLIGHT) & 1)
                if lane < rows:
                    cute.autovec_copy(rMix[None, 0], sMix[buffer, lane, None])
                self.arrive(weighed + buffer)
                self.clear(mine, 0, lane < rows, 1)
                self.order()
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def take_coefficients(self, mPost: Any, mComb: Any, begin: Int32, tokens: Int32, rFour: cute.Tensor):
        """post and comb of this lane's token."""
        if cutlass.const_expr(self.post):
            token = cutlass.min(begin + cute.arch.lane_idx() // 2, tokens - 1)
            for i in cutlass.range_constexpr(N):
                cute.autovec_copy(cute.local_tile(mComb[token, None], (N,), (i,)), rFour[None, i])
            cute.autovec_copy(cute.local_tile(mPost[token, None], (N,), (0,)), rFour[None, N])

    @cute.jit
    def split_pairs(self, rFour: cute.Tensor, rWords: cute.Tensor):
        """[stream, pair of inputs][part] of two streams of a token."""
        even = cute.arch.lane_idx() % 2 == 0
        for s in cutlass.range_constexpr(2):
            values = [cutlass.select_(even, rFour[s, i], rFour[2 + s, i]) for i in range(INPUTS)]
            values = [*values, Float32(0.0)]
            for q in cutlass.range_constexpr(PARTS):
                for part, word in enumerate(self.parts_of(values[2 * q : 2 * q + 2])):
                    rWords[part, 4 * s + q] = word

    def order(self) -> None:
        """What this warp read or cleared comes before what anybody sends who hears of it."""
        cute.arch.fence_acq_rel_gpu()

    @cute.jit
    def weigh_parts(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        sTrace: cute.Tensor,
        barriers: tuple,
        space: tuple,
        place: tuple,
        eps: tuple,
    ):
        """Role of the owner: weights of its tokens to every CTA."""
        rank, first, step, rows, tokens = place
        sent, read = barriers
        inbox, letters = space
        lane, group, pitch = cute.arch.lane_idx(), cute.arch.lane_idx() // 4, 4 * self.sum_pitch
        count, apart = max(1, self.cluster // 8), 8 * pitch
        rFours = cute.make_rmem_tensor((N, count), Float32)
        rSum = cute.make_rmem_tensor(N, Float32)
        rPre = cute.make_rmem_tensor(N, Float32)
        cute.arch.griddepcontrol_wait()
        scale, base = mScale[0], mBase[lane % 4]
        tile, begin = Int32(0), first
        while begin < tokens:
            turned = (rank + TILE * tile) & (self.cluster - 1)
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
            self.order()
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
