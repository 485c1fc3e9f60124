"""Map CTAs to requests, heads and tokens.

An item is (request, split of its tokens, 64 heads), or 128 heads of a pair of CTAs. CTAs or pairs take every `step`-th
one, all roles by themselves, each as far ahead as its pipelines let it. Items of the same tokens follow each other, so
that their tiles are read from L2.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, pipeline

from dsv4lib.ops.mla_decode import splits
from dsv4lib.ops.mla_decode.config import HEADS, PAIR, SOFTMAX_THREADS, Config


class Requests(NamedTuple):
    """Lengths int32 [B] and page table int32 [B, N]."""

    seq_lens: cute.Tensor
    page_table: cute.Tensor


class Outputs(NamedTuple):
    """Hold out [B, H, 512] and LSE [B, H].

    Partial: fp32 [splits, B, H, 512] and [splits, B, H].
    """

    out: cute.Tensor
    lse: cute.Tensor
    scale: Float32  # of out: that of FP8 entries


class Items(NamedTuple):
    """What a CTA takes: items ``first``, ``first + step``, .. below ``end``."""

    splits: Int32
    head_blocks: Int32
    first: Int32
    end: Int32
    step: Int32


class Work(NamedTuple):
    """What a CTA does for one item."""

    request: Int32
    split: Int32
    head: Int32  # the first of this CTA
    tokens: Int32  # of the request
    first: Int32  # tiles of this split: first .. end - 1
    end: Int32


class Row(NamedTuple):
    """What a softmax thread is. It has a row of the tile and half of its tokens or dims."""

    tidx: Int32  # its lane of tensor memory
    half: Int32
    head: Int32
    inside: Boolean  # there is such a head


class Plan(Config):
    """How CTAs map to requests, heads and tokens."""

    @cute.jit
    def items(self, heads: Int32, requests: Requests, num_splits: Int32):
        """Return the `Items` of this CTA."""
        head_blocks = cute.ceil_div(heads, HEADS * self.cluster)
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        end = requests.seq_lens.shape[0] * num_splits * head_blocks
        return Items(num_splits, head_blocks, first, end, step)

    @cute.jit
    def work(self, requests: Requests, items: Items, item: Int32):
        """Return the `Work` of an item."""
        block, item = item % items.head_blocks, item // items.head_blocks
        split, request = Int32(0), item
        if cutlass.const_expr(self.partial):
            split, request = item % items.splits, item // items.splits
        tokens = cutlass.max(requests.seq_lens[request], 0)
        tokens = cutlass.min(tokens, requests.page_table.shape[1] * self.page_size)
        first, stop = self.split_tokens(tokens, split, items.splits)
        head = (block * self.cluster + self.rank()) * HEADS
        return Work(request, split, head, tokens, first // self.tile, cute.ceil_div(stop, self.tile))

    def rank(self) -> Int32:
        """Return which CTA of a pair this is; 0 alone."""
        return cute.arch.block_idx_in_cluster() if self.cluster > 1 else Int32(0)

    @cute.jit
    def split_tokens(self, tokens: Int32, split: Int32, num_splits: Int32):
        """Return the first token of a split and the one past its last.

        They are whole tiles of 128, see `splits`.
        """
        first, stop = Int32(0), tokens
        if cutlass.const_expr(self.partial):
            each = cute.ceil_div(cute.ceil_div(tokens, splits.TILE), num_splits) * splits.TILE
            first = cutlass.min(split * each, tokens)
            stop = cutlass.min(first + each, tokens)
        some = first < stop  # else no tiles
        first, stop = cutlass.select_(some, first, Int32(0)), cutlass.select_(some, stop, Int32(0))
        return first, stop

    def pair(self, row: Row) -> pipeline.NamedBarrier:
        """Return the barrier of the two warps that share 32 heads."""
        return pipeline.NamedBarrier(PAIR + row.tidx // 32 % 2, 64)

    @cute.jit
    def row(self, heads: Int32, work: Work):
        """Return the `Row` of this thread."""
        tidx, _, _ = cute.arch.thread_idx()
        tidx = tidx % SOFTMAX_THREADS
        head = work.head + tidx % HEADS
        return Row(tidx, tidx // HEADS, head, head < heads)
