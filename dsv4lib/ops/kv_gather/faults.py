"""Faults of a gather, injected one at a time. Every class is the kernel with one thing replaced, and compiles.

`FAULTS` holds them by name.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.kv_gather import kernel as kv_gather_kernel


class MinusOneIsRowZero(kv_gather_kernel.KvGather):
    """Clamps -1 to 0: what should be skipped is the first entry of the pool."""

    def entry_of(self, index: Int32, entries: Int32) -> Int32:
        """Never negative."""
        return cutlass.max(super().entry_of(index, entries), 0)


class ScaleOfTheNextGroup(kv_gather_kernel.KvGather):
    """Takes the scale of the next 64 dims; the last group's is the padding byte."""

    def scale_at(self, piece: Int32) -> Int32:
        """One byte on."""
        return super().scale_at(piece) + 1


class NanScaleIsInfinity(kv_gather_kernel.KvGather):
    """Forgets that scale byte 255 is NaN: as an exponent it is infinity."""

    def value_of(self, byte: Int32) -> Float32:
        """An exponent and nothing else."""
        return (byte << 23).bitcast(Float32)


class PagesTransposed(kv_gather_kernel.KvGather):
    """Counts entries across pages first: index % pages is the page."""

    def place_of(self, index: Int32, page: Divisor, pages: Int32) -> tuple[Int32, Int32]:
        """(page, slot), swapped."""
        return index % pages, index // pages


FAULTS = {
    kernel.__name__: kernel for kernel in (MinusOneIsRowZero, ScaleOfTheNextGroup, NanScaleIsInfinity, PagesTransposed)
}
