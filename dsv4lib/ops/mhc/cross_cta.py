"""Exchange sums between the CTAs of a group. Four warps of `many_tokens` do it, which touch no streams.

    send_sums       adds up what the workers left of a tile and sends each token's 36 sums (`head`: 20) to the CTA that
                    owns it: token t of tile n is that of CTA t + 16 n, modulo the group
    send_pre        of owned tokens: adds up the CTAs, sends pre / rms(x) to every CTA
    post_comb       of owned tokens, up to two tiles after send_pre: Sinkhorn is a chain that pre must not wait for
    feed_workers    coefficients of the site before in three limbs, and pre / rms(x) of a tile once it has come

Cross-CTA reduction with the flag in the data (`dsl.exchange`):

    slots       sums [group][8 tiles][16 tokens][CTA][36], then pre / rms(x) [group][8 tiles][CTA][16 tokens][4]

Slots of eight tiles need no further flags. A CTA has reset the sums of tile n, and fenced, before it sends pre of n + 3
(post_comb too: send_pre waits for it). A CTA that has received pre of n + 3 passes that order on by its own fence; with
a lag of three tiles these are mixed before n + 8 is projected. pre alike.

rms(x) follows from products of streams, so it needs no second exchange: with G_ij = X'_i . X'_j

    sum x^2 = sum_ij pre_i pre_j G_ij,  x = sum_i pre_i X'_i

The ten products do not depend on pre and travel with the sums, 4 x 16 bytes a token, one a lane of four:

    member  0  pre 0   G00   2 G10   G11
            1  pre 1  2 G20  2 G21   G22
            2  pre 2  2 G30  2 G31  2 G32
            3  pre 3   G33     0    G00 + G11 + G22 + G33

x is not rounded to bf16 before its norm. Where streams cancel, the error is that of fp32 times
sum (pre_i |X'_i|)^2 / sum x^2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4lib.dsl import exchange
from dsv4lib.ops.mhc.config import (
    COEFFICIENT_WORDS,
    COEFFICIENTS,
    IN_FLIGHT,
    INPUTS,
    LANES,
    LIMBS,
    MIX_FOURS,
    RING,
    TILE,
    N,
)
from dsv4lib.ops.mhc.kernel import Affine, Cta, Mhc, sigmoid
from dsv4lib.ops.mhc.ptx import pack, unpack


class Barriers(NamedTuple):
    """mbarriers. In the configuration (how many, arrivals), in the kernel the address of the first.

    Attributes:
        sums_ready, sums_free: the workers' sums of a tile; send_sums has read them.
        pre_ready, pre_free: pre / rms(x) of a tile; send_sums has seen that the workers mixed with it.
        coefficients_ready, coefficients_free: limbs of post and comb; the workers have read them.
        squares_ready, squares_free: send_pre has a tile's squares; post_comb has read them.
    """

    sums_ready: Any
    sums_free: Any
    pre_ready: Any
    pre_free: Any
    coefficients_ready: Any
    coefficients_free: Any
    squares_ready: Any
    squares_free: Any


class Smem(NamedTuple):
    """Shared memory.

    Attributes:
        fn_lo: [2 words, lane, 8 rows, k step, warp], the third limb of fn in pairs.
        sums: [warp, token, sum] fp32. pre: [4 tiles, token, stream] fp32, pre / rms(x).
        squares: [2 tiles, owned token] fp32, sum of X'^2.
        coefficients: [4 words, 2 tiles x 16 tokens x 16] limbs of post and comb.
        stages: address of the workers' stages.
        maxima: [warp, token], bits of the largest |y| of 32 columns; None where no scale needs those of several warps.
    """

    fn_lo: cute.Tensor
    sums: cute.Tensor
    pre: cute.Tensor
    squares: cute.Tensor
    coefficients: cute.Tensor
    stages: Int32
    maxima: Any


class Slots(NamedTuple):
    """Addresses of the group's slots in the workspace: of sums and of pre / rms(x)."""

    sums: Int64
    pre: Int64


