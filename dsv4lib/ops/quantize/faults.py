"""Faults of the kernel that stores KV entries, one at a time. A class is the kernel with one thing replaced.

`FAULTS` holds them by name.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsv4lib.dsl.tensors import Divisor
from dsv4lib.ops.kv_gather.kernel import scale_of, to_bf16
from dsv4lib.ops.quantize import codes, entries
from dsv4lib.ops.quantize.kernel import values_of, words_of


class ScaleOneGroupOn(entries.KvEntries):
    """Stores every scale one byte on: a group is read with the scale of the one before."""

    def scale_at(self, piece: Int32) -> Int32:
        """The next of 8 bytes."""
        return (super().scale_at(piece) + 1) % self.layout.scale_bytes


class ScaleRoundedDown(entries.KvEntries):
    """Rounds log2 of the scale down, not up: the largest of a group saturate."""

    def scale_byte(self, amax: Int32) -> Int32:
        """One power of two less, but for what is no number."""
        return codes.larger(super().scale_byte(amax) - 1, Int32(self.format.floor))


class NanScaleDropped(entries.KvEntries):
    """Keeps the scale of a group with a NaN finite: the NaN stays, its neighbours come back as zeros."""

    def scale_byte(self, amax: Int32) -> Int32:
        """At most the largest power of two."""
        byte = super().scale_byte(amax)
        return Int32(cutlass.select_(byte > 254, Int32(254), byte))


class RopeQuantised(entries.KvEntries):
    """Rounds the rope dims to FP8, too, before they are stored as bf16."""

    @cute.jit
    def rope_words(self, rPiece: cute.Tensor):
        """Through E4M3 and back, a scale a piece."""
        byte = self.scale_byte(codes.largest(words_of(rPiece), self.dtype == "bf16"))
        words = codes.e4m3(values_of(rPiece), codes.inverse_power(byte))
        return list(to_bf16(words[0], words[1], scale_of(byte)))


class PagesTransposed(entries.KvEntries):
    """Counts entries across pages first: index % pages is the page."""

    def place_of(self, index: Int32, page: Divisor, pages: Int32) -> tuple[Int32, Int32]:
        """(page, slot), swapped."""
        return index % pages, index // pages


FAULTS = {
    kernel.__name__: kernel
    for kernel in (ScaleOneGroupOn, ScaleRoundedDown, NanScaleDropped, RopeQuantised, PagesTransposed)
}
