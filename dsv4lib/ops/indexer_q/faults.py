"""Faults of the kernel of indexer queries, one at a time. A class is the kernel with one thing replaced.

`FAULTS` holds them by name.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.indexer_q import kernel as indexer_q_kernel


class TurnsBackwards(indexer_q_kernel.IndexerQ):
    """Rotate by minus the position, as the output of attention is rotated."""

    def angles(self, mTable: cute.Tensor, mPositions: Any, token: Int32, place: Int32) -> list:
        """Cosines, and sines of the other sign."""
        found = super().angles(mTable, mPositions, token, place)
        return [(cosines, [Float32(0.0) - x for x in sines]) for cosines, sines in found]


class RotatesFirst(indexer_q_kernel.IndexerQ):
    """Applies the Hadamard matrix ahead of RoPE: neither is wrong, but keys have them the other way round."""

    def apply_rope(self, rX: cute.Tensor, angles: list, place: Int32) -> None:
        """Both, in the wrong order."""
        super().rotate(rX, place)
        super().apply_rope(rX, angles, place)

    def rotate(self, rX: cute.Tensor, place: Int32) -> None:
        """Has been done."""


class ScaleLeftOut(indexer_q_kernel.IndexerQ):
    """Leaves FP8's scale out of the weight: heads count by how large their query is."""

    def store_fp8(
        self,
        rX: cute.Tensor,
        mCodes: cute.Tensor,
        mOut: cute.Tensor,
        token: Int32,
        head: Int32,
        inside: Any,
        place: Int32,
        weight: Float32,
    ) -> None:
        """The weight once more, as it came."""
        super().store_fp8(rX, mCodes, mOut, token, head, inside, place, weight)
        self.put_weight(mOut, token, head, inside, place, weight)

    @cute.jit
    def put_weight(self, mOut: cute.Tensor, token: Int32, head: Int32, inside: Any, place: Int32, weight: Float32):
        """By the lane that has just stored it."""
        if inside & (place == 0):
            mOut[token, head] = weight


class WeightsAsTheyCome(indexer_q_kernel.IndexerQ):
    """Leaves (128 H)^-0.5 out of the weights: every score is 90 times as large, and no pick changes."""

    def round(
        self,
        given: indexer_q_kernel.Token,
        first: Int32,
        last: Any,
        place: Int32,
        angles: list,
        rQ: cute.Tensor,
        rWeights: cute.Tensor,
    ) -> None:
        """A factor of 1."""
        super().round(given._replace(factor=Float32(1.0)), first, last, place, angles, rQ, rWeights)


FAULTS = {kernel.__name__: kernel for kernel in (TurnsBackwards, RotatesFirst, ScaleLeftOut, WeightsAsTheyCome)}
