"""Bring Q and tiles of keys of one token after the other to shared memory on Hopper.

Loads of a tile's entries go out a tile ahead, its indices two ahead: at the end of a token already those of the next
one. So every token has an even number of tiles, two or more (`Span`); those past its keys are zeros that no row sees.

A stage is written, and signalled, in halves: dimensions 0 - 255, then the others. S starts with the first half, and a
half is free when the warpgroup that multiplies P by it has done so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsv4lib.dsl import kv_entry
from dsv4lib.dsl.asm import asm
from dsv4lib.dsl.kv_entry import ROW_BYTES
from dsv4lib.ops.fmha.config import CHUNK_BYTES, TILE_M, TILE_N
from dsv4lib.ops.fmha.sm90.attend import PIECE, copy
from dsv4lib.ops.fmha.sm90.config import HEAD_DIM, MATH_WARPS, STAGE_BYTES
from dsv4lib.ops.fmha.sm90.keys import Keys, KeySources, Ring, convert
from dsv4lib.ops.fmha.work import Items, KeyLists, KeySplits, there_are

HALVES = 2  # of a stage: dimensions of either math warpgroup
CHUNKS_OF = tuple(kv_entry.Chunks(4 * half, 4 * half + 4) for half in range(HALVES))


class Queries(NamedTuple):
    """Q of a token in shared memory: its address, barriers. Also pairs of tiles that its token has."""

    smem: Int32
    pairs: cute.Tensor  # Int32 [1]
    full: cute.Pointer
    empty: cute.Pointer


class Span(NamedTuple):
    """Keys of a token: as `work.Work` has them, tiles made even."""

    token: Int32
    entries: Int32
    window: Int32
    entry_row: Int32
    window_row: Int32
    window_at: Int32
    tiles: Int32


class Counts(NamedTuple):
    """First row, where it is a range, and number of a token's entries and window rows; as they are in memory."""

    first_entry: Int32
    entries: Int32
    first_window: Int32
    window: Int32


