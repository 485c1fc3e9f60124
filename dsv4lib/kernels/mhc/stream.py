"""A site boundary as a stream: no warp waits for another CTA while it has a tile to fetch, write back and project.

Columns, lanes, write-back and projection are those of `simt`. What differs is who adds up, and when X' is mixed: one
tile later, when what the cluster made of a tile's sums has arrived.

    workers     write_back -> store X' -> project -> multiply_streams (`products`) of tile n; mix, scale, store y of
                tile n - 1. They wait for nobody but the sender, a tile behind
    sender      fn by bulk copies; coefficients of the site before and streams into L2, two tiles ahead; adds up what
                the workers left of a tile and sends each token's 36 sums (`head`: 20) to the CTA that owns it (t mod
                cluster): 144 messages of 16 bytes a tile and CTA, where `simt` needs 660, each of which an mbarrier
                has to count
    owner       adds up the CTAs of its tokens, sends pre / rms to every CTA; then post and comb

X' waits for its mixture in L2, as fn leaves no room in shared memory: a lane reads what it stored itself (without
write-back: what it read before). With streams asked for three tiles ahead L2 loses more of both (d 7168, 4096 tokens
on an H200: 361 us; one tile ahead 377; two 313).

    barriers    fn; projected (workers), taken (sender): sums of a tile in shared memory; ready [2]: coefficients
                sums, weighed [4 each]: bytes from all CTAs, each of which also arrives

Four tiles may be in flight, and nothing says that a buffer is free: a CTA sends the sums of tile n + 4 when its workers
have mixed tile n + 2, which the owner weighed after it was done with n + 1; and nobody weighs tile n + 4 before all
have sent it, when all have mixed n + 2.

    SMEM (d 7168, 16 CTAs)   fn 172,416  sums 32,256  inbox 9,216  weights 1,024  coefficients 2,560

Orders of sums are fixed as in `simt`. Source: as `simt`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsv4lib.kernels.common.bulk import load_bulk
from dsv4lib.kernels.mhc.config import (
    COEFFICIENTS,
    COLUMNS,
    FOURS,
    IN_FLIGHT,
    LANES,
    MIX,
    OWNED,
    ROWS_N,
    TILE,
    UNIT,
    WORDS,
    N,
    StreamConfig,
)
from dsv4lib.kernels.mhc.products import TRACE, Products
from dsv4lib.kernels.mhc.simt import Mhc
from dsv4lib.kernels.mhc.words import TF32, floats, halves, multiply, pair, peer, prefetch_bulk, send, store_async

AHEAD = 2  # tiles from the one projected to the one that is requested


class MhcStream(StreamConfig, Products, Mhc):
    """A site boundary as a stream; see the module docstring. Settings: `config.StreamConfig`."""

    def arrivals(self) -> list[int]:
        """How many arrivals each barrier waits for: fn, projected, taken, ready, sums, weighed."""
        return [1, self.warps, 1, 1, 1] + [self.cluster + 1] * (2 * IN_FLIGHT)

    @cute.jit
    def roles(self, warp: Int32, given: tuple, storage: Any, shared: tuple, barriers: list, place: tuple, eps: tuple):
        """What each warp does."""
        (mX, (mF, mPost, mComb), mFn, mScale, mBase, mWeight, (mNew, mY, mPostNew, mCombNew)) = given
        sFn, sSums, sCoefficients = shared
        fn, projected, taken, ready, _, sums = barriers[:6]
        weighed = barriers[5 + IN_FLIGHT]
        shape, block = (IN_FLIGHT, self.slots, self.cluster, self.sum_pitch), self.cluster * self.sum_pitch
        sInbox = storage.inbox.get_tensor(
            cute.make_layout(shape, stride=(self.slots * block, block, self.sum_pitch, 1))
        )
        sMix = storage.mix.get_tensor(cute.make_layout((IN_FLIGHT, TILE, MIX), stride=(TILE * MIX, MIX, 1)))
        tidx, _, _ = cute.arch.thread_idx()
        if warp == self.warps:
            self.fetch_fn(mFn, place[0], sFn, fn, Int32(0), 1)
            waits = projected, taken, ready, sums, weighed
            self.gather((mX, mF), mPost, mComb, sSums, sInbox, sCoefficients, waits, place)
        elif warp == self.warps + 1:
            self.weigh(mScale, mBase, mPostNew, mCombNew, sInbox, sMix, (sums, weighed), place, eps)
        else:
            small = sFn, sSums, sCoefficients, sMix
            self.stream((mX, mF), mWeight, (mNew, mY), small, (fn, projected, taken, ready, weighed), place)

    @cute.jit
    def stream(self, given: tuple, mWeight: cute.Tensor, out: tuple, small: tuple, barriers: tuple, place: tuple):
        """Role of the workers: a tile's write-back and projection, and the mixture of the one before."""
        (mX, mF), (mNew, mY) = given, out
        sFn, sSums, sCoefficients, sMix = small
        fn, projected, taken, ready, weighed = barriers
        rank, first, step, rows, tokens = place
        tidx, _, _ = cute.arch.thread_idx()
        warp, four = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx() % 4
        column = (rank * self.columns + warp * UNIT) // COLUMNS + four  # in units of 8
        rX = cute.make_rmem_tensor((COLUMNS, N, 2), BFloat16)
        rF = cute.make_rmem_tensor((COLUMNS, 2), BFloat16)
        rZ = cute.make_rmem_tensor((WORDS, N, 2), Uint32)
        rOne = cute.make_rmem_tensor((WORDS, N), Uint32)
        rWeight = cute.make_rmem_tensor(COLUMNS, Float32)
        weights = cute.local_tile(mWeight, (COLUMNS,), (column,))
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weights.iterator])
        cute.arch.griddepcontrol_wait()
        self.fetch(mX, mF, first, rows, tokens, column, rX, rF)
        cute.arch.mbarrier_wait(fn, 0)
        tile, begin = Int32(0), first
        while begin < tokens + step:
            if begin < tokens:
                if cutlass.const_expr(self.post):
                    cute.arch.mbarrier_wait(ready + (tile & 1), (tile >> 1) & 1)
                self.write_back(rX, rF, sCoefficients[tile & 1, None, None], rows, rZ)
                if cutlass.const_expr(self.keep):
                    self.store_streams(mNew, rZ, begin, rows, tokens, column)
                if tile > 0:
                    cute.arch.mbarrier_wait(taken, (tile + 1) & 1)
                self.project(rZ, sFn, sSums[warp, None, None], warp)
                self.multiply_streams(rZ, sSums[warp, None, None], rows)
                self.fetch(mX, mF, begin + step, rows, tokens, column, rX, rF)
                self.arrive(projected)
            if tile > 0:
                before, buffer = begin - step, (tile - 1) & (IN_FLIGHT - 1)
                cute.autovec_copy(weights, rWeight)
                cute.arch.mbarrier_wait(weighed + buffer, ((tile - 1) // IN_FLIGHT) & 1)
                for h in cutlass.range_constexpr(2):
                    cute.arch.sync_warp()  # or both tokens come at once, and registers spill
                    self.fetch_again(mNew if self.keep else mX, rOne, h, before, rows, tokens, column)
                    self.mix_weighed(mY, rOne, rWeight, sMix[buffer, None, None], h, before, rows, tokens, column)
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def project(self, rZ: cute.Tensor, sFn: cute.Tensor, sSum: cute.Tensor, warp: Int32):
        """This warp's part of fn z, for all 16 tokens; as in `simt`, but tokens are A, which takes fewer registers.

        A: row lane / 4 (+ 8), k lane mod 4 (+ 4); B: the same k, column lane / 4; sums: columns 2 (lane mod 4) and
        the next. k and k + 4 of MMA w are columns 2 w and 2 w + 1 of this lane's eight.
        """
        group, four = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        row = cutlass.min(group, Int32(self.values - 1)) if self.head else group
        rC = cute.make_rmem_tensor((4, self.tiles), Float32)
        rC.fill(0.0)
        rB = cute.make_rmem_tensor((4, self.tiles), Float32)
        for i in cutlass.range(N, unroll_full=True):
            cute.arch.sync_warp()  # or all of fn comes at once, and registers spill
            for half in cutlass.range(2, unroll_full=True):
                place = i * (self.columns // 4) + warp * (UNIT // 4) + 2 * four + half
                for n in cutlass.range_constexpr(self.tiles):
                    line = sFn[ROWS_N * n + row, None]
                    cute.autovec_copy(cute.local_tile(line, (4,), (place,)), rB[None, n])
                for w in cutlass.range_constexpr(2):
                    word = 2 * half + w
                    z = [halves(rZ[word, i, h]) for h in range(2)]
                    a = [z[0][0], z[1][0], z[0][1], z[1][1]]
                    for n in cutlass.range_constexpr(self.tiles):
                        b = [rB[2 * w + k, n] for k in range(2)]
                        high = [value.bitcast(Uint32) & Uint32(TF32) for value in b]
                        multiply(a, high, rC[None, n])
                        low = [value - cut.bitcast(Float32) for value, cut in zip(b, high, strict=True)]
                        multiply(a, [value.bitcast(Uint32) for value in low], rC[None, n])
        self.store_products(rC, sSum)

    @cute.jit
    def fetch_again(
        self,
        mZ: cute.Tensor,
        rZ: cute.Tensor,
        h: cutlass.Constexpr,
        begin: Int32,
        rows: Int32,
        tokens: Int32,
        column: Int32,
    ):
        """X' of this lane and one token from where it stored it (or took it)."""
        rOut = cute.recast_tensor(rZ, BFloat16)
        rZ.fill(0)
        t = cute.arch.lane_idx() // 4 + 8 * h
        if t < rows and begin + t < tokens:
            for i in cutlass.range_constexpr(N):
                place = column + i * (self.d // COLUMNS)
                cute.autovec_copy(cute.local_tile(mZ[begin + t, None], (COLUMNS,), (place,)), rOut[None, i])

    @cute.jit
    def mix_weighed(
        self,
        mY: cute.Tensor,
        rZ: cute.Tensor,
        rWeight: cute.Tensor,
        sMix: cute.Tensor,
        h: cutlass.Constexpr,
        begin: Int32,
        rows: Int32,
        tokens: Int32,
        column: Int32,
    ):
        """y of this lane's columns and one token."""
        rPre = cute.make_rmem_tensor(N, Float32)
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        t = cute.arch.lane_idx() // 4 + 8 * h
        if t < rows and begin + t < tokens:  # nobody weighs the others
            cute.autovec_copy(sMix[t, None], rPre)
            for w in cutlass.range_constexpr(WORDS):
                x = [rPre[0] * z for z in floats(rZ[w, 0])]
                for i in cutlass.range_constexpr(1, N):
                    z = floats(rZ[w, i])
                    x = [cute.math.fma(rPre[i], z[k], x[k]) for k in range(2)]
                rWords[w] = pair(x[0] * rWeight[2 * w], x[1] * rWeight[2 * w + 1])
            line = cute.local_tile(mY[begin + t, None], (COLUMNS,), (column,))
            cute.autovec_copy(cute.recast_tensor(rWords, BFloat16), line)

    @cute.jit
    def gather(
        self,
        given: tuple,
        mPost: Any,
        mComb: Any,
        sSums: cute.Tensor,
        sInbox: cute.Tensor,
        sCoefficients: cute.Tensor,
        barriers: tuple,
        place: tuple,
    ):
        """Role of the sender: streams into L2 and coefficients for the workers, and their sums to the owners."""
        rank, first, step, rows, tokens = place
        projected, taken, ready, sums, weighed = barriers
        lane, pieces = cute.arch.lane_idx(), FOURS + (0 if self.head else OWNED // N)
        rounds = -(-pieces * TILE // LANES)
        rSum = cute.make_rmem_tensor((N, rounds), Float32)
        rPlace = cute.make_rmem_tensor(rounds, Int32)
        rSignal = cute.make_rmem_tensor(rounds, Int32)
        for k in cutlass.range_constexpr(rounds):  # four sums of a token a lane
            t, piece = (lane + LANES * k) % rows, (lane + LANES * k) // rows
            mine = cute.domain_offset((0, t // self.cluster, rank, N * piece), sInbox).iterator
            rPlace[k], rSignal[k] = peer(mine, t % self.cluster), peer(sums, t % self.cluster)
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range_constexpr(2):
            if first + k * step < tokens:
                self.fetch_coefficients(mPost, mComb, first + k * step, tokens, sCoefficients, ready, Int32(k))
        for k in cutlass.range_constexpr(1, AHEAD):
            self.request(given, first + k * step, rank, rows, tokens)
        cute.arch.cluster_wait()
        tile, begin = Int32(0), first
        while begin < tokens:
            buffer = tile & (IN_FLIGHT - 1)
            cute.arch.mbarrier_wait(projected, tile & 1)
            for k in cutlass.range_constexpr(rounds):
                item = lane + LANES * k
                if item < pieces * rows:
                    self.over_warps(sSums[None, item % rows, None], item // rows, rSum[None, k])
            self.arrive(taken)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(weighed + buffer, 4 * MIX * rows)
            self.tell(sums + buffer)
            for k in cutlass.range_constexpr(rounds):
                if lane + LANES * k < pieces * rows:
                    there = rPlace[k] + buffer * (4 * self.slots * self.cluster * self.sum_pitch)
                    store_async(there, [rSum[v, k] for v in range(N)], rSignal[k] + 8 * buffer)
            if begin + 2 * step < tokens:  # in place of those of this tile
                self.fetch_coefficients(mPost, mComb, begin + 2 * step, tokens, sCoefficients, ready, tile)
            self.request(given, begin + AHEAD * step, rank, rows, tokens)
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def fetch_coefficients(
        self,
        mPost: Any,
        mComb: Any,
        begin: Int32,
        tokens: Int32,
        sCoefficients: cute.Tensor,
        ready: cute.Pointer,
        tile: Int32,
    ):
        """post and comb of a tile by bulk copies, those of the last token for what is behind it."""
        if cutlass.const_expr(self.post):
            lane, barrier = cute.arch.lane_idx(), ready + (tile & 1)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * TILE * COEFFICIENTS)
            cute.arch.sync_warp()
            token = cutlass.min(begin + lane % TILE, tokens - 1)
            line = cute.domain_offset((tile & 1, lane % TILE, 0), sCoefficients).iterator
            if lane < TILE:
                load_bulk(line, mPost[token, None].iterator, Int32(4 * N), barrier)
            else:
                load_bulk(line + N, mComb[token, None].iterator, Int32(4 * N * N), barrier)

    @cute.jit
    def request(self, given: tuple, begin: Int32, rank: Int32, rows: Int32, tokens: Int32):
        """This CTA's columns of a tile to come, into L2: a lane fetches its columns a tile later."""
        mX, mF = given
        size = Int32(2 * self.columns)
        for item in cutlass.range(cute.arch.lane_idx(), (N + 1 if self.post else N) * TILE, LANES, unroll=1):
            t, stream = item % TILE, item // TILE
            if t < rows and begin + t < tokens:
                if stream < N:
                    line = cute.domain_offset((stream * self.d + rank * self.columns,), mX[begin + t, None])
                    prefetch_bulk(line.iterator, size)
                else:
                    if cutlass.const_expr(self.post):
                        line = cute.domain_offset((rank * self.columns,), mF[begin + t, None])
                        prefetch_bulk(line.iterator, size)

    @cute.jit
    def tell(self, barrier: cute.Pointer):
        """All CTAs hear that this warp, and those it waited for, are done with what they read before.

        The bytes that the barrier counts would say so too, but they publish nothing but themselves.
        """
        cute.arch.sync_warp()
        if cute.arch.lane_idx() < self.cluster:
            cute.arch.mbarrier_arrive(barrier, cute.arch.lane_idx())

    @cute.jit
    def weigh(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        mPostNew: Any,
        mCombNew: Any,
        sInbox: cute.Tensor,
        sMix: cute.Tensor,
        barriers: tuple,
        place: tuple,
        eps: tuple,
    ):
        """Role of the owner: pre and 1 / rms of its tokens to every CTA, post and comb to global memory."""
        rank, first, step, rows, tokens = place
        sums, weighed = barriers
        lane = cute.arch.lane_idx()
        mine, size = self.share(rank, rows)
        rSum = cute.make_rmem_tensor(N, Float32)
        rPre = cute.make_rmem_tensor(N, Float32)
        rLogit = cute.make_rmem_tensor(self.slots, Float32)
        rC = cute.make_rmem_tensor((N, N), Float32)
        slot = cutlass.min(lane // 4, Int32(self.slots - 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()
        scale, base = mScale[0], mBase[lane % 4]
        value = cutlass.min(lane, Int32(OWNED - 1))
        own_scale, own_base = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(not self.head):
            own_scale, own_base = mScale[cutlass.select_(value < N, Int32(1), Int32(2))], mBase[N + value]
        tile, begin = Int32(0), first
        while begin < tokens:
            buffer = tile & (IN_FLIGHT - 1)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(sums + buffer, size)
            cute.arch.mbarrier_wait(sums + buffer, (tile // IN_FLIGHT) & 1)
            sTile = sInbox[buffer, None, None, None]
            rSum.fill(0.0)
            if slot < mine:  # nobody sends the others
                self.over_all(sTile[slot, None, None], rSum)
            norm = self.weights(rSum, scale, base, eps, rPre)
            self.tell(weighed + buffer)
            self.send_weights(rPre, norm, sMix[buffer, None, None], weighed + buffer, rank, rows)
            if cutlass.const_expr(not self.head):
                self.own_logits(own_scale, own_base, sTile, mine, eps[1], rLogit)
                self.store_post(mPostNew, rLogit, begin, rank, rows, tokens)
                self.sinkhorn(rLogit, rC, eps[0])
                self.store_comb(mCombNew, rC, begin, rank, rows, tokens)
            tile = tile + 1
            begin = begin + step

    def share(self, rank: Int32, rows: Int32) -> tuple:
        """How many tokens of a tile this CTA owns, and how many bytes it is sent for them."""
        mine = (rows - rank + self.cluster - 1) // self.cluster
        return mine, 16 * self.cluster * (FOURS + (0 if self.head else OWNED // N)) * mine

    @cute.jit
    def send_weights(
        self, rPre: cute.Tensor, norm: Float32, sMix: cute.Tensor, barrier: cute.Pointer, rank: Int32, rows: Int32
    ):
        """pre / rms of every token of this CTA to every CTA: 16 bytes a lane."""
        lane = cute.arch.lane_idx()
        for s in cutlass.range_constexpr(self.slots):
            t = s * self.cluster + rank
            values = [cute.arch.shuffle_sync(rPre[i] * norm, 4 * s) for i in range(N)]
            if t < rows and lane < self.cluster:
                send(cute.domain_offset((t, 0), sMix).iterator, lane, values, barrier)

    @cute.jit
    def own_logits(
        self, scale: Float32, base: Float32, sTile: cute.Tensor, mine: Int32, eps: Float32, rLogit: cute.Tensor
    ):
        """Lane v gets logit v of post and comb, of every token that this CTA owns."""
        value = cutlass.min(cute.arch.lane_idx(), Int32(OWNED - 1))
        rSums = cute.make_rmem_tensor(2, Float32)
        for s in cutlass.range_constexpr(self.slots):
            rSums.fill(0.0)
            if s < mine:
                self.over_sources((sTile[s, None, 4 * FOURS + value], sTile[s, None, TRACE]), rSums)
            norm = cute.math.rsqrt(rSums[1] * (1.0 / (N * self.d)) + eps, fastmath=True)
            rLogit[s] = cute.math.fma(scale, rSums[0] * norm, base)
