"""One site boundary of mHC in one launch: write back, coefficients of the next site, mixture, RMSNorm.

    X'_j = bf16(post_j f + sum_i C[i, j] X_i)               `post`; else X' = X
    m    = (fn z) / sqrt(mean(z^2) + eps),  z = flatten(X')  4 pre, 4 post, 16 comb (`head`: 4 pre)
    x    = bf16(sum_i pre_i X'_i),  pre = sigmoid(s_pre m + b) + hc_eps
    y    = bf16(weight x / sqrt(mean(x^2) + eps))
    post = 2 sigmoid(s_post m + b),  comb = sinkhorn(s_comb m + b)       for the write-back behind the sublayer

The streams are read once and written once. A cluster of CTAs owns a tile of up to 24 tokens (d 7168: 16), a CTA a slice
of the columns of all four streams, a warp 32 of them, a lane 8 of three tokens: what a lane loads, 16 bytes a stream,
is what it writes back, what the MMAs read as B (tokens are N; a sum does not care which k comes first, so 8 consecutive
columns serve as the k of four MMAs), and what it mixes. X' never leaves its registers. A call of up to 8 tokens a tile
does a third of the work.

The slice of fn (24 rows) stays in shared memory for all tiles of a CTA: clusters are persistent, and fn is read from
L2 once a cluster. X' is exact in TF32, fn = hi + lo is exact to 2^-22 (hi: its first 11 bits, which is what an MMA
reads of it; lo: the next 11): two MMAs give the products of fp32.

    worker warps   write_back -> project -> exchange 1 -> mix -> exchange 2 -> scale; the next tile's loads are
                   on their way since mix
    all            fn by bulk copies ahead of griddepcontrol.wait, a part each: a warp issues one at a time
    last warp      coefficients of the site before; post and comb of the tokens that this CTA owns (`coefficients`)

    exchange 1     sums of a CTA's warps go to where they are needed: 4 pre and the squares to every CTA of the
                   cluster, 20 others to the CTA that owns the token (t mod cluster); `st.async`, whose bytes an
                   mbarrier of the receiver counts
    exchange 2     squares of x, to every CTA

    barriers       fn (its bytes); sums, squares (bytes of the exchanges); ready: the last warp has read the sums of
                   a tile and left the next one's coefficients; free: a CTA's buffers, two tiles deep, have been read

    SMEM (d 4096, 16 CTAs)   fn 98,688  sums 21,504  pre 13,056  squares 3,840  owned 5,120  x 3,840  coefficients 3,840
    launch                   (cluster, clusters) CTAs of 32 (d / 32 cluster + 1) threads

This form is the one for few tokens; `bulk` and `stream` have less to wait for with many (`forms`).

Orders of sums are fixed: k within a warp, warps, CTAs. Neither the number of tokens nor a token's place changes them.

Source: DSV4 paper, mHC section; `dsv4lib.reference.mhc`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, memory

from dsv4lib.kernels.mhc.coefficients import Coefficients, sigmoid
from dsv4lib.kernels.mhc.config import COEFFICIENTS, COLUMNS, LANES, OWNED, PARTS, ROWS_N, UNIT, WORDS, N
from dsv4lib.kernels.mhc.words import TF32, floats, halves, multiply, pair, send


class Mhc(Coefficients):
    """A site boundary; see the module docstring. Settings: `config.Config`."""

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
        rows: Int32,
        clusters: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
        stream: cuda.CUstream,
    ):
        """Launch ``clusters`` clusters.

        Args:
            mX: [T, 4 d] bf16, a token's streams side by side.
            mF: [T, d] bf16, or None without `post`, as mPost [T, 4] and mComb [T, 16] fp32.
            mFn: [24, 4 d] fp32 (`head`: [4, 4 d]).
            mScale: [3] fp32 (`head`: [1]).
            mBase: [24] fp32 (`head`: [4]).
            mWeight: [d] fp32.
            mNew: [T, 4 d] bf16, X'; may be ``mX`` itself; None: not written (always without `post`).
            mY: [T, d] bf16; may be ``mF`` itself.
            mPostNew: [T, 4] fp32, mCombNew: [T, 16] fp32, or None with `head`; may not be ``mPost``, ``mComb``.
            rows: tokens a tile, 1 to `tile`.
            clusters: at most the number of tiles.
            hc_eps, rms_eps: eps of pre and Sinkhorn; of both norms.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            fn: cute.struct.Align[cute.struct.MemRange[Float32, self.fn_floats], 128]
            held: cute.struct.Align[cute.struct.MemRange[Float32, self.held_floats], 64]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.sum_floats], 16]
            inbox: cute.struct.Align[cute.struct.MemRange[Float32, self.inbox_floats], 16]
            mix: cute.struct.Align[cute.struct.MemRange[Float32, self.mix_floats], 16]
            pre: cute.struct.Align[cute.struct.MemRange[Float32, self.pre_floats], 16]
            squares: cute.struct.Align[cute.struct.MemRange[Float32, self.square_floats], 16]
            owned: cute.struct.Align[cute.struct.MemRange[Float32, self.owned_floats], 16]
            mixed: cute.struct.Align[cute.struct.MemRange[Float32, self.mixed_floats], 16]
            mine: cute.struct.Align[cute.struct.MemRange[Float32, self.mine_floats], 16]
            coefficients: cute.struct.Align[cute.struct.MemRange[Float32, self.coefficient_floats], 16]
            barriers: cute.struct.MemRange[Int64, self.barriers]

        self.storage = Storage
        before, after = (mF, mPost, mComb), (mNew, mY, mPostNew, mCombNew)
        self.kernel(mX, before, mFn, mScale, mBase, mWeight, after, rows, hc_eps, rms_eps).launch(
            grid=(self.cluster, clusters, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
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
        rows: Int32,
        hc_eps: Float32,
        rms_eps: Float32,
    ):
        """Set-up that all forms have, then their roles."""
        rank, first, _ = cute.arch.block_idx()
        _, step, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        sFn = storage.fn.get_tensor(cute.make_layout((self.values, N * self.columns), stride=(self.fn_pitch, 1)))
        shape, pitch = (self.warps, self.tile, self.sum_pitch), self.sum_pitch
        sSums = storage.sums.get_tensor(cute.make_layout(shape, stride=(self.tile * pitch, pitch, 1)))
        shape = (2, self.tile, COEFFICIENTS)
        sCoefficients = storage.coefficients.get_tensor(
            cute.make_layout(shape, stride=(self.tile * COEFFICIENTS, COEFFICIENTS, 1))
        )
        barriers = [storage.barriers.data_ptr() + k for k in range(self.barriers)]
        if tidx == 0:
            for barrier, arrivals in zip(barriers, self.arrivals(), strict=True):
                cute.arch.mbarrier_init(barrier, arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.cluster_arrive_relaxed()  # the others may send when everybody waited
        place = rank, first * rows, step * rows, rows, mX.shape[0]
        given, shared = (mX, before, mFn, mScale, mBase, mWeight, after), (sFn, sSums, sCoefficients)
        self.roles(warp, given, storage, shared, barriers, place, (hc_eps, rms_eps))

    def arrivals(self) -> list[int]:
        """How many arrivals each barrier waits for: fn, sums, squares, ready, free."""
        return [self.threads // LANES, 1, 1, 1, self.cluster]

    @cute.jit
    def roles(self, warp: Int32, given: tuple, storage: Any, shared: tuple, barriers: list, place: tuple, eps: tuple):
        """What each warp does."""
        (mX, (mF, mPost, mComb), mFn, mScale, mBase, mWeight, (mNew, mY, mPostNew, mCombNew)) = given
        sFn, sSums, sCoefficients = shared
        fn, sums, _, ready, _ = barriers
        shape, pitch = (2, self.slots, self.cluster, OWNED), self.cluster * OWNED
        sOwned = storage.owned.get_tensor(cute.make_layout(shape, stride=(self.slots * pitch, pitch, OWNED, 1)))
        sSquares, sSent = self.exchanged(storage)
        self.fetch_fn(mFn, place[0], sFn, fn, warp, self.threads // LANES)
        if warp == self.warps:
            cute.arch.griddepcontrol_wait()
            cute.arch.cluster_wait()
            small = sSquares, sOwned, sCoefficients
            self.own(mPost, mComb, mScale, mBase, mPostNew, mCombNew, small, (sums, ready), place, eps)
        else:
            small = sFn, sSums, sSent, sOwned, sCoefficients
            self.work((mX, mF), (mScale, mBase, mWeight), (mNew, mY), small, barriers, place, eps)

    @cute.jit
    def exchanged(self, storage: Any) -> tuple:
        """What CTAs send each other: (squares or their sums [buffer, token, CTA], tensors that `work` needs)."""
        shape, pitch = (2, self.tile, self.cluster, N), self.pre_pitch
        sPre = storage.pre.get_tensor(cute.make_layout(shape, stride=(self.tile * pitch, pitch, N, 1)))
        shape, pitch = (2, self.tile, self.cluster), self.square_pitch
        sSquares = storage.squares.get_tensor(cute.make_layout(shape, stride=(self.tile * pitch, pitch, 1)))
        shape = (2, self.cluster, self.tile)
        sMixed = storage.mixed.get_tensor(cute.make_layout(shape, stride=(self.cluster * self.tile, self.tile, 1)))
        sMine = storage.mine.get_tensor(cute.make_layout((self.warps, self.tile), stride=(self.tile, 1)))
        return sSquares, (sPre, sSquares, sMixed, sMine)

    @cute.jit
    def work(
        self, given: tuple, parameters: tuple, out: tuple, small: tuple, barriers: tuple, place: tuple, eps: tuple
    ):
        """Role of the other warps: tile after tile, all but post and comb."""
        (mX, mF), (mScale, mBase, mWeight), (mNew, mY) = given, parameters, out
        sFn, sSums, sSent, sOwned, sCoefficients = small
        sPre, sSquares, sMixed, sMine = sSent
        fn, sums, squares, ready, free = barriers
        rank, first, step, rows, tokens = place
        tidx, _, _ = cute.arch.thread_idx()
        warp, four = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx() % 4
        column = (rank * self.columns + warp * UNIT) // COLUMNS + four  # in units of 8
        rX = cute.make_rmem_tensor((COLUMNS, N, self.eights), BFloat16)
        rF = cute.make_rmem_tensor((COLUMNS, self.eights), BFloat16)
        rZ = cute.make_rmem_tensor((WORDS, N, self.eights), Uint32)
        rMix = cute.make_rmem_tensor((WORDS, self.eights), Uint32)
        rWeight = cute.make_rmem_tensor(COLUMNS, Float32)
        weights = cute.domain_offset((column * COLUMNS,), mWeight).iterator
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weights])
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[mScale.iterator])
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[mBase.iterator])
        cute.arch.griddepcontrol_wait()
        self.fetch(mX, mF, first, rows, tokens, column, rX, rF)
        cute.arch.cluster_wait()
        tile, begin = Int32(0), first
        while begin < tokens:
            buffer = tile & 1
            cute.arch.mbarrier_wait(ready, buffer)
            self.write_back(rX, rF, sCoefficients[buffer, None, None], rows, rZ)
            if cutlass.const_expr(self.keep):
                self.store_streams(mNew, rZ, begin, rows, tokens, column)
            cute.arch.mbarrier_wait(fn, 0)
            self.project_rows(rZ, sFn, sSums[warp, None, None], warp, rows)
            if begin > first:  # buffers are for two tiles: all CTAs have read the one before the last
                cute.arch.mbarrier_wait(free, 1 - buffer)
            self.meet()
            # Behind the last tile nobody waits, and a CTA that has ended hears nothing.
            if begin + step < tokens and tidx < self.cluster:
                cute.arch.mbarrier_arrive(free, tidx)  # the tile before has been read here
            sFirst = sPre[buffer, None, None, None], sSquares[buffer, None, None]
            self.exchange_sums(sSums, *sFirst, sOwned[buffer, None, None, None], sums, rank, rows)
            scale, base = mScale[0], mBase[four]
            cute.arch.mbarrier_wait(sums, buffer)
            self.mix(rZ, *sFirst, scale, base, eps, rows, rMix, sMine[warp, None])
            self.fetch(mX, mF, begin + step, rows, tokens, column, rX, rF)
            cute.autovec_copy(cute.local_tile(mWeight, (COLUMNS,), (column,)), rWeight)
            self.meet()
            self.exchange_squares(sMine, sMixed[buffer, None, None], squares, rank, rows)
            cute.arch.mbarrier_wait(squares, buffer)
            self.store_scaled(mY, rMix, rWeight, sMixed[buffer, None, None], begin, rows, tokens, column, eps[1])
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def meet(self):
        """All workers."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)

    @cute.jit
    def fetch(
        self,
        mX: cute.Tensor,
        mF: Any,
        begin: Int32,
        rows: Int32,
        tokens: Int32,
        column: Int32,
        rX: cute.Tensor,
        rF: cute.Tensor,
    ):
        """This lane's columns of its tokens, zeros where there is none (and nothing to keep until then)."""
        group = cute.arch.lane_idx() // 4
        rX.fill(0.0)
        rF.fill(0.0)
        for h in cutlass.range_constexpr(self.eights):
            t = group + 8 * h
            token = begin + t
            if t < rows and token < tokens:
                for i in cutlass.range_constexpr(N):
                    place = column + i * (self.d // COLUMNS)
                    cute.autovec_copy(cute.local_tile(mX[token, None], (COLUMNS,), (place,)), rX[None, i, h])
                if cutlass.const_expr(self.post):
                    cute.autovec_copy(cute.local_tile(mF[token, None], (COLUMNS,), (column,)), rF[None, h])

    @cute.jit
    def write_back(self, rX: cute.Tensor, rF: cute.Tensor, sCoefficients: cute.Tensor, rows: Int32, rZ: cute.Tensor):
        """X' in words of two columns; the second and third token only where a tile has them."""
        rOld, rNew, group = cute.recast_tensor(rX, Uint32), cute.recast_tensor(rF, Uint32), cute.arch.lane_idx() // 4
        if cutlass.const_expr(not self.post):
            rZ.store(rOld.load())
        else:
            self.write_token(rOld[None, None, 0], rNew[None, 0], sCoefficients[group, None], rZ[None, None, 0])
            for h in cutlass.range_constexpr(1, self.eights):
                rZ[None, None, h].fill(0)
                if rows > ROWS_N * h:
                    line = sCoefficients[group + ROWS_N * h, None]
                    self.write_token(rOld[None, None, h], rNew[None, h], line, rZ[None, None, h])

    @cute.jit
    def write_token(self, rOld: cute.Tensor, rNew: cute.Tensor, sLine: cute.Tensor, rZ: cute.Tensor):
        """X' of one token."""
        rC = cute.make_rmem_tensor((N, N + 1), Float32)
        for i in cutlass.range_constexpr(N + 1):
            cute.autovec_copy(cute.local_tile(sLine, (N,), (i,)), rC[None, i])
        for w in cutlass.range(WORDS, unroll_full=True):
            f = floats(rNew[w])
            x = [floats(rOld[w, i]) for i in range(N)]
            for j in cutlass.range_constexpr(N):
                z = [f[k] * rC[j, 0] for k in range(2)]
                for i in cutlass.range_constexpr(N):
                    z = [cute.math.fma(x[i][k], rC[j, 1 + i], z[k]) for k in range(2)]
                rZ[w, j] = pair(*z)

    @cute.jit
    def store_streams(
        self, mNew: cute.Tensor, rZ: cute.Tensor, begin: Int32, rows: Int32, tokens: Int32, column: Int32
    ):
        """X' to global memory."""
        rOut = cute.recast_tensor(rZ, BFloat16)
        for h in cutlass.range_constexpr(self.eights):
            t = cute.arch.lane_idx() // 4 + 8 * h
            token = begin + t
            if t < rows and token < tokens:
                for i in cutlass.range_constexpr(N):
                    place = column + i * (self.d // COLUMNS)
                    cute.autovec_copy(rOut[None, i, h], cute.local_tile(mNew[token, None], (COLUMNS,), (place,)))

    @cute.jit
    def project_rows(self, rZ: cute.Tensor, sFn: cute.Tensor, sSum: cute.Tensor, warp: Int32, rows: Int32):
        """`project` of the eights of tokens that a tile has."""
        if rows <= ROWS_N:
            self.project(rZ, sFn, sSum, warp, 1)
        elif rows <= 2 * ROWS_N:
            self.project(rZ, sFn, sSum, warp, 2)
        else:
            if cutlass.const_expr(self.eights == 3):
                self.project(rZ, sFn, sSum, warp, 3)

    @cute.jit
    def project(self, rZ: cute.Tensor, sFn: cute.Tensor, sSum: cute.Tensor, warp: Int32, eights: cutlass.Constexpr):
        """This warp's part of fn z and of the squares, for the tile's first tokens, eight at a time.

        A: rows lane / 4 and 8 further of fn, k lane mod 4 (+ 4), hi, then lo; of rows 16 to 23 (`head`: 0 to 3) hi and
        below it lo. B: the same k, token lane / 4; sums: tokens 2 (lane mod 4) and the next. k and k + 4 of MMA w are
        columns 2 w and 2 w + 1 of this lane's eight.
        """
        group, four = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        row = cutlass.min(group, Int32(self.values - 1)) if self.head else group
        rC = cute.make_rmem_tensor((4, 2, eights), Float32)  # rows 0 to 15, and the last
        rSquares = cute.make_rmem_tensor((2, eights), Float32)
        rC.fill(0.0)
        rSquares.fill(0.0)
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
                    whole = [[rB[2 * w + k, n] for k in range(2)] for n in range(self.tiles)]
                    high = [[value.bitcast(Uint32) & Uint32(TF32) for value in one] for one in whole]
                    low = [
                        [(value - cut.bitcast(Float32)).bitcast(Uint32) for value, cut in zip(*two, strict=True)]
                        for two in zip(whole, high, strict=True)
                    ]
                    for h in cutlass.range_constexpr(eights):
                        z = halves(rZ[word, i, h])
                        for k in cutlass.range_constexpr(2):
                            value = z[k].bitcast(Float32)
                            rSquares[k, h] = cute.math.fma(value, value, rSquares[k, h])
                        if cutlass.const_expr(not self.head):
                            for part in (high, low):
                                multiply([part[n][k] for k in range(2) for n in range(2)], z, rC[None, 0, h])
                        multiply([part[-1][k] for k in range(2) for part in (high, low)], z, rC[None, 1, h])
        for h in cutlass.range_constexpr(eights):
            last = [rC[k, 1, h] + rC[2 + k, 1, h] for k in range(2)]
            for k in cutlass.range_constexpr(2):
                line = sSum[ROWS_N * h + 2 * four + k, None]
                if cutlass.const_expr(self.head):
                    line[group] = last[k]
                else:
                    for n, value in enumerate((rC[k, 0, h], rC[2 + k, 0, h], last[k])):
                        line[ROWS_N * n + group] = value
            total = rSquares[0, h] + rSquares[1, h]
            for lanes in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, lanes)
            sSum[group + ROWS_N * h, ROWS_N * self.tiles + four] = total  # four times, as sums are read by fours

    @cute.jit
    def exchange_sums(
        self,
        sSums: cute.Tensor,
        sPre: cute.Tensor,
        sSquares: cute.Tensor,
        sOwned: cute.Tensor,
        barrier: cute.Pointer,
        rank: Int32,
        rows: Int32,
    ):
        """The sums of this CTA's warps, in order, to the CTAs that need them: four of a token a thread."""
        tidx, _, _ = cute.arch.thread_idx()
        owned = 0 if self.head else OWNED // N
        if tidx == 0:
            mine = (rows - rank + self.cluster - 1) // self.cluster  # tokens below rows that this CTA owns
            size = 4 * self.cluster * ((N + 1) * rows + N * owned * mine)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        rSum = cute.make_rmem_tensor(N, Float32)
        for item in cutlass.range(tidx, (2 * PARTS + owned) * self.tile, self.workers, unroll=1):
            t, piece = item % self.tile, item // self.tile
            if t < rows:
                if piece < 2 * PARTS:
                    self.over_warps(
                        sSums[None, t, None], cutlass.select_(piece < PARTS, Int32(0), Int32(self.tiles * 2)), rSum
                    )
                    for k in cutlass.range_constexpr(self.cluster // PARTS):
                        peer = piece % PARTS * (self.cluster // PARTS) + k
                        if piece < PARTS:
                            place = cute.domain_offset((t, rank, 0), sPre).iterator
                            send(place, peer, [rSum[v] for v in range(N)], barrier)
                        else:
                            send(cute.domain_offset((t, rank), sSquares).iterator, peer, [rSum[0]], barrier)
                else:
                    fours = piece - 2 * PARTS
                    self.over_warps(sSums[None, t, None], 1 + fours, rSum)
                    place = cute.domain_offset((t // self.cluster, rank, N * fours), sOwned).iterator
                    send(place, t % self.cluster, [rSum[v] for v in range(N)], barrier)

    @cute.jit
    def over_warps(self, sLines: cute.Tensor, fours: Int32, rSum: cute.Tensor):
        """Four values of each warp, added in order."""
        cute.autovec_copy(cute.local_tile(sLines[0, None], (N,), (fours,)), rSum)
        for w in cutlass.range_constexpr(1, self.warps):
            rOne = cute.make_rmem_tensor(N, Float32)
            cute.autovec_copy(cute.local_tile(sLines[w, None], (N,), (fours,)), rOne)
            rSum.store(rSum.load() + rOne.load())

    @cute.jit
    def mix(
        self,
        rZ: cute.Tensor,
        sPre: cute.Tensor,
        sSquares: cute.Tensor,
        scale: Float32,
        base: Float32,
        eps: tuple,
        rows: Int32,
        rMix: cute.Tensor,
        sMine: cute.Tensor,
    ):
        """x of this lane's columns, and the sum of its squares over the warp's columns."""
        group, four = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        for h in cutlass.range_constexpr(self.eights):
            if rows > ROWS_N * h:
                rSums = cute.make_rmem_tensor(2, Float32)
                rSums.fill(0.0)
                if group + 8 * h < rows:  # nobody sends the others
                    self.over_sources((sPre[group + 8 * h, None, four], sSquares[group + 8 * h, None]), rSums)
                norm = cute.math.rsqrt(rSums[1] * (1.0 / (N * self.d)) + eps[1], fastmath=True)
                mine = sigmoid(cute.math.fma(scale, rSums[0] * norm, base)) + eps[0]
                pre = [cute.arch.shuffle_sync(mine, 4 * group + i) for i in range(N)]
                squares = Float32(0.0)
                for w in cutlass.range_constexpr(WORDS):
                    x = [pre[0] * z for z in floats(rZ[w, 0, h])]
                    for i in cutlass.range_constexpr(1, N):
                        z = floats(rZ[w, i, h])
                        x = [cute.math.fma(pre[i], z[k], x[k]) for k in range(2)]
                    rMix[w, h] = pair(*x)
                    for value in floats(rMix[w, h]):
                        squares = cute.math.fma(value, value, squares)
                for lanes in (1, 2):
                    squares = squares + cute.arch.shuffle_sync_bfly(squares, lanes)
                if four == 0:
                    sMine[group + 8 * h] = squares

    @cute.jit
    def exchange_squares(
        self, sMine: cute.Tensor, sMixed: cute.Tensor, barrier: cute.Pointer, rank: Int32, rows: Int32
    ):
        """The squares of this CTA's columns to every CTA, four tokens a thread."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 16 * self.cluster * cute.ceil_div(rows, 4))
        rSum = cute.make_rmem_tensor(4, Float32)
        for item in cutlass.range(tidx, self.cluster * (self.tile // 4), self.workers, unroll=1):
            fours, peer = item % (self.tile // 4), item // (self.tile // 4)
            if 4 * fours < rows:
                self.over_warps(sMine, fours, rSum)
                place = cute.domain_offset((rank, 4 * fours), sMixed).iterator
                send(place, peer, [rSum[v] for v in range(4)], barrier)

    @cute.jit
    def store_scaled(
        self,
        mY: cute.Tensor,
        rMix: cute.Tensor,
        rWeight: cute.Tensor,
        sMixed: cute.Tensor,
        begin: Int32,
        rows: Int32,
        tokens: Int32,
        column: Int32,
        eps: Float32,
    ):
        """y of this lane's columns."""
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        rSum = cute.make_rmem_tensor(1, Float32)
        for h in cutlass.range_constexpr(self.eights):
            t = cute.arch.lane_idx() // 4 + 8 * h
            token = begin + t
            if t < rows and token < tokens:
                self.over_sources((sMixed[None, t],), rSum)
                norm = cute.math.rsqrt(rSum[0] * (1.0 / self.d) + eps, fastmath=True)
                for w in cutlass.range_constexpr(WORDS):
                    x = floats(rMix[w, h])
                    rWords[w] = pair(x[0] * norm * rWeight[2 * w], x[1] * norm * rWeight[2 * w + 1])
                line = cute.local_tile(mY[token, None], (COLUMNS,), (column,))
                cute.autovec_copy(cute.recast_tensor(rWords, BFloat16), line)
