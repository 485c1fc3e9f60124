"""The gate and the selection of its experts in one launch, for decode: x [T, d] and the gate's weight [E, d] in bf16.

    logits = x W^T (fp32 sums), then all of `router.simt`

What there is to move: W, 2 MiB (Flash: 256 x 4096) or 5.3 MiB (Pro: 384 x 7168); 0.44 and 1.15 us of an H200's
memory, so latencies decide and every SM has to fetch. A CTA owns 8 N experts, 16 M tokens and a quarter of d, its 8
warps an eighth of that each; 16 tokens and N = M = 1 make 128 CTAs of Flash, 192 of Pro, in one wave. Operands go
from global memory to registers in 16-byte loads and from there into `mma.m16n8k16` (tokens are its M, experts its N),
without shared memory: a sum does not care which k is called first, so a lane's 8 consecutive values serve as the
pairs of two MMAs, the same for both operands. The 8 warps' sums meet in shared memory, the quarters in a workspace in
global memory:

    gate   every CTA writes its part and counts itself in (`atom.inc`, which wraps to 0 by itself: no reset, no memset)
    route  the CTA that counts itself in last among those of its tokens adds the quarters and selects, a warp a token

One launch instead of two, and nobody waits for anybody. The alternative, clusters that share a quarter's sums through
distributed shared memory, saves 3/4 of the 4 T E 4 bytes of parts (16 KiB a token, from L2) and costs a cluster
barrier; it would still need the counter, because 8 CTAs (a portable cluster) cannot fetch W fast enough.

With many tokens the last CTA of a tile would select for 16 m of them while all others idle. Then (`apart`) nobody
counts, and a launch of `Router` adds the quarters and selects, a warp a token all over the GPU.

W does not depend on the kernel before: lines of it are requested (into L2) before `griddepcontrol.wait`.

The order of every sum is fixed: k within a warp, warps 0 .. 7, quarters 0 .. 3. Neither T, nor a token's place, nor M
and N change it, so a token's bits do not depend on its batch.

    SMEM    sums [8 warps][16 M][8 N (+ 8)] fp32: 4 KiB (M = N = 1) to 40 KiB (M = 2, N = 4); the flag of the last CTA
    launch  (E / 8 N, 4, T / 16 M) CTAs of 256 threads

Source: DSV4 paper, MoE section; PTX ISA, "mma.m16n8k16" fragments; `dsv4lib.reference.router`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, memory

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.router.simt import WARPS, Router

QUARTERS = 4  # parts of d that CTAs share; with the warps, 32 parts
UNIT = 64  # of d: what a warp fetches at once, a line of 128 bytes a row
STEP = 32  # of d: one 16-byte load of 4 lanes, two MMAs
ROWS_M, ROWS_N = 16, 8  # of an MMA: tokens, experts
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)


class FusedRouter(Router):
    """Gate and selection; see the module docstring.

    Args:
        experts, k, hashed: as in `Router`.
        m, n: MMAs a warp has side by side: 16 m tokens, 8 n experts a CTA; 1, 2 or 4 each, m n at most 8.
        apart: leave the selection to a launch of `Router` with 4 parts.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self, experts: int = 256, k: int = 6, hashed: bool = False, m: int = 1, n: int = 1, apart: bool = False
    ):
        super().__init__(experts, k, hashed, QUARTERS)
        for name, value in (("m", m), ("n", n)):
            if value not in (1, 2, 4):
                raise ConfigError(name, value, "1, 2 or 4")
        if m * n > 8:
            raise ConfigError("m", m, f"at most {8 // n} with n={n}")
        self.m, self.n, self.apart = m, n, apart
        self.tokens, self.columns = ROWS_M * m, ROWS_N * n  # of a CTA
        self.pitch = self.columns + (8 if n > 1 else 0)  # of a row of sums: 8 rows begin in different banks
        # Units whose loads are in flight together: as many as fit into 96 registers.
        self.ahead = max(1, 96 // (4 * (2 * m + n) * (UNIT // STEP)))

    @property
    def arrivals(self) -> int:
        """CTAs that share a tile of tokens."""
        return QUARTERS * -(-self.experts // self.columns)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.m}x{self.n}{', apart' * self.apart})"

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        chosen: Any,
        mParts: cute.Tensor,
        mCounters: cute.Tensor,
        mExperts: cute.Tensor,
        mWeights: cute.Tensor,
        factor: Float32,
        stream: cuda.CUstream,
    ):
        """Launch.

        Args:
            mX: [T, d] bf16, d a multiple of 64.
            mW: [E, d] bf16.
            chosen: bias [E] fp32, or (tid2eid int64 [V, k], token ids int64 [T]).
            mParts: [4, T, E] fp32, written.
            mCounters: [>= T / 16 m] int32, zeros before and after.
            mExperts: [T, k] int32.
            mWeights: [T, k] fp32.
            factor: the sum of a token's weights.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * self.tokens * self.pitch], 16]
            last: cute.struct.MemRange[Int32, 1]

        self.storage = Storage
        grid = (
            cute.ceil_div(self.experts, self.columns),
            QUARTERS,
            cute.ceil_div(mX.shape[0], self.tokens),
        )
        self.kernel(mX, mW, chosen, mParts, mCounters, mExperts, mWeights, factor).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        chosen: Any,
        mParts: cute.Tensor,
        mCounters: cute.Tensor,
        mExperts: cute.Tensor,
        mWeights: cute.Tensor,
        factor: Float32,
    ):
        """Gate by all CTAs, selection by the last of each tile of tokens."""
        column, quarter, tile = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        shape = (WARPS, self.tokens, self.columns)
        sSums = storage.sums.get_tensor(cute.make_layout(shape, stride=(self.tokens * self.pitch, self.pitch, 1)))
        sLast = storage.last.get_tensor(cute.make_layout(1))

        if cutlass.const_expr(self.apart):
            cute.arch.griddepcontrol_launch_dependents()  # `Router` may come, where there is room, and waits itself
        share, units = quarter * WARPS + warp, mX.shape[1] // UNIT
        first, end = share * units // (QUARTERS * WARPS), (share + 1) * units // (QUARTERS * WARPS)
        self.request(mW, column, first, end)
        cute.arch.griddepcontrol_wait()
        self.gate(mX, mW, column, tile, first, end, sSums[warp, None, None])
        cute.arch.barrier()
        self.add_warps(sSums, mParts[quarter, None, None], column, tile)
        if cutlass.const_expr(not self.apart):
            cute.arch.barrier()
            self.count_in(mCounters, tile, sLast)
            cute.arch.barrier()
            if sLast[0] != 0:
                end = cutlass.min((tile + 1) * self.tokens, mX.shape[0])
                for token in cutlass.range(tile * self.tokens + warp, end, WARPS, unroll=1):
                    self.route(mParts, chosen, mExperts, mWeights, factor, token)

    @cute.jit
    def request(self, mW: cute.Tensor, column: Int32, first: Int32, end: Int32):
        """Ask for this warp's lines of W: lane l those of row l, if there is one."""
        row = column * self.columns + cute.arch.lane_idx()
        if cute.arch.lane_idx() < self.columns and row < self.experts:
            for unit in cutlass.range(first, end, unroll=1):
                line = cute.domain_offset((unit * UNIT,), mW[row, None]).iterator
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[line])

    @cute.jit
    def gate(
        self, mX: cute.Tensor, mW: cute.Tensor, column: Int32, tile: Int32, first: Int32, end: Int32, sSum: cute.Tensor
    ):
        """This warp's part of the sums: rows of x times rows of W over its units of d.

        Row and column of a fragment's element: lane / 4 (and + 8), and 2 (lane mod 4). Rows behind the last token or
        expert are those of the last; what comes of them is not stored.
        """
        group, pair = cute.arch.lane_idx() // 4, cute.arch.lane_idx() % 4
        rC = cute.make_rmem_tensor((4, self.m, self.n), Float32)
        rC.fill(0.0)
        rX = cute.make_rmem_tensor((8, 2, self.m, UNIT // STEP, self.ahead), BFloat16)
        rW = cute.make_rmem_tensor((8, self.n, UNIT // STEP, self.ahead), BFloat16)
        rX.fill(0.0)
        rW.fill(0.0)
        for unit in cutlass.range(first, end, self.ahead, unroll=1):
            for a in cutlass.range_constexpr(self.ahead):
                if unit + a < end:
                    place = ((unit + a) * UNIT) // 8 + pair
                    for i in cutlass.range_constexpr(2 * self.m):
                        row = cutlass.min(tile * self.tokens + 8 * i + group, mX.shape[0] - 1)
                        self.fetch(mX[row, None], place, rX[None, i % 2, i // 2, None, a])
                    for j in cutlass.range_constexpr(self.n):
                        row = cutlass.min(column * self.columns + ROWS_N * j + group, Int32(self.experts - 1))
                        self.fetch(mW[row, None], place, rW[None, j, None, a])
            for a in cutlass.range_constexpr(self.ahead):
                if unit + a < end:
                    for half in cutlass.range_constexpr(UNIT // STEP):
                        self.multiply(rX[None, None, None, half, a], rW[None, None, half, a], rC)
        for i in cutlass.range_constexpr(self.m):
            for j in cutlass.range_constexpr(self.n):
                for high in cutlass.range_constexpr(2):
                    line = sSum[ROWS_M * i + 8 * high + group, None]
                    rPair = cute.make_rmem_tensor(2, Float32)
                    rPair[0], rPair[1] = rC[2 * high, i, j], rC[2 * high + 1, i, j]
                    cute.autovec_copy(rPair, cute.local_tile(line, (2,), (4 * j + pair,)))

    @cute.jit
    def fetch(self, row: cute.Tensor, place: Int32, rRow: cute.Tensor):
        """8 values of each half of a unit."""
        for half in cutlass.range_constexpr(UNIT // STEP):
            cute.autovec_copy(cute.local_tile(row, (8,), (place + half * STEP // 8,)), rRow[None, half])

    def multiply(self, rX: cute.Tensor, rW: cute.Tensor, rC: cute.Tensor) -> None:
        """rC += x W^T over 32 of d: registers q and q + 1 of a lane's four are its pairs in one MMA."""
        rA = cute.recast_tensor(rX, Uint32)
        rB = cute.recast_tensor(rW, Uint32)
        for q in (0, 2):
            for i in range(self.m):
                for j in range(self.n):
                    a = [rA[q, 0, i], rA[q, 1, i], rA[q + 1, 0, i], rA[q + 1, 1, i]]
                    b, c = [rB[q, j], rB[q + 1, j]], [rC[r, i, j] for r in range(4)]
                    sums = cute.arch.inline_ptx(_MMA, write_only_types=[Float32] * 4, read_only_args=a + b + c)
                    for r in range(4):
                        rC[r, i, j] = sums[r]

    @cute.jit
    def add_warps(self, sSums: cute.Tensor, mPart: cute.Tensor, column: Int32, tile: Int32):
        """The sums of the warps, in order, into this quarter's part: a thread has ``width`` experts of a token."""
        tidx, _, _ = cute.arch.thread_idx()
        across = self.columns // self.width
        for item in cutlass.range(tidx, self.tokens * across, self.threads, unroll=1):
            line, place = item // across, item % across
            rSum = cute.make_rmem_tensor(self.width, Float32)
            rSum.fill(0.0)
            for w in cutlass.range_constexpr(WARPS):
                rOne = cute.make_rmem_tensor(self.width, Float32)
                cute.autovec_copy(cute.local_tile(sSums[w, line, None], (self.width,), (place,)), rOne)
                rSum.store(rSum.load() + rOne.load())
            token, expert = tile * self.tokens + line, column * self.columns + place * self.width
            if token < mPart.shape[0] and expert < self.experts:
                row = mPart[token, None]
                cute.autovec_copy(rSum, cute.local_tile(row, (self.width,), (expert // self.width,)))

    @cute.jit
    def count_in(self, mCounters: cute.Tensor, tile: Int32, sLast: cute.Tensor):
        """``sLast`` becomes 1 in the CTA that comes last, whose reads then see what all the others wrote."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            last = self.arrivals - 1
            counter = cute.domain_offset((tile,), mCounters).iterator
            before = cute.arch.inline_ptx(
                "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int32],
                read_only_args=[counter, Int32(last)],
            )
            sLast[0] = cutlass.select_(before == last, Int32(1), Int32(0))
