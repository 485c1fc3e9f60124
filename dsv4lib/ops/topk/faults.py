"""Inject one fault into a top-k at a time. Every class is the kernel with one thing replaced, and compiles.

`FAULTS` holds them by name.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.topk import cluster
from dsv4lib.ops.topk import kernel as topk_kernel
from dsv4lib.ops.topk.counting import Shared
from dsv4lib.ops.topk.paged import Picks


class NoRowBarrier(cluster.ClusterTopK):
    """CTAs of a row do not wait for each other where a bin is split."""

    def sync_row(self) -> None:
        """A barrier of this CTA alone."""
        cute.arch.barrier()


class TiesAnyhow(topk_kernel.TopK):
    """Of equal candidates the later one wins."""

    @cute.jit
    def better(self, other: Int32, key: Int32, at: Int32, index: Int32) -> cutlass.Boolean:
        """The higher index first."""
        return other > key or (other == key and at > index)


class DropsItsBound(topk_kernel.TopK):
    """Drops the bin of its bound, too, where it drops scores unseen."""

    @cute.jit
    def keep_good(self, tile: Any, low: Int32, stop: Any, most: Int32, s: Shared):
        """Better bins alone."""
        super().keep_good(tile, low + (1 << self.bins.shift), stop, most, s)


class OneEntryTooMany(topk_kernel.TopK):
    """Takes a length for an index that still counts: the entry that is being formed can be picked."""

    def length(self, mRow: cute.Tensor, mLengths: Any, row: Int32) -> Int32:
        """One more."""
        return cutlass.min(mLengths[row] + 1, mRow.shape[0]) if self.ragged else mRow.shape[0]


class PaddedWithZero(topk_kernel.TopK):
    """Leaves 0, not -1, where a row has no more picks."""

    @cute.jit
    def take_all(self, picks: Picks, length: Int32, rank: Int32):
        """An index that exists."""
        tidx, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(rank * self.threads + tidx, picks.out.shape[0], self.ctas * self.threads, unroll=1):
            picks.out[i] = cutlass.select_(i < length, Int32(i), Int32(0))


class ReadsTwice(topk_kernel.TopK):
    """Streams a row, and does it all over."""

    @cute.jit
    def streamed(self, mRow: cute.Tensor, mLengths: Any, picks: Picks, s: Shared, row: Int32, rank: Int32):
        """The same picks, twice."""
        super().streamed(mRow, mLengths, picks, s, row, rank)
        cute.arch.barrier()
        super().streamed(mRow, mLengths, picks, s, row, rank)


FAULTS = {
    kernel.__name__: kernel
    for kernel in (NoRowBarrier, TiesAnyhow, DropsItsBound, OneEntryTooMany, PaddedWithZero, ReadsTwice)
}
