"""The gate and the selection of its experts in one launch, for decode: x [T, d] and the gate's weight [E, d] in bf16.

    logits = x W^T (fp32 sums), then all of `router.simt`

What there is to move: W, 2 MiB (Flash: 256 x 4096) or 5.3 MiB (Pro: 384 x 7168); 0.44 and 1.15 us of an H200's
memory, so latencies decide, and every SM has to fetch, at once and only once.

    gate   a CTA has 16 M tokens, 8 N A experts and an eighth or a sixteenth of d (``shares``). Two warps share a piece
           of that tile: each has 32 of every 64 values, by `mma.m16n8k16` (tokens are its M, experts its N). The sum of
           both goes to a workspace in global memory
    pick   behind those CTAs in the grid comes one for each token (`picks`). It waits for the token's parts, adds
           them, and selects

Gates never wait, and come first in the grid, so the waiting ends wherever they run. Where gates leave no room on an SM
for picks (``apart``), a launch of `Picker` has them, which needs less of it.

Operands of few tokens go from global memory to registers, all 16-byte loads of a warp at once. Of more (``staged``)
they are staged in shared memory by `cp.async`, all of a CTA's at once, and multiplied as they come. A sum does not care
which k is called first, so a lane's 8 consecutive values serve as the pairs of two MMAs, the same for both operands.

W does not depend on the kernel before: lines of it are requested (into L2) before `griddepcontrol.wait`.

The order of every sum is fixed: with k = 64 u + 32 h + 8 p + 4 q + i, over u in each of four chains (h, q); chains 00 +
01, 10 + 11, both; quarters of the parts, in order, then those as (0 + 1) + (2 + 3). Neither T, nor a token's place, nor
M, N and A change it, so a token's bits do not depend on its batch.

    SMEM    operands 128 B a row and unit (Flash 64 x 64: 64 KiB, Pro 64 x 96: 140 KiB) when staged; sums of one of the
            two warps, 512 B an MMA; keys and logits of a token
    launch  (E / 8 N A) shares (T / 16 M) + T CTAs

Source: DSV4 paper, MoE section; PTX ISA, "mma.m16n8k16" fragments, "Memory Consistency Model";
`dsv4lib.reference.router`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, memory

from dsv4lib.errors import ConfigError
from dsv4lib.kernels.router.picks import Picker, Picks, marked
from dsv4lib.kernels.router.selection import LANES, QUAD

UNIT = 64  # of d: what is fetched at once, a line of 128 bytes a row
STEP = 32  # of d: one 16-byte load of 4 lanes, two MMAs, one warp of a pair
CHUNK = 8  # values of 16 bytes
ROWS_M, ROWS_N = 16, 8  # of an MMA: tokens, experts
CHAINS = 2  # sums a warp keeps apart: an MMA waits for the one before the last
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)
_COPY = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
_PUBLISH = "st.relaxed.gpu.global.v2.f32 [{$r0}], {{$r1}, {$r2}};"


class FusedRouter(Picker):
    """Gate and selection; see the module docstring.

    Args:
        experts, k, hashed: as in `Router`.
        m: 16 m tokens a CTA: 1, 2 or 4. A warp has two MMAs side by side along tokens, or one.
        n: MMAs a warp has side by side along experts: 1, 2 or 4.
        across: pairs of warps along experts, 1 to 8.
        staged: operands go through shared memory.
        units: of d that are under way together, 1 to 8.
        apart: leave the picks to a launch of `Picker`.
        shares: CTAs that share d, 8 or 16.
        patient: as in `Picker`.

    Raises:
        ConfigError: a value that is not allowed.
    """

    behind = False

    def __init__(
        self,
        experts: int = 256,
        k: int = 6,
        hashed: bool = False,
        m: int = 1,
        n: int = 1,
        across: int = 4,
        staged: bool = False,
        units: int = 4,
        apart: bool = False,
        shares: int = 16,
        patient: bool = False,
    ):
        super().__init__(experts, k, hashed, shares, patient)
        for name, value, allowed in (
            ("m", m, (1, 2, 4)),
            ("n", n, (1, 2, 4)),
            ("across", across, range(1, 9)),
            ("units", units, range(1, 9)),
        ):
            if value not in allowed:
                raise ConfigError(name, value, f"{allowed[0]} to {allowed[-1]}")
        self.m, self.n, self.across, self.staged, self.units, self.apart = min(m, 2), n, across, staged, units, apart
        self.down = m // self.m  # pairs of warps along tokens
        self.pairs = self.down * across
        self.warps = 2 * self.pairs
        self.threads = LANES * self.warps
        self.tokens, self.columns = ROWS_M * m, ROWS_N * n * across  # of a CTA
        self.tiles = -(-experts // self.columns)  # of experts

    def __repr__(self) -> str:
        way = f"{'staged' if self.staged else 'direct'} {self.units}{', apart' * self.apart}"
        return f"{super().__repr__()[:-1]}, {self.tokens}x{self.columns}, {self.n}, {way})"

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, picks: Picks, stream: cuda.CUstream):
        """Launch.

        Args:
            mX: [T, d] bf16, d a multiple of 64.
            mW: [E, d] bf16.
            picks: see there.
            stream: where the launch is queued.
        """
        size = self.units * (self.tokens + self.columns) * UNIT if self.staged else CHUNK

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, size], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.pairs * self.m * self.n * LANES * 4], 16]
            keys: cute.struct.Align[cute.struct.MemRange[Uint32, LANES * QUAD * self.quads], 16]
            affinities: cute.struct.MemRange[Float32, LANES * QUAD * self.quads]
            ready: cute.struct.MemRange[cutlass.Int64, self.units]

        self.storage = Storage
        ctas = self.tiles * self.shares * cute.ceil_div(mX.shape[0], self.tokens)
        if cutlass.const_expr(not self.apart):
            ctas += mX.shape[0]
        self.kernel(mX, mW, picks).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True)

    # -------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, picks: Picks):
        """Gates first, then a CTA a token."""
        block, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        gates = self.tiles * self.shares * cute.ceil_div(mX.shape[0], self.tokens)
        if cutlass.const_expr(self.apart):
            self.gate(mX, mW, picks.parts, storage, block)
        elif block < gates:
            self.gate(mX, mW, picks.parts, storage, block)
        else:
            cute.arch.griddepcontrol_wait()
            self.pick(picks, storage, block - gates)

    @cute.jit
    def gate(self, mX: cute.Tensor, mW: cute.Tensor, mParts: cute.Tensor, storage: Any, block: Int32):
        """This CTA's part of the sums."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        column, share, tile = block % self.tiles, block // self.tiles % self.shares, block // (self.tiles * self.shares)
        units = mX.shape[1] // UNIT
        first, end = share * units // self.shares, (share + 1) * units // self.shares
        self.request(mW, column, first, end)
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.apart):
            cute.arch.griddepcontrol_launch_dependents()  # they read what the kernel before may have written, too
        rC = cute.make_rmem_tensor((4, self.m, self.n, CHAINS), Float32)
        rC.fill(0.0)
        if cutlass.const_expr(self.staged):
            self.through_smem(mX, mW, storage, rC, column, tile, first, end)
        else:
            self.direct(mX, mW, rC, column, tile, first, end)
        rC[None, None, None, 0].store(rC[None, None, None, 0].load() + rC[None, None, None, 1].load())
        shape = (4, self.n, self.m, LANES, self.pairs)
        layout = cute.make_ordered_layout(shape, order=(0, 2, 3, 1, 4))
        sSum = storage.sums.get_tensor(layout)[None, None, None, cute.arch.lane_idx(), warp // 2]
        if warp % 2 == 1:
            for i in cutlass.range_constexpr(self.m):
                for j in cutlass.range_constexpr(self.n):
                    cute.autovec_copy(rC[None, i, j, 0], sSum[None, j, i])
        cute.arch.barrier()
        if warp % 2 == 0:
            self.publish(rC[None, None, None, 0], sSum, mParts[share, None, None], column, tile, warp // 2)

    @cute.jit
    def request(self, mW: cute.Tensor, column: Int32, first: Int32, end: Int32):
        """Ask for this CTA's lines of W."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tidx, self.columns * (end - first), self.threads, unroll=1):
            row = cutlass.min(column * self.columns + i % self.columns, Int32(self.experts - 1))
            line = cute.domain_offset(((first + i // self.columns) * UNIT,), mW[row, None]).iterator
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[line])

    @cute.jit
    def direct(
        self, mX: cute.Tensor, mW: cute.Tensor, rC: cute.Tensor, column: Int32, tile: Int32, first: Int32, end: Int32
    ):
        """Sums of this warp from global memory: rows of x times rows of W over its half of every unit.

        Row and column of a fragment's element: lane / 4 (and + 8), and 2 (lane mod 4). Rows behind the last token or
        expert are those of the last; what comes of them is not stored.
        """
        half, right, below = self.place()
        group, chunk = cute.arch.lane_idx() // 4, half * (STEP // CHUNK) + cute.arch.lane_idx() % 4
        rX = cute.make_rmem_tensor((CHUNK, 2, self.m, self.units), BFloat16)
        rW = cute.make_rmem_tensor((CHUNK, self.n, self.units), BFloat16)
        rX.fill(0.0)
        rW.fill(0.0)
        for start in cutlass.range(first, end, self.units, unroll=1):
            for u in cutlass.range_constexpr(self.units):
                if start + u < end:
                    at = (start + u) * (UNIT // CHUNK) + chunk
                    for j in cutlass.range_constexpr(self.n):
                        row = column * self.columns + (right * self.n + j) * ROWS_N + group
                        mRow = mW[cutlass.min(row, Int32(self.experts - 1)), None]
                        cute.autovec_copy(cute.local_tile(mRow, (CHUNK,), (at,)), rW[None, j, u])
                    for i in cutlass.range_constexpr(2 * self.m):
                        row = tile * self.tokens + below * self.m * ROWS_M + 8 * i + group
                        mRow = mX[cutlass.min(row, mX.shape[0] - 1), None]
                        cute.autovec_copy(cute.local_tile(mRow, (CHUNK,), (at,)), rX[None, i % 2, i // 2, u])
            for u in cutlass.range_constexpr(self.units):
                if start + u < end:
                    self.multiply(rX[None, None, None, u], rW[None, None, u], rC)

    @cute.jit
    def through_smem(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        storage: Any,
        rC: cute.Tensor,
        column: Int32,
        tile: Int32,
        first: Int32,
        end: Int32,
    ):
        """Sums of this warp as in `direct`, from rows in shared memory; all units are requested before the first comes.

        Chunk c of an odd row is at place c xor 4: a quarter of a warp reads two rows from different banks.
        """
        half, right, below = self.place()
        group = cute.arch.lane_idx() // 4
        place = (half * (STEP // CHUNK) + cute.arch.lane_idx() % 4) ^ (group % 2 * 4)
        lines = self.tokens + self.columns
        sRows = storage.rows.get_tensor(cute.make_layout((UNIT, lines, self.units), stride=(1, UNIT, UNIT * lines)))
        ready = storage.ready.data_ptr()
        rX = cute.make_rmem_tensor((CHUNK, 2, self.m), BFloat16)
        rW = cute.make_rmem_tensor((CHUNK, self.n), BFloat16)
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < self.units:
            cute.arch.mbarrier_init(ready + tidx, self.threads)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        phase = Int32(0)
        for start in cutlass.range(first, end, self.units, unroll=1):
            if start > first:
                cute.arch.barrier()  # what is there was read
            count = cutlass.min(end - start, Int32(self.units))
            for u in cutlass.range(count, unroll=1):
                at = tile * self.tokens
                self.stage(mX, sRows[None, None, u], at, mX.shape[0] - 1, start + u, 0, self.tokens)
                at = column * self.columns
                self.stage(mW, sRows[None, None, u], at, Int32(self.experts - 1), start + u, self.tokens, self.columns)
                cute.arch.cp_async_mbarrier_arrive_noinc(ready + u)
            for u in cutlass.range(count, unroll=1):
                cute.arch.mbarrier_wait(ready + u, phase)
                for i in cutlass.range_constexpr(2 * self.m):
                    sRow = sRows[None, below * self.m * ROWS_M + 8 * i + group, u]
                    cute.autovec_copy(cute.local_tile(sRow, (CHUNK,), (place,)), rX[None, i % 2, i // 2])
                for j in cutlass.range_constexpr(self.n):
                    sRow = sRows[None, self.tokens + (right * self.n + j) * ROWS_N + group, u]
                    cute.autovec_copy(cute.local_tile(sRow, (CHUNK,), (place,)), rW[None, j])
                self.multiply(rX, rW, rC)
            phase ^= 1

    @cute.jit
    def stage(
        self,
        mRows: cute.Tensor,
        sRows: cute.Tensor,
        at: Int32,
        last: Int32,
        unit: Int32,
        to: cutlass.Constexpr,
        count: cutlass.Constexpr,
    ):
        """Request a unit of ``count`` rows from ``at``, not behind ``last``, into rows from ``to``."""
        tidx, _, _ = cute.arch.thread_idx()
        chunks = UNIT // CHUNK
        for i in cutlass.range_constexpr(-(-count * chunks // self.threads)):
            row, chunk = (tidx + i * self.threads) // chunks, tidx % chunks
            if row < count:
                source = cute.domain_offset((unit * UNIT + chunk * CHUNK,), mRows[cutlass.min(at + row, last), None])
                target = sRows.iterator + (to + row) * UNIT + (chunk ^ (row % 2 * 4)) * CHUNK
                cute.arch.inline_ptx(_COPY, read_only_args=[target.toint(), source.iterator])

    def place(self) -> tuple:
        """(half of a unit, place along experts, place along tokens) of this warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp % 2, warp // 2 % self.across, warp // 2 // self.across

    def multiply(self, rX: cute.Tensor, rW: cute.Tensor, rC: cute.Tensor) -> None:
        """rC += x W^T over 32 of d: registers q and q + 1 of a lane's four are its pairs in one MMA."""
        rA = cute.recast_tensor(rX, Uint32)
        rB = cute.recast_tensor(rW, Uint32)
        for chain in range(CHAINS):
            q = 2 * chain
            for i in range(self.m):
                for j in range(self.n):
                    a = [rA[q, 0, i], rA[q, 1, i], rA[q + 1, 0, i], rA[q + 1, 1, i]]
                    b, c = [rB[q, j], rB[q + 1, j]], [rC[r, i, j, chain] for r in range(4)]
                    sums = cute.arch.inline_ptx(_MMA, write_only_types=[Float32] * 4, read_only_args=a + b + c)
                    for r in range(4):
                        rC[r, i, j, chain] = sums[r]

    @cute.jit
    def publish(self, rC: cute.Tensor, sSum: cute.Tensor, mPart: cute.Tensor, column: Int32, tile: Int32, pair: Int32):
        """The sums of both warps of a pair into this share's part, none of them 0."""
        rOther = cute.make_rmem_tensor(4, Float32)
        group = cute.arch.lane_idx() // 4
        for i in cutlass.range_constexpr(self.m):
            for j in cutlass.range_constexpr(self.n):
                cute.autovec_copy(sSum[None, j, i], rOther)
                expert = column * self.columns + (pair % self.across * self.n + j) * ROWS_N
                expert += cute.arch.lane_idx() % 4 * 2
                for high in cutlass.range_constexpr(2):
                    token = tile * self.tokens + (pair // self.across * self.m + i) * ROWS_M + 8 * high + group
                    if (token < mPart.shape[0]) & (expert < self.padded):
                        at = cute.domain_offset((expert,), mPart[token, None]).iterator
                        two = [marked(rC[2 * high + r, i, j] + rOther[2 * high + r]) for r in range(2)]
                        cute.arch.inline_ptx(_PUBLISH, read_only_args=[at, *two])
