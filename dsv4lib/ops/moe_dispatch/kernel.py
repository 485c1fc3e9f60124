"""Sort the (token, slot) routes by expert.

Rows of an expert start at a multiple of 128; the host knows no count.

    counts[e]  = routes to e                 offsets[e + 1] = offsets[e] + counts[e] rounded up to 128      (contiguous)
                                             offsets[e]     = e max_m                                       (masked)
    row_of[t, s] = offsets[e] + number of routes (t', s') < (t, s) to e          e = experts[t, s]; -1 if that is -1
    rows[row_of[t, s]] = t, row_weight[row_of[t, s]] = weights[t, s]             -1 and 0 in all other rows

A stable counting sort in one launch, whose result is defined: no atomic's order is in it, no CTA waits for another. A
CTA owns 256 routes, one a thread, but reads all of them: it needs the totals (for the offsets) and what precedes its
own (for the ranks). That costs T k 4 bytes from L2 a CTA, 3 KiB at 128 tokens, 96 KiB at 4,096, and saves the second
launch, or the wait, that a scan over CTAs needs. Within a warp a route's rank comes from `match.any`; the warps'
counts are added up in shared memory. Rows of padding are shared out over all CTAs, so a decode step launches more CTAs
than it has routes for: up to 128 rows an active expert are to be filled with -1.

    SMEM    counts before this CTA's routes and from there on, of the 8 warps, offsets: 11 E + 9 words (22 KiB at E 512)
    bytes   T k 8 in, T k 4 + R 8 + E 8 out

Source: `dsv4lib.reference.moe_dispatch`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, memory

from dsv4lib.errors import ConfigError

MAX_EXPERTS, MAX_K = 512, 16
LANES, WARPS = 32, 8
THREADS = LANES * WARPS
FILLED = 2048  # rows that are worth a CTA
QUAD = 4  # routes, or rows, of a 16-byte access


class MoeDispatch:
    """Permute routes; see the module docstring.

    Args:
        experts: E, 1 to 512.
        k: routes a token, 1 to 16.
        align: what row starts are multiples of; a multiple of 4.
        masked: every expert has ``max_m`` rows; else as many as it needs, rounded up to ``align``.
        weighted: rows get weights.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, experts: int = 256, k: int = 6, align: int = 128, masked: bool = False, weighted: bool = True):
        if not 1 <= experts <= MAX_EXPERTS:
            raise ConfigError("experts", experts, f"1 to {MAX_EXPERTS}")
        if not 1 <= k <= MAX_K:
            raise ConfigError("k", k, f"1 to {MAX_K}")
        if align < QUAD or align % QUAD:
            raise ConfigError("align", align, f"a multiple of {QUAD}")
        self.experts, self.k, self.align, self.masked, self.weighted = experts, k, align, masked, weighted
        self.per_thread = -(-experts // THREADS)  # experts in the scan

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        options = [name for name in ("masked", "weighted") if vars(self)[name]]
        return f"MoeDispatch({', '.join([str(self.experts), str(self.k), str(self.align), *options])})"

    @cute.jit
    def __call__(
        self,
        mExperts: cute.Tensor,
        mWeights: Any,
        mCounts: cute.Tensor,
        mOffsets: cute.Tensor,
        mRows: cute.Tensor,
        mRowOf: cute.Tensor,
        mRowWeight: Any,
        max_m: Int32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for 256 routes, or more for many rows.

        Args:
            mExperts: [T k] int32; what is outside 0 .. E - 1 goes nowhere.
            mWeights: [T k] fp32 or None.
            mCounts: [E] int32, written, as all below.
            mOffsets: [E + 1] int32.
            mRows: [R] int32, R a multiple of 4 and large enough (`ops.moe_dispatch.max_rows`).
            mRowOf: [T k] int32.
            mRowWeight: [R] fp32 or None.
            max_m: rows an expert in the masked layout.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            counts: cute.struct.Align[cute.struct.MemRange[Int32, (2 + WARPS) * self.experts], 16]
            offsets: cute.struct.MemRange[Int32, self.experts + 1]
            sums: cute.struct.MemRange[Int32, WARPS]

        self.storage = Storage
        ctas = cutlass.max(cute.ceil_div(mExperts.shape[0], THREADS), cute.ceil_div(mRows.shape[0], FILLED))
        self.kernel(mExperts, mWeights, mCounts, mOffsets, mRows, mRowOf, mRowWeight, max_m).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mExperts: cute.Tensor,
        mWeights: Any,
        mCounts: cute.Tensor,
        mOffsets: cute.Tensor,
        mRows: cute.Tensor,
        mRowOf: cute.Tensor,
        mRowWeight: Any,
        max_m: Int32,
    ):
        """Count all routes, find the offsets, place this CTA's routes and padding."""
        block, _, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        # [before this CTA's routes, from there on, warp 0, .., warp 7][E]
        sCounts = storage.counts.get_tensor(cute.make_layout((2 + WARPS, self.experts), stride=(self.experts, 1)))
        sOffsets = storage.offsets.get_tensor(cute.make_layout(self.experts + 1))
        sSums = storage.sums.get_tensor(cute.make_layout(WARPS))
        for i in cutlass.range(tidx, cute.size(sCounts), THREADS, unroll=1):
            sCounts[i // self.experts, i % self.experts] = 0
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        route = block * THREADS + tidx
        expert, rank = self.own(mExperts, route, sCounts)
        self.count(mExperts, block * THREADS, sCounts)
        cute.arch.barrier()
        self.scan(sCounts, sOffsets, sSums, max_m)
        cute.arch.barrier()
        self.place(mWeights, mRows, mRowOf, mRowWeight, route, expert, rank, sCounts, sOffsets, max_m)
        self.pad(mRows, mRowWeight, sCounts, sOffsets)
        if block == 0:
            for e in cutlass.range(tidx, self.experts + 1, THREADS, unroll=1):
                mOffsets[e] = sOffsets[e]
                if e < self.experts:
                    mCounts[e] = sCounts[0, e] + sCounts[1, e]

    @cute.jit
    def own(self, mExperts: cute.Tensor, route: Int32, sCounts: cute.Tensor):
        """Return (expert or -1, rank in this warp) of this thread's route.

        Also the warp's counts.
        """
        warp, expert = cute.arch.warp_idx(), Int32(-1)
        if route < mExperts.shape[0]:
            expert = mExperts[route]
        expert = cutlass.select_(expert.bitcast(Uint32) < self.experts, expert, Int32(-1))
        same = cute.arch.match_sync(Uint32(0xFFFFFFFF), expert)
        rank = cute.arch.popc(same & cute.arch.lanemask_lt())
        if expert >= 0 and rank == 0:
            sCounts[2 + warp, expert] = Int32(cute.arch.popc(same))
        return expert, Int32(rank)

    @cute.jit
    def count(self, mExperts: cute.Tensor, first: Int32, sCounts: cute.Tensor):
        """Counts of all routes before ``first`` and from there on."""
        tidx, _, _ = cute.arch.thread_idx()
        routes = mExperts.shape[0]
        for quad in cutlass.range(tidx, routes // QUAD, THREADS, unroll=4):
            rExperts = cute.make_rmem_tensor(QUAD, Int32)
            cute.autovec_copy(cute.local_tile(mExperts, (QUAD,), (quad,)), rExperts)
            for j in cutlass.range_constexpr(QUAD):
                self.add_one(rExperts[j], quad * QUAD >= first, sCounts)
        rest = routes // QUAD * QUAD + tidx
        if rest < routes:
            self.add_one(mExperts[rest], rest >= first, sCounts)

    @cute.jit
    def add_one(self, expert: Int32, late: cutlass.Boolean, sCounts: cute.Tensor):
        """Count a route.

        ``first`` is a multiple of 4, so the routes of a load are on one side of it.
        """
        if expert.bitcast(Uint32) < self.experts:
            place = cutlass.select_(late, Int32(self.experts), Int32(0)) + expert
            cute.arch.atomic_add(sCounts.iterator + place, Int32(1), scope="cta")

    @cute.jit
    def scan(self, sCounts: cute.Tensor, sOffsets: cute.Tensor, sSums: cute.Tensor, max_m: Int32):
        """Offsets of all experts; a thread has one or two in a row."""
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane, first = cute.arch.warp_idx(), cute.arch.lane_idx(), tidx * self.per_thread
        rSize = cute.make_rmem_tensor(self.per_thread, Int32)
        sum_of_thread = Int32(0)
        for i in cutlass.range_constexpr(self.per_thread):
            rSize[i] = 0
            if first + i < self.experts:
                rSize[i] = max_m
                if cutlass.const_expr(not self.masked):
                    count = sCounts[0, first + i] + sCounts[1, first + i]
                    rSize[i] = (count + (self.align - 1)) // self.align * self.align
            sum_of_thread += rSize[i]
        to_here = sum_of_thread
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(to_here, 1 << step, mask_and_clamp=0)
            to_here += cutlass.select_(lane >= 1 << step, below, Int32(0))
        if lane == LANES - 1:
            sSums[warp] = to_here
        cute.arch.barrier()
        at = to_here - sum_of_thread
        for w in cutlass.range_constexpr(WARPS - 1):
            at += cutlass.select_(warp > w, sSums[w], Int32(0))
        for i in cutlass.range_constexpr(self.per_thread):
            if first + i < self.experts:
                sOffsets[first + i] = at
                at += rSize[i]
                if first + i == self.experts - 1:
                    sOffsets[self.experts] = at

    @cute.jit
    def place(
        self,
        mWeights: Any,
        mRows: cute.Tensor,
        mRowOf: cute.Tensor,
        mRowWeight: Any,
        route: Int32,
        expert: Int32,
        rank: Int32,
        sCounts: cute.Tensor,
        sOffsets: cute.Tensor,
        max_m: Int32,
    ):
        """Store this thread's route into its row."""
        warp = cute.arch.warp_idx()
        if route < mRowOf.shape[0]:
            row = Int32(-1)
            if expert >= 0:
                number = sCounts[0, expert] + rank
                for w in cutlass.range_constexpr(WARPS - 1):
                    number += cutlass.select_(warp > w, sCounts[2 + w, expert], Int32(0))
                row = sOffsets[expert] + number
                if cutlass.const_expr(self.masked):
                    row = cutlass.select_(number < max_m, row, Int32(-1))
                if row >= 0:
                    mRows[row] = route // self.k
                    if cutlass.const_expr(self.weighted):
                        mRowWeight[row] = mWeights[route]
            mRowOf[route] = row

    @cute.jit
    def pad(self, mRows: cute.Tensor, mRowWeight: Any, sCounts: cute.Tensor, sOffsets: cute.Tensor):
        """Store -1 into the rows after each expert's and after the last one's.

        A warp an expert, a thread where there are few such rows; after the last 16 bytes a thread.
        """
        block, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        team = 1 if self.align <= LANES else LANES  # threads of an expert
        for e in cutlass.range((block * THREADS + tidx) // team, self.experts, ctas * THREADS // team, unroll=1):
            filled = sOffsets[e] + sCounts[0, e] + sCounts[1, e] + tidx % team
            for row in cutlass.range(filled, sOffsets[e + 1], team, unroll=1):
                mRows[row] = -1
                if cutlass.const_expr(self.weighted):
                    mRowWeight[row] = 0.0
        rNone = cute.make_rmem_tensor(QUAD, Int32)
        rZero = cute.make_rmem_tensor(QUAD, Float32)
        rNone.fill(-1)
        rZero.fill(0.0)
        first = sOffsets[self.experts] // QUAD + block * THREADS + tidx
        for quad in cutlass.range(first, mRows.shape[0] // QUAD, ctas * THREADS, unroll=1):
            cute.autovec_copy(rNone, cute.local_tile(mRows, (QUAD,), (quad,)))
            if cutlass.const_expr(self.weighted):
                cute.autovec_copy(rZero, cute.local_tile(mRowWeight, (QUAD,), (quad,)))
