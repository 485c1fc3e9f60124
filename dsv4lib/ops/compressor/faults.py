"""Inject one fault into a compressor at a time. Every class is the kernel with one thing replaced, and compiles.

`FAULTS` holds them by name; those of `RUNNING` are about the running state, the others about CSA's two windows. Those
of `STREAMED` are of the variant for decode steps of many requests.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from dsv4lib.ops.compressor import kernel as compressor_kernel
from dsv4lib.ops.compressor import stream
from dsv4lib.ops.compressor.config import Sizes


class HalvesSwapped(compressor_kernel.Compressor):
    """Pools the window before through its own half."""

    def half_of(self, j: int) -> int:
        """The other half."""
        return 1 - super().half_of(j)


class FirstWindowFromState(compressor_kernel.Compressor):
    """Takes what a recycled state holds for the window before position 0."""

    def exists(self, position: Int32) -> Boolean:
        """One window too many."""
        return position >= -4


class TurnedByTheNextWindow(compressor_kernel.Compressor):
    """RoPE at the position after the window."""

    def table_row(self, item: compressor_kernel.Item) -> Int32:
        """One window too late."""
        return item.window + 1


class OldestRowForgotten(compressor_kernel.Compressor):
    """Pools one row less."""

    def pool(self, rK: cute.Tensor, rZ: cute.Tensor, rSoftmax: cute.Tensor):
        """Without the first row."""
        rZ[None, 0].fill(-float("inf"))
        compressor_kernel.Compressor.pool(self, rK, rZ, rSoftmax)


class HalfOfTheStateNotWritten(compressor_kernel.Compressor):
    """Keeps the current window's columns alone: the next window misses those of the one before."""

    def update_half(
        self,
        rows: compressor_kernel.Rows,
        item: compressor_kernel.Item,
        channel: Int32,
        group: Int32,
        half: int,
        opened: Int32,
    ):
        """The second half alone."""
        if half == 1:
            compressor_kernel.Compressor.update_half(self, rows, item, channel, group, half, opened)


class ScalesFourApart(compressor_kernel.Compressor):
    """Places scales as those of FP4 keys lie: four bytes an entry."""

    @functools.wraps(Sizes.__init__)
    def __init__(self, **settings: Any):
        Sizes.__init__(self, **settings)
        if self.form == "kv":
            self.layout = dataclasses.replace(self.layout, scale_bytes=4)


class MaximaMixed(compressor_kernel.Compressor):
    """Adds sums of exponentials that were taken under different maxima."""

    @cute.jit
    def merge(self, rSoftmax: cute.Tensor, c: cutlass.Constexpr, row_max: Float32, row_sum: Float32, acc: Float32):
        """No common maximum."""
        rSoftmax[c, 0] = cute.arch.fmax(rSoftmax[c, 0], row_max)
        rSoftmax[c, 1] += row_sum
        rSoftmax[c, 2] += acc


class WarpsNotAwaited(compressor_kernel.Compressor):
    """Merges the warps' softmaxes before all are there."""

    def sync(self) -> None:
        """No barrier."""


class StageFilledTooSoon(stream.StreamedCompressor):
    """Copies rows over those that a team still reads."""

    def wait_until_read(self, empty: cute.Pointer, phase: Int32) -> None:
        """No wait."""


class NewestRowForgotten(stream.StreamedCompressor):
    """Pools the rows of the state alone."""

    @cute.jit
    def pool_group(self, *given: Any):
        """Without a gate of the newest row."""
        given[-1].new[None, 1, 0].fill(-float("inf"))
        stream.StreamedCompressor.pool_group(self, *given)


WINDOWS = (
    HalvesSwapped,
    FirstWindowFromState,
    TurnedByTheNextWindow,
    OldestRowForgotten,
    HalfOfTheStateNotWritten,
    ScalesFourApart,
)
RUNNING = (MaximaMixed, WarpsNotAwaited)
STREAMED = (StageFilledTooSoon, NewestRowForgotten)
FAULTS = {kernel.__name__: kernel for kernel in (*WINDOWS, *RUNNING)}
