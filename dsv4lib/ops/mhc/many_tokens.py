"""Compute a site boundary for many tokens, by groups of CTAs that are no cluster.

A group of CTAs shares a tile of up to 16 tokens. It has as many CTAs as fn needs to stay in registers and shared
memory: 16 (d 4096) or 32 (d 7168). The CTAs exchange sums in global memory (`cross_cta`), which takes longer than a
tile does: a tile's streams wait in shared memory for their mixture, two or three tiles long. All MMAs are of bf16 with
exact products:

    write-back    a token at a time, k = 8. A: 16 columns of (X_0, .., X_3, f), by ldmatrix; B: comb and post, three
                  bf16 limbs a value (24 bits, as fp32), an MMA for each. No other token takes part: a NaN stays in its
    projection    k = 16. A: 16 tokens of X'; B: fn in three bf16 limbs: two in registers, one in shared memory
    products      X'_i . X'_j, k = 16. A: two streams of eight tokens (rows 0-7, 8-15), B: a stream of the same tokens;
                  of an 8 x 8 block only the diagonal is wanted. Five MMAs give the ten pairs; the same registers are
                  rows of A and columns of B

    stage         of a warp: 64 rows (16 tokens, four streams) of 64 bytes, in pieces of 16; of f, of four warps: the
                  same, a warp in place of a stream. Piece p of stream i of token t lies in row 4 t + (i ^ t mod 2),
                  where p ^ (t / 2) ^ (i / 2) mod 4 would: a stream of 8 tokens, the inputs of one, or a row of two are
                  in different banks. X' is written over X. A warp reads nothing but what it fetched itself

    workers       write_back -> project -> products of tile n; mix, store X' and y of n - lag; fetch tile n + 2.
                  Scales of 128 columns: a barrier of the four warps of a block, twice a tile; CTAs share no block
    four warps    send_sums, send_pre, post_comb, feed_workers (`cross_cta`)

    pipeline      producer         consumer     stages
    sums          workers          send_sums    1
    coefficients  feed_workers     workers      2
    pre           feed_workers     workers      4
    squares       send_pre         post_comb    2

    SMEM          d 4096 (16 CTAs, lag 2): fn 49,152  stages 147,456  coefficients 8,192  sums 18,432  pre 1,024
                  d 7168 (32 CTAs, lag 3): fn 43,008  stages 159,744  coefficients 8,192  sums 16,128  pre 1,024
    launch        (CTAs of a group, groups) CTAs of 32 (d / 32 CTAs + 4) threads, all of which must be resident

Limit: bytes cross the memory once, but loads, stores and mixtures alone take two thirds of the time. The rest are the
write-back, the projection and waits for sums of other CTAs (data/bench/mhc.md).

Infinite inputs give NaN. Orders of sums are fixed: k within a warp, warps, CTAs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32

from dsv4lib.dsl.warp_mma import ldmatrix, mma, stmatrix
from dsv4lib.ops.mhc.config import (
    COEFFICIENT_WORDS,
    COLUMNS,
    IN_FLIGHT,
    INPUTS,
    LANES,
    LIMBS,
    MIX_FOURS,
    RING,
    ROW_BYTES,
    ROWS_N,
    TILE,
    UNIT,
    WORDS,
    ManyConfig,
    N,
)
from dsv4lib.ops.mhc.cross_cta import Barriers, CrossCta, Slots, Smem, limbs
from dsv4lib.ops.mhc.kernel import Cta, Gmem, fragment_place, view
from dsv4lib.ops.mhc.ptx import copy_16_bytes, load_four, pack, unpack
from dsv4lib.ops.quantize import codes

K = 2 * ROWS_N  # of an MMA of the projection


class Product(NamedTuple):
    """An MMA of the products of streams.

    Attributes:
        rows: streams of A's rows 0-7 and 8-15. column: stream of B. places: of the two products among a token's sums.
    """

    rows: tuple[int, int]
    column: int
    places: tuple[int, int]


PRODUCTS = (
    Product((0, 1), 0, (1, 2)),
    Product((2, 3), 0, (5, 9)),
    Product((1, 2), 1, (3, 6)),
    Product((2, 3), 2, (7, 11)),
    Product((1, 3), 3, (10, 13)),
)
SQUARES, ZERO = 15, 14  # places of the sum of squares, and of nothing


class Stage(NamedTuple):
    """Addresses of a tile in shared memory: this warp's streams, f of its four warps."""

    x: Int32
    f: Int32


