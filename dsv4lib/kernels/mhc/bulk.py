"""`stream` with tiles that asynchronous copies bring into shared memory, and tensor cores for all that multiplies fn or
comb; of fn, two thirds stay in registers.

Machine instructions of a worker's loop, a tile of 16 tokens of d 4096 on sm_90a (in it, MMAs): `stream` 1490 (116),
this form 892 (128): neither the write-back nor the projection unpacks X' or cuts fn. All MMAs are of bf16 with k = 16
and exact products, on operands that are there already:

    write-back    a token at a time. A: 16 columns of (X_0, .., X_3, f), three times, k = 15 of 16, by ldmatrix; B: comb
                  and post, three bf16 a value (24 bits, as fp32). No other token takes part: a NaN stays in its own
    projection    A: 16 tokens of X'; B: fn = a + b + c, three bf16 a value; a and b in registers, c in shared memory
    products      as in `products`; both operands by ldmatrix, each in its own order

    stage         of a warp: 80 rows (16 tokens, their four streams and f) of 64 bytes, in pieces of 16; piece p of
                  token t and input i lies where p ^ (t / 2) ^ (i / 2) mod 4 would: a stream of 8 tokens, the inputs
                  of one, or a row of two are in different banks. X' is written over X and waits there for its
                  mixture. A warp reads nothing but what it fetched itself

    workers       write_back -> project -> products of tile n; mix, scale, store X' and y of n - 1; fetch tile n + 2
    splitter      coefficients of the site before in three parts, two tiles ahead
    sender, owner as in `stream`, the sender without coefficients, the owner without Sinkhorn
    balancer      post and comb of the owner's tokens, up to two tiles behind it: Sinkhorn is a chain that the next
                  tile's weights would wait for (with 4096 tokens on an H200 159 us instead of 146)

    barriers      projected, taken, sums [4], weighed [4] as in `stream`; full [2]: coefficients are there, written [2]:
                  the workers have read them; sent [2]: the owner is done with a tile's sums, read [2]: the balancer is

    SMEM (d 4096, 16 CTAs)   fn 49,152  stages 122,880  coefficients 4,096  sums 18,432  inbox 9,216  weights 1,024

What limits it (H200, 4096 tokens), as far as times tell: shared memory and L1, which everything passes. With eight more
warps for write-back, mixture, loads and stores, and registers of their own for each kind, it took the same (146.8 us).
Of these, in that form, 20 us went without the stores of X', as many without the write-back, 14 without the projection,
14 without the products, 12 without the loads; loads, stores and sums alone took 88.

Infinite inputs give NaN.

Source: as `simt`; PTX ISA, "mma.m16n8k16" (bf16 fragments), "ldmatrix", "stmatrix".
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4lib.kernels.mhc.config import (
    COLUMNS,
    IN_FLIGHT,
    LANES,
    MIX,
    OWNED,
    PIECES,
    ROW_BYTES,
    ROWS_N,
    STAGES,
    TILE,
    UNIT,
    WORDS,
    BulkConfig,
    N,
)
from dsv4lib.kernels.mhc.products import PAIRS
from dsv4lib.kernels.mhc.stream import MhcStream
from dsv4lib.kernels.mhc.words import (
    copy_four,
    floats,
    load_matrices,
    load_words,
    multiply,
    pair,
    store_matrices,
)

INPUTS = N + 1  # of a write-back
PARTS = 3  # bf16 in a value of fp32
K = 2 * ROWS_N  # of an MMA
AT_ONCE = 4  # tokens whose write-backs are under way


class MhcBulk(BulkConfig, MhcStream):
    """A site boundary as a stream of asynchronous copies; see the module docstring. Settings: `config.BulkConfig`."""

    def arrivals(self) -> list[int]:
        """How many arrivals each barrier waits for: projected, taken, sums, weighed, full, written, sent, read."""
        return [self.warps, 1] + [self.cluster + 1] * (2 * IN_FLIGHT) + [1] * 2 + [self.warps] * 2 + [1] * 4

    @cute.jit
    def roles(self, warp: Int32, given: tuple, storage: Any, shared: tuple, barriers: list, place: tuple, eps: tuple):
        """What each warp does."""
        (mX, (mF, mPost, mComb), mFn, mScale, mBase, mWeight, (mNew, mY, mPostNew, mCombNew)) = given
        _, sSums, _ = shared
        projected, taken, sums = barriers[:3]
        weighed, full, written = barriers[2 + IN_FLIGHT], barriers[2 + 2 * IN_FLIGHT], barriers[4 + 2 * IN_FLIGHT]
        sent, read = barriers[6 + 2 * IN_FLIGHT], barriers[8 + 2 * IN_FLIGHT]
        shape, block = (IN_FLIGHT, self.slots, self.cluster, self.sum_pitch), self.cluster * self.sum_pitch
        sInbox = storage.inbox.get_tensor(
            cute.make_layout(shape, stride=(self.slots * block, block, self.sum_pitch, 1))
        )
        sMix = storage.mix.get_tensor(cute.make_layout((IN_FLIGHT, TILE, MIX), stride=(TILE * MIX, MIX, 1)))
        layout = cute.make_ordered_layout((2, LANES, self.tiles, 2 * N, self.warps), order=(0, 1, 2, 3, 4))
        sThird = cute.make_tensor(cute.recast_ptr(storage.fn.data_ptr(), dtype=Uint32), layout)
        layout = cute.make_layout((4, 2 * TILE * PIECES // 4), stride=(1, 4))
        sParts = cute.make_tensor(cute.recast_ptr(storage.coefficients.data_ptr(), dtype=Uint32), layout)
        if warp == self.warps:
            self.gather((mX, mF), mPost, mComb, sSums, sInbox, sMix, (projected, taken, taken, sums, weighed), place)
        elif warp == self.warps + 1:
            self.weigh_only(mScale, mBase, sInbox, sMix, (sums, weighed, sent, read), place, eps)
        elif warp == self.warps + 2:
            if cutlass.const_expr(not self.head):
                self.balance(mScale, mBase, (mPostNew, mCombNew), sInbox, (sent, read), place, eps)
        elif warp == self.warps + 3:
            if cutlass.const_expr(self.post):
                self.split_coefficients(mPost, mComb, sParts, (full, written), place)
        else:
            small = sThird, sSums, sMix, storage.held.data_ptr().toint(), sParts.iterator.toint()
            waits = projected, taken, weighed, full, written
            self.follow((mX, mF), mFn, mWeight, (mNew, mY), small, waits, place)

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
        """The splitter does that."""

    @cute.jit
    def request(self, given: tuple, begin: Int32, rank: Int32, rows: Int32, tokens: Int32):
        """The workers do that."""

    @cute.jit
    def weigh_only(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        sInbox: cute.Tensor,
        sMix: cute.Tensor,
        barriers: tuple,
        place: tuple,
        eps: tuple,
    ):
        """Role of the owner: weights of its tokens to every CTA."""
        rank, first, step, rows, tokens = place
        sums, weighed, sent, read = barriers
        lane = cute.arch.lane_idx()
        mine, size = self.share(rank, rows)
        rSum = cute.make_rmem_tensor(N, Float32)
        rPre = cute.make_rmem_tensor(N, Float32)
        slot = cutlass.min(lane // 4, Int32(self.slots - 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()
        scale, base = mScale[0], mBase[lane % 4]
        tile, begin = Int32(0), first
        while begin < tokens:
            buffer = tile & (IN_FLIGHT - 1)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(sums + buffer, size)
            cute.arch.mbarrier_wait(sums + buffer, (tile // IN_FLIGHT) & 1)
            rSum.fill(0.0)
            if slot < mine:  # nobody sends the others
                self.over_all(sInbox[buffer, slot, None, None], rSum)
            norm = self.weights(rSum, scale, base, eps, rPre)
            if cutlass.const_expr(not self.head):
                if tile > 1:
                    cute.arch.mbarrier_wait(read + (tile & 1), (tile >> 1) + 1 & 1)
            self.tell(weighed + buffer)
            self.send_weights(rPre, norm, sMix[buffer, None, None], weighed + buffer, rank, rows)
            if cutlass.const_expr(not self.head):
                self.arrive(sent + (tile & 1))
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def balance(
        self,
        mScale: cute.Tensor,
        mBase: cute.Tensor,
        after: tuple,
        sInbox: cute.Tensor,
        barriers: tuple,
        place: tuple,
        eps: tuple,
    ):
        """Role of the balancer: post and comb of this CTA's tokens, behind the owner."""
        rank, first, step, rows, tokens = place
        (mPostNew, mCombNew), (sent, read) = after, barriers
        mine, _ = self.share(rank, rows)
        rLogit = cute.make_rmem_tensor(self.slots, Float32)
        rC = cute.make_rmem_tensor((N, N), Float32)
        value = cutlass.min(cute.arch.lane_idx(), Int32(OWNED - 1))
        scale, base = mScale[cutlass.select_(value < N, Int32(1), Int32(2))], mBase[N + value]
        tile, begin = Int32(0), first
        while begin < tokens:
            cute.arch.mbarrier_wait(sent + (tile & 1), (tile >> 1) & 1)
            self.own_logits(scale, base, sInbox[tile & (IN_FLIGHT - 1), None, None, None], mine, eps[1], rLogit)
            self.arrive(read + (tile & 1))
            self.store_post(mPostNew, rLogit, begin, rank, rows, tokens)
            self.sinkhorn(rLogit, rC, eps[0])
            self.store_comb(mCombNew, rC, begin, rank, rows, tokens)
            tile = tile + 1
            begin = begin + step

    @cute.jit
    def split_coefficients(
        self, mPost: cute.Tensor, mComb: cute.Tensor, sParts: cute.Tensor, barriers: tuple, place: tuple
    ):
        """Role of the splitter: B of the write-backs, [token, stream, pair of inputs][part]; two streams a lane."""
        _, first, step, _, tokens = place
        full, written = barriers
        lane = cute.arch.lane_idx()
        rFour = cute.make_rmem_tensor((N, INPUTS), Float32)
        rWords = cute.make_rmem_tensor((4, 8), Uint32)
        rWords.fill(0)
        cute.arch.griddepcontrol_wait()
        tile, begin = Int32(0), first
        while begin < tokens:
            token = cutlass.min(begin + lane // 2, tokens - 1)
            for i in cutlass.range_constexpr(N):
                cute.autovec_copy(cute.local_tile(mComb[token, None], (N,), (i,)), rFour[None, i])
            cute.autovec_copy(cute.local_tile(mPost[token, None], (N,), (0,)), rFour[None, N])
            for s in cutlass.range_constexpr(2):
                values = [cutlass.select_(lane % 2 == 0, rFour[s, i], rFour[2 + s, i]) for i in range(INPUTS)]
                values = [*values, Float32(0.0)]
                for q in cutlass.range_constexpr(PARTS):
                    for part, word in enumerate(self.parts_of(values[2 * q : 2 * q + 2])):
                        rWords[part, 4 * s + q] = word
            if tile > 1:
                cute.arch.mbarrier_wait(written + (tile & 1), (tile >> 1) + 1 & 1)
            for k in cutlass.range_constexpr(8):
                cute.autovec_copy(rWords[None, k], sParts[None, (tile & 1) * (TILE * PIECES // 4) + 8 * lane + k])
            self.arrive(full + (tile & 1))
            tile = tile + 1
            begin = begin + step

    def parts_of(self, left: list) -> list:
        """Three words of bf16 that add up to two values."""
        words = []
        for _ in range(PARTS):
            words.append(pair(*left))
            left = [value - cut for value, cut in zip(left, floats(words[-1]), strict=True)]
        return words

    @cute.jit
    def follow(
        self, given: tuple, mFn: cute.Tensor, mWeight: cute.Tensor, out: tuple, small: tuple, waits: tuple, place: tuple
    ):
        """Role of the workers: a tile's write-back and projection, and the mixture of the one before."""
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
        stages = stages + self.stage_bytes * STAGES * warp
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range_constexpr(STAGES - 1):
            self.fetch_tile(mX, mF, first + k * step, tokens, column, stages + self.stage_bytes * k)
        tile, begin, here, behind = Int32(0), first, stages, stages + self.stage_bytes * (STAGES - 1)
        while begin < tokens + step:
            if begin < tokens:
                cute.arch.cp_async_wait_group(STAGES - 2)
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
            if tile > 0:
                before, buffer = begin - step, (tile - 1) & (IN_FLIGHT - 1)
                cute.autovec_copy(weights, rWeight)
                cute.arch.mbarrier_wait(weighed + buffer, ((tile - 1) // IN_FLIGHT) & 1)
                for h in cutlass.range_constexpr(2):
                    cute.arch.sync_warp()  # or both tokens come at once, and registers spill
                    self.take_own(behind, rOne, h)
                    self.mix_weighed(mY, rOne, rWeight, sMix[buffer, None, None], h, before, rows, tokens, column)
                    if cutlass.const_expr(self.keep):
                        self.store_token(mNew, rOne, h, before, rows, tokens, column)
                cute.arch.sync_warp()
            self.fetch_tile(mX, mF, begin + (STAGES - 1) * step, tokens, column, behind)
            tile = tile + 1
            begin = begin + step
            behind = here
            here = here + self.stage_bytes
            here = cutlass.select_(here == stages + STAGES * self.stage_bytes, stages, here)

    def place_of(self, here: Int32, token: Int32, given: Int32, piece: Int32) -> Int32:
        """Where 16 bytes of a token's stream (or f) lie in the stage ``here``.

        Stages begin at multiples of 64 bytes, so other pieces, streams and tokens are at ``place ^ 16 piece``,
        `behind` and `tokens_behind`.
        """
        return here + ROW_BYTES * (INPUTS * token + given) + 16 * ((piece ^ (token // 2) ^ (given // 2)) & 3)

    def behind(self, place: Int32, streams: int) -> Int32:
        """Where the piece lies so many streams further (an even number, or from stream 0)."""
        return (place ^ (16 * (streams // 2))) + ROW_BYTES * streams

    def tokens_behind(self, place: Int32, tokens: int) -> Int32:
        """Where the piece lies so many tokens further, at most 7 (from token 0, or at most 3 from token 4)."""
        return (place ^ (16 * (tokens // 2))) + ROW_BYTES * INPUTS * tokens

    @cute.jit
    def fetch_tile(self, mX: cute.Tensor, mF: Any, begin: Int32, tokens: Int32, column: Int32, there: Int32):
        """This lane's columns of its two tokens into a stage, a group of copies; the last token for what is behind."""
        if begin < tokens:
            group = cute.arch.lane_idx() // 4
            target = self.place_of(there, group, Int32(0), cute.arch.lane_idx() % 4)
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(begin + group + 8 * h, tokens - 1)
                source = cute.domain_offset((COLUMNS * column,), mX[token, None]).iterator
                for i in cutlass.range_constexpr(N):
                    copy_four(self.behind(target, i) + self.half_bytes * h, source + i * self.d)
                if cutlass.const_expr(self.post):
                    source = cute.domain_offset((COLUMNS * column,), mF[token, None]).iterator
                    copy_four(self.behind(target, N) + self.half_bytes * h, source)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def split_fn(self, mFn: cute.Tensor, rank: Int32, warp: Int32, rFn: cute.Tensor, sThird: cute.Tensor):
        """B of the projection: columns 2 (lane mod 4) and the next (+ 8) of an MMA's 16, row lane / 4 of eight."""
        group, four = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        column = (rank * self.columns + warp * UNIT) // 2 + four  # in units of 2
        rTwo = cute.make_rmem_tensor(2, Float32)
        rThird = cute.make_rmem_tensor(2, Uint32)
        for i in cutlass.range_constexpr(N):
            for c in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tiles):
                    row = cutlass.min(group, Int32(self.values - 1)) if self.head else group + ROWS_N * n
                    for k in cutlass.range_constexpr(2):
                        place = column + (i * self.d + K * c + ROWS_N * k) // 2
                        cute.autovec_copy(cute.local_tile(mFn[row, None], (2,), (place,)), rTwo)
                        words = self.parts_of([rTwo[0], rTwo[1]])
                        for part in cutlass.range_constexpr(2):
                            rFn[k, n, 2 * i + c, part] = words[part]
                        rThird[k] = words[2]
                    cute.autovec_copy(rThird, sThird[None, n, 2 * i + c])

    @cute.jit
    def write_back_tile(self, here: Int32, parts: Int32):
        """X' over X, this warp's columns of all 16 tokens.

        A: column lane / 4 (+ 8), inputs 2 (lane mod 4) and the next (of eight: the first three again), and once more:
        k of 8 and up has the same registers. B: their first and second part, then in an MMA of k = 8 the third, of
        stream lane / 4 mod 4: of one token where lane < 16, of the other elsewhere. Sums: streams 2 (lane mod 4) and
        the next of both; where lane mod 4 < 2 of the first token, elsewhere of the second.
        """
        lane = cute.arch.lane_idx()
        zero = Int32(0)
        parts = parts + 4 * PIECES * N * (lane // TILE) + 16 * (lane % TILE)
        source = self.place_of(here, zero, lane % 8 % INPUTS, lane // 8)
        target = self.place_of(here, lane % 8 // N * N, lane % N, lane // 8)
        first = lane % 4 < 2
        for _ in cutlass.range(2, unroll=1):
            for half in cutlass.range_constexpr(2):
                ones = [2 * half, 2 * half + 1]  # and the tokens four further: their rows are in different banks
                words = [load_words(parts + 4 * PIECES * one) for one in ones]
                places = [self.tokens_behind(source, one + N * t) for one in ones for t in range(2)]
                columns = [load_matrices(place, turned=True) for place in places]
                rSums = cute.make_rmem_tensor((4, 2, AT_ONCE), Float32)
                rSums.fill(0.0)
                for count in (2, 1):  # parts at once
                    for k in cutlass.range_constexpr(AT_ONCE):
                        for c in cutlass.range_constexpr(2):
                            two = columns[k][2 * c : 2 * c + 2]
                            b = words[k // 2][:2] if count == 2 else words[k // 2][2:3]
                            multiply(two * count, b, rSums[None, c, k], pairs=True)
                for k, one in enumerate(ones):
                    both = [rSums[None, None, 2 * k + t] for t in range(2)]
                    store_matrices(self.tokens_behind(target, one), self.packed(both, first))
            source, target = source + self.half_bytes, target + self.half_bytes
            parts = parts + 4 * PIECES * (TILE // 2)
        cute.arch.sync_warp()

    def packed(self, both: list, first: cutlass.Boolean) -> list:
        """X' of 32 columns of two tokens: of the first in half of the lanes, of the second in the others."""
        pairs = [(2 * k, c) for c in range(2) for k in range(2)]
        one, two = ([pair(rSums[r, c], rSums[r + 1, c]) for r, c in pairs] for rSums in both)
        return [cutlass.select_(first, *words) for words in zip(one, two, strict=True)]

    @cute.jit
    def project_tile(self, here: Int32, rFn: cute.Tensor, sThird: cute.Tensor, sSum: cute.Tensor):
        """This warp's part of fn z, for all 16 tokens; what a step multiplies comes a step ahead."""
        rC = cute.make_rmem_tensor((4, self.tiles, 2), Float32)
        rC.fill(0.0)
        rThird = cute.make_rmem_tensor((2, self.tiles, 2), Uint32)
        lane = cute.arch.lane_idx()
        place = self.place_of(here, lane % TILE, Int32(0), lane // TILE)
        coming = load_matrices(place)
        cute.autovec_copy(sThird[None, None, 0], rThird[None, None, 0])
        for step in cutlass.range_constexpr(2 * N):
            cute.arch.sync_warp()  # or all of fn comes at once, and registers spill
            a, following = coming, step + 1
            if cutlass.const_expr(following < 2 * N):
                coming = load_matrices(self.behind(place, following // 2) ^ (32 * (following % 2)))
                cute.autovec_copy(sThird[None, None, following], rThird[None, None, following % 2])
            for part in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tiles):
                    multiply(a, [rFn[k, n, step, part] for k in range(2)], rC[None, n, part], pairs=True)
            for n in cutlass.range_constexpr(self.tiles):
                multiply(a, [rThird[k, n, step % 2] for k in range(2)], rC[None, n, 1], pairs=True)
        rC[None, None, 0].store(rC[None, None, 0].load() + rC[None, None, 1].load())
        self.store_products(rC[None, None, 0], sSum)

    @cute.jit
    def multiply_tokens(self, here: Int32, sSum: cute.Tensor, h: cutlass.Constexpr):
        """This warp's part of the products of streams, for eight tokens; see `products`."""
        lane = cute.arch.lane_idx()
        rG = cute.make_rmem_tensor((4, len(PAIRS)), Float32)
        rG.fill(0.0)
        place = self.place_of(here, lane % 8, lane // 16, lane // 8 % 2) + self.half_bytes * h
        for c in cutlass.range_constexpr(2):
            fours = [load_matrices(self.behind(place, i) ^ (32 * c)) for i in (0, 2)]
            z = [four[k : k + 2] for four in fours for k in (0, 2)]  # of each stream, as rows of A and as columns of B
            for n, ((i, j), k, _) in enumerate(PAIRS):
                multiply([z[i][0], z[j][0], z[i][1], z[j][1]], z[k], rG[None, n], pairs=True)
        self.store_squares(rG, sSum, h)

    @cute.jit
    def take_own(self, there: Int32, rZ: cute.Tensor, h: cutlass.Constexpr):
        """X' of this lane's columns and one of its tokens."""
        place = self.place_of(there, cute.arch.lane_idx() // 4, Int32(0), cute.arch.lane_idx() % 4)
        for i in cutlass.range_constexpr(N):
            words = load_words(self.behind(place, i) + self.half_bytes * h)
            for w in cutlass.range_constexpr(WORDS):
                rZ[w, i] = words[w]

    @cute.jit
    def store_token(
        self,
        mNew: cute.Tensor,
        rZ: cute.Tensor,
        h: cutlass.Constexpr,
        begin: Int32,
        rows: Int32,
        tokens: Int32,
        column: Int32,
    ):
        """X' of this lane's columns and one of its tokens to global memory."""
        rOut = cute.recast_tensor(rZ, cutlass.BFloat16)
        t = cute.arch.lane_idx() // 4 + 8 * h
        if t < rows and begin + t < tokens:
            for i in cutlass.range_constexpr(N):
                place = column + i * (self.d // COLUMNS)
                cute.autovec_copy(rOut[None, i], cute.local_tile(mNew[begin + t, None], (COLUMNS,), (place,)))
