"""Compute the gate and select its experts in one launch, for decode.

    logits = x W^T (fp32 sums) of x [T, d] and the gate's weight W [E, d] in bf16, then all of `router.kernel`

Limit: latency. W is 2 MiB (Flash: 256 x 4096) or 5.3 MiB (Pro: 384 x 7168), 0.44 and 1.15 us of an H200's memory, so
every SM has to fetch, at once and only once (figures: data/bench/router.md).

    gate   a CTA has 16 M tokens (or 8), 8 N A experts and one or more (``deep``) neighbours of 8 or 16 shares of d. Two
           warps have a piece of that tile and a share: each has 32 of every 64 values, by `mma.m16n8k16` (tokens are
           its M, experts its N). The sum of these warps, a team, goes to a workspace in global memory
    pick   after those CTAs in the grid comes one for each token (`picks`). It receives the token's partial sums, adds
           them, and selects

Gates never wait and precede picks in the grid, so every partial sum is sent eventually.

Operands of few tokens go from global memory to registers, all 16-byte loads of a warp at once: a launch bound says
that an SM needs room for one CTA, else the compiler saves registers and loads wait for products. Of more (``staged``)
they are staged in shared memory by `cp.async`, all of a CTA's at once, and multiplied as they arrive. A sum does not
depend on which k is called first, so a lane's 8 consecutive values serve as the pairs of two MMAs, the same for both
operands.

W does not depend on the kernel before: lines of it are requested (into L2) before `griddepcontrol.wait`, or (``early``)
its copies.

Addresses are made once, and those of units differ by constants. Where every share has the same ``units`` of d
(``whole``), no load or product tests whether it belongs to this share. Picks have a thread an expert: a gate of fewer
warps gets more, which exit at once.

The order of every sum is fixed: with k = 64 u + 32 h + 8 p + 4 q + i, over u in each of four chains (h, q); chains 00 +
01, 10 + 11, both; of shares neighbours, then neighbours of these. Neither T, nor a token's place, nor M, N, A and
``deep`` change it, so a token's bits do not depend on its batch.

    SMEM    operands 128 B a row and unit (Flash 64 x 32: 96 KiB, Pro 64 x 96: 140 KiB) when staged; sums of a warp,
            512 B an MMA, in the place of operands if these are of several shares; keys and logits of a token
    launch  (E / 8 N A) (shares / deep) (T / 16 M) + T CTAs

Source: DSV4 paper, MoE section; PTX ISA, "mma.m16n8k16" fragments, "Memory Consistency Model";
`dsv4lib.reference.router`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, memory

from dsv4lib.dsl import exchange
from dsv4lib.dsl.warp_mma import mma
from dsv4lib.errors import ConfigError
from dsv4lib.ops.router.picks import Picker, Picks, added
from dsv4lib.ops.router.selection import LANES, QUAD

UNIT = 64  # of d: what is fetched at once, a line of 128 bytes a row
STEP = 32  # of d: one 16-byte load of 4 lanes, two MMAs, one warp of a pair
CHUNK = 8  # values of 16 bytes
ROWS_M, ROWS_N = 16, 8  # of an MMA: tokens, experts
SHARES = 8, 16  # of d
CHAINS = 2  # sums a warp keeps apart: an MMA waits for the one before the last


class Place(NamedTuple):
    """What a CTA of the gate multiplies.

    Attributes:
        column: tile of experts. tile: of tokens.
        first, end: units of d.
    """

    column: Int32
    tile: Int32
    first: Int32
    end: Int32


class WarpPlace(NamedTuple):
    """What a warp of the gate multiplies.

    Attributes:
        half: of a unit. share: of the CTA's. right: place along experts. below: place along tokens.
    """

    half: Int32
    share: Int32
    right: Int32
    below: Int32


class FusedRouter(Picker):
    """Gate and selection; see the module docstring.

    Args:
        experts, k, hashed: as in `Router`.
        m: 16 m tokens a CTA: 1, 2 or 4. A warp has two MMAs side by side along tokens, or one.
        n: MMAs a warp has side by side along experts: 1, 2 or 4.
        across: pairs of warps along experts, 1 to 8.
        staged: operands go through shared memory.
        units: of d that are under way together, 1 to 8.
        shares: of d, 8 or 16.
        patient: as in `Picker`.
        whole: d is 64 units shares: every share has all its units under way together.
        early: if staged, copy W ahead of the wait, instead of asking for its lines in L2.
        deep: shares of a CTA, 1, 2 or 4; more than one only of ``whole`` shares.
        few: a CTA has 8 tokens; m is 1.

    Raises:
        ConfigError: a value that is not allowed.
    """

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
        shares: int = 16,
        patient: bool = False,
        whole: bool = False,
        early: bool = False,
        deep: int = 1,
        few: bool = False,
    ):
        if shares not in SHARES:
            raise ConfigError("shares", shares, " or ".join(map(str, SHARES)))
        if deep not in (1, 2, 4) or (deep > 1 and not whole):
            raise ConfigError("deep", deep, "1, or 2 or 4 of whole shares")
        if few and m != 1:
            raise ConfigError("few", few, "False for m above 1")
        super().__init__(experts, k, hashed, shares // deep, patient)
        self.whole, self.early, self.deep, self.few = whole, early and staged, deep, few
        for name, value, allowed in (
            ("m", m, (1, 2, 4)),
            ("n", n, (1, 2, 4)),
            ("across", across, range(1, 9)),
            ("units", units, range(1, 9)),
        ):
            if value not in allowed:
                raise ConfigError(name, value, f"{allowed[0]} to {allowed[-1]}")
        self.m, self.n, self.across, self.staged, self.units = min(m, 2), n, across, staged, units
        self.down = m // self.m  # teams of warps along tokens
        self.teams, self.team = self.down * across, 2 * deep
        self.warps = self.teams * self.team
        self.reuse = staged and deep > 1  # sums take the room of operands
        self.workers = LANES * self.warps  # threads of a gate
        self.threads = max(self.workers, LANES * QUAD * self.quads)
        self.eights = 1 if few else 2 * self.m  # of tokens, a warp
        self.tokens, self.columns = 8 * self.eights * self.down, ROWS_N * n * across  # of a CTA
        self.tiles = -(-experts // self.columns)  # of experts

    def __repr__(self) -> str:
        way = f"{'staged' if self.staged else 'direct'} {self.units}{', whole' * self.whole}{', early' * self.early}"
        return f"{super().__repr__()[:-1]}, {self.tokens}x{self.columns}, {self.n}, {way}, {self.deep} deep)"

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, picks: Picks, stream: cuda.CUstream):
        """Launch.

        Args:
            mX: [T, d] bf16, d a multiple of 64; with ``whole`` 64 units shares.
            mW: [E, d] bf16.
            picks: see there.
            stream: where the launch is queued.
        """
        size, partial = self.room()

        @cute.struct
        class Storage:
            rows: cute.struct.Align[cute.struct.MemRange[BFloat16, size], 128]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, partial], 16]
            keys: cute.struct.Align[cute.struct.MemRange[Uint32, LANES * QUAD * self.quads], 16]
            affinities: cute.struct.MemRange[Float32, LANES * QUAD * self.quads]
            ready: cute.struct.MemRange[cutlass.Int64, self.deep * self.units]

        self.storage = Storage
        self.kernel(mX, mW, picks).launch(
            grid=(self.gates(mX) + mX.shape[0], 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # else the compiler saves registers, and loads wait for others
        )

    def room(self) -> tuple[int, int]:
        """Return the elements of shared memory for operands and for sums."""
        rows = self.deep * self.units * (self.tokens + self.columns) * UNIT if self.staged else CHUNK
        sums = self.warps * self.m * self.n * LANES * 4
        return (max(rows, 2 * sums), 4) if self.reuse else (rows, sums)

    def gates(self, mX: cute.Tensor) -> Int32:
        """CTAs of the gate."""
        return self.tiles * self.splits * cute.ceil_div(mX.shape[0], self.tokens)

    # -------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, picks: Picks):
        """Gates first, then a CTA a token."""
        block, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        gates = self.gates(mX)
        if block < gates:
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < self.warps:
                self.gate(mX, mW, picks.slots, storage, block)
        else:
            cute.arch.griddepcontrol_wait()
            self.pick(picks, storage, block - gates)

    @cute.jit
    def gate(self, mX: cute.Tensor, mW: cute.Tensor, mSlots: cute.Tensor, storage: Any, block: Int32):
        """Compute this CTA's split of the sums."""
        column, split, tile = block % self.tiles, block // self.tiles % self.splits, block // (self.tiles * self.splits)
        units = mX.shape[1] // UNIT
        first, end = split * units // self.splits, (split + 1) * units // self.splits
        if cutlass.const_expr(self.whole):
            first, end = split * self.deep * self.units, (split + 1) * self.deep * self.units
        rC = cute.make_rmem_tensor((4, self.m, self.n, CHAINS), Float32)
        rC.fill(0.0)
        if cutlass.const_expr(not self.early):
            self.request(mW, column, first, end)
        at = Place(column, tile, first, end)
        if cutlass.const_expr(self.staged):
            self.open(storage)
        multiply_units = self.through_smem if self.staged else self.direct
        if cutlass.const_expr(self.whole):
            multiply_units(mX, mW, storage, rC, at, first)
        else:
            if first == end:  # no sums, but the launch before must have reset the slots
                cute.arch.griddepcontrol_wait()
            for start in cutlass.range(first, end, self.units, unroll=1):
                multiply_units(mX, mW, storage, rC, at, start)
        rC[None, None, None, 0].store(rC[None, None, None, 0].load() + rC[None, None, None, 1].load())
        self.publish(rC[None, None, None, 0], storage, mSlots[split, None, None], at)

    @cute.jit
    def request(self, mW: cute.Tensor, column: Int32, first: Int32, end: Int32):
        """Prefetch this CTA's lines of W into L2."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tidx, self.columns * (end - first), self.workers, unroll=1):
            row = cutlass.min(column * self.columns + i % self.columns, Int32(self.experts - 1))
            line = cute.domain_offset(((first + i // self.columns) * UNIT,), mW[row, None]).iterator
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[line])

    @cute.jit
    def direct(self, mX: cute.Tensor, mW: cute.Tensor, storage: Any, rC: cute.Tensor, at: Place, start: Int32):
        """Sum up from global memory what is this warp's.

        Rows of x times rows of W over its half of every unit from ``start``.

        Row and column of a fragment's element: lane / 4 (and + 8), and 2 (lane mod 4). Rows past the last expert are
        those of the last, past the last token 0; their sums are not stored.
        """
        half, own, _, below = self.place()
        group, chunk = cute.arch.lane_idx() // 4, half * (STEP // CHUNK) + cute.arch.lane_idx() % 4
        start = start + own * self.units
        rX = cute.make_rmem_tensor((CHUNK, 2, self.m, self.units), BFloat16)
        rW = cute.make_rmem_tensor((CHUNK, self.n, self.units), BFloat16)
        rX.fill(0.0)
        if cutlass.const_expr(not self.whole):
            rW.fill(0.0)
        if self.opens(start, at.first):
            cute.arch.griddepcontrol_wait()
        self.take_weights(mW, rW, at.column, start, at.end)
        for i in cutlass.range_constexpr(self.eights):
            row = at.tile * self.tokens + below * self.m * ROWS_M + 8 * i + group
            if row < mX.shape[0]:
                mChunks = self.chunks(mX, row, start * UNIT + chunk * CHUNK)
                for u in cutlass.range_constexpr(self.units):
                    if self.has(start + u, at.end):
                        cute.autovec_copy(mChunks[None, u], rX[None, i % 2, i // 2, u])
        for u in cutlass.range_constexpr(self.units):
            if self.has(start + u, at.end):
                self.multiply(rX[None, None, None, u], rW[None, None, u], rC)

    @cute.jit
    def take_weights(self, mW: cute.Tensor, rW: cute.Tensor, column: Int32, start: Int32, end: Int32):
        """Take this warp's half of the units from ``start``, of its rows of W."""
        half, _, right, _ = self.place()
        group, chunk = cute.arch.lane_idx() // 4, half * (STEP // CHUNK) + cute.arch.lane_idx() % 4
        for j in cutlass.range_constexpr(self.n):
            row = column * self.columns + (right * self.n + j) * ROWS_N + group
            mChunks = self.chunks(mW, cutlass.min(row, Int32(self.experts - 1)), start * UNIT + chunk * CHUNK)
            for u in cutlass.range_constexpr(self.units):
                if self.has(start + u, end):
                    cute.autovec_copy(mChunks[None, u], rW[None, j, u])

    def chunks(self, mRows: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """Return [8, units] values of a row, 8 of each unit. They begin at a column, a multiple of 8."""
        address = mRows[row, None].iterator.toint() + cutlass.Int64(column * 2)
        pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout((CHUNK, self.units), stride=(1, UNIT)))

    @cute.jit
    def open(self, storage: Any):
        """Make the mbarriers of `through_smem`."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx < self.deep * self.units:
            cute.arch.mbarrier_init(storage.ready.data_ptr() + tidx, self.workers)
        cute.arch.mbarrier_init_fence()
        self.sync_gate()

    @cute.jit
    def through_smem(self, mX: cute.Tensor, mW: cute.Tensor, storage: Any, rC: cute.Tensor, at: Place, start: Int32):
        """Sum as in `direct`, from rows in SMEM.

        The sums are this warp's; all units are requested first.

        Chunk c of an odd row is at place c xor 4: a quarter of a warp reads two rows from different banks.
        """
        half, own, right, below = self.place()
        group = cute.arch.lane_idx() // 4
        place = (half * (STEP // CHUNK) + cute.arch.lane_idx() % 4) ^ (group % 2 * 4)
        lines = self.tokens + self.columns
        shape = UNIT, lines, self.deep * self.units
        sRows = storage.rows.get_tensor(cute.make_layout(shape, stride=(1, UNIT, UNIT * lines)))
        ready = storage.ready.data_ptr()
        rX = cute.make_rmem_tensor((CHUNK, 2, self.m), BFloat16)
        rW = cute.make_rmem_tensor((CHUNK, self.n), BFloat16)
        rX.fill(0.0)
        phase = Int32(0)
        if cutlass.const_expr(not self.whole):
            phase = (start - at.first) // self.units % 2
            if start > at.first:
                self.sync_gate()  # what is there was read
        expert, token = at.column * self.columns, at.tile * self.tokens
        if cutlass.const_expr(self.early):
            self.stage(mW, sRows, ready, expert, Int32(self.experts - 1), start, at.end, True)
        if self.opens(start, at.first):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not self.early):
            self.stage(mW, sRows, ready, expert, Int32(self.experts - 1), start, at.end, True)
        self.stage(mX, sRows, ready, token, mX.shape[0] - 1, start, at.end, False)
        for u in cutlass.range_constexpr(self.units):
            if self.has(start + u, at.end):
                unit = own * self.units + u
                cute.arch.mbarrier_wait(ready + unit, phase)
                for i in cutlass.range_constexpr(self.eights):
                    sRow = sRows[None, below * self.m * ROWS_M + 8 * i + group, unit]
                    cute.autovec_copy(cute.local_tile(sRow, (CHUNK,), (place,)), rX[None, i % 2, i // 2])
                for j in cutlass.range_constexpr(self.n):
                    sRow = sRows[None, self.tokens + (right * self.n + j) * ROWS_N + group, unit]
                    cute.autovec_copy(cute.local_tile(sRow, (CHUNK,), (place,)), rW[None, j])
                self.multiply(rX, rW, rC)

    @cute.jit
    def stage(
        self,
        mRows: cute.Tensor,
        sRows: cute.Tensor,
        ready: cute.Pointer,
        at: Int32,
        last: Int32,
        start: Int32,
        end: Int32,
        weights: cutlass.Constexpr,
    ):
        """Request units of rows from ``at`` up to ``last``.

        From unit ``start``; tokens come last and arrive at ``ready``.
        """
        tidx, _, _ = cute.arch.thread_idx()
        chunks = UNIT // CHUNK
        first, chunk, step = tidx // chunks, tidx % chunks, self.workers // chunks
        to, count = (self.tokens, self.columns) if weights else (0, self.tokens)
        sources, targets = [], []
        for i in cutlass.range_constexpr(-(-count // step)):
            row = first + i * step
            source = mRows[cutlass.min(at + row, last), None].iterator.toint()
            sources.append(source + cutlass.Int64((start * UNIT + chunk * CHUNK) * 2))
            targets.append((sRows.iterator + (to + row) * UNIT + (chunk ^ (row % 2 * 4)) * CHUNK).toint())
        for u in cutlass.range_constexpr(self.deep * self.units):
            if self.has(start + u, end):
                for i in cutlass.range_constexpr(len(sources)):
                    if first + i * step < count:
                        offsets = u * UNIT * (self.tokens + self.columns) * 2, u * UNIT * 2
                        text = f"cp.async.cg.shared.global [{{$r0}}+{offsets[0]}], [{{$r1}}+{offsets[1]}], 16;"
                        cute.arch.inline_ptx(text, read_only_args=[targets[i], sources[i]])
                if cutlass.const_expr(not weights):
                    cute.arch.cp_async_mbarrier_arrive_noinc(ready + u)

    def opens(self, start: Int32, first: Int32) -> Any:
        """Return whether these are the first units."""
        return True if self.whole else start == first

    def has(self, unit: Int32, end: Int32) -> Any:
        """Return whether a unit belongs to this share."""
        return True if self.whole else unit < end

    def sync_gate(self) -> None:
        """Barrier of all threads of a gate."""
        if self.workers == self.threads:
            cute.arch.barrier()
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=self.workers)

    def place(self) -> WarpPlace:
        """Return what this warp multiplies."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        team = warp // self.team
        return WarpPlace(warp % 2, warp // 2 % self.deep, team % self.across, team // self.across)

    def multiply(self, rX: cute.Tensor, rW: cute.Tensor, rC: cute.Tensor) -> None:
        """Compute rC += x W^T over 32 of d. Registers q and q + 1 of a lane's four are its pairs in one MMA."""
        rA = cute.recast_tensor(rX, Uint32)
        rB = cute.recast_tensor(rW, Uint32)
        for chain in range(CHAINS):
            q = 2 * chain
            for i in range(self.m):
                for j in range(self.n):
                    a = [rA[q, 0, i], rA[q, 1, i], rA[q + 1, 0, i], rA[q + 1, 1, i]]
                    mma(a, [rB[q, j], rB[q + 1, j]], rC[None, i, j, chain])

    @cute.jit
    def publish(self, rC: cute.Tensor, storage: Any, mSlots: cute.Tensor, at: Place):
        """Send the sums of all warps of a team to this CTA's slots (`dsl.exchange`)."""
        half, own, right, below = self.place()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token = at.tile * self.tokens + below * self.m * ROWS_M + lane // 4
        expert = at.column * self.columns + right * self.n * ROWS_N + lane % 4 * 2
        address, below_it = mSlots[token, None].iterator.toint() + expert * 4, cutlass.Int64(mSlots.stride[0]) * (4 * 8)
        shape = (4, self.n, self.m, LANES, self.team, self.teams)
        layout = cute.make_ordered_layout(shape, order=(0, 2, 3, 1, 4, 5))
        room = storage.sums.data_ptr()
        if cutlass.const_expr(self.reuse):
            self.sync_gate()
            room = cute.recast_ptr(storage.rows.data_ptr(), dtype=Float32)
        sSum = cute.make_tensor(room, layout)[None, None, None, lane, None, warp // self.team]
        first = half + own == 0
        if not first:
            for i in cutlass.range_constexpr(self.m):
                for j in cutlass.range_constexpr(self.n):
                    cute.autovec_copy(rC[None, i, j], sSum[None, j, i, warp % self.team])
        self.sync_gate()
        if first:
            rOther = cute.make_rmem_tensor((4, self.n, self.team), Float32)
            for i in cutlass.range_constexpr(self.m):
                for j in cutlass.range_constexpr(self.n):
                    rOther[None, j, 0].store(rC[None, i, j].load())
                    for other in cutlass.range_constexpr(1, self.team):
                        cute.autovec_copy(sSum[None, j, i, other], rOther[None, j, other])
                for high in cutlass.range_constexpr(min(2, self.eights)):
                    row = address + below_it * (2 * i + high)
                    if token + i * ROWS_M + 8 * high < mSlots.shape[0]:
                        for j in cutlass.range_constexpr(self.n):
                            if expert + j * ROWS_N < self.padded:
                                two = [[rOther[2 * high + r, j, w] for w in range(self.team)] for r in range(2)]
                                exchange.send(row, (added(one) for one in two), offset=4 * ROWS_N * j)
