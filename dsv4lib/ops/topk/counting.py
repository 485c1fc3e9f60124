"""Histograms of keys in shared memory. Counting, and the bin of the k-th best of one CTA or of a cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.topk.keys import Bins

LANES = 32
QUAD = 4  # entries an access
CELLS = 16
# Cells: candidates, entries of the list, what `find` found (three; of a cluster: five), picks of the CTAs before, the
# lowest and the highest key of a span, 0.
CANDIDATES, KEPT, FOUND, EARLIER, SPAN, ZERO = 0, 1, 2, 7, 8, 10


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    hist: Any  # [bins]
    coarse: Any  # [32] sums of hist
    bits: Any  # [capacity / 32] picks of the slice
    key: Any  # [PAIRS] candidates of this CTA
    index: Any
    tops: Any  # [bins] histogram of maxima
    kept_x: Any  # [keep] scores that may be picks, their bits
    kept_index: Any
    pick_key: Any  # [MAX_K] picks that are to be sorted
    pick_index: Any
    sums: Any  # [warps]
    looks: Any  # [4, 32] what each warp saw of a span
    cells: Any
    # Of a cluster.
    all_coarse: Any  # [CTAs, 32] coarse of each
    all_bins: Any  # [CTAs, bins / 32] the bins of one entry of coarse, of each
    all_pairs: Any  # [PAIRS, 2] candidates of all, key and index
    gates: Any  # mbarriers of 8 bytes


class Counting:
    """Hold histograms of ``bins`` bins in ``ctas`` CTAs of ``threads`` threads.

    One bin more is for what does not count.
    """

    def __init__(self, threads: int, ctas: int, bins: int):
        self.threads, self.ctas, self.bins = threads, ctas, Bins(bins)
        self.steps = (bins // QUAD // LANES).bit_length() - 1  # of adding up 1/32 of the bins, 4 a thread

    @cute.jit
    def clear_bins(self, hist: cute.Tensor):
        """Zeros in a histogram."""
        tidx, _, _ = cute.arch.thread_idx()
        rZero = cute.make_rmem_tensor(QUAD, Int32)
        rZero.fill(0)
        for i in cutlass.range(-(-self.bins.size // QUAD // self.threads), unroll=1):
            at = tidx + i * self.threads
            if at < self.bins.size // QUAD:
                cute.autovec_copy(rZero, cute.local_tile(hist, (QUAD,), (at,)))

    def add_one(self, hist: cute.Tensor, place: Int32, there: Any = None) -> None:
        """Count a score that is there.

        Others go to a bin of their own, because a branch costs more.
        """
        at = hist.iterator + (place if there is None else cutlass.select_(there, place, Int32(self.bins.size)))
        cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[at.toint()])

    def put(self, part: cute.Tensor, at: Int32, value: Int32, there: Any) -> None:
        """Set entry ``at`` of a part, if the value is there."""
        given = [(part.iterator + at).toint(), value]
        cute.arch.inline_ptx("st.shared.u32 [{$r0}], {$r1};", read_only_args=given, predicate=there)

    @cute.jit
    def find(self, s: Shared, hist: cute.Tensor, k: Int32, across: cutlass.Constexpr):
        """Return (bin of the k-th best, count in better bins, count in it).

        Of this CTA, or of the row's.

        The last bin if there are fewer than k. Every thread gets it; a barrier must come before it counts again.
        """
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.barrier()
        quads = self.bins.size // QUAD
        each = quads // LANES  # threads whose sums make an entry of coarse: 8, 16 or 32
        for i in cutlass.range(-(-quads // self.threads), unroll=1):
            quad = tidx + i * self.threads
            total = Int32(0)
            rBins = cute.make_rmem_tensor(QUAD, Int32)
            if quad < quads:
                cute.autovec_copy(cute.local_tile(hist, (QUAD,), (quad,)), rBins)
                total = rBins[0] + rBins[1] + rBins[2] + rBins[3]
            for step in cutlass.range_constexpr(self.steps):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step)
            if quad < quads and tidx % each == 0:
                s.coarse[quad // each] = total
        if cutlass.const_expr(not across):
            cute.arch.barrier()
            return self.search(s, hist, k, False)
        self.sync_row()
        if cute.arch.warp_idx() == 0:
            place, above, count = self.search(s, hist, k, True)
            if tidx == 0:
                s.cells[FOUND], s.cells[FOUND + 1], s.cells[FOUND + 2] = place, above, count
        cute.arch.barrier()
        return s.cells[FOUND], s.cells[FOUND + 1], s.cells[FOUND + 2]

    @cute.jit
    def search(self, s: Shared, hist: cute.Tensor, k: Int32, across: cutlass.Constexpr):
        """Return what `find` finds, by one warp. Among 32 sums, then among the bins of one."""
        lane, ctas = cute.arch.lane_idx(), self.ctas if across else 1
        size = self.bins.size // LANES
        per = size // LANES
        total = Int32(0)
        for peer in cutlass.range_constexpr(ctas):
            total += self.read(s.coarse, lane, peer, across)
        to_here = self.scan(total)
        group = self.first_of(to_here >= k)
        before = cute.arch.shuffle_sync(to_here - total, group)
        rBins = cute.make_rmem_tensor(per, Int32)
        rBins.fill(0)
        for peer in cutlass.range_constexpr(ctas):
            for i in cutlass.range_constexpr(per):
                rBins[i] = rBins[i] + self.read(hist, group * size + lane * per + i, peer, across)
        total = Int32(0)
        for i in cutlass.range_constexpr(per):
            total += rBins[i]
        to_here = self.scan(total) + before
        winner = self.first_of(to_here >= k)
        above, place, count = to_here - total, group * size + lane * per, rBins[0]
        for i in cutlass.range_constexpr(1, per):
            further = above + count < k
            above = cutlass.select_(further, above + count, above)
            place = cutlass.select_(further, place + 1, place)
            count = cutlass.select_(further, rBins[i], count)
        return (
            cute.arch.shuffle_sync(place, winner),
            cute.arch.shuffle_sync(above, winner),
            cute.arch.shuffle_sync(count, winner),
        )

    @cute.jit
    def scan(self, value: Int32) -> Int32:
        """Sum over the lanes up to this one."""
        lane = cute.arch.lane_idx()
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
            value += cutlass.select_(lane >= 1 << step, below, Int32(0))
        return value

    def first_of(self, hit: Any) -> Int32:
        """Return the first lane for which it holds, 31 if there is none."""
        return cutlass.min(self.lowest(cute.arch.vote_ballot_sync(hit)), Int32(LANES - 1))

    def lowest(self, bits: Int32) -> Int32:
        """Return the number of the lowest bit that is set, 32 of 0."""
        return Int32(cute.arch.popc((bits & -bits) - 1))

    def peer(self, part: cute.Tensor, at: Int32, rank: Int32) -> Int32:
        """Return the address of entry ``at`` of a part of another CTA's shared memory."""
        return cute.arch.map_dsmem_ptr(part.iterator + at, rank).toint()

    def read(self, part: cute.Tensor, at: Int32, rank: Int32, across: bool = True) -> Int32:
        """Entry ``at`` of a part of another CTA's shared memory, or of this one's."""
        if not across:
            return part[at]
        place = [self.peer(part, at, rank)]
        return cute.arch.inline_ptx(
            "ld.shared::cluster.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=place
        )

    def sync_row(self) -> None:
        """Synchronise the row's CTAs."""
        if self.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()
