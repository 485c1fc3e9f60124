"""Faults of the Hopper kernel of FP8 linears, injected one at a time. Each is marked ``WRONG``.

Every class is the kernel with one thing replaced. They compile without a word. `CAUGHT_BY` says what finds each: a kind
of the emulator's reports, "stopped" (a store past the output's end) or "wrong numbers" (the comparison with fp64).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.ops.linear.sm90.kernel import HopperLinear
from dsv4lib.ops.linear.sm90.load import Load, Sources, Tile
from dsv4lib.ops.linear.sm90.sums import Exchange


class NoProxyFence(HopperLinear):
    """The tensor core reads what `cp.async` wrote without a proxy fence: most often right."""

    def copied_by_threads(self) -> None:
        """See `Sums.copied_by_threads`."""  # WRONG: no fence


class FirstFactors(HopperLinear):
    """The first block's factors serve all of a stage: right where neighbouring blocks are alike."""

    def factors_of(self, chunk: int) -> int:
        """See `Sums.factors_of`."""
        return 0  # WRONG


class NoTailMask(HopperLinear):
    """Columns of the MMA after the last token are written."""

    def is_token(self, token: Int32, mOut: cute.Tensor) -> cutlass.Boolean:
        """See `Sums.is_token`."""
        return token < mOut.shape[1] + 1  # WRONG


class RangesOverlap(HopperLinear):
    """Ranges of K share a step: its products count twice."""

    @cute.jit
    def steps(self, sources: Sources):
        """See `Load.steps`."""
        first, end = Load.steps(self, sources)
        if first > 0:
            first = first - 1  # WRONG
        return first, end


class NotAwaited(HopperLinear):
    """A CTA sends the sums of its next tile before those of the last have been read."""

    def await_free(self, exchange: Exchange, turn: Int32) -> None:
        """See `Sums.await_free`."""  # WRONG: no wait


class FirstTileScales(HopperLinear):
    """Scales of the weights are those of the tensor's first 128 rows: right where all are alike."""

    @cute.jit
    def load_scales(self, sources: Sources, tile: Tile, step: Int32, rX: cute.Tensor, rW: cute.Tensor):
        """See `Load.load_scales`."""
        Load.load_scales(self, sources, Tile(tile.group, Int32(0), tile.token), step, rX, rW)  # WRONG


_ALL = (
    (NoProxyFence, "missing_proxy_fence_cp_async"),
    (FirstFactors, "wrong numbers"),
    (NoTailMask, "stopped"),
    (RangesOverlap, "wrong numbers"),
    (NotAwaited, "race_shared"),
    (FirstTileScales, "wrong numbers"),
)
FAULTS = {kind.__name__: kind for kind, _ in _ALL}
CAUGHT_BY = {kind.__name__: found for kind, found in _ALL}