class PrefillKeys(Keys):
    """What the producer warps do."""

    @cute.jit
    def counts(self, lists: KeyLists, items: Items, token: Int32):
        """Load what `span` needs of a token: first row and count of entries and window. Nothing waits for it here."""
        token = cutlass.min(token, items.end - 1)
        found = [Int32(0)] * 4
        for i, keys in enumerate(lists):
            if cutlass.const_expr(keys is not None):
                found[2 * i + 1] = keys.count[token]
                if cutlass.const_expr(keys.first is not None):
                    found[2 * i] = keys.first[token]
        return Counts(*found)

    @cute.jit
    def span(self, counts: Counts, items: Items, token: Int32):
        """Return the `Span` of a token; past the last one of one without keys."""
        there = token < items.end
        entries = cutlass.select_(there, there_are(counts.entries), Int32(0))
        window = cutlass.select_(there, there_are(counts.window), Int32(0))
        window_at, tiles = self.places(entries, window)
        entry_row = counts.first_entry
        if cutlass.const_expr(self.partial):
            each = self.tiles_of_split(tiles, items.splits)
            first = cutlass.min(items.split * each, tiles)
            tiles = cutlass.min(first + each, tiles) - first
            first = first * TILE_N
            entries = entries - first
            window_at, entry_row = window_at - first, entry_row + first
        tiles = self.even(tiles)
        return Span(
            cutlass.min(token, items.end - 1),
            entries,
            window,
            entry_row,
            counts.first_window,
            window_at,
            tiles,
        )

    def tiles_of_split(self, tiles: Int32, splits: KeySplits) -> Int32:
        """See `Keys.tiles_of_split`. Whole pairs: a tile that makes a number even is never the next split's."""
        return self.even(cute.ceil_div(tiles, splits.splits))

    def even(self, tiles: Int32) -> Int32:
        """Round up to an even number of tiles, 2 or more."""
        return cutlass.max((tiles + 1) & -2, 2)

    @cute.jit
    def produce_all(
        self, mQ: cute.Tensor, sources: KeySources, lists: KeyLists, items: Items, ring: Ring, queries: Queries
    ):
        """Producer warps: Q, then tile after tile, token after token.

        A tile's loads start when the one before is converted whole: loads of a warp have one scoreboard, so that to
        wait for those of an older tile is to wait for all.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - MATH_WARPS
        first_key, batches = warp * self.keys, self.keys // kv_entry.ENTRIES_AT_ONCE
        own = first_key + lane % self.keys  # the key of a tile whose index this lane reads
        offset = ring.keys + kv_entry.smem_offset(first_key + lane // 4, lane)
        held = cute.make_rmem_tensor(batches, Int32)
        raw = cute.make_rmem_tensor((kv_entry.raw_words(), batches), Int64)
        scales = cute.make_rmem_tensor((2, batches), Int32)
        pools = self.lane_pools(sources)
        first, step = items.first, items.step
        guess = None
        if cutlass.const_expr(self.early):
            guess = self.guess(lists, items)
            if first < items.end:
                self.copy_queries(mQ, first, queries)
        now = self.span(self.counts(lists, items, first), items, first)
        following = self.span(self.counts(lists, items, first + step), items, first + step)
        index, in_window = self.next_entry(lists, now, following, Int32(0), own, guess)
        for batch in cutlass.range_constexpr(batches):
            self.start(pools, index, in_window, batch, held, raw, scales)
        there = cute.arch.vote_ballot_sync(index >= 0)
        index, in_window = self.next_entry(lists, now, following, Int32(1), own)
        parity = Int32(1)
        q_parity = Int32(1)
        for token in cutlass.range(first, items.end, step, unroll=1):
            self.wait_for_room(queries, q_parity)
            q_parity = q_parity ^ 1
            self.store_pairs(now.tiles, queries)
            if cutlass.const_expr(not self.early):
                self.copy_queries(mQ, token, queries)
            elif token > first:
                self.copy_queries(mQ, token, queries)
            self.prefetch_queries(mQ, token + step, items)
            coming = self.counts(lists, items, token + 2 * step)
            for tile in cutlass.range(now.tiles, unroll=1):
                stage = tile & 1
                for half in cutlass.range_constexpr(HALVES):
                    cute.arch.mbarrier_wait(ring.empty + (HALVES * stage + half), parity)
                    for batch in cutlass.range_constexpr(batches):
                        rows = offset + stage * STAGE_BYTES + batch * (kv_entry.ENTRIES_AT_ONCE * kv_entry.ROW_BYTES)
                        convert(held[batch], raw[None, batch], scales[None, batch], rows, CHUNKS_OF[half])
                    if cutlass.const_expr(half == 0):
                        if lane == 0:
                            self.store_valid(ring, stage, warp, there)
                    self.visible_to_mma()  # a fence that would wait for loads, too: none is under way
                    cute.arch.mbarrier_arrive(ring.full + (HALVES * stage + half))
                for batch in cutlass.range_constexpr(batches):
                    self.start(pools, index, in_window, batch, held, raw, scales)
                parity = parity ^ stage
                there = cute.arch.vote_ballot_sync(index >= 0)
                index, in_window = self.next_entry(lists, now, following, tile + 2, own)
            now = following
            following = self.span(coming, items, token + 2 * step)

    @cute.jit
    def next_entry(self, lists: KeyLists, now: Span, following: Span, tile: Int32, key: Int32, guess: Any = None):
        """Return (index of the ``key``-th entry of a tile, whether it is of the window); -1: none.

        Tiles past the end of a token are those of the next one.
        """
        token, entries, window, entry_row, window_row, window_at, _ = now
        place = tile * TILE_N + key
        if tile >= now.tiles:
            token, entries, window, entry_row, window_row, window_at, _ = following
            place = place - now.tiles * TILE_N
        found, in_window = self.nowhere(lists, token), Int32(0)
        if cutlass.const_expr(self.entries != "none"):
            if place < window_at and place < entries:
                found = self.named(lists.entries.index, token, place, entry_row, found)
        if cutlass.const_expr(self.window):
            place = place - window_at
            if place >= 0:
                in_window = Int32(1)
                if place < window:
                    found = self.named(lists.window.index, token, place, window_row, found)
        return self.known(found, guess), in_window

    @cute.jit
    def start(
        self,
        pools: list,
        index: Int32,
        in_window: Int32,
        batch: cutlass.Constexpr,
        held: cute.Tensor,
        raw: cute.Tensor,
        scales: cute.Tensor,
    ):
        """Start the loads of a batch. Lane l loads of the entry whose index lane 8 batch + l / 4 has."""
        source = batch * kv_entry.ENTRIES_AT_ONCE + cute.arch.lane_idx() // 4
        own = cute.arch.shuffle_sync(index, source)
        held[batch] = own
        if cutlass.const_expr(self.entries != "none" and self.window):
            if cute.arch.shuffle_sync(in_window, source) == 0:
                self.load(pools[0], own, raw[None, batch], scales[None, batch])
            else:
                self.load(pools[1], own, raw[None, batch], scales[None, batch])
        else:
            pool = pools[0] if self.entries != "none" else pools[1]
            self.load(pool, own, raw[None, batch], scales[None, batch])

    def wait_for_room(self, queries: Queries, parity: Int32) -> None:
        """Wait until Q of the token before was read for the last time."""
        cute.arch.mbarrier_wait(queries.empty, parity)

    @cute.jit
    def store_pairs(self, tiles: Int32, queries: Queries):
        """Say how many pairs of tiles the next token has."""
        if cute.arch.thread_idx()[0] == 32 * MATH_WARPS:
            queries.pairs[0] = tiles >> 1
            cute.arch.mbarrier_arrive(queries.full)

    @cute.jit
    def copy_queries(self, mQ: cute.Tensor, token: Int32, queries: Queries):
        """Start the copies of 64 heads of Q. Rows of the 128-byte swizzle; rows that are no heads are zeros."""
        pieces, threads = HEAD_DIM * 2 // PIECE, 32 * self.producer_warps
        thread = cute.arch.thread_idx()[0] & threads - 1
        piece, row = thread & pieces - 1, thread >> pieces.bit_length() - 1
        first, heads = self.head_block() * TILE_M, mQ.shape[1]
        target = queries.smem + (piece >> 3) * CHUNK_BYTES
        for i in cutlass.range(TILE_M * pieces // threads, unroll=8):
            place = i * (threads // pieces) + row
            size = cutlass.select_(first + place < heads, Int32(PIECE), Int32(0))
            head = cutlass.min(first + place, heads - 1)
            source = mQ[token, head, None].iterator.toint() + piece * PIECE
            copy(target + place * ROW_BYTES + (((piece ^ place) & 7) << 4), source, size)
        cute.arch.cp_async_mbarrier_arrive_noinc(queries.full)

    @cute.jit
    def prefetch_queries(self, mQ: cute.Tensor, token: Int32, items: Items):
        """Have L2 fetch Q of a token, if there is one: its copy starts when the last S of this token is there."""
        thread = cute.arch.thread_idx()[0] & 32 * self.producer_warps - 1
        head = self.head_block() * TILE_M + thread
        if thread < TILE_M and head < mQ.shape[1] and token < items.end:
            prefetch(mQ[token, head, None].iterator.toint(), HEAD_DIM * 2)


def prefetch(address: Int64, size: int) -> None:
    """Have L2 fetch ``size`` bytes, a multiple of 16."""
    asm(f"cp.async.bulk.prefetch.L2.global [$0], {size};", [], [address])