class CrossCta(Mhc):
    """Run the warps that do not touch streams; see the module docstring."""

    def sum_slots(self, slots: Int64, tile: Int32, token: Int32) -> Int64:
        """Return the address of a token's sums of the first CTA."""
        return slots + Int64(((tile & (RING - 1)) * TILE + token) * (4 * self.cluster * self.sum_pitch))

    def pre_slots(self, slots: Int64, tile: Int32, receiver: Int32, token: Int32) -> Int64:
        """Return the address of a token's pre / rms(x) for a CTA."""
        return slots + Int64((((tile & (RING - 1)) * self.cluster + receiver) * TILE + token) * (4 * N))

    def first_owned(self, cta: Cta, tile: Int32) -> Int32:
        """Return the first token of a tile that this CTA owns.

        The others follow ``cluster`` apart.
        """
        return (cta.rank + TILE * tile) & (self.cluster - 1)

    # ----------------------------------------------------------- send_sums

    @cute.jit
    def send_sums(self, cta: Cta, smem: Smem):
        """Send the workers' sums of a tile to the CTAs that own its tokens."""
        bar = cta.bar
        mine = cta.slots.sums + Int64(4 * self.sum_pitch * cta.rank)
        cute.arch.griddepcontrol_wait()
        tile, begin = Int32(0), cta.first
        while begin < cta.tokens:
            cute.arch.mbarrier_wait(bar.sums_ready, tile & 1)
            self.send_fours(cta, smem, mine, tile, 0, MIX_FOURS)  # first what a mixture waits for
            if cutlass.const_expr(not self.head):
                self.send_fours(cta, smem, mine, tile, MIX_FOURS, COEFFICIENTS // N)
            self.arrive(bar.sums_free)
            self.arrive(bar.pre_free + (tile & (IN_FLIGHT - 1)))
            tile = tile + 1
            begin = begin + cta.step

    @cute.jit
    def send_fours(self, cta: Cta, smem: Smem, mine: Int64, tile: Int32, first: int, count: int):
        """Send ``count`` fours of sums from four ``first``, of each token."""
        rounds = -(-count * TILE // LANES)
        rSum = cute.make_rmem_tensor((N, rounds), Float32)
        for k in cutlass.range_constexpr(rounds):
            item = cute.arch.lane_idx() + LANES * k
            if item < count * cta.rows:
                self.sum_warps(smem.sums[None, item // count, None], first + item % count, rSum[None, k])
        for k in cutlass.range_constexpr(rounds):
            item = cute.arch.lane_idx() + LANES * k
            if item < count * cta.rows:
                slot = self.sum_slots(mine, tile, item // count) + Int64(16 * (first + item % count))
                exchange.send(slot, [rSum[v, k] for v in range(N)])

    # ------------------------------------------------------------ send_pre

    @cute.jit
    def send_pre(self, cta: Cta, smem: Smem):
        """Send pre / rms(x) of owned tokens to every CTA."""
        bar, lane, pitch = cta.bar, cute.arch.lane_idx(), 4 * self.sum_pitch
        source = lane // 4  # of eight CTAs
        count = max(1, self.cluster // 8)
        rFours = cute.make_rmem_tensor((N, count), Float32)
        rSum = cute.make_rmem_tensor(N, Float32)
        rPre = cute.make_rmem_tensor(N, Float32)
        cute.arch.griddepcontrol_wait()
        logit = Affine(cta.gmem.scale[0], cta.gmem.base[lane % 4])
        tile, begin = Int32(0), cta.first
        while begin < cta.tokens:
            owned = self.first_owned(cta, tile)
            if cutlass.const_expr(not self.head):
                if tile > 1:
                    cute.arch.mbarrier_wait(bar.squares_free + (tile & 1), (tile >> 1) + 1 & 1)
            for s in cutlass.range_constexpr(self.owned_tokens):
                t = s * self.cluster + owned
                if t < cta.rows:
                    mine = self.sum_slots(cta.slots.sums, tile, t) + Int64(source * pitch + lane % 4 * 16)
                    exchange.receive(mine, 8 * pitch, source < self.cluster, rFours)
                    for v in cutlass.range_constexpr(N):
                        total = rFours[v, 0]
                        for k in cutlass.range_constexpr(1, count):
                            total = total + rFours[v, k]
                        for lanes in (4, 8, 16):
                            total = total + cute.arch.shuffle_sync_bfly(total, lanes)
                        rSum[v] = total
                    rstd = self.pre(cta, rSum, logit, rPre)
                    if lane < self.cluster:
                        slot = self.pre_slots(cta.slots.pre, tile, lane, t)
                        exchange.send(slot, [rPre[i] * rstd for i in range(N)])
                    if lane == 3:
                        smem.squares[tile & 1, s] = rSum[3]
                    exchange.reset(mine, 8 * pitch, source < self.cluster, count)
            if cutlass.const_expr(not self.head):
                self.arrive(bar.squares_ready + (tile & 1))
            cute.arch.fence_acq_rel_gpu()  # resets precede what a CTA sends that has received pre
            tile = tile + 1
            begin = begin + cta.step

    @cute.jit
    def pre(self, cta: Cta, rSum: cute.Tensor, logit: Affine, rPre: cute.Tensor) -> Float32:
        """Compute pre of a token, and return 1 / rms(x), in all of its four lanes."""
        member, first = cute.arch.lane_idx() % 4, cute.arch.lane_idx() // 4 * 4
        # pre = sigmoid(s_pre m + b) + hc_eps, m = fn z / sqrt(mean(z^2) + eps)
        squares = cute.arch.shuffle_sync(rSum[3], first + 3)
        rstd = self.rsqrt_mean(squares, N * self.d, cta.rms_eps)
        mine = sigmoid(logit(rSum[0] * rstd)) + cta.hc_eps
        p = [cute.arch.shuffle_sync(mine, first + i) for i in range(N)]
        for i in cutlass.range_constexpr(N):
            rPre[i] = p[i]
        # sum x^2: members 0 to 2 s1 p0 a + s2 p1 a + s3 b c; member 3 s1 p3 p3
        is_first, is_last = member == 0, member == 3
        a = cutlass.select_(is_first, p[0], cutlass.select_(member == 1, p[2], p[3]))
        b = cutlass.select_(is_first, p[1], p[2])
        c = cutlass.select_(member == 2, p[3], b)
        line = cute.math.fma(rSum[1], cutlass.select_(is_last, p[3], p[0]), rSum[2] * p[1])
        x_squares = cute.math.fma(a, line, cutlass.select_(is_last, Float32(0.0), rSum[3]) * (b * c))
        for lanes in (1, 2):
            x_squares = x_squares + cute.arch.shuffle_sync_bfly(x_squares, lanes)
        x_squares = cute.arch.fmax(x_squares, Float32(0.0))  # streams that cancel to nothing
        return self.rsqrt_mean(x_squares, self.d, cta.rms_eps)

    # ----------------------------------------------------------- post_comb

    @cute.jit
    def post_comb(self, cta: Cta, smem: Smem):
        """Compute post and comb of owned tokens, after send_pre."""
        bar, pieces, sources, pitch = cta.bar, COEFFICIENTS // N, 4, 4 * self.sum_pitch
        lane, count = cute.arch.lane_idx(), self.cluster // 4
        piece, there = lane % pieces, lane < pieces * sources
        rFours = cute.make_rmem_tensor((N, count), Float32)
        rLogit = cute.make_rmem_tensor(self.owned_tokens, Float32)
        rComb = cute.make_rmem_tensor((N, N), Float32)
        rLogit.fill(0.0)
        value = cutlass.min(lane, Int32(COEFFICIENTS - 1))
        cute.arch.griddepcontrol_wait()
        logit = self.post_comb_logit(cta.gmem)
        tile, begin = Int32(0), cta.first
        while begin < cta.tokens:
            owned = self.first_owned(cta, tile)
            cute.arch.mbarrier_wait(bar.squares_ready + (tile & 1), (tile >> 1) & 1)
            for s in cutlass.range_constexpr(self.owned_tokens):
                t = s * self.cluster + owned
                if t < cta.rows:
                    mine = self.sum_slots(cta.slots.sums, tile, t)
                    mine = mine + Int64(lane // pieces * pitch + 16 * (MIX_FOURS + piece))
                    exchange.receive(mine, sources * pitch, there, rFours)
                    exchange.reset(mine, sources * pitch, there, count)
                    found = Float32(0.0)
                    for v in cutlass.range_constexpr(N):
                        total = rFours[v, 0]
                        for k in cutlass.range_constexpr(1, count):
                            total = total + rFours[v, k]
                        p = [cute.arch.shuffle_sync(total, piece + pieces * k) for k in range(sources)]
                        total = (p[0] + p[1]) + (p[2] + p[3])
                        other = cute.arch.shuffle_sync(total, value // N)
                        found = cutlass.select_(value % N == v, other, found)
                    rstd = self.rsqrt_mean(smem.squares[tile & 1, s], N * self.d, cta.rms_eps)
                    rLogit[s] = logit(found * rstd)
            self.arrive(bar.squares_free + (tile & 1))
            if owned < cta.rows:
                self.store_post(cta, rLogit, begin, owned)
                self.sinkhorn(rLogit, rComb, cta.hc_eps)
                self.store_comb(cta, rComb, begin, owned)
            tile = tile + 1
            begin = begin + cta.step

    @cute.jit
    def sinkhorn(self, rLogit: cute.Tensor, rComb: cute.Tensor, eps: Float32):
        """Compute comb of owned token s in lane s, of the last one in further lanes.

        softmax of rows + eps, then columns and rows divided by their sums + eps in turns.
        """
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(N):
            for j in cutlass.range_constexpr(N):
                found = cute.arch.shuffle_sync(rLogit[0], N + N * i + j)
                for s in cutlass.range_constexpr(1, self.owned_tokens):
                    other = cute.arch.shuffle_sync(rLogit[s], N + N * i + j)
                    found = cutlass.select_(lane >= s, other, found)
                rComb[i, j] = found
        for i in cutlass.range_constexpr(N):
            self.softmax(rComb[i, None], eps)
        self.normalise(rComb, eps, rows=False)
        for _ in cutlass.range(self.iters - 1, unroll=1):
            self.normalise(rComb, eps, rows=True)
            self.normalise(rComb, eps, rows=False)

    @cute.jit
    def normalise(self, rComb: cute.Tensor, eps: Float32, rows: cutlass.Constexpr):
        """Divide rows or columns by their sums + eps."""
        for a in cutlass.range_constexpr(N):
            line = rComb[a, None] if rows else rComb[None, a]
            inverse = cute.arch.rcp_approx(((line[0] + line[1]) + (line[2] + line[3])) + eps)
            for b in cutlass.range_constexpr(N):
                line[b] = line[b] * inverse

    @cute.jit
    def store_comb(self, cta: Cta, rComb: cute.Tensor, begin: Int32, owned: Int32):
        """Store comb of owned token s from lane s."""
        t = cute.arch.lane_idx() * self.cluster + owned
        if t < cta.rows and begin + t < cta.tokens:
            line = cta.gmem.comb_new[begin + t, None]
            for i in cutlass.range_constexpr(N):
                rRow = cute.make_rmem_tensor(N, Float32)
                for j in cutlass.range_constexpr(N):
                    rRow[j] = rComb[i, j]
                cute.autovec_copy(rRow, cute.local_tile(line, (N,), (i,)))

    # -------------------------------------------------------- feed_workers

    @cute.jit
    def feed_workers(self, cta: Cta, smem: Smem):
        """Feed the workers B of the write-backs, and pre / rms(x) of what they mix next."""
        bar, lane = cta.bar, cute.arch.lane_idx()
        rFour = cute.make_rmem_tensor((N, INPUTS), Float32)
        rWords = cute.make_rmem_tensor((4, 8), Uint32)
        rPre = cute.make_rmem_tensor((N, 1), Float32)
        rWords.fill(0)
        cute.arch.griddepcontrol_wait()
        self.load_coefficients(cta, cta.first, rFour)
        tile, begin = Int32(0), cta.first
        while begin < cta.tokens + self.lag * cta.step:
            if cutlass.const_expr(self.post):
                if begin < cta.tokens:
                    self.split_coefficients(rFour, rWords)
                    self.load_coefficients(cta, begin + cta.step, rFour)
                    if tile > 1:
                        cute.arch.mbarrier_wait(bar.coefficients_free + (tile & 1), (tile >> 1) + 1 & 1)
                    for k in cutlass.range_constexpr(8):
                        at = (tile & 1) * (TILE * COEFFICIENT_WORDS // 4) + 8 * lane + k
                        cute.autovec_copy(rWords[None, k], smem.coefficients[None, at])
                    self.arrive(bar.coefficients_ready + (tile & 1))
            if tile >= self.lag:
                before = tile - self.lag
                buffer, mine = before & (IN_FLIGHT - 1), self.pre_slots(cta.slots.pre, before, cta.rank, lane)
                exchange.receive(mine, 0, lane < cta.rows, rPre)
                cute.arch.mbarrier_wait(bar.pre_free + buffer, (before // IN_FLIGHT) & 1)
                if lane < cta.rows:
                    cute.autovec_copy(rPre[None, 0], smem.pre[buffer, lane, None])
                self.arrive(bar.pre_ready + buffer)
                exchange.reset(mine, 0, lane < cta.rows, 1)
                cute.arch.fence_acq_rel_gpu()  # what was received and reset precedes what this CTA sends later
            tile = tile + 1
            begin = begin + cta.step

    @cute.jit
    def load_coefficients(self, cta: Cta, begin: Int32, rFour: cute.Tensor):
        """Load comb and post of this lane's token."""
        if cutlass.const_expr(self.post):
            token = cutlass.min(begin + cute.arch.lane_idx() // 2, cta.tokens - 1)
            for i in cutlass.range_constexpr(N):
                cute.autovec_copy(cute.local_tile(cta.gmem.comb[token, None], (N,), (i,)), rFour[None, i])
            cute.autovec_copy(cute.local_tile(cta.gmem.post[token, None], (N,), (0,)), rFour[None, N])

    @cute.jit
    def split_coefficients(self, rFour: cute.Tensor, rWords: cute.Tensor):
        """Split coefficients of two streams of a token: [stream, pair of inputs][limb]."""
        even = cute.arch.lane_idx() % 2 == 0
        for s in cutlass.range_constexpr(2):
            values = [cutlass.select_(even, rFour[s, i], rFour[2 + s, i]) for i in range(INPUTS)]
            values = [*values, Float32(0.0)]
            for q in cutlass.range_constexpr(LIMBS):
                for limb, word in enumerate(limbs(values[2 * q : 2 * q + 2])):
                    rWords[limb, 4 * s + q] = word


def limbs(left: list) -> list:
    """Split two values into three pairs of bf16 that add up to them."""
    words = []
    for _ in range(LIMBS):
        words.append(pack(*left))
        left = [value - cut for value, cut in zip(left, unpack(words[-1]), strict=True)]
    return words
