"""Compute a site boundary for few tokens, by clusters of CTAs.

The streams are read once and written once. A group of warps has eight tokens, four lanes a token: what a lane loads,
16 bytes a stream, is what it writes back, what MMAs read as B, and what it mixes. X' replaces X in shared memory.

    projection     tokens are N of the MMA, rows of fn M. A sum does not care which k comes first, so 8 consecutive
                   columns of a lane serve as the k of four MMAs. X' is exact in TF32, fn = hi + lo is exact to 2^-22
                   (hi: the 11 bits that an MMA reads of it; lo: the next 11): two MMAs give the products of fp32
    fn             a CTA's slice (24 rows) stays in shared memory for all of its tiles

    worker warps   write_back -> project -> exchange 1 -> mix -> exchange 2 -> scale; copies of the next tile are under
                   way since mix
    last warp      coefficients of the site before; post and comb of the tokens that this CTA owns

    exchange 1     sums of a CTA's warps: 4 pre and the squares to every CTA of the cluster, 20 others to the CTA that
                   owns the token (t mod cluster), by `st.async`
    exchange 2     squares of x, to every CTA; where a scale of y has columns of several CTAs (d 7168, fp8), its largest
                   |weight x| too, from each of them to the others

    pipeline       producer                      consumer                 stages
    fn             bulk copies, one a stream     workers                  4, once
    sums           exchange 1 of all CTAs        workers, last warp       2
    squares        exchange 2 of all CTAs        workers                  2
    coefficients   last warp                     workers                  2
    free           CTAs that read the buffers    workers before sending   2

    SMEM (d 4096, 16 CTAs, 3 groups)   fn 98,688  held 61,440  sums 21,504  pre 13,056  squares 3,072  owned 5,120
                                       x squares 3,072  squares of warps 1,536  coefficients 3,840
    launch                             (cluster, clusters) CTAs of 32 (groups d / 32 cluster + 1) threads

Limit: latency. At one token fn comes from L2 or memory once a cluster, code comes from memory once; so streams are a
loop, not four copies of its body, and a kernel for one tile (`once`) has no code for a second.

Orders of sums are fixed: k within a warp, warps, CTAs. Neither the number of tokens nor a token's place changes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsv4lib.dsl.bulk import load_bulk
from dsv4lib.dsl.warp_mma import mma
from dsv4lib.ops.mhc.block_maxima import BlockMaxima, Lane, Smem
from dsv4lib.ops.mhc.config import COEFFICIENTS, COLUMNS, LANES, ROWS_N, UNIT, WORDS, FewConfig, N
from dsv4lib.ops.mhc.kernel import Affine, Cta, fragment_place, sigmoid, to_bf16, view
from dsv4lib.ops.mhc.ptx import copy_16_bytes, pack, send_to_cta, unpack, unpack_bits

TF32 = 0xFFFFE000  # the bits that an MMA reads
SENDERS = 4  # threads that send a token's pre to all CTAs


class Barriers(NamedTuple):
    """mbarriers. In the configuration (how many, arrivals), in the kernel the address of the first.

    Attributes:
        fn: bytes of a stream's columns of fn. sums, squares: bytes of exchanges 1 and 2.
        coefficients: the last warp has a tile's coefficients, and has read its sums. free: all CTAs have read a buffer.
    """

    fn: Any
    sums: Any
    squares: Any
    coefficients: Any
    free: Any


class MhcFewTokens(FewConfig, BlockMaxima):
    """Compute a site boundary by clusters; see the module docstring. Settings: `config.FewConfig`."""

    in_cluster = True

    @property
    def barriers(self) -> Barriers:
        """Return (how many, arrivals) of the mbarriers."""
        return Barriers(fn=(N, 1), sums=(1, 1), squares=(1, 1), coefficients=(1, 1), free=(1, self.cluster))

    @cute.jit
    def roles(self, cta: Cta, storage: Any, warp: Int32):
        """Start each warp's role."""
        tile, cluster = self.tile, self.cluster
        by_cta = (2, tile, cluster), (cluster * tile, 1, tile)
        held = cute.make_layout((WORDS, N + 1, self.workers), stride=(1, WORDS * self.workers, WORDS))
        pre = tile * self.pre_pitch, self.pre_pitch, N, 1
        sums = view(storage.sums, (self.warps, tile, self.sum_pitch))
        smem = Smem(
            fn=view(storage.fn, (self.values, N * self.columns), (self.fn_pitch, 1)),
            held=cute.make_tensor(cute.recast_ptr(storage.held.data_ptr(), dtype=Uint32), held),
            sums=sums,
            coefficients=view(storage.coefficients, (2, tile, COEFFICIENTS)),
            pre=view(storage.pre, (2, tile, cluster, N), pre),
            squares=view(storage.squares, *by_cta),
            owned=view(storage.owned, (2, self.owned_tokens, cluster, COEFFICIENTS)),
            x_squares=view(storage.x_squares, *by_cta),
            warp_squares=view(storage.warp_squares, (2, self.warps, tile)),
            maxima=sums[None, None, ROWS_N * self.tiles],
            others=view(storage.maxima, (2, 2 * self.neighbours, tile)) if self.neighbours else None,
        )
        if warp < self.workers // LANES:
            self.work(cta, smem)
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
            self.prefetch_weight(cta)
            self.post_comb(cta, smem)
            cute.arch.cluster_wait()

    # ------------------------------------------------------- worker warps

    @cute.jit
    def work(self, cta: Cta, smem: Smem):
        """Run the workers: tile after tile, all but post and comb."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        part, group = warp % self.warps, warp // self.warps
        t = ROWS_N * group + lane // 4
        column = (cta.rank * self.columns + part * UNIT) // COLUMNS + lane % 4
        mine = Lane(part, group, t, column)
        cute.arch.griddepcontrol_wait()
        self.fetch(cta, smem, mine, cta.first)
        self.fetch_fn(cta, smem, warp)
        self.pad_scales(cta)
        cute.arch.cluster_wait()
        if cutlass.const_expr(self.once):
            self.boundary(cta, smem, mine, Int32(0), cta.first)
        else:
            tile, begin = Int32(0), cta.first
            while begin < cta.tokens:
                self.boundary(cta, smem, mine, tile, begin)
                tile = tile + 1
                begin = begin + cta.step

    @cute.jit
    def boundary(self, cta: Cta, smem: Smem, mine: Lane, tile: Int32, begin: Int32):
        """Compute all of a tile but post and comb."""
        gmem, bar, rows = cta.gmem, cta.bar, cta.rows
        tidx, _, _ = cute.arch.thread_idx()
        buffer, there = tile & 1, (mine.t < rows) & (begin + mine.t < cta.tokens)
        cute.arch.cp_async_wait_group(0)
        cute.arch.mbarrier_wait(bar.coefficients, buffer)
        # X'_j = bf16(post_j f + sum_i comb_ij X_i)
        self.write_back(cta, smem, mine, buffer, begin + mine.t, there)
        # fn z and z^2, over this warp's columns
        if ROWS_N * mine.group < rows:
            self.project(cta, smem, mine)
        # exchange 1: the same over all columns
        if cutlass.const_expr(not self.once):
            if begin > cta.first:  # all CTAs have read the tile before the last, whose buffer this is
                cute.arch.mbarrier_wait(bar.free, 1 - buffer)
        self.sync_workers()
        if cutlass.const_expr(not self.once):
            # After the last tile no CTA waits, and a CTA that has ended cannot be signalled.
            if begin + cta.step < cta.tokens and tidx < self.cluster:
                cute.arch.mbarrier_arrive(bar.free, tidx)  # the tile before has been read here
        if tidx == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bar.sums, self.sum_bytes(cta.rank, rows))
        self.send_squares(cta, smem.warp_squares[0, None, None], smem.squares[buffer, None, None], bar.sums)
        self.send_sums(cta, smem, buffer)
        logit = Affine(gmem.scale[0], gmem.base[tidx % 4])
        rX = cute.make_rmem_tensor(WORDS, Uint32)
        rWeight = cute.make_rmem_tensor(COLUMNS, Float32)
        early = self.recipe is not None and self.once  # maxima need it before exchange 2; a second tile needs registers
        if cutlass.const_expr(early):
            cute.autovec_copy(self.stream_columns(gmem.weight, mine.column), rWeight)
        cute.arch.mbarrier_wait(bar.sums, buffer)
        # x = bf16(sum_i pre_i X'_i) and x^2, over this warp's columns
        self.mix(cta, smem, mine, buffer, logit, rX)
        if cutlass.const_expr(not self.once):
            self.fetch(cta, smem, mine, begin + cta.step)
        if cutlass.const_expr(not early):
            cute.autovec_copy(self.stream_columns(gmem.weight, mine.column), rWeight)
        if cutlass.const_expr(self.recipe is not None):
            self.store_maximum(smem, mine, rX, rWeight)
        # exchange 2: x^2 over all columns
        self.sync_workers()
        if tidx == 0:
            lines = self.cluster if self.neighbours == 0 else self.cluster + self.lines(cta.rank)
            cute.arch.mbarrier_arrive_and_expect_tx(bar.squares, 16 * lines * cute.ceil_div(rows, 4))
        self.send_squares(cta, smem.warp_squares[1, None, None], smem.x_squares[buffer, None, None], bar.squares)
        if cutlass.const_expr(self.neighbours > 0):
            self.send_maxima(cta, smem, smem.others[buffer, None, None])
        cute.arch.mbarrier_wait(bar.squares, buffer)
        # y = bf16((weight x) / sqrt(mean(x^2) + eps))
        if there:
            self.scale(cta, smem, mine, buffer, rX, rWeight, begin + mine.t)

    def held(self, smem: Smem) -> cute.Tensor:
        """View this thread's streams and f in shared memory."""
        tidx, _, _ = cute.arch.thread_idx()
        return smem.held[None, None, tidx]

    @cute.jit
    def sync_workers(self):
        """Wait for all workers."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)

    @cute.jit
    def fetch_fn(self, cta: Cta, smem: Smem, warp: Int32):
        """Start the bulk copies of this CTA's columns of fn. All warps go stream after stream, a row a copy."""
        lane, size, warps = cute.arch.lane_idx(), 4 * self.columns, self.workers // LANES
        if warp == 0 and lane < N:
            cute.arch.mbarrier_arrive_and_expect_tx(cta.bar.fn + lane, self.values * size)
        cute.arch.sync_warp()
        for item in cutlass.range(warp + warps * lane, self.values * N, warps * LANES, unroll=1):
            row, stream = item % self.values, item // self.values
            column = stream * self.d + cta.rank * self.columns
            source = cute.domain_offset((column,), cta.gmem.fn[row, None]).iterator
            target = smem.fn.iterator + (row * self.fn_pitch + stream * self.columns)
            load_bulk(target, source, Int32(size), cta.bar.fn + stream)

    @cute.jit
    def fetch(self, cta: Cta, smem: Smem, mine: Lane, begin: Int32):
        """Start the copies of this lane's columns of its token's streams and f."""
        token, sHeld = begin + mine.t, self.held(smem)
        if mine.t < cta.rows and token < cta.tokens:
            for i in cutlass.range_constexpr(N):
                source = self.stream_columns(cta.gmem.x[token, None], mine.column, i)
                copy_16_bytes(sHeld[None, i].iterator.toint(), source.iterator)
            if cutlass.const_expr(self.post):
                source = self.stream_columns(cta.gmem.f[token, None], mine.column)
                copy_16_bytes(sHeld[None, N].iterator.toint(), source.iterator)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def write_back(self, cta: Cta, smem: Smem, mine: Lane, buffer: Int32, token: Int32, there: cutlass.Boolean):
        """Replace X of this lane's token by X' and store it.

        By zeros where there is none.
        """
        sHeld, sLine = self.held(smem), smem.coefficients[buffer, mine.t, None]
        rOld = cute.make_rmem_tensor((WORDS, N + 1), Uint32)
        rNew = cute.make_rmem_tensor((WORDS, N), Uint32)
        rOld.fill(0)
        if there:
            for i in cutlass.range_constexpr(N + 1 if self.post else N):
                cute.autovec_copy(sHeld[None, i], rOld[None, i])
        if cutlass.const_expr(self.post):
            rC = cute.make_rmem_tensor((N, N + 1), Float32)  # post, then rows of comb
            for i in cutlass.range_constexpr(N + 1):
                cute.autovec_copy(cute.local_tile(sLine, (N,), (i,)), rC[None, i])
            # X'_j = bf16(post_j f + sum_i comb_ij X_i), a pair of columns at a time
            for w in cutlass.range(WORDS, unroll_full=True):
                f = unpack(rOld[w, N])
                x = [unpack(rOld[w, i]) for i in range(N)]
                for j in cutlass.range_constexpr(N):
                    z = [f[k] * rC[j, 0] for k in range(2)]
                    for i in cutlass.range_constexpr(N):
                        z = [cute.math.fma(x[i][k], rC[j, 1 + i], z[k]) for k in range(2)]
                    rNew[w, j] = pack(*z)
        else:
            for i in cutlass.range_constexpr(N):
                rNew[None, i].store(rOld[None, i].load())
        for i in cutlass.range_constexpr(N):
            cute.autovec_copy(rNew[None, i], sHeld[None, i])
        if cutlass.const_expr(self.keep):
            if there:
                rOut = cute.recast_tensor(rNew, BFloat16)
                for i in cutlass.range_constexpr(N):
                    cute.autovec_copy(rOut[None, i], self.stream_columns(cta.gmem.x_new[token, None], mine.column, i))

    @cute.jit
    def project(self, cta: Cta, smem: Smem, mine: Lane):
        """Multiply fn z and z^2 over this warp's columns, for this group's eight tokens.

        A: rows group and group + 8 of fn, k = member (+ 4), hi, then lo; of rows 16 to 23 (`head`: 0 to 3) hi and below
        it lo. B: the same k, token group; sums: tokens 2 member and the next. k and k + 4 of MMA w are columns 2 w and
        2 w + 1 of a lane's eight.
        """
        sHeld, sSums = self.held(smem), smem.sums[mine.part, None, None]
        sSum = cute.local_tile(sSums, (ROWS_N, self.sum_pitch), (mine.group, 0))
        sSquares = cute.local_tile(smem.warp_squares[0, mine.part, None], (ROWS_N,), (mine.group,))
        group, member = fragment_place()
        row = cutlass.min(group, Int32(self.values - 1)) if self.head else group
        rC = cute.make_rmem_tensor((4, 3), Float32)  # rows 0 to 15 of hi, of lo; the last
        rSquares = cute.make_rmem_tensor(2, Float32)
        rC.fill(0.0)
        rSquares.fill(0.0)
        rFn = cute.make_rmem_tensor((4, self.tiles), Float32)
        rZ = cute.make_rmem_tensor(WORDS, Uint32)
        for stream in cutlass.range(N, unroll=1):
            cute.autovec_copy(sHeld[None, stream], rZ)
            cute.arch.mbarrier_wait(cta.bar.fn + stream, 0)
            for half in cutlass.range_constexpr(2):
                four = stream * (self.columns // 4) + mine.part * (UNIT // 4) + 2 * member + half
                for n in cutlass.range_constexpr(self.tiles):
                    line = smem.fn[ROWS_N * n + row, None]
                    cute.autovec_copy(cute.local_tile(line, (4,), (four,)), rFn[None, n])
                for w in cutlass.range_constexpr(2):
                    # fn = hi + lo
                    fn = [[rFn[2 * w + k, n] for k in range(2)] for n in range(self.tiles)]
                    hi = [[value.bitcast(Uint32) for value in one] for one in fn]
                    lo = [[self.low_bits(value) for value in one] for one in fn]
                    z = unpack_bits(rZ[2 * half + w])
                    for k in cutlass.range_constexpr(2):
                        value = z[k].bitcast(Float32)
                        rSquares[k] = cute.math.fma(value, value, rSquares[k])
                    if cutlass.const_expr(not self.head):
                        for n, cut in enumerate((hi, lo)):
                            mma([cut[m][k] for k in range(2) for m in range(2)], z, rC[None, n], "tf32")
                    mma([cut[-1][k] for k in range(2) for cut in (hi, lo)], z, rC[None, 2], "tf32")
        for k in cutlass.range_constexpr(2):
            line = sSum[2 * member + k, None]
            sums = (rC[k, 0] + rC[k, 1], rC[2 + k, 0] + rC[2 + k, 1], rC[k, 2] + rC[2 + k, 2])
            for n, value in enumerate(sums[-self.tiles :]):
                line[ROWS_N * n + group] = value
        self.store_squares(rSquares[0] + rSquares[1], sSquares, group)

    def low_bits(self, value: Float32) -> Uint32:
        """Return lo of a value: what an MMA does not read of it."""
        return (value - (value.bitcast(Uint32) & Uint32(TF32)).bitcast(Float32)).bitcast(Uint32)

    @cute.jit
    def store_squares(self, squares: Float32, sSquares: cute.Tensor, t: Int32):
        """Add up the squares of a token's four lanes."""
        for lanes in (1, 2):
            squares = squares + cute.arch.shuffle_sync_bfly(squares, lanes)
        if cute.arch.lane_idx() % 4 == 0:
            sSquares[t] = squares

    def sum_bytes(self, rank: Int32, rows: Int32) -> Int32:
        """Return the bytes of exchange 1 that this CTA receives."""
        owned = (rows - rank + self.cluster - 1) // self.cluster  # tokens below rows that this CTA owns
        return 4 * self.cluster * (4 * cute.ceil_div(rows, 4) + N * rows + self.coefficients * owned)

    @cute.jit
    def send_squares(self, cta: Cta, sWarps: cute.Tensor, sTarget: cute.Tensor, barrier: cute.Pointer):
        """Send the squares of this CTA's columns to every CTA, four tokens a thread."""
        tidx, _, _ = cute.arch.thread_idx()
        rSum = cute.make_rmem_tensor(4, Float32)
        for item in cutlass.range(tidx, self.cluster * (self.tile // 4), self.workers, unroll=1):
            four, peer = item % (self.tile // 4), item // (self.tile // 4)
            if 4 * four < cta.rows:
                self.sum_warps(sWarps, four, rSum)
                target = cute.domain_offset((4 * four, cta.rank), sTarget).iterator
                send_to_cta(target, peer, [rSum[v] for v in range(4)], barrier)

    @cute.jit
    def send_sums(self, cta: Cta, smem: Smem, buffer: Int32):
        """Send the sums of this CTA's warps to the CTAs that need them.

        Four of a token a thread.
        """
        sPre, sOwned = smem.pre[buffer, None, None, None], smem.owned[buffer, None, None, None]
        tidx, _, _ = cute.arch.thread_idx()
        rSum = cute.make_rmem_tensor(N, Float32)
        for item in cutlass.range(tidx, (SENDERS + self.coefficients // N) * self.tile, self.workers, unroll=1):
            t, piece = item % self.tile, item // self.tile
            if t < cta.rows:
                four = cutlass.max(piece - (SENDERS - 1), Int32(0))
                self.sum_warps(smem.sums[None, t, None], four, rSum)
                values = [rSum[v] for v in range(N)]
                if piece >= SENDERS:
                    target = cute.domain_offset((t // self.cluster, cta.rank, N * (four - 1)), sOwned).iterator
                    send_to_cta(target, t % self.cluster, values, cta.bar.sums)
                else:
                    target = cute.domain_offset((t, cta.rank, 0), sPre).iterator
                    for k in cutlass.range_constexpr(self.cluster // SENDERS):
                        send_to_cta(target, piece * (self.cluster // SENDERS) + k, values, cta.bar.sums)

    @cute.jit
    def mix(self, cta: Cta, smem: Smem, mine: Lane, buffer: Int32, logit: Affine, rMix: cute.Tensor):
        """Mix x of this lane's columns, and sum its squares over the warp's columns."""
        sHeld = self.held(smem)
        sPre, sSquares = smem.pre[buffer, mine.t, None, None], smem.squares[buffer, mine.t, None]
        first, member = cute.arch.lane_idx() // 4 * 4, cute.arch.lane_idx() % 4
        # pre = sigmoid(s_pre m + b) + hc_eps, m = fn z / sqrt(mean(z^2) + eps)
        rSums = cute.make_rmem_tensor(2, Float32)
        rSums.fill(0.0)
        if mine.t < cta.rows:  # no CTA sends the others
            self.sum_ctas([sPre[None, member], sSquares], rSums)
        rstd = self.rsqrt_mean(rSums[1], N * self.d, cta.rms_eps)
        pre = sigmoid(logit(rSums[0] * rstd)) + cta.hc_eps  # number ``member``
        # x = bf16(sum_i pre_i X'_i)
        rX = cute.make_rmem_tensor((2, WORDS), Float32)
        rX.fill(0.0)
        rZ = cute.make_rmem_tensor(WORDS, Uint32)
        for i in cutlass.range(N, unroll=1):
            pre_i = cute.arch.shuffle_sync(pre, first + i)
            cute.autovec_copy(sHeld[None, i], rZ)
            for w in cutlass.range_constexpr(WORDS):
                z = unpack(rZ[w])
                for k in cutlass.range_constexpr(2):
                    rX[k, w] = cute.math.fma(pre_i, z[k], rX[k, w])
        squares = Float32(0.0)
        for w in cutlass.range_constexpr(WORDS):
            rMix[w] = pack(rX[0, w], rX[1, w])
            for value in unpack(rMix[w]):
                squares = cute.math.fma(value, value, squares)
        self.store_squares(squares, smem.warp_squares[1, mine.part, None], mine.t)

    @cute.jit
    def scale(
        self, cta: Cta, smem: Smem, mine: Lane, buffer: Int32, rMix: cute.Tensor, rWeight: cute.Tensor, token: Int32
    ):
        """Store y of this lane's columns."""
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        rSum = cute.make_rmem_tensor(1, Float32)
        self.sum_ctas([smem.x_squares[buffer, mine.t, None]], rSum)
        rstd = self.rsqrt_mean(rSum[0], self.d, cta.rms_eps)
        products = self.products(rMix, rWeight)
        for w in cutlass.range_constexpr(WORDS):
            rWords[w] = pack(products[2 * w] * rstd, products[2 * w + 1] * rstd)
        amax = Int32(0)
        if cutlass.const_expr(self.recipe is not None):
            amax = to_bf16(self.block_maximum(cta, smem, mine, buffer), rstd)
        self.store_y(cta, token, mine.column, rWords, amax)

    @cute.jit
    def sum_ctas(self, sLines: list, rSums: cute.Tensor):
        """Add up the values of each line, one a CTA. Four sums go side by side, then in pairs.

        A loop, or the values wait in registers that the next tile needs.
        """
        rParts = cute.make_rmem_tensor((4, len(sLines)), Float32)
        rParts.fill(0.0)
        for first in cutlass.range(0, self.cluster, 4, unroll=1):
            for k in cutlass.range_constexpr(4):
                for n in cutlass.range_constexpr(len(sLines)):
                    rParts[k, n] = rParts[k, n] + sLines[n][first + k]
        for n in cutlass.range_constexpr(len(sLines)):
            rSums[n] = (rParts[0, n] + rParts[1, n]) + (rParts[2, n] + rParts[3, n])

    # ---------------------------------------------------------- last warp

    @cute.jit
    def prefetch_weight(self, cta: Cta):
        """Prefetch the norm's weight of this CTA's columns into L2."""
        lane, line = cute.arch.lane_idx(), 128 // 4  # floats
        if lane < self.columns // line:
            weight = cute.domain_offset((cta.rank * self.columns + lane * line,), cta.gmem.weight).iterator
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weight])

    @cute.jit
    def post_comb(self, cta: Cta, smem: Smem):
        """Fetch the coefficients of the site before, by the last warp.

        It then computes post and comb of owned tokens.
        """
        bar = cta.bar
        self.fetch_coefficients(cta, cta.first, smem.coefficients[0, None, None])
        logit = None if self.head else self.post_comb_logit(cta.gmem)
        cute.arch.cp_async_wait_group(0)
        self.arrive(bar.coefficients)
        rLogit = cute.make_rmem_tensor(self.owned_tokens, Float32)
        if cutlass.const_expr(self.once):
            cute.arch.mbarrier_wait(bar.sums, 0)
            self.logits(cta, smem, Int32(0), logit, rLogit)
            self.store_post_comb(cta, rLogit, cta.first)
        else:
            self.fetch_coefficients(cta, cta.first + cta.step, smem.coefficients[1, None, None])
            tile, begin = Int32(0), cta.first
            while begin < cta.tokens:
                buffer = tile & 1
                cute.arch.mbarrier_wait(bar.sums, buffer)
                self.logits(cta, smem, buffer, logit, rLogit)
                cute.arch.cp_async_wait_group(0)
                self.arrive(bar.coefficients)  # the sums of the next tile but one may come
                self.fetch_coefficients(cta, begin + 2 * cta.step, smem.coefficients[buffer, None, None])
                self.store_post_comb(cta, rLogit, begin)
                tile = tile + 1
                begin = begin + cta.step

    @cute.jit
    def fetch_coefficients(self, cta: Cta, begin: Int32, sTile: cute.Tensor):
        """Start the copies of a tile's post and comb to [token][post, comb].

        Past the end the last token's.
        """
        if cutlass.const_expr(self.post):
            if begin < cta.tokens:
                for item in cutlass.range(cute.arch.lane_idx(), (N + 1) * self.tile, LANES, unroll=1):
                    t, piece = item // (N + 1), item % (N + 1)
                    token = cutlass.min(begin + t, cta.tokens - 1)
                    source = cta.gmem.comb[token, None].iterator.toint() + 4 * N * (piece - 1)
                    source = cutlass.select_(piece == 0, cta.gmem.post[token, None].iterator.toint(), source)
                    copy_16_bytes(cute.local_tile(sTile[t, None], (N,), (piece,)).iterator.toint(), source)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def logits(self, cta: Cta, smem: Smem, buffer: Int32, logit: Any, rLogit: cute.Tensor):
        """Compute s m + b of every owned token; lane v has value v of post and comb."""
        if cutlass.const_expr(not self.head):
            value = cutlass.min(cute.arch.lane_idx(), Int32(COEFFICIENTS - 1))
            rSums = cute.make_rmem_tensor(2, Float32)
            sOwned, sSquares = smem.owned[buffer, None, None, None], smem.squares[buffer, None, None]
            for s in cutlass.range_constexpr(self.owned_tokens):
                t = s * self.cluster + cta.rank
                rSums.fill(0.0)
                if t < cta.rows:  # no CTA sends the others
                    self.sum_ctas([sOwned[s, None, value], sSquares[t, None]], rSums)
                rstd = self.rsqrt_mean(rSums[1], N * self.d, cta.rms_eps)
                rLogit[s] = logit(rSums[0] * rstd)

    @cute.jit
    def store_post_comb(self, cta: Cta, rLogit: cute.Tensor, begin: Int32):
        """Store post and comb of a tile's owned tokens.

        Lanes 4 s to 4 s + 3 have the rows of token s.
        """
        if cutlass.const_expr(not self.head):
            rRow = cute.make_rmem_tensor(N, Float32)
            self.store_post(cta, rLogit, begin, cta.rank)
            self.sinkhorn(rLogit, rRow, cta.hc_eps)
            i, t = cute.arch.lane_idx() % 4, cute.arch.lane_idx() // 4 * self.cluster + cta.rank
            if t < cta.rows and begin + t < cta.tokens:
                for x in cutlass.range_constexpr(N):
                    cta.gmem.comb_new[begin + t, N * i + (i ^ x)] = rRow[x]

    @cute.jit
    def sinkhorn(self, rLogit: cute.Tensor, rRow: cute.Tensor, eps: Float32):
        """Compute comb of owned tokens. Lanes 4 s to 4 s + 3 have a row each, column (lane mod 4) ^ x at x.

        comb_ij = u_i K_ij v_j with constant K = softmax_j(logit) + eps. Dividing rows by their sums + eps is u_i = 1 /
        w_i, w_i = sum_j K_ij v_j + eps w_i of the step before; v alike. A lane has row and column of K, u and v.
        """
        lane = cute.arch.lane_idx()
        i = lane % 4
        rColumn = cute.make_rmem_tensor(N, Float32)
        for x in cutlass.range_constexpr(N):
            value = N + N * i + (i ^ x)
            rRow[x] = cute.arch.shuffle_sync(rLogit[0], value)
            for s in cutlass.range_constexpr(1, self.owned_tokens):
                other = cute.arch.shuffle_sync(rLogit[s], value)
                rRow[x] = cutlass.select_(lane >= 4 * s, other, rRow[x])
        self.softmax(rRow, eps)
        for x in cutlass.range_constexpr(N):
            rColumn[x] = self.of_lane(rRow[x], x)
        one = Float32(1.0)
        u, over_u = one, one
        v, over_v = self.column_factor(rColumn, u, one, eps)
        for _ in cutlass.range(self.iters - 1, unroll=1):
            u, over_u = self.factor(rRow, v, over_u, eps)
            v, over_v = self.column_factor(rColumn, u, over_v, eps)
        for x in cutlass.range_constexpr(N):
            rRow[x] = rRow[x] * u * self.of_lane(v, x)

    @cute.jit
    def column_factor(self, rColumn: cute.Tensor, u: Float32, over: Float32, eps: Float32) -> tuple:
        """Return `factor` of this lane's column."""
        return self.factor(rColumn, u, over, eps)

    @cute.jit
    def factor(self, rLine: cute.Tensor, given: Float32, over: Float32, eps: Float32) -> tuple:
        """Return (this line's factor, 1 over it).

        From the factors of the lines that cross it.
        """
        total = over * eps
        for x in cutlass.range_constexpr(N):
            total = cute.math.fma(rLine[x], self.of_lane(given, x), total)
        return cute.arch.rcp_approx(total), total

    def of_lane(self, value: Float32, x: int) -> Float32:
        """Return the value of lane ^ x."""
        return cute.arch.shuffle_sync_bfly(value, x) if x else value
