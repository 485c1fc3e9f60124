"""Map CTAs to tokens, heads and keys. Says which items a CTA takes, its tiles, the token and head of each row.

A CTA keeps its block of heads and its split of the keys and takes every ``step``-th token (or group). All roles go
through the same `Items` by themselves, each as far ahead as its pipelines let it.

Without groups a tile's rows are heads of one token. With groups they are the heads of several adjacent tokens, which
see nearly the same keys (SWA inside a chunk, HCA under the limit per query): the CTA walks over the union of their
ranges and each row masks what its own token does not see.

Keys are counted through the tiles: the entries from place 0 on, the window from place ``window_at`` on. That is the
next tile, or, where it saves one, the next multiple of 4 after the last entry: one tile then holds the end of the
entries and the beginning of the window. (4: rows that a gather takes from one tensor map.)

    entries 70, window 129     apart   | 64 | 6         | 64 | 64 | 1 |      5 tiles
                               joint   | 64 | 6 . . 56  | 64 | 9      |      4 tiles, window_at 72

It saves one where both ends fit into a tile: not for a token with a full window of two whole tiles, but for the union
of two tokens' windows (129 keys) unless the last tile of entries has more than 60.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.ops.fmha.config import HALF_N, REGION, SOFTMAX_THREADS, TILE_M, TILE_N, Config

TILE_SHIFT = TILE_N.bit_length() - 1  # a signed division would be more instructions
NO_ROW = 0x3FFFFFFF  # past the end of every pool
SHARE_SHIFT = 10  # of `KeySplits.share`: so up to 2^21 tiles


class Span(NamedTuple):
    """Places ``first`` .. ``end - 1``."""

    first: Int32
    end: Int32


class KeyRows(NamedTuple):
    """Keys as the launch gets them: rows of a pool, by index or consecutive.

    Attributes:
        pool: [R, D], or `PagedPool` of FP8 entries.
        index: [T, K] int32, -1 skipped; None: rows are consecutive.
        first: [T] int32, first row of each token; None: by index.
        count: [T] int32.
    """

    pool: Any
    index: Any
    first: Any
    count: cute.Tensor


class PagedPool(NamedTuple):
    """Hold pages [P, S] uint8 of 584-byte entries and their divisor.

    Entries a page, and its `kv_entry.page_divisor`.
    """

    pages: cute.Tensor
    page_size: Int32
    multiplier: Uint32
    shift: Int32


class KeyList(NamedTuple):
    """Which rows of a pool each token has as keys: `KeyRows` without the pool."""

    index: Any
    first: Any
    count: cute.Tensor


class KeyLists(NamedTuple):
    """The `KeyList` of compressed entries and of window keys. None: there are no such keys."""

    entries: Any
    window: Any


class Outputs(NamedTuple):
    """Where O and LSE go, and what is applied to O.

    That is sink logits [H] and angles, or None; shapes of `Fmha.__call__`.
    """

    sink: Any
    rope: Any  # `rope.Tables`
    o: cute.Tensor
    lse: cute.Tensor


class KeySplits(NamedTuple):
    """How keys are split: into ``splits`` equal ranges of tiles. The last may have another length.

    A short last split of many tokens is for the SMs that whole splits leave idle: ``last`` CTAs (or clusters) at a
    time take it, one token after the other, beside those of the other splits.
    """

    splits: Int32
    last: Int32  # tokens (or groups) at a time whose last split is worked on; 0: all splits are equal
    share: Int32  # of the last split, in 1024ths of a token's tiles


class Items(NamedTuple):
    """What a CTA takes: tokens, or groups, ``first``, ``first + step``, .. below ``end``; of each one key split."""

    groups: Any  # tensor [G, 2], or None
    splits: KeySplits
    split: Int32
    first: Int32
    end: Int32
    step: Int32


class Work(NamedTuple):
    """What a CTA does for one item; the same in both CTAs of a cluster."""

    token: Int32  # the first, or the only one
    tokens: Int32
    entries: Int32  # keys: of the index list, or of the union of the ranges
    window: Int32
    entry_row: Int32  # where the union of the ranges starts
    window_row: Int32
    window_at: Int32  # place of the first window key, counted through the tiles from the first entry on
    first: Int32  # tiles of this split of the keys: first .. end - 1
    end: Int32


class Row(NamedTuple):
    """What a softmax or epilogue thread is. It has a row of the tile and half of its keys or dimensions."""

    tidx: Int32  # its lane of tensor memory
    half: Int32
    token: Int32
    head: Int32
    inside: Boolean  # there is such a token and head
    entries: Span  # keys of its token in the union
    window: Span


class Plan(Config):
    """How CTAs map to tokens, heads, keys."""

    @cute.jit
    def items(self, mQ: cute.Tensor, mGroups: Any, splits: KeySplits, per_split: Int32):
        """Return the `Items` of this CTA. They go round robin, so that short and long lists of neighbours are spread.

        Args:
            per_split: items that are worked on at a time of each split but an unequal last one. Then splits follow
                each other on the grid's first axis, else on its third.
        """
        first, _, split = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        end = mQ.shape[0] if cutlass.const_expr(not self.groups) else mGroups.shape[0]
        if cutlass.const_expr(self.partial):
            if splits.last > 0:
                split = cutlass.min(first // per_split, splits.splits - 1)
                first -= split * per_split
                step = cutlass.select_(split == splits.splits - 1, splits.last, per_split)
        return Items(mGroups, splits, split, first, end, step)

    @cute.jit
    def head_block(self):
        """Return which 64 rows of an item this CTA has.

        A cluster's CTAs are neighbours on the grid's second axis.
        """
        _, block, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.dim_splits > 1):
            block = block // (self.cluster * self.dim_splits) * self.cluster + block % self.cluster
        return block

    @cute.jit
    def dim_split(self):
        """Return which split of O's dimensions this CTA has.

        A constant 0 where there is one.
        """
        split = 0
        if cutlass.const_expr(self.dim_splits > 1):
            _, block, _ = cute.arch.block_idx()
            split = block // self.cluster % self.dim_splits
        return split

    @cute.jit
    def work(self, lists: KeyLists, items: Items, item: Int32):
        """Return the `Work` of an item; past the last one that of the last one."""
        item = cutlass.min(item, items.end - 1)
        token, tokens = item, Int32(1)
        if cutlass.const_expr(self.groups):
            token, tokens = items.groups[item, 0], items.groups[item, 1]
        (entry_row, entries), (window_row, window) = self.ranges(lists, token, tokens)
        window_at, tiles = self.places(entries, window)
        first, end = Int32(0), tiles
        if cutlass.const_expr(self.partial):
            splits, last, share = items.splits
            equal = cutlass.select_(last > 0, splits - 1, splits)  # splits of one length
            shared = tiles - ((tiles * share) >> SHARE_SHIFT)
            each = cute.ceil_div(shared, equal)
            first = cutlass.min(items.split * each, shared)
            end = cutlass.select_(items.split < equal, cutlass.min(first + each, shared), tiles)
        return Work(token, tokens, entries, window, entry_row, window_row, window_at, first, end)

    @cute.jit
    def places(self, entries: Int32, window: Int32):
        """Return (place of the first window key, tiles) of so many keys.

        As `config.count_tiles`.
        """
        apart = (entries + (TILE_N - 1)) & -TILE_N
        window_at, tiles = apart, (apart + window + (TILE_N - 1)) >> TILE_SHIFT
        if cutlass.const_expr(self.entries != "none" and self.window):
            after = (entries + (REGION - 1)) & -REGION
            joint = (after + window + (TILE_N - 1)) >> TILE_SHIFT
            window_at = cutlass.select_(joint < tiles, after, apart)
            tiles = cutlass.min(joint, tiles)
        return window_at, tiles

    @cute.jit
    def ranges(self, lists: KeyLists, token: Int32, tokens: Int32):
        """Return (first row, rows) of entries and of window keys.

        Of index lists only the second counts.
        """
        entries, window = (Int32(0), Int32(0)), (Int32(0), Int32(0))
        if cutlass.const_expr(self.entries == "index"):
            entries = Int32(0), there_are(lists.entries.count[token])
        if cutlass.const_expr(self.entries == "range"):
            entries = self.union(lists.entries, token, tokens)
        if cutlass.const_expr(self.window_index):
            window = Int32(0), there_are(lists.window.count[token])
        elif cutlass.const_expr(self.window):
            window = self.union(lists.window, token, tokens)
        return entries, window

    @cute.jit
    def union(self, keys: KeyList, token: Int32, tokens: Int32):
        """Return (first row, rows) of the interval that holds a group's ranges.

        A whole warp calls it.
        """
        mFirst, mCount = keys.first, keys.count
        if cutlass.const_expr(not self.groups):
            return mFirst[token], there_are(mCount[token])
        first, end = Int32(NO_ROW), Int32(0)
        for i in cutlass.range(cute.arch.lane_idx(), tokens, 32, unroll=1):
            count = mCount[token + i]
            if count > 0:
                first = cutlass.min(first, mFirst[token + i])
                end = cutlass.max(end, mFirst[token + i] + count)
        first = cute.arch.warp_redux_sync(first, "min")
        end = cute.arch.warp_redux_sync(end, "max")
        return first, cutlass.max(end - first, 0)

    @cute.jit
    def tile_row(self, mQ: cute.Tensor, lists: KeyLists, work: Work):
        """Return the `Row` of this thread. Rows of all CTAs of a token (or group) are counted through."""
        thread, _, _ = cute.arch.thread_idx()
        tidx = thread % SOFTMAX_THREADS  # of the epilogue warps too
        place = self.head_block() * TILE_M + tidx % TILE_M
        token, head, inside = self.member(mQ, work, place)
        entries, window = Span(Int32(0), work.entries), Span(Int32(0), work.window)
        if cutlass.const_expr(self.groups):
            if cutlass.const_expr(self.entries == "range"):
                entries = self.own(lists.entries, token, inside, work.entry_row)
            if cutlass.const_expr(self.window):
                window = self.own(lists.window, token, inside, work.window_row)
        return Row(tidx, tidx // TILE_M, token, head, inside, entries, window)

    @cute.jit
    def member(self, mQ: cute.Tensor, work: Work, place: Int32):
        """Return (token, head, whether there are such) of a row.

        Rows are counted through the tiles of all CTAs of an item.
        """
        token, head, inside = work.token, place, place < mQ.shape[1]
        if cutlass.const_expr(self.groups):
            other, head = place // mQ.shape[1], place % mQ.shape[1]
            token, inside = work.token + other, other < work.tokens
        return token, head, inside

    @cute.jit
    def own(self, keys: KeyList, token: Int32, inside: Boolean, start: Int32):
        """Return the `Span` of a token's keys in a union from row ``start`` on.

        Empty for a row that is no token's.
        """
        first, count = Int32(0), Int32(0)
        if inside:
            first, count = keys.first[token] - start, there_are(keys.count[token])
        return Span(first, first + count)

    @cute.jit
    def valid_keys(self, lists: KeyLists, work: Work, row: Row, tile: Int32):
        """Return one bit for each of a thread's 32 keys of a tile. It is 1 where its token has that key."""
        position = tile * TILE_N + row.half * HALF_N
        if cutlass.const_expr(self.entries == "none"):
            return bits_of(row.window, position)
        if cutlass.const_expr(not self.window):
            return self.valid_entries(lists, work, row, position)
        valid = Int32(0)
        if position < work.window_at:
            valid = self.valid_entries(lists, work, row, position)
        if position + HALF_N > work.window_at:
            valid = valid | bits_of(row.window, position - work.window_at)
        return valid

    @cute.jit
    def valid_entries(self, lists: KeyLists, work: Work, row: Row, position: Int32):
        """Return one bit for each of the 32 places from ``position`` on.

        It is 1 where this thread's token has an entry.
        """
        if cutlass.const_expr(self.entries == "range"):
            return bits_of(row.entries, position)
        there = cutlass.Boolean(False)
        if position + cute.arch.lane_idx() < work.entries:
            there = lists.entries.index[work.token, position + cute.arch.lane_idx()] >= 0
        return cute.arch.vote_ballot_sync(there)


def there_are(count: Int32) -> Int32:
    """Return the keys of a token; a negative number (a padded row) is none."""
    return cutlass.max(count, 0)


@dsl_user_op
def _mask(first: Int32, count: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Set ``count`` bits from bit ``first`` on, as many as fit; one instruction where shifts would be of 64 bits."""
    text = "bmsk.clamp.b32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, read_only_args=[first, count], write_only_types=[Int32], loc=loc, ip=ip)


@cute.jit
def bits_of(span: Span, position: Int32):
    """Set bit i of 32 where ``position + i`` is in ``span``."""
    first, end = (cutlass.max(x - position, 0) for x in span)
    return _mask(first, end - first)