class MhcManyTokens(ManyConfig, CrossCta):
    """Compute a site boundary by groups of CTAs; see the module docstring. Settings: `config.ManyConfig`."""

    @property
    def barriers(self) -> Barriers:
        """Return (how many, arrivals) of the mbarriers."""
        one, two, each, workers = (1, 1), (2, 1), (IN_FLIGHT, 1), self.warps
        return Barriers((1, workers), one, each, each, two, (2, workers), two, two)

    @cute.jit
    def roles(self, cta: Cta, storage: Any, warp: Int32):
        """Start each warp's role."""
        fn_lo = cute.make_ordered_layout((2, LANES, self.tiles, 2 * N, self.warps), order=(0, 1, 2, 3, 4))
        coefficients = cute.make_layout((4, 2 * TILE * COEFFICIENT_WORDS // 4), stride=(1, 4))
        smem = Smem(
            fn_lo=cute.make_tensor(cute.recast_ptr(storage.fn.data_ptr(), dtype=Uint32), fn_lo),
            sums=view(storage.sums, (self.warps, TILE, self.sum_pitch)),
            pre=view(storage.pre, (IN_FLIGHT, TILE, N)),
            squares=view(storage.squares, (2, self.owned_tokens)),
            coefficients=cute.make_tensor(cute.recast_ptr(storage.coefficients.data_ptr(), dtype=Uint32), coefficients),
            stages=storage.held.data_ptr().toint(),
            maxima=view(storage.maxima, (self.warps, TILE)) if self.units > 1 else None,
        )
        if warp == self.warps:
            self.send_sums(cta, smem)
        elif warp == self.warps + 1:
            self.send_pre(cta, smem)
        elif warp == self.warps + 2:
            if cutlass.const_expr(not self.head):
                self.post_comb(cta, smem)
        elif warp == self.warps + 3:
            self.feed_workers(cta, smem)
        else:
            self.work(cta, smem)

    def slots_of(self, gmem: Gmem, group: Int32, groups: Int32) -> Slots:
        """Locate the group's slots in the workspace."""
        sums, pre = (4 * RING * TILE * self.cluster * floats for floats in (self.sum_pitch, N))
        workspace = gmem.workspace.iterator.toint()
        return Slots(workspace + Int64(group * sums), workspace + Int64(groups * sums + group * pre))

    @cute.jit
    def work(self, cta: Cta, smem: Smem):
        """Run the workers. They do a tile's write-back and projection, and the mixture of an earlier one."""
        bar, rows = cta.bar, cta.rows
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        member = cute.arch.lane_idx() % 4
        column = (cta.rank * self.columns + warp * UNIT) // COLUMNS + member  # in units of 8
        rFn = cute.make_rmem_tensor((2, self.tiles, 2 * N, 2), Uint32)
        rX = cute.make_rmem_tensor((WORDS, N), Uint32)
        rY = cute.make_rmem_tensor(WORDS, Uint32)
        rWeight = cute.make_rmem_tensor(COLUMNS, Float32)
        weight = self.stream_columns(cta.gmem.weight, column)
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weight.iterator])
        sFnLo = smem.fn_lo[None, cute.arch.lane_idx(), None, None, warp]
        self.split_fn(cta, warp, rFn, sFnLo)
        f_stages = smem.stages + self.stage_bytes * (self.stages * self.warps + 2 * (warp // N))
        stages = smem.stages + self.stage_bytes * self.stages * warp
        coefficients = smem.coefficients.iterator.toint()
        cute.arch.griddepcontrol_wait()
        self.pad_scales(cta)
        for k in cutlass.range_constexpr(2):
            there = Stage(stages + self.stage_bytes * k, f_stages + self.stage_bytes * k)
            self.fetch(cta, cta.first + k * cta.step, column, there)
        tile, begin, here, end = Int32(0), cta.first, stages, stages + self.stages * self.stage_bytes
        while begin < cta.tokens + self.lag * cta.step:
            if begin < cta.tokens:
                cute.arch.cp_async_wait_group(1)
                cute.arch.sync_warp()
                # X'_j = bf16(post_j f + sum_i comb_ij X_i)
                if cutlass.const_expr(self.post):
                    cute.arch.mbarrier_wait(bar.coefficients_ready + (tile & 1), (tile >> 1) & 1)
                    stage = Stage(here, f_stages + (tile & 1) * self.stage_bytes)
                    self.write_back(stage, coefficients + (tile & 1) * (4 * TILE * COEFFICIENT_WORDS))
                    self.arrive(bar.coefficients_free + (tile & 1))
                if tile > 0:
                    cute.arch.mbarrier_wait(bar.sums_free, (tile + 1) & 1)
                # fn z and X'_i . X'_j, over this warp's columns
                self.project(here, rFn, sFnLo, smem.sums[warp, None, None])
                for h in cutlass.range_constexpr(2):
                    if rows > TILE // 2 * h:
                        self.products(here, smem.sums[warp, None, None], h)
                self.arrive(bar.sums_ready)
            after = here + 2 * self.stage_bytes
            after = cutlass.select_(after >= end, after - self.stages * self.stage_bytes, after)
            if tile >= self.lag:
                before, buffer = begin - self.lag * cta.step, (tile - self.lag) & (IN_FLIGHT - 1)
                cute.autovec_copy(weight, rWeight)
                cute.arch.mbarrier_wait(bar.pre_ready + buffer, ((tile - self.lag) // IN_FLIGHT) & 1)
                for h in cutlass.range_constexpr(2):
                    cute.arch.sync_warp()  # or both tokens come at once, and registers spill
                    self.load_streams(after, rX, h)
                    self.mix(cta, rX, rWeight, smem.pre[buffer, None, None], h, before, rY)
                    if cutlass.const_expr(self.recipe is None):
                        self.store_mixture(cta, smem, rY, h, before, column)
                    if cutlass.const_expr(self.keep):
                        self.store_streams(cta, rX, h, before, column)
                    if cutlass.const_expr(self.recipe is not None):  # last: registers of the streams are free
                        self.store_mixture(cta, smem, rY, h, before, column)
                cute.arch.sync_warp()
            self.fetch(cta, begin + 2 * cta.step, column, Stage(after, f_stages + (tile & 1) * self.stage_bytes))
            tile = tile + 1
            begin = begin + cta.step
            here = here + self.stage_bytes
            here = cutlass.select_(here == end, stages, here)

    # -------------------------------------------------- places in a stage

    def piece(self, stage: Int32, token: Int32, stream: Int32, piece: Int32) -> Int32:
        """Return the address of 16 bytes of a token's stream in a stage.

        Or of f of warp ``stream`` mod 4.

        Stages begin at multiples of 256 bytes, so other pieces, streams and tokens are at ``address ^ 16 piece``,
        `at_stream` and `at_token`.
        """
        line = N * token + (stream ^ (token & 1))
        return stage + ROW_BYTES * line + 16 * ((piece ^ (token // 2) ^ (stream // 2)) & 3)

    def at_stream(self, address: Int32, stream: int) -> Int32:
        """Return the address of the same piece of another stream.

        Its number differs in these bits.
        """
        return address ^ (ROW_BYTES * stream + 16 * (stream // 2))

    def at_token(self, address: Int32, token: int) -> Int32:
        """Return the address of the same piece so many tokens on. That is at most 7 from token 0, 3 from token 4."""
        return (address ^ (ROW_BYTES * (token % 2) + 16 * (token // 2))) + ROW_BYTES * N * token

    def f_piece(self, stage: Int32, token: Int32, piece: Int32) -> Int32:
        """Return the address of 16 bytes of f of this warp.

        Its banks are not those of its streams 0 and 2, or 1 and 3.
        """
        mine = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % N
        return self.piece(stage, token, mine, piece ^ (mine // 2) ^ 2)

    # -------------------------------------------------------------- steps

    @cute.jit
    def fetch(self, cta: Cta, begin: Int32, column: Int32, there: Stage):
        """Start the copies of this lane's columns of its two tokens.

        Past the end the last token's.
        """
        if begin < cta.tokens:
            group, member = fragment_place()
            target = self.piece(there.x, group, Int32(0), member)
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(begin + group + 8 * h, cta.tokens - 1)
                source = cute.domain_offset((COLUMNS * column,), cta.gmem.x[token, None]).iterator
                for i in cutlass.range_constexpr(N):
                    copy_16_bytes(self.at_stream(target, i) + self.half_bytes * h, source + i * self.d)
                if cutlass.const_expr(self.post):
                    source = cute.domain_offset((COLUMNS * column,), cta.gmem.f[token, None]).iterator
                    copy_16_bytes(self.f_piece(there.f, group, member) + self.half_bytes * h, source)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def split_fn(self, cta: Cta, warp: Int32, rFn: cute.Tensor, sFnLo: cute.Tensor):
        """Split fn into B of the projection, in three limbs.

        k = 2 member and the next (+ 8) of 16, row group of eight.
        """
        group, member = fragment_place()
        column = (cta.rank * self.columns + warp * UNIT) // 2 + member  # in units of 2
        rTwo = cute.make_rmem_tensor(2, Float32)
        rLo = cute.make_rmem_tensor(2, Uint32)
        for i in cutlass.range_constexpr(N):
            for c in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tiles):
                    row = cutlass.min(group, Int32(self.values - 1)) if self.head else group + ROWS_N * n
                    for k in cutlass.range_constexpr(2):
                        two = column + (i * self.d + K * c + ROWS_N * k) // 2
                        cute.autovec_copy(cute.local_tile(cta.gmem.fn[row, None], (2,), (two,)), rTwo)
                        words = limbs([rTwo[0], rTwo[1]])
                        for limb in cutlass.range_constexpr(2):
                            rFn[k, n, 2 * i + c, limb] = words[limb]
                        rLo[k] = words[2]
                    cute.autovec_copy(rLo, sFnLo[None, n, 2 * i + c])

    @cute.jit
    def write_back(self, stage: Stage, coefficients: Int32):
        """Write X' over X, this warp's columns of all 16 tokens. X'_j = bf16(post_j f + sum_i comb_ij X_i).

        A: column group (+ 8), inputs 2 member and the next (of eight: the first three again, times nothing). B: a limb
        of their coefficients, of stream lane / 4 mod 4: of one token where lane < 16, of the other elsewhere. Sums:
        streams 2 member and the next of both; those of the first token are right where member < 2, of the second
        elsewhere.
        """
        lane, zero = cute.arch.lane_idx(), Int32(0)
        coefficients = coefficients + 4 * COEFFICIENT_WORDS * N * (lane // TILE) + 16 * (lane % TILE)
        one_of = lane % 8 % INPUTS
        source = self.piece(stage.x, zero, one_of % N, lane // 8)
        source = cutlass.select_(one_of == N, self.f_piece(stage.f, zero, lane // 8), source)
        target = self.piece(stage.x, lane % 8 // N * N, lane % N, lane // 8)
        first = lane % 4 < 2
        for _ in cutlass.range(2, unroll=1):
            for half in cutlass.range_constexpr(2):
                ones = [2 * half, 2 * half + 1]  # and the tokens four further: their rows are in different banks
                words = [load_four(coefficients + 4 * COEFFICIENT_WORDS * one) for one in ones]
                addresses = [self.at_token(source, one + N * t) for one in ones for t in range(2)]
                columns = [ldmatrix(address, transpose=True) for address in addresses]
                for k, one in enumerate(ones):
                    rSums = cute.make_rmem_tensor((4, 2, 2), Float32)
                    rSums.fill(0.0)
                    for limb in cutlass.range_constexpr(LIMBS):
                        for t in cutlass.range_constexpr(2):
                            for c in cutlass.range_constexpr(2):
                                two = columns[2 * k + t][2 * c : 2 * c + 2]
                                mma(two, words[k][limb : limb + 1], rSums[None, c, t])
                    address, pairs = self.at_token(target, one), [(2 * k, c) for c in range(2) for k in range(2)]
                    both = [[pack(rSums[r, c, t], rSums[r + 1, c, t]) for r, c in pairs] for t in range(2)]
                    stmatrix(address, [cutlass.select_(first, *words_of) for words_of in zip(*both, strict=True)])
            source, target = source + self.half_bytes, target + self.half_bytes
            coefficients = coefficients + 4 * COEFFICIENT_WORDS * (TILE // 2)
        cute.arch.sync_warp()

    @cute.jit
    def project(self, here: Int32, rFn: cute.Tensor, sFnLo: cute.Tensor, sSum: cute.Tensor):
        """Multiply fn z over this warp's columns, for all 16 tokens.

        Operands are loaded a step ahead.
        """
        rC = cute.make_rmem_tensor((4, self.tiles, 2), Float32)
        rC.fill(0.0)
        rLo = cute.make_rmem_tensor((2, self.tiles, 2), Uint32)
        lane = cute.arch.lane_idx()
        address = self.piece(here, lane % TILE, Int32(0), lane // TILE)
        coming = ldmatrix(address)
        cute.autovec_copy(sFnLo[None, None, 0], rLo[None, None, 0])
        for step in cutlass.range_constexpr(2 * N):
            cute.arch.sync_warp()  # or all of fn comes at once, and registers spill
            z, following = coming, step + 1
            if cutlass.const_expr(following < 2 * N):
                coming = ldmatrix(self.at_stream(address, following // 2) ^ (32 * (following % 2)))
                cute.autovec_copy(sFnLo[None, None, following], rLo[None, None, following % 2])
            for limb in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tiles):
                    mma(z, [rFn[k, n, step, limb] for k in range(2)], rC[None, n, limb])
            for n in cutlass.range_constexpr(self.tiles):
                mma(z, [rLo[k, n, step % 2] for k in range(2)], rC[None, n, 1])
        rC[None, None, 0].store(rC[None, None, 0].load() + rC[None, None, 1].load())
        # sums of pre first of each four (`cross_cta`), the others after the fours of the mixture
        group, member = fragment_place()
        for h in cutlass.range_constexpr(2):
            line = sSum[group + 8 * h, None]
            if member < 2:
                for k in cutlass.range_constexpr(2):
                    line[8 * member + 4 * k] = rC[2 * h + k, 0, 0]
            for n in cutlass.range_constexpr(0 if not self.head else self.tiles, self.tiles):
                if n > 0 or member >= 2:
                    rPair = cute.make_rmem_tensor(2, Float32)
                    for k in cutlass.range_constexpr(2):
                        rPair[k] = rC[2 * h + k, n, 0]
                    cute.autovec_copy(rPair, cute.local_tile(line, (2,), (2 * MIX_FOURS - 2 + 4 * n + member,)))

    @cute.jit
    def products(self, here: Int32, sSum: cute.Tensor, h: int):
        """Multiply X'_i . X'_j over this warp's columns, for eight tokens: diagonals of blocks."""
        lane = cute.arch.lane_idx()
        rG = cute.make_rmem_tensor((4, len(PRODUCTS)), Float32)
        rG.fill(0.0)
        address = self.piece(here, lane % 8, lane // 16, lane // 8 % 2) + self.half_bytes * h
        for c in cutlass.range_constexpr(2):
            fours = [ldmatrix(self.at_stream(address, i) ^ (32 * c)) for i in (0, 2)]
            z = [four[k : k + 2] for four in fours for k in (0, 2)]  # of each stream, as rows of A and as columns of B
            for n, ((i, j), k, _) in enumerate(PRODUCTS):
                mma([z[i][0], z[j][0], z[i][1], z[j][1]], z[k], rG[None, n])
        group, member = fragment_place()
        if member == group // 2:  # columns 2 member and the next: this lane has the diagonal
            line, squares = sSum[group + 8 * h, None], Float32(0.0)
            for n, product in enumerate(PRODUCTS):
                for row in cutlass.range_constexpr(2):
                    value = cutlass.select_(group % 2 == 1, rG[2 * row + 1, n], rG[2 * row, n])
                    if cutlass.const_expr(product.rows[row] == product.column):
                        squares = squares + value
                        line[product.places[row]] = value
                    else:
                        line[product.places[row]] = value + value
            line[SQUARES] = squares
            line[ZERO] = Float32(0.0)

    @cute.jit
    def load_streams(self, stage: Int32, rX: cute.Tensor, h: int):
        """Load X' of this lane's columns and one of its tokens."""
        group, member = fragment_place()
        address = self.piece(stage, group, Int32(0), member)
        for i in cutlass.range_constexpr(N):
            words = load_four(self.at_stream(address, i) + self.half_bytes * h)
            for w in cutlass.range_constexpr(WORDS):
                rX[w, i] = words[w]

    @cute.jit
    def mix(
        self, cta: Cta, rX: cute.Tensor, rWeight: cute.Tensor, sPre: cute.Tensor, h: int, begin: Int32, rY: cute.Tensor
    ):
        """Mix y of this lane's columns and one of its tokens."""
        rPre = cute.make_rmem_tensor(N, Float32)
        rY.fill(0)
        t = cute.arch.lane_idx() // 4 + 8 * h
        if t < cta.rows and begin + t < cta.tokens:  # the others have no pre
            # y = bf16(weight sum_i (pre_i / rms(x)) X'_i)
            cute.autovec_copy(sPre[t, None], rPre)
            for w in cutlass.range_constexpr(WORDS):
                x = [rPre[0] * z for z in unpack(rX[w, 0])]
                for i in cutlass.range_constexpr(1, N):
                    z = unpack(rX[w, i])
                    x = [cute.math.fma(rPre[i], z[k], x[k]) for k in range(2)]
                rY[w] = pack(x[0] * rWeight[2 * w], x[1] * rWeight[2 * w + 1])

    @cute.jit
    def store_mixture(self, cta: Cta, smem: Smem, rY: cute.Tensor, h: int, begin: Int32, column: Int32):
        """Store y of this lane's columns and one of its tokens."""
        t = cute.arch.lane_idx() // 4 + 8 * h
        amax = self.block_maximum(smem, rY, t)
        if t < cta.rows and begin + t < cta.tokens:
            self.store_y(cta, begin + t, column, rY, amax)

    @cute.jit
    def block_maximum(self, smem: Smem, rY: cute.Tensor, t: Int32) -> Int32:
        """Return the bits of the largest |y| of this lane's block of columns.

        All lanes call it.
        """
        amax = Int32(0)
        if cutlass.const_expr(self.recipe is not None):
            amax = codes.largest([Int32(rY[w]) for w in range(WORDS)], True)
            amax = codes.over_lanes(amax, 4)
        if cutlass.const_expr(self.units > 1):
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            first = warp // self.units * self.units
            if cute.arch.lane_idx() % 4 == 0:
                smem.maxima[warp, t] = amax.bitcast(Float32)
            # the tokens' other half, or the next tile, is written only after all four warps came here once more
            cute.arch.barrier(barrier_id=1 + first // self.units, number_of_threads=LANES * self.units)
            for k in cutlass.range_constexpr(self.units):
                amax = codes.larger(amax, smem.maxima[first + k, t].bitcast(Int32))
        return amax

    @cute.jit
    def store_streams(self, cta: Cta, rX: cute.Tensor, h: int, begin: Int32, column: Int32):
        """Store X' of this lane's columns and one of its tokens."""
        rOut = cute.recast_tensor(rX, BFloat16)
        t = cute.arch.lane_idx() // 4 + 8 * h
        if t < cta.rows and begin + t < cta.tokens:
            for i in cutlass.range_constexpr(N):
                line = self.stream_columns(cta.gmem.x_new[begin + t, None], column, i)
                cute.autovec_copy(rOut[None, i], line)
