"""Which tokens a CTA takes, which keys it walks over, in which tiles, and which token and head a row of its tiles is.

A CTA keeps its block of heads and its part of the keys and takes every ``step``-th token (or group): all roles go
through the same `Items` by themselves, each as far ahead as its pipelines let it.

Without groups a tile's rows are heads of one token. With groups they are the heads of several adjacent tokens, which
see nearly the same keys (SWA inside a chunk, HCA under the limit per query): the CTA walks over the union of their
ranges and each row masks what its own token does not see.

Keys are counted through the tiles: the entries from place 0 on, the window from place ``window_at`` on. That is the
next tile, or, where it saves one, the next multiple of 4 behind the last entry: one tile then holds the end of the
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
from cutlass import Boolean, Int32
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.ops.fmha.config import HALF_N, REGION, SOFTMAX_THREADS, TILE_M, TILE_N, Config

TILE_SHIFT = TILE_N.bit_length() - 1  # a signed division would be more instructions
NO_ROW = 0x3FFFFFFF  # behind every row of a pool
SHARE_SHIFT = 10  # of `Split.share`: so up to 2^21 tiles


class Split(NamedTuple):
    """How the keys are split: into ``splits`` parts, all equal, or the last one shorter or longer than the others.

    A short last part of many tokens is for the SMs that whole parts leave idle: ``last`` CTAs (or clusters) at a time
    take it, one token behind the other, beside those of the other parts.
    """

    splits: Int32
    last: Int32  # tokens (or groups) at a time whose last part is worked on; 0: all parts are equal
    share: Int32  # of the last part, in 1024ths of a token's tiles


class Items(NamedTuple):
    """What a CTA takes: tokens, or groups of them, ``first``, ``first + step``, .. below ``end``; of each a part."""

    groups: Any  # tensor [G, 2], or None
    split: Split
    part: Int32
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
    first: Int32  # tiles of this part of the keys: first .. end - 1
    end: Int32


class Row(NamedTuple):
    """What a softmax or epilogue thread is: a row of the tile and half of its keys or dimensions."""

    tidx: Int32  # its lane of tensor memory
    half: Int32
    token: Int32
    head: Int32
    inside: Boolean  # there is such a token and head
    entries: tuple  # first and end of the keys of its token in the union
    window: tuple


class Plan(Config):
    """How CTAs map to tokens, heads, keys."""

    @cute.jit
    def items(self, mQ: cute.Tensor, mGroups: Any, split: Split, per_part: Int32):
        """The `Items` of this CTA: round robin, so that short and long lists of neighbours are spread.

        Args:
            per_part: items that are worked on at a time of each part but an unequal last one. Then parts lie behind
                each other on the grid's first axis, else on its third.
        """
        first, _, part = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        end = mQ.shape[0] if cutlass.const_expr(not self.groups) else mGroups.shape[0]
        if cutlass.const_expr(self.partial):
            if split.last > 0:
                part = cutlass.min(first // per_part, split.splits - 1)
                first -= part * per_part
                step = cutlass.select_(part == split.splits - 1, split.last, per_part)
        return Items(mGroups, split, part, first, end, step)

    @cute.jit
    def head_block(self):
        """Which 64 rows of an item this CTA has; CTAs of a cluster are neighbours on the grid's second axis."""
        _, block, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.dim_parts > 1):
            block = block // (self.cluster * self.dim_parts) * self.cluster + block % self.cluster
        return block

    @cute.jit
    def dim_part(self):
        """Which part of the dimensions of O this CTA has; a constant 0 where there is one."""
        part = 0
        if cutlass.const_expr(self.dim_parts > 1):
            _, block, _ = cute.arch.block_idx()
            part = block // self.cluster % self.dim_parts
        return part

    @cute.jit
    def work(self, lists: tuple, items: Items, item: Int32):
        """The `Work` of an item; behind the last one that of the last one."""
        item = cutlass.min(item, items.end - 1)
        token, tokens = item, Int32(1)
        if cutlass.const_expr(self.groups):
            token, tokens = items.groups[item, 0], items.groups[item, 1]
        (entry_row, entries), (window_row, window) = self.ranges(lists, token, tokens)
        window_at, tiles = self.places(entries, window)
        first, end = Int32(0), tiles
        if cutlass.const_expr(self.partial):
            splits, last, share = items.split
            parts = cutlass.select_(last > 0, splits - 1, splits)  # that are equal
            shared = tiles - ((tiles * share) >> SHARE_SHIFT)
            each = cute.ceil_div(shared, parts)
            first = cutlass.min(items.part * each, shared)
            end = cutlass.select_(items.part < parts, cutlass.min(first + each, shared), tiles)
        return Work(token, tokens, entries, window, entry_row, window_row, window_at, first, end)

    @cute.jit
    def places(self, entries: Int32, window: Int32):
        """(place of the first window key, tiles) of so many keys; `config.count_tiles`."""
        apart = (entries + (TILE_N - 1)) & -TILE_N
        window_at, tiles = apart, (apart + window + (TILE_N - 1)) >> TILE_SHIFT
        if cutlass.const_expr(self.entries != "none" and self.window):
            behind = (entries + (REGION - 1)) & -REGION
            joint = (behind + window + (TILE_N - 1)) >> TILE_SHIFT
            window_at = cutlass.select_(joint < tiles, behind, apart)
            tiles = cutlass.min(joint, tiles)
        return window_at, tiles

    @cute.jit
    def ranges(self, lists: tuple, token: Int32, tokens: Int32):
        """(first row, rows) of entries and of window keys; of index lists only the second counts."""
        entries, window = (Int32(0), Int32(0)), (Int32(0), Int32(0))
        if cutlass.const_expr(self.entries == "index"):
            entries = Int32(0), there_are(lists[0][2][token])
        if cutlass.const_expr(self.entries == "range"):
            entries = self.union(lists[0][1], lists[0][2], token, tokens)
        if cutlass.const_expr(self.window_index):
            window = Int32(0), there_are(lists[1][1][token])
        elif cutlass.const_expr(self.window):
            window = self.union(lists[1][0], lists[1][1], token, tokens)
        return entries, window

    @cute.jit
    def union(self, mFirst: cute.Tensor, mCount: cute.Tensor, token: Int32, tokens: Int32):
        """(first row, rows) of the interval that holds the ranges of all tokens of a group; a whole warp calls it."""
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
    def tile_row(self, mQ: cute.Tensor, lists: tuple, work: Work):
        """The `Row` of this thread: rows of the tiles of all CTAs of a token (or group) are counted through."""
        thread, _, _ = cute.arch.thread_idx()
        tidx = thread % SOFTMAX_THREADS  # of the epilogue warps too
        place = self.head_block() * TILE_M + tidx % TILE_M
        token, head, inside = self.member(mQ, work, place)
        entries, window = (Int32(0), work.entries), (Int32(0), work.window)
        if cutlass.const_expr(self.groups):
            if cutlass.const_expr(self.entries == "range"):
                entries = self.own(lists[0][1], lists[0][2], token, inside, work.entry_row)
            if cutlass.const_expr(self.window):
                window = self.own(lists[1][0], lists[1][1], token, inside, work.window_row)
        return Row(tidx, tidx // TILE_M, token, head, inside, entries, window)

    @cute.jit
    def member(self, mQ: cute.Tensor, work: Work, place: Int32):
        """(token, head, whether there are such) of a row, counted through the tiles of all CTAs of an item."""
        token, head, inside = work.token, place, place < mQ.shape[1]
        if cutlass.const_expr(self.groups):
            other, head = place // mQ.shape[1], place % mQ.shape[1]
            token, inside = work.token + other, other < work.tokens
        return token, head, inside

    @cute.jit
    def own(self, mFirst: cute.Tensor, mCount: cute.Tensor, token: Int32, inside: Boolean, start: Int32):
        """(first, end) of a token's keys in a union that starts at row ``start``; none for a row that is no token's."""
        first, count = Int32(0), Int32(0)
        if inside:
            first, count = mFirst[token] - start, there_are(mCount[token])
        return first, first + count

    @cute.jit
    def valid_keys(self, lists: tuple, work: Work, row: Row, tile: Int32):
        """One bit for each of a thread's 32 keys of a tile: 1 where its token has that key."""
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
    def valid_entries(self, lists: tuple, work: Work, row: Row, position: Int32):
        """One bit for each of the 32 places from ``position`` on: 1 where this thread's token has an entry."""
        if cutlass.const_expr(self.entries == "range"):
            return bits_of(row.entries, position)
        there = cutlass.Boolean(False)
        if position + cute.arch.lane_idx() < work.entries:
            there = lists[0][0][work.token, position + cute.arch.lane_idx()] >= 0
        return cute.arch.vote_ballot_sync(there)


def there_are(count: Int32) -> Int32:
    """Keys of a token; a negative number (a padded row) is none."""
    return cutlass.max(count, 0)


@dsl_user_op
def _mask(first: Int32, count: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """``count`` ones from bit ``first`` on, as many as fit; one instruction where shifts would be of 64 bits."""
    text = "bmsk.clamp.b32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(text, read_only_args=[first, count], write_only_types=[Int32], loc=loc, ip=ip)


@cute.jit
def bits_of(span: tuple, position: Int32):
    """Bit i is 1 where ``position + i`` is in ``span`` (first, end), of 32."""
    first, end = (cutlass.max(x - position, 0) for x in span)
    return _mask(first, end - first)
