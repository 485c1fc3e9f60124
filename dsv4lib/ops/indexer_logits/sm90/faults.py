"""Faults of the Hopper kernels of the scores, one at a time. A class is the kernel with one thing replaced.

`FAULTS` holds those of the FP8 kernel by name, `FP4_FAULTS` those of what the FP4 kernel does otherwise, `CAUGHT_BY`
what finds each: "wrong numbers" or a kind of hazard.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.indexer_logits.sm90.fp4 import HopperLogitsFp4, placed_pairs
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits


class NoRelu(HopperLogits):
    """Leaves the ReLU out: heads vote against entries, too."""

    def relu(self, x: Float32) -> Float32:
        """Return x as it is."""
        return x


class PagesInOrder(HopperLogits):
    """Ignores the table: reads the pool's pages one after another."""

    def page_of(self, table: cute.Tensor, key: Int32) -> Int32:
        """Return the key's page as if the request had the first ones."""
        return key // self.page_size


class FirstHeads(HopperLogits):
    """Weights of the first 64 heads serve the others, too: right with 64."""

    @cute.jit
    def load_weights(self, mWeights: cute.Tensor, token: Int32) -> cute.Tensor:
        """Take the column modulo 64."""
        rWeights = HopperLogits.load_weights(self, mWeights, token)
        for i in cutlass.range_constexpr(cute.size(rWeights)):
            rWeights[i] = rWeights[i % 16]
        return rWeights


class UnwatchedQueries(HopperLogits):
    """The tensor core reads queries without a proxy fence: most often right."""

    def queries_written(self) -> None:
        """Forget the fence."""


class HastyCopies(HopperLogits):
    """A stage is filled anew while a warp may still read it."""

    def wait_for_room(self, barrier: cute.Pointer, parity: Int32) -> None:
        """Do not wait."""


class FirstScale(HopperLogitsFp4):
    """All blocks of a key have the scale of the first: right where they are equal."""

    def scale_of(self, block: Int32) -> Int32:
        """Return the first."""
        return Int32(0)


class ScalesNotExchanged(HopperLogitsFp4):
    """A lane's block is relative to its own scale, not to the largest of the key."""

    def largest(self, own: Int32) -> Int32:
        """Forget the other lanes."""
        return cutlass.max(own, Int32(1))


class NibblesReversed(HopperLogitsFp4):
    """Registers of a word in the other order than the queries have."""

    def placed(self, word: Int32) -> list:
        """Return the last first."""
        return placed_pairs(word)[::-1]


_ALL = (
    (NoRelu, "wrong numbers"),
    (PagesInOrder, "wrong numbers"),
    (FirstHeads, "wrong numbers"),
    (UnwatchedQueries, "missing_proxy_fence"),
    (HastyCopies, "race_through_completion"),
)
_FP4 = tuple((kind, "wrong numbers") for kind in (FirstScale, ScalesNotExchanged, NibblesReversed))
FAULTS = {kind.__name__: kind for kind, _ in _ALL}
FP4_FAULTS = {kind.__name__: kind for kind, _ in _FP4}
CAUGHT_BY = {kind.__name__: found for kind, found in (*_ALL, *_FP4)}
