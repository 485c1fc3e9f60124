"""Faults of the scores' kernel, one at a time. A class is the kernel with one thing replaced.

`FAULTS` holds them by name.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits, Shared, Work


class NoRelu(IndexerLogits):
    """Leaves the ReLU out: heads vote against entries, too."""

    def relu(self, x: Float32) -> Float32:
        """Return x as it is."""
        return x


class PagesInOrder(IndexerLogits):
    """Ignores the table: reads the pool's pages one after another."""

    def place_of(self, table: cute.Tensor, request: Int32, key: Int32) -> tuple:
        """Return the key's page as if the request had the first ones."""
        return key // self.page_size, key % self.page_size


class RunsShareKeys(IndexerLogits):
    """Stores all tokens of a tile in every run: a neighbour of another request gets scores of foreign keys."""

    @cute.jit
    def store(
        self, mOut: cute.Tensor, work: Work, shared: Shared, run: Int32, token: Int32, key: Int32, score: Float32
    ):
        """Store if the token has the key, of any request."""
        if key < shared.runs[3, token]:
            mOut[work.token + token, key] = score


class OneScoreTooMany(IndexerLogits):
    """Writes one score past each length."""

    @cute.jit
    def store(
        self, mOut: cute.Tensor, work: Work, shared: Shared, run: Int32, token: Int32, key: Int32, score: Float32
    ):
        """Compare with <= where < is right."""
        length = shared.runs[3, token]
        if shared.runs[2, token] == run and key <= length and length > 0 and key < mOut.shape[1]:
            mOut[work.token + token, key] = score


class KeyScalesInRows(IndexerLogits):
    """FP4: leaves the scales of keys as the page has them; the tensor core wants key r at row r % 32, word r / 32."""

    @cute.jit
    def arrange_key_scales(self, shared: Shared, stage: Int32):
        """Do nothing."""


class ScalesReleasedUnread(IndexerLogits):
    """FP8: arrives for the stage before its scales are read, so that the next tile's may land first."""

    def key_scale(
        self, shared: Shared, lane: Int32, keys: pipeline.PipelineTmaUmma, full: pipeline.PipelineState
    ) -> Float32:
        """Release, then read."""
        self.release(keys, full)
        return shared.words[lane, full.index].bitcast(Float32)


FAULTS = {
    kernel.__name__: kernel
    for kernel in (NoRelu, PagesInOrder, RunsShareKeys, OneScoreTooMany, KeyScalesInRows, ScalesReleasedUnread)
}
