"""Narrow spans of scores. Says what is in one, and cuts it down until few scores, or none too many, are left.

A span has a lowest and a highest key; where those are the same, the scores are equal, and it has a lowest and a highest
index, too. Scores are looked at where they are, in a list in shared memory and in the registers that hold a tile; none
is read again. A tile is (keys or scores of this thread, index of its first four, the index that ends them).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4lib.ops.topk.counting import KEPT, LANES, QUAD, SPAN, ZERO, Counting, Shared
from dsv4lib.ops.topk.keys import MAGNITUDE, NOTHING, digit_shift, key_of

LOWEST, HIGHEST, ABOVE, INSIDE = range(4)  # quarters of `Shared.looks`


class Narrowing(Counting):
    """Cut spans, with ``vectors`` vectors a thread and lists of ``keep``.

    Vectors are ``step`` scores apart.
    """

    vectors: int
    step: int
    warps: int
    maxima: int
    keep: int
    tile: int

    @cute.jit
    def look(self, tile: Any, s: Shared, listed: Int32, low: Int32, high: Int32, across: cutlass.Constexpr):
        """Return (lowest key, highest, scores above, scores in) of a CTA's span.

        ``across``: keys of the row, but this CTA's numbers.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        lowest, highest, above, inside = Int32(MAGNITUDE), Int32(NOTHING), Int32(0), Int32(0)
        if cutlass.const_expr(self.maxima > 0):
            for i in cutlass.range(tidx, listed, self.threads, unroll=1):
                key = self.kept_key(s, i)
                there = key >= low and key <= high
                lowest = cutlass.min(lowest, cutlass.select_(there, key, Int32(MAGNITUDE)))
                highest = cutlass.max(highest, cutlass.select_(there, key, Int32(NOTHING)))
                above += cutlass.select_(key > high, Int32(1), Int32(0))
                inside += cutlass.select_(there, Int32(1), Int32(0))
        if cutlass.const_expr(tile is not None):
            zero = s.cells[ZERO]
            for v in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(QUAD):
                    key = self.tile_key(tile, v, j, zero)
                    there = key >= low and key <= high
                    lowest = cutlass.min(lowest, cutlass.select_(there, key, Int32(MAGNITUDE)))
                    highest = cutlass.max(highest, cutlass.select_(there, key, Int32(NOTHING)))
                    above += cutlass.select_(key > high, Int32(1), Int32(0))
                    inside += cutlass.select_(there, Int32(1), Int32(0))
        found = self.reduced(lowest, highest, above, inside)
        if lane < 4:
            value = cutlass.select_(lane < 2, cutlass.select_(lane == 0, found[0], found[1]), found[2])
            s.looks[lane * LANES + warp] = cutlass.select_(lane == INSIDE, found[3], value)
        cute.arch.barrier()
        lowest, highest, above, inside = Int32(MAGNITUDE), Int32(NOTHING), Int32(0), Int32(0)
        if lane < self.warps:
            lowest, highest = s.looks[LOWEST * LANES + lane], s.looks[HIGHEST * LANES + lane]
            above, inside = s.looks[ABOVE * LANES + lane], s.looks[INSIDE * LANES + lane]
        lowest, highest, above, inside = self.reduced(lowest, highest, above, inside)
        if cutlass.const_expr(across and self.ctas > 1):
            if tidx == 0:
                s.cells[SPAN], s.cells[SPAN + 1] = lowest, highest
            self.sync_row()
            if lane < self.ctas:
                lowest, highest = self.read(s.cells, Int32(SPAN), lane), self.read(s.cells, Int32(SPAN + 1), lane)
            lowest = cute.arch.warp_redux_sync(lowest, "min")
            highest = cute.arch.warp_redux_sync(highest, "max")
        return lowest, highest, above, inside

    def reduced(self, lowest: Int32, highest: Int32, above: Int32, inside: Int32) -> tuple[Int32, ...]:
        """Reduce over a warp's lanes: the lowest, the highest, two sums."""
        kinds = zip((lowest, highest, above, inside), ("min", "max", "add", "add"), strict=True)
        return tuple(cute.arch.warp_redux_sync(value, kind) for value, kind in kinds)

    @cute.jit
    def split(
        self,
        tile: Any,
        s: Shared,
        listed: Int32,
        span: Any,
        need: Int32,
        count: Int32,
        most: Int32,
        across: cutlass.Constexpr,
    ):
        """Cut a span until at most ``most`` scores are in it.

        (lowest key, highest key, lowest index, highest index).

        Or until none too many are: ``need`` of the ``count`` in it.
        """
        low, high, start, stop = span
        bits = self.bins.size.bit_length() - 1
        while count > most and count > need:
            ties = low == high
            width = Int32(cutlass.select_(ties, stop - start, high - low)).bitcast(Uint32)
            shift = digit_shift(width, bits)
            if cutlass.const_expr(across):
                self.sync_row()
            else:
                cute.arch.barrier()
            self.clear_bins(s.hist)
            cute.arch.barrier()
            self.count_digits(tile, s, listed, (low, high, start, stop, shift))
            place, above, count = self.find(s, s.hist, need, across and self.ctas > 1)
            need -= above
            offset, last = place << shift.bitcast(Int32), (Int32(1) << shift.bitcast(Int32)) - 1
            if ties:
                start = start + offset
                stop = cutlass.min(stop - start, last) + start
            else:
                high = high - offset
                rest = cutlass.min((high - low).bitcast(Uint32), last.bitcast(Uint32))
                low = high - rest.bitcast(Int32)
            if count > most and count > need and low != high:
                low, high, _, _ = self.look(tile, s, listed, low, high, across)
        return (low, high, start, stop), need, count

    @cute.jit
    def count_digits(self, tile: Any, s: Shared, listed: Int32, state: Any):
        """Count the scores of a span by their next bits."""
        tidx, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.maxima > 0):
            for i in cutlass.range(tidx, listed, self.threads, unroll=1):
                self.digit(self.kept_key(s, i), s.kept_index[i], s, state)
        if cutlass.const_expr(tile is not None):
            (_, at, _), zero = tile, s.cells[ZERO]
            for v in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(QUAD):
                    self.digit(self.tile_key(tile, v, j, zero), at + v * self.step + j, s, state)

    @cute.jit
    def digit(self, key: Int32, index: Int32, s: Shared, state: Any):
        """Count a score of the span by its next bits."""
        low, high, start, stop, shift = state
        there = key >= low and key <= high and index >= start and index <= stop
        amount = Int32(cutlass.select_(low == high, index - start, high - key)).bitcast(Uint32)
        self.add_one(s.hist, Int32(amount >> shift), there)

    @cute.jit
    def squeeze(self, tile: Any, cut: Any, s: Shared, k: Int32, before: Int32, bound: Any):
        """Raise a bound until the list and a tile's scores fit; put those there.

        The list is as before the tile.

        The list is full, or the bound poor. At most half of the list is in use then, but for k scores.

        Args:
            cut: the first index of the slice and the one past it.
            before: entries that the list had before this tile.
            bound: (low, stop): k scores have a higher key than ``low``, or ``low`` and an index up to ``stop``.

        Returns:
            the new bound; the histogram is empty.
        """
        tidx, _, _ = cute.arch.thread_idx()
        low, stop = bound
        _, end = self.bins.keys(self.bins.place(low))  # where the k-th best is likely to be
        start = low
        lowest, highest, above, inside = Int32(0), Int32(0), Int32(0), Int32(0)
        further = cutlass.Boolean(True)
        while further:
            lowest, highest, above, inside = self.look(tile, s, before, start, end, False)
            further = above >= k
            start = end + 1
            end = Int32(MAGNITUDE)
            cute.arch.barrier()
        if above + inside >= k:
            need, count = k - above, inside
            most = cutlass.max(self.keep // 2 - k, Int32(0))
            span = lowest, highest, cut[0], cut[1] - 1
            (lowest, highest, _, last), _, _ = self.split(tile, s, before, span, need, count, most, False)
            last = cutlass.select_(lowest == highest, last, Int32(MAGNITUDE))
            stop = cutlass.select_(lowest == low, cutlass.min(last, stop), last)
            low = lowest
        cute.arch.barrier()
        self.clear_bins(s.hist)
        if tidx == 0:
            s.cells[KEPT] = 0
        cute.arch.barrier()
        for chunk in cutlass.range(0, before, self.threads, unroll=1):
            i = chunk + tidx
            bits, index = Int32(0), Int32(MAGNITUDE)
            if i < before:
                bits, index = s.kept_x[i], s.kept_index[i]
            cute.arch.barrier()  # entries after those that go into their places are read
            key = key_of(bits.bitcast(Float32))
            good = i < before and (key > low or (key == low and index <= stop))
            votes, at = cute.arch.vote_ballot_sync(good), Int32(0)
            if cute.arch.lane_idx() == 0:
                at = cute.arch.atomic_add(s.cells.iterator + KEPT, Int32(cute.arch.popc(votes)), scope="cta")
            below = Int32(votes) & ((Int32(1) << cute.arch.lane_idx()) - 1)
            at = cute.arch.shuffle_sync(at, 0) + Int32(cute.arch.popc(below))
            self.put(s.kept_x, at, bits, good)
            self.put(s.kept_index, at, index, good)
        self.keep_good(tile, low, stop, Int32(self.tile), s)
        cute.arch.barrier()
        return low, stop

    def kept(self, s: Shared) -> Int32:
        """Return how many scores are in the list, or wanted to be."""
        return s.cells[KEPT] if self.maxima else Int32(0)

    def kept_key(self, s: Shared, i: Int32) -> Int32:
        """Key of an entry of the list."""
        return key_of(s.kept_x[i].bitcast(Float32))

    @cute.jit
    def tile_key(self, tile: Any, v: cutlass.Constexpr, j: cutlass.Constexpr, zero: Int32) -> Int32:
        """Return the key of a score of a tile, `NOTHING` past its end.

        ``zero`` comes from shared memory before each pass over a tile: a compiler that knew it would keep the keys of a
        pass for the next one, for which there are no registers.
        """
        rX, at, end = tile
        key = rX[j, v]
        if cutlass.const_expr(rX.element_type is Float32):
            there = end - at + zero > v * self.step + j
            key = cutlass.select_(there, key_of(key, zero.bitcast(Float32)), Int32(NOTHING))
        return key
