"""Select the exact top-k of fp32 scores: a CTA a row, one read of the scores. `cluster` shares a row among several.

    picks = indices of the k best of the first ``length`` scores of a row, -1 after them if there are fewer; in
            ascending order, or the best first

Higher scores first; of equal ones (0 is -0) the lower index; NaN after -inf. A CTA owns a slice of a row, alone all of
it:

    count     a histogram in shared memory of the slice's scores (integer additions: no order to depend on)
    find      the bin in which the row's k-th best score lies, by two scans of 32 sums
    classify  scores above that bin are picks: a bit each in a map of the slice; those in it are candidates, a list
    rank      a candidate is a pick if fewer than what is missing of k beat it, counted by comparing all pairs
    emit      bits counted from the start of the row give each pick its place

Only a bin with more than 256 candidates (many equal scores, or a row of one octave) takes longer: its keys, then the
indices of equal keys, are split by further histograms until few are left (`narrowing`), where they are, in registers
or in a list: no score is read twice.

An addition to the histogram costs about 16 cycles of an SM a warp, which is what a tile of many scores waits for. So
(``maxima``) threads first count the maxima of their scores only: the k-th best maximum is a bound that k scores of the
tile reach, and only scores that reach it are put into a list and counted from there.

Two variants. On chip: a slice is one tile, held in registers, and loaded before the row's length is known. Streaming:
a slice is many tiles; the bound is raised to the bin of the k-th best so far, so that of a long row nearly everything
is dropped by one comparison while the next tile is in flight. A tile has a piece from each of as many runs of the
slice as there are warps, so that the first one tells of scores that rise along the row, too.

A list that overflows, or a first bound that most scores of a warp reach, is a bound too low: then the k-th best of list
and tile is found among both, to the key and the index where scores are equal, and what is below it is dropped.

    SMEM     histograms 4 to 16 KiB each, map of the slice 1 bit a score, candidates 2 KiB, list 8 B an entry
    launch   (CTAs a row x B) CTAs, those of a row a cluster

Source: DSV4 paper, lightning indexer; `dsv4lib.reference.topk`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.errors import ConfigError
from dsv4lib.ops.topk.counting import CANDIDATES, CELLS, KEPT, LANES, QUAD, Shared
from dsv4lib.ops.topk.keys import MAGNITUDE, NAN, NOTHING, edge_of, key_of
from dsv4lib.ops.topk.narrowing import Narrowing
from dsv4lib.ops.topk.paged import Picks, picks_of, place

MAX_K = 2048
PAIRS = 256  # candidates that are compared with each other
ALIGNED = ("hist", "tops", "all_bins", "all_pairs", "gates")  # on 16 bytes
UNIT = 128  # a slice of a streamed row is a multiple of it


class TopK(Narrowing):
    """Indices of the best; see the module docstring.

    Args:
        threads: of a CTA, 32 to 1024, a power of two.
        vectors: loads of 16 bytes a thread has under way: 1, 2, 4 or 8.
        ctas: CTAs a row: 1 here, 2, 4, 8 or 16 in `cluster.ClusterTopK` (8 is what every GPU takes).
        bins: of the histogram, 1024, 2048 or 4096.
        maxima: how many maxima a thread contributes to the bound below which scores are dropped unseen, a divisor of
            ``vectors``; 0: every score is counted instead (on chip only). The bound is tight where the maxima of a tile
            are at least 2 k.
        stream: tiles come one after the other.
        capacity: scores a CTA takes when streaming, a multiple of 32 threads; on chip it is the tile.
        keep: entries of the list.
        wide: rows start on 16 bytes and L is a multiple of 4.
        by_score: picks in the order of their scores, the best first, instead of that of their indices.
        ragged: rows have lengths; otherwise every score counts.
        page: picks are rows of pages of so many; 0: indices.

    Raises:
        ConfigError: a value that is not allowed.
    """

    CTAS: tuple[int, ...] = (1,)
    LAZY = 8  # the bound of a streamed row is raised when the list has k / LAZY new entries

    def __init__(
        self,
        threads: int = 1024,
        vectors: int = 2,
        ctas: int = 1,
        bins: int = 2048,
        maxima: int = 0,
        stream: bool = False,
        capacity: int = 1 << 18,
        keep: int = 1 << 13,
        wide: bool = True,
        by_score: bool = False,
        ragged: bool = True,
        page: int = 0,
    ):
        for name, value, allowed in (
            ("threads", threads, (32, 64, 128, 256, 512, 1024)),
            ("vectors", vectors, (1, 2, 4, 8)),
            ("ctas", ctas, self.CTAS),
            ("bins", bins, (1024, 2048, 4096)),
        ):
            if value not in allowed:
                raise ConfigError(name, value, f"one of {allowed}")
        if maxima < 0 or (maxima and vectors % maxima) or (stream and not maxima):
            raise ConfigError("maxima", maxima, f"a divisor of {vectors}" + ("" if stream else " or 0"))
        if stream and (capacity < 1 or capacity % (32 * threads)):
            raise ConfigError("capacity", capacity, f"a multiple of {32 * threads}")
        if maxima and keep <= vectors * UNIT:
            raise ConfigError("keep", keep, f"more than {vectors * UNIT}")
        if page < 0 or (page and by_score):
            raise ConfigError("page", page, "0 or more" if page < 0 else "0 by score")
        super().__init__(threads, ctas, bins)
        self.vectors, self.stream, self.wide = vectors, stream, wide
        self.by_score, self.ragged, self.maxima, self.page = by_score, ragged, maxima, page
        self.tile = threads * vectors * QUAD
        self.step = (LANES if stream else threads) * QUAD  # from a thread's four scores of a tile to its next
        self.most = 3 * LANES * vectors  # good scores of a warp, of 4 x 32 x vectors
        self.capacity = capacity if stream else self.tile
        self.keep = keep if stream else min(keep, self.tile) if maxima else 0
        self.warps = threads // LANES
        # A full list is cut down to the best k and ties, of which a warp, on chip a thread, may have some too many.
        full, ties = maxima and (stream or self.keep < self.tile), vectors * UNIT if stream else QUAD
        self.most_picks = min(MAX_K, self.keep - ties) if full else MAX_K
        self.several = max(1, threads // PAIRS)  # threads that compare one candidate
        self.share = self.capacity // threads  # bits of the map that a thread makes picks of
        # Shared memory, numbers of 4 bytes.
        self.buffers = {"hist": bins + CELLS, "bits": self.capacity // LANES, "key": PAIRS, "index": PAIRS}
        self.buffers |= {"coarse": LANES, "sums": LANES, "looks": 4 * LANES, "cells": CELLS}
        if maxima:
            self.buffers |= {"tops": bins + CELLS, "kept_x": self.keep, "kept_index": self.keep}
        if by_score:
            self.buffers |= {"pick_key": MAX_K, "pick_index": MAX_K}

    def __repr__(self) -> str:  # the compiler puts this into the kernel's symbol name
        variant = (f"stream {self.capacity} {self.keep}" if self.stream else "chip") + f" {self.maxima}"
        wide = "wide" if self.wide else "narrow"
        order = f"{'score' if self.by_score else 'index'}, {'ragged' if self.ragged else 'full'}"
        order += f", page {self.page}" if self.page else ""
        cut = f"{self.threads}x{self.vectors}, {self.ctas}, {self.bins.size}"
        return f"{type(self).__name__}({cut}, {variant}, {wide}, {order})"

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(self, mScores: cute.Tensor, mLengths: Any, mPicks: cute.Tensor, pages: Any, stream: cuda.CUstream):
        """Launch.

        Args:
            mScores: [B, L] fp32, L at most ``ctas`` x ``capacity``.
            mLengths: [B] int32, scores that count in each row; None unless ``ragged``.
            mPicks: [B, k] int32, k at most 2048.
            pages: `Pages` that picks are looked up in; None where ``page`` is 0.
            stream: where the launch is queued.
        """
        buffers = {name: cute.struct.MemRange[Int32, size] for name, size in self.buffers.items()}
        buffers |= {name: cute.struct.Align[buffers[name], 16] for name in ALIGNED if name in buffers}
        self.storage = cute.struct(type("Storage", (), {"__annotations__": buffers}))
        self.kernel(mScores, mLengths, mPicks, pages).launch(
            grid=(self.ctas * mPicks.shape[0], 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.ctas, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def shared(self) -> Shared:
        """Tensors over this CTA's shared memory."""
        storage = memory.SmemAllocator().allocate(self.storage)
        sizes = self.buffers.items()
        buffers = {name: getattr(storage, name).get_tensor(cute.make_layout(size)) for name, size in sizes}
        alone = dict.fromkeys(Shared._fields) | {"kept_x": buffers["key"], "kept_index": buffers["index"]}
        return Shared(**{**alone, **buffers})

    # -------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mLengths: Any, mPicks: cute.Tensor, pages: Any):
        """Select from a row, by a CTA or cluster."""
        block, _, _ = cute.arch.block_idx()
        rank, row = block % self.ctas, block // self.ctas
        s = self.shared()
        self.open(s)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        picks = picks_of(mPicks, pages, row)
        if cutlass.const_expr(self.stream):
            self.streamed(mScores[row, None], mLengths, picks, s, row, rank)
        else:
            self.on_chip(mScores[row, None], mLengths, picks, s, row, rank)
        if cutlass.const_expr(self.by_score):
            self.sort(mScores[row, None], mLengths, picks, s, row, rank)

    @cute.jit
    def on_chip(self, mRow: cute.Tensor, mLengths: Any, picks: Picks, s: Shared, row: Int32, rank: Int32):
        """Select from a row of at most ``ctas`` tiles.

        Scores are requested before its length is known.
        """
        tidx, _, _ = cute.arch.thread_idx()
        first, k = rank * self.capacity, picks.out.shape[0]
        at = first + tidx * QUAD
        rX = cute.make_rmem_tensor((QUAD, self.vectors), Float32)
        rX.fill(0.0)
        for v in cutlass.range_constexpr(self.vectors):
            self.fetch(mRow, self.index(at, v), mRow.shape[0], rX[None, v])
        length = self.length(mRow, mLengths, row)
        self.clear(s)
        if length <= k:
            self.ready()
            self.take_all(picks, length, rank)
        else:
            cute.arch.barrier()
            end = cutlass.min(first + self.capacity, length)
            if cutlass.const_expr(self.maxima > 0):
                low = self.first_bound((rX, at, end), k, s)
                self.keep_good((rX, at, end), low, None, Int32(self.most), s)
                cute.arch.barrier()
                if self.kept(s) > self.keep:
                    self.squeeze((rX, at, end), (first, end), s, k, Int32(0), (low, Int32(MAGNITUDE)))
                self.count_kept(Int32(0), self.kept(s), s)
                self.select((first, end, None), picks, s, length, rank)
            else:
                rKey = cute.make_rmem_tensor((QUAD, self.vectors), Int32)
                room = length - at
                for v in cutlass.range_constexpr(self.vectors):
                    for j in cutlass.range_constexpr(QUAD):
                        there = room > v * self.step + j
                        rKey[j, v] = cutlass.select_(there, key_of(rX[j, v]), Int32(NOTHING))
                        self.add_one(s.hist, self.bins.place(rKey[j, v]), there)
                self.select((first, end, (rKey, at, end)), picks, s, length, rank)

    @cute.jit
    def streamed(self, mRow: cute.Tensor, mLengths: Any, picks: Picks, s: Shared, row: Int32, rank: Int32):
        """Select from a row of any number of tiles.

        A warp has its own run of the slice, a piece of it a tile.
        """
        k, length = picks.out.shape[0], self.length(mRow, mLengths, row)
        part = (length + (self.ctas * UNIT - 1)) // (self.ctas * UNIT) * UNIT
        first = rank * part
        end = cutlass.min(first + part, length)
        if length <= k:
            self.ready()
            self.take_all(picks, length, rank)
        else:
            run = (cutlass.max(end - first, Int32(0)) + (self.warps * UNIT - 1)) // (self.warps * UNIT) * UNIT
            start = first + cute.arch.warp_idx() * run
            mine = cutlass.min(start + run, end)
            start += cute.arch.lane_idx() * QUAD
            piece = self.vectors * UNIT
            rX = cute.make_rmem_tensor((QUAD, self.vectors), Float32)
            rNow = cute.make_rmem_tensor((QUAD, self.vectors), Float32)
            rX.fill(0.0)
            for v in cutlass.range_constexpr(self.vectors):
                self.fetch(mRow, self.index(start, v), mine, rX[None, v])
            self.clear(s)
            cute.arch.barrier()
            low, stop = Int32(NAN), Int32(MAGNITUDE)
            kept, counted, limit = Int32(0), Int32(0), start + run
            for at in cutlass.range(start, limit, piece, unroll=1):
                rNow.store(rX.load())
                for v in cutlass.range_constexpr(self.vectors):
                    self.fetch(mRow, self.index(at + piece, v), mine, rX[None, v])
                most = Int32(self.tile)
                if low == NAN:
                    low = self.first_bound((rNow, at, mine), k, s)
                    most = Int32(self.most)
                self.keep_good((rNow, at, mine), low, stop, most, s)
                cute.arch.barrier()
                before, kept = kept, self.kept(s)
                if kept > self.keep:
                    low, stop = self.squeeze((rNow, at, mine), (first, end), s, k, before, (low, stop))
                    kept, counted = self.kept(s), Int32(0)
                if (kept - counted) * self.LAZY >= k and at + piece < limit:
                    self.count_kept(counted, kept, s)
                    counted = kept
                    place, _, _ = self.find(s, s.hist, k, False)
                    lowest, _ = self.bins.keys(place)
                    if lowest > low:
                        low, stop = lowest, Int32(MAGNITUDE)
                else:
                    cute.arch.barrier()  # all have read how many are kept
            self.count_kept(counted, kept, s)
            self.select((first, end, None), picks, s, length, rank)

    def open(self, s: Shared) -> None:
        """Prepare a cluster before its CTAs exchange data (`cluster.ClusterTopK`)."""

    def ready(self) -> None:
        """Wait until all CTAs of the row have opened.

        Each thread once, whatever it does then.
        """

    def length(self, mRow: cute.Tensor, mLengths: Any, row: Int32) -> Int32:
        """Return how many scores of the row count."""
        return cutlass.min(mLengths[row], mRow.shape[0]) if self.ragged else mRow.shape[0]

    def index(self, at: Int32, v: int) -> Int32:
        """Return the row index of a thread's v-th four scores of a tile.

        The first ones are at ``at``.
        """
        return at + v * self.step

    @cute.jit
    def fetch(self, mRow: cute.Tensor, index: Int32, end: Int32, rX: cute.Tensor):
        """Four scores, those before ``end``."""
        if cutlass.const_expr(self.wide):
            if index < end:
                cute.autovec_copy(cute.local_tile(mRow, (QUAD,), (index // QUAD,)), rX)
        else:
            for j in cutlass.range_constexpr(QUAD):
                if index + j < end:
                    rX[j] = mRow[index + j]

    @cute.jit
    def clear(self, s: Shared):
        """Zeros wherever something is counted."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tidx, cute.size(s.bits), self.threads, unroll=1):
            s.bits[i] = 0
        self.clear_bins(s.hist)
        if cutlass.const_expr(self.maxima > 0):
            self.clear_bins(s.tops)
        if tidx < CELLS:
            s.cells[tidx], s.hist[self.bins.size + tidx] = 0, 0
            if cutlass.const_expr(self.maxima > 0):
                s.tops[self.bins.size + tidx] = 0

    @cute.jit
    def take_all(self, picks: Picks, length: Int32, rank: Int32):
        """Take all of a row with no more scores than picks."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(rank * self.threads + tidx, picks.out.shape[0], self.ctas * self.threads, unroll=1):
            pick = Int32(-1)
            if i < length:
                pick = place(picks, Int32(i), self.page)
            picks.out[i] = pick

    # ------------------------------------------------------------ streaming

    @cute.jit
    def first_bound(self, tile: Any, k: Int32, s: Shared) -> Int32:
        """Return the lowest key of the bin of a tile's k-th best maximum. k of its scores are not below it."""
        rX, at, end = tile
        each, room = self.vectors // self.maxima, end - at
        for m in cutlass.range_constexpr(self.maxima):
            top = -Float32.inf
            for v in cutlass.range_constexpr(m * each, (m + 1) * each):
                for j in cutlass.range_constexpr(QUAD):
                    there = room > v * self.step + j
                    top = cute.arch.fmax(top, cutlass.select_(there, rX[j, v], -Float32.inf))
            self.add_one(s.tops, self.bins.place(key_of(top)), room > m * each * self.step)
        place, _, _ = self.find(s, s.tops, k, False)
        lowest, _ = self.bins.keys(place)
        return lowest

    @cute.jit
    def keep_good(self, tile: Any, low: Int32, stop: Any, most: Int32, s: Shared):
        """List a tile's scores with a key above ``low``.

        Also those with key ``low`` and an index up to ``stop``.

        A warp that finds no room says so by a list longer than there is room for, and so does one that has more than
        ``most`` such scores: the bound is poor then. ``stop`` None: any index.
        """
        rX, at_first, end = tile
        lane = cute.arch.lane_idx()
        reach, beyond, everything = edge_of(low), edge_of(low + 1), low <= NAN  # NaN reaches no edge
        flags, room = Int32(0), end - at_first
        edge, anything = reach, everything
        for v in cutlass.range_constexpr(self.vectors):
            if cutlass.const_expr(stop is not None and (v == 0 or not self.stream)):
                tied = self.index(at_first, v) <= stop  # or a few past it, at most what one warp has of a tile
                edge, anything = cutlass.select_(tied, reach, beyond), everything and tied
            for j in cutlass.range_constexpr(QUAD):
                good = rX[j, v] >= edge or anything
                flags |= cutlass.select_(good, Int32(1) << (QUAD * v + j), Int32(0))
        if room < (self.vectors - 1) * self.step + QUAD:
            there = Int32(0)
            for v in cutlass.range_constexpr(self.vectors):
                here = cutlass.max(cutlass.min(room - v * self.step, Int32(QUAD)), Int32(0))
                there |= ((Int32(1) << here) - 1) << (QUAD * v)
            flags &= there
        if cute.arch.vote_any_sync(flags != 0):
            more = Int32(cute.arch.popc(flags))
            to_here, at = self.scan(more), Int32(0)
            if lane == LANES - 1:
                many = to_here > most
                at = cute.arch.atomic_add(
                    s.cells.iterator + KEPT, cutlass.select_(many, Int32(self.keep + 1), to_here), scope="cta"
                )
                at = cutlass.select_(many, Int32(self.keep), at)
            at = cute.arch.shuffle_sync(at, LANES - 1) + to_here - more
            for v in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(QUAD):
                    mine = (flags >> (QUAD * v + j)) & 1
                    good = mine != 0 and at < self.keep
                    self.put(s.kept_x, at, rX[j, v].bitcast(Int32), good)
                    self.put(s.kept_index, at, self.index(at_first, v) + j, good)
                    at += mine

    @cute.jit
    def count_kept(self, counted: Int32, kept: Int32, s: Shared):
        """Count what the list has beyond its first ``counted`` entries."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(counted + tidx, kept, self.threads, unroll=1):
            self.add_one(s.hist, self.bins.place(self.kept_key(s, i)))

    # ------------------------------------------------------------ selection

    @cute.jit
    def select(self, source: Any, picks: Picks, s: Shared, length: Int32, rank: Int32):
        """From a complete histogram to the picks.

        Args:
            source: the first index of the slice, the one past it, the keys of a tile that is all of it or None.
        """
        first, _, tile = source
        place, above, count = self.find(s, s.hist, picks.out.shape[0], False)
        need = picks.out.shape[0] - above
        low, high = self.bins.keys(place)
        if count > PAIRS and count > need:
            low, high, _, _ = self.look(tile, s, self.kept(s), low, high, False)
        span = low, high, Int32(0), length - 1
        span, need, count = self.split(tile, s, self.kept(s), span, need, count, Int32(PAIRS), False)
        if count == need:  # all of them: none is a candidate
            span = span[0], span[1], span[3] + 1, span[3]
        self.classify(source, s, span)
        cute.arch.barrier()
        if count > need:
            self.rank(s, first, need)
        cute.arch.barrier()
        self.emit(picks, s, first, rank)

    @cute.jit
    def classify(self, source: Any, s: Shared, state: Any):
        """Mark picks, note candidates."""
        tidx, _, _ = cute.arch.thread_idx()
        first, _, tile = source
        if cutlass.const_expr(self.maxima > 0):
            for i in cutlass.range(tidx, self.kept(s), self.threads, unroll=1):
                self.classify_one(self.kept_key(s, i), s.kept_index[i], first, s, state)
        else:
            self.classify_tile(tile, first, s, state)

    @cute.jit
    def classify_tile(self, tile: Any, first: Int32, s: Shared, state: Any):
        """Four scores have a nibble of the map; candidates are few."""
        low, high, start, stop = state
        rKey, at_first, _ = tile
        candidates = Int32(0)
        for v in cutlass.range_constexpr(self.vectors):
            nibble, index = Int32(0), self.index(at_first, v)
            for j in cutlass.range_constexpr(QUAD):
                sure = rKey[j, v] > high or (rKey[j, v] >= low and index + j < start)
                between = rKey[j, v] >= low and not sure and index + j <= stop
                nibble |= cutlass.select_(sure, Int32(1 << j), Int32(0))
                candidates |= cutlass.select_(between, Int32(1) << (QUAD * v + j), Int32(0))
            self.mark(s, index - first, nibble, nibble != 0)
        if candidates != 0:
            at = cute.arch.atomic_add(s.cells.iterator + CANDIDATES, Int32(cute.arch.popc(candidates)), scope="cta")
            for v in cutlass.range_constexpr(self.vectors):
                for j in cutlass.range_constexpr(QUAD):
                    mine = (candidates >> (QUAD * v + j)) & 1
                    self.put(s.key, at, rKey[j, v], mine != 0)
                    self.put(s.index, at, self.index(at_first, v) + j, mine != 0)
                    at += mine

    @cute.jit
    def classify_one(self, key: Int32, index: Int32, first: Int32, s: Shared, state: Any):
        """Classify one score of a list."""
        low, high, start, stop = state
        if key >= low:
            sure = key > high or index < start
            self.mark(s, index - first, Int32(1), sure)
            if not sure and index <= stop:
                at = cute.arch.atomic_add(s.cells.iterator + CANDIDATES, Int32(1), scope="cta")
                s.key[at] = key
                s.index[at] = index

    def mark(self, s: Shared, at: Int32, flags: Int32, there: Any) -> None:
        """Scores of the slice from ``at`` are picks where a flag is set, if any is."""
        given = [(s.bits.iterator + (at >> 5)).toint(), flags << (at & 31)]
        cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=given, predicate=there)

    @cute.jit
    def rank(self, s: Shared, first: Int32, need: Int32):
        """Mark the ``need`` best of the candidates; several threads compare one with all."""
        tidx, _, _ = cute.arch.thread_idx()
        count = s.cells[CANDIDATES]
        for start in cutlass.range(0, count, self.threads // self.several, unroll=1):
            i = start + tidx // self.several
            beaten = Int32(0)
            key, index = Int32(NOTHING), first
            if i < count:
                key, index = s.key[i], s.index[i]
            for j in cutlass.range(tidx % self.several, count, self.several, unroll=4):
                other, at = s.key[j], s.index[j]
                better = self.better(other, key, at, index)
                beaten += cutlass.select_(better, Int32(1), Int32(0))
            for step in cutlass.range_constexpr(self.several.bit_length() - 1):
                beaten += cute.arch.shuffle_sync_bfly(beaten, 1 << step)
            self.mark(s, index - first, Int32(1), i < count and beaten < need and tidx % self.several == 0)

    @cute.jit
    def emit(self, picks: Picks, s: Shared, first: Int32, rank: Int32):
        """Picks in the order of their indices: each thread those of ``share`` scores."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        words = max(1, self.share // LANES)
        rBits = cute.make_rmem_tensor(words, Int32)
        mine = Int32(0)
        for w in cutlass.range_constexpr(words):
            rBits[w] = s.bits[tidx * self.share // LANES + w]
            if cutlass.const_expr(self.share < LANES):
                rBits[w] = (rBits[w] >> (tidx * self.share % LANES)) & Int32((1 << self.share) - 1)
            mine += Int32(cute.arch.popc(rBits[w]))
        to_here = self.scan(mine)
        if lane == LANES - 1:
            s.sums[warp] = to_here
        cute.arch.barrier()
        total = Int32(0)
        if lane < self.warps:
            total = s.sums[lane]
        at = cute.arch.warp_redux_sync(cutlass.select_(lane < warp, total, Int32(0)), "add") + to_here - mine
        at += self.before(s)
        for w in cutlass.range_constexpr(words):
            bits, start = rBits[w], first + tidx * self.share + w * LANES
            while bits != 0:
                picks.out[at] = place(picks, start + self.lowest(bits), self.page)
                bits = bits & (bits - 1)
                at += 1

    def before(self, s: Shared) -> Int32:
        """Picks of the CTAs of the row before this one."""
        return Int32(0)

    @cute.jit
    def sort(self, mRow: cute.Tensor, mLengths: Any, picks: Picks, s: Shared, row: Int32, rank: Int32):
        """Sort the picks of a row from the order of indices to that of scores."""
        tidx, _, _ = cute.arch.thread_idx()
        count = cutlass.min(self.length(mRow, mLengths, row), picks.out.shape[0])
        self.sync_row()  # all picks are written
        for i in cutlass.range(tidx, count, self.threads, unroll=1):
            s.pick_index[i] = picks.out[i]
            s.pick_key[i] = key_of(mRow[picks.out[i]])
        self.sync_row()  # all picks are read
        for i in cutlass.range(rank * self.threads + tidx, count, self.ctas * self.threads, unroll=1):
            key, place = s.pick_key[i], Int32(0)
            for j in cutlass.range(count, unroll=4):
                better = self.better(s.pick_key[j], key, j, i)
                place += cutlass.select_(better, Int32(1), Int32(0))
            picks.out[place] = s.pick_index[i]

    @cute.jit
    def better(self, other: Int32, key: Int32, at: Int32, index: Int32) -> cutlass.Boolean:
        """Return whether (other, at) ranks before (key, index)."""
        return other > key or (other == key and at < index)
