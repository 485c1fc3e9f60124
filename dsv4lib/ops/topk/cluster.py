"""Select the top-k of a row by a cluster of CTAs.

Slices, counting and emitting as in `kernel`.

A barrier of a cluster costs a fence and a round trip, a read of another CTA's shared memory another round trip. So a
thread sends its numbers to all CTAs of the row at once (``st.async``), and an mbarrier of the receiver counts the
bytes:

    sums    32 sums of a CTA's histogram, by the threads that have them
    bins    the bins of the sum in which the row's k-th best lies, by the warp that searches
    pairs   candidates, key and index

From the first two every CTA also knows how many picks and candidates the CTAs before it have. So a candidate has its
place in every CTA's list before it is sent, every CTA ranks the whole list, and no CTA sends how many picks it ended
with. The one barrier of the cluster waits for the mbarriers' initialisation, while scores are in flight.

Where a bin must be split, which is rare, CTAs synchronise and read.

    SMEM     beside that of `kernel`: candidates of all 2 KiB, 128 B + 4 bins / 32 B a CTA of the row

Source: as `kernel`; PTX ISA, "st.async".
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4lib.ops.topk.counting import CANDIDATES, EARLIER, FOUND, LANES, QUAD, Shared
from dsv4lib.ops.topk.kernel import PAIRS, TopK
from dsv4lib.ops.topk.paged import Picks

GATES = 3
SUMS, BINS, LIST = range(GATES)
NUMBER = 4  # bytes


class ClusterTopK(TopK):
    """Select indices of the best; see the module docstring.

    Arguments and errors as in `kernel.TopK`.
    """

    CTAS = 2, 4, 8, 16

    @functools.wraps(TopK.__init__)
    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.buffers |= {"all_coarse": LANES * self.ctas, "all_bins": self.bins.size // LANES * self.ctas}
        self.buffers |= {"all_pairs": 2 * PAIRS, "gates": 2 * GATES}

    # ------------------------------------------------------------- messages

    @cute.jit
    def open(self, s: Shared):
        """Make the mbarriers."""
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            for i in cutlass.range_constexpr(GATES):
                cute.arch.mbarrier_init(self.gate(s, i), 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()

    def ready(self) -> None:
        """Wait until those of all CTAs of the row are there.

        Each thread once, whatever it does then.
        """
        cute.arch.cluster_wait()

    def gate(self, s: Shared, number: int) -> cute.Pointer:
        """Return an mbarrier: `SUMS`, `BINS` or `LIST`."""
        return cute.recast_ptr(s.gates.iterator, dtype=Int64) + number

    def await_bytes(self, s: Shared, number: int, size: Int32) -> None:
        """Expect bytes, by one thread; some may already have arrived."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.gate(s, number), size)

    def wait(self, s: Shared, number: int) -> None:
        """Wait until all bytes of a kind are here."""
        cute.arch.mbarrier_wait(self.gate(s, number), 0)

    def push(self, s: Shared, number: int, part: cute.Tensor, at: Int32, to: Int32, values: list) -> None:
        """Send 1, 2 or 4 numbers to entry ``at`` of a CTA's part.

        A CTA of the row, maybe this one.
        """
        names = ", ".join(f"{{$r{i + 2}}}" for i in range(len(values)))
        vector, source = ("", names) if len(values) == 1 else (f".v{len(values)}", f"{{{names}}}")
        text = f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [{{$r0}}], {source}, [{{$r1}}];"
        places = [self.peer(part, at, to), cute.arch.map_dsmem_ptr(self.gate(s, number), to).toint()]
        cute.arch.inline_ptx(text, read_only_args=[*places, *values])

    # ------------------------------------------------------------ selection

    @cute.jit
    def select(self, source: Any, picks: Picks, s: Shared, length: Int32, rank: Int32):
        """From a complete histogram to the picks; arguments as there."""
        tidx, _, _ = cute.arch.thread_idx()
        (first, _, tile), k = source, picks.out.shape[0]
        place, above, count, sure, earlier = self.find_row(s, k, rank)
        need = k - above
        low, high = self.bins.keys(place)
        many = count > PAIRS and count > need
        if many:
            low, high, _, _ = self.look(tile, s, self.kept(s), low, high, True)
        span = low, high, Int32(0), length - 1
        span, need, count = self.split(tile, s, self.kept(s), span, need, count, Int32(PAIRS), True)
        if count == need:  # all of them: none is a candidate
            span = span[0], span[1], span[3] + 1, span[3]
        self.classify(source, s, span)
        if many:
            sure, earlier = self.gather_row(s, rank)
        elif count > need:
            self.share_candidates(s, earlier, count)
        else:
            sure += earlier
        if tidx == 0:
            cute.arch.atomic_add(s.cells.iterator + EARLIER, sure, scope="cta")
        if count > need:
            self.rank_row(s, first, need, count, earlier)
        cute.arch.barrier()
        self.emit(picks, s, first, rank)

    def before(self, s: Shared) -> Int32:
        """Those for sure, and those among candidates."""
        return s.cells[EARLIER]

    @cute.jit
    def find_row(self, s: Shared, k: Int32, rank: Int32):
        """Return `find` of the row, and what CTAs before this one have. (place, above, count, above, count)."""
        tidx, _, _ = cute.arch.thread_idx()
        self.ready()
        cute.arch.barrier()
        if tidx == 0:
            self.await_bytes(s, SUMS, self.ctas * LANES * NUMBER)
            self.await_bytes(s, BINS, self.ctas * (self.bins.size // LANES) * NUMBER)
        quads = self.bins.size // QUAD
        each = quads // LANES  # threads that add up 1/32 of the bins
        rBins = cute.make_rmem_tensor(QUAD, Int32)
        for i in cutlass.range_constexpr(-(-quads // self.threads)):
            quad, total = tidx + i * self.threads, Int32(0)
            if quad < quads:
                cute.autovec_copy(cute.local_tile(s.hist, (QUAD,), (quad,)), rBins)
                total = rBins[0] + rBins[1] + rBins[2] + rBins[3]
            for step in cutlass.range_constexpr(self.steps):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step)
            for start in cutlass.range_constexpr(0, self.ctas, each):  # all of them have the sum: a CTA each
                to = start + tidx % each
                if quad < quads and to < self.ctas:
                    self.push(s, SUMS, s.all_coarse, rank * LANES + quad // each, to, [total])
        if cute.arch.warp_idx() == 0:
            found = self.search_row(s, k, rank)
            if tidx == 0:
                for i in cutlass.range_constexpr(5):
                    s.cells[FOUND + i] = found[i]
        cute.arch.barrier()
        return tuple(s.cells[FOUND + i] for i in range(5))

    @cute.jit
    def search_row(self, s: Shared, k: Int32, rank: Int32):
        """Return what `find_row` finds, by one warp. Among 32 sums, then among the bins of one."""
        lane = cute.arch.lane_idx()
        size = self.bins.size // LANES
        per = size // LANES
        self.wait(s, SUMS)
        total, theirs = Int32(0), Int32(0)
        for peer in cutlass.range_constexpr(self.ctas):
            one = s.all_coarse[peer * LANES + lane]
            total += one
            theirs += cutlass.select_(peer < rank, one, Int32(0))
        to_here = self.scan(total)
        group = self.first_of(to_here >= k)
        before = cute.arch.shuffle_sync(to_here - total, group)
        theirs = cutlass.select_(lane < group, theirs, Int32(0))
        self.push_bins(s, group, rank)
        self.wait(s, BINS)
        rBins, rTheirs = cute.make_rmem_tensor(per, Int32), cute.make_rmem_tensor(per, Int32)
        rOne = cute.make_rmem_tensor(per, Int32)
        rBins.fill(0)
        rTheirs.fill(0)
        for peer in cutlass.range_constexpr(self.ctas):
            cute.autovec_copy(cute.local_tile(s.all_bins, (per,), (peer * LANES + lane,)), rOne)
            for i in cutlass.range_constexpr(per):
                rBins[i] = rBins[i] + rOne[i]
                rTheirs[i] = rTheirs[i] + cutlass.select_(peer < rank, rOne[i], Int32(0))
        total = Int32(0)
        for i in cutlass.range_constexpr(per):
            total += rBins[i]
        to_here = self.scan(total) + before
        winner = self.first_of(to_here >= k)
        above, place, count = to_here - total, group * size + lane * per, rBins[0]
        sure, earlier, whole = Int32(0), rTheirs[0], rTheirs[0]
        for i in cutlass.range_constexpr(1, per):
            further = above + count < k
            above = cutlass.select_(further, above + count, above)
            place = cutlass.select_(further, place + 1, place)
            count = cutlass.select_(further, rBins[i], count)
            sure = cutlass.select_(further, sure + earlier, sure)
            earlier = cutlass.select_(further, rTheirs[i], earlier)
            whole += rTheirs[i]
        theirs += cutlass.select_(lane < winner, whole, cutlass.select_(lane == winner, sure, Int32(0)))
        place, above, count, earlier = (cute.arch.shuffle_sync(x, winner) for x in (place, above, count, earlier))
        return place, above, count, cute.arch.warp_redux_sync(theirs, "add"), earlier

    @cute.jit
    def push_bins(self, s: Shared, group: Int32, rank: Int32):
        """Send the bins of a sum, by one warp."""
        size = self.bins.size // LANES
        quads = size // QUAD
        rQuad = cute.make_rmem_tensor(QUAD, Int32)
        for i in cutlass.range_constexpr(-(-quads * self.ctas // LANES)):
            at = cute.arch.lane_idx() + i * LANES
            quad, to = at % quads, at // quads
            if to < self.ctas:
                cute.autovec_copy(cute.local_tile(s.hist, (QUAD,), (group * quads + quad,)), rQuad)
                self.push(s, BINS, s.all_bins, rank * size + quad * QUAD, to, [rQuad[j] for j in range(QUAD)])

    @cute.jit
    def share_candidates(self, s: Shared, earlier: Int32, count: Int32):
        """Send this CTA's candidates and wait for all ``count`` of the row.

        They follow those of the CTAs before it.
        """
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.barrier()
        if tidx == 0:
            self.await_bytes(s, LIST, count * (2 * NUMBER))
        for i in cutlass.range(tidx, s.cells[CANDIDATES] * self.ctas, self.threads, unroll=1):
            one, to = i // self.ctas, i % self.ctas
            self.push(s, LIST, s.all_pairs, 2 * (earlier + one), to, [s.key[one], s.index[one]])
        self.wait(s, LIST)

    @cute.jit
    def gather_row(self, s: Shared, rank: Int32):
        """Fetch the candidates of the row's CTAs, a warp a CTA.

        Synchronises where bins were split.

        Returns:
            how many picks the CTAs before this one have for sure, and how many candidates.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        cute.arch.barrier()  # all have read what was found
        if tidx == 0:
            s.cells[FOUND] = 0
        cute.arch.barrier()
        marks = Int32(0)
        for i in cutlass.range(tidx, cute.size(s.bits), self.threads, unroll=1):
            marks += Int32(cute.arch.popc(s.bits[i]))
        marks = cute.arch.warp_redux_sync(marks, "add")
        if lane == 0:
            cute.arch.atomic_add(s.cells.iterator + FOUND, marks, scope="cta")
        self.sync_row()
        size, sure = Int32(0), Int32(0)
        if lane < self.ctas:
            size, sure = self.read(s.cells, Int32(CANDIDATES), lane), self.read(s.cells, Int32(FOUND), lane)
        for peer in cutlass.range(warp, self.ctas, self.warps, unroll=1):
            before = cute.arch.warp_redux_sync(cutlass.select_(lane < peer, size, Int32(0)), "add")
            own = cute.arch.shuffle_sync(size, peer)
            for i in cutlass.range(lane, own, LANES, unroll=1):
                s.all_pairs[2 * (before + i)] = self.read(s.key, i, peer)
                s.all_pairs[2 * (before + i) + 1] = self.read(s.index, i, peer)
        self.sync_row()  # no CTA exits before all have read
        sure = cute.arch.warp_redux_sync(cutlass.select_(lane < rank, sure, Int32(0)), "add")
        return sure, cute.arch.warp_redux_sync(cutlass.select_(lane < rank, size, Int32(0)), "add")

    @cute.jit
    def rank_row(self, s: Shared, first: Int32, need: Int32, count: Int32, earlier: Int32):
        """Find the ``need`` best of the row's ``count`` candidates. Mark this CTA's, count those of CTAs before it."""
        tidx, _, _ = cute.arch.thread_idx()
        sPairs = cute.make_tensor(s.all_pairs.iterator, cute.make_layout((2, PAIRS)))
        end = earlier + s.cells[CANDIDATES]
        # As many threads a candidate as there are, up to a warp; where there are too few, candidates go in rounds.
        shift = cutlass.max(self.threads.bit_length() - 1 - (LANES - Int32(cute.arch.clz(count - 1))), Int32(0))
        shift = cutlass.min(shift, Int32(LANES.bit_length() - 1))
        several = Int32(1) << shift
        rMine, rOther = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
        for start in cutlass.range(0, count, self.threads >> shift, unroll=1):
            i, leads = start + (tidx >> shift), (tidx & (several - 1)) == 0
            rMine.fill(0)
            if i < count:
                cute.autovec_copy(sPairs[None, i], rMine)
            beaten = Int32(0)
            for j in cutlass.range(tidx & (several - 1), count, several, unroll=4):
                cute.autovec_copy(sPairs[None, j], rOther)
                better = self.better(rOther[0], rMine[0], rOther[1], rMine[1])
                beaten += cutlass.select_(better, Int32(1), Int32(0))
            for step in cutlass.range_constexpr(LANES.bit_length() - 1):
                further = cute.arch.shuffle_sync_bfly(beaten, 1 << step)
                beaten += cutlass.select_(step < shift, further, Int32(0))
            pick = leads and i < count and beaten < need
            self.mark(s, rMine[1] - first, Int32(1), pick and i >= earlier and i < end)
            others = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(pick and i < earlier)))
            if others > 0 and cute.arch.lane_idx() == 0:
                cute.arch.atomic_add(s.cells.iterator + EARLIER, others, scope="cta")
