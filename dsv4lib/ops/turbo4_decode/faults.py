"""Inject faults into the attention, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.turbo4_decode import kernel as decode_kernel
from dsv4lib.ops.turbo4_decode.output import Lane


class QueryNotRotated(decode_kernel.Turbo4Decode):
    """Attends with q as it came to keys that are rotated: all logits are wrong."""

    @cute.jit
    def rotated(self, x: list, lane: Lane):
        """As it came."""
        return x


class NoKeyNorms(decode_kernel.Turbo4Decode):
    """Forgets the norms of keys: right where all keys have length 1."""

    def key_norm(self, norm: Float32) -> Float32:
        """One."""
        return Float32(1.0)


class NoValueNorms(decode_kernel.Turbo4Decode):
    """Forgets the norms of values."""

    def value_norm(self, norm: Float32) -> Float32:
        """One."""
        return Float32(1.0)


class FirstPageAlone(decode_kernel.Turbo4Decode):
    """Reads the first page of a request for all: right for requests of one page."""

    def page_column(self, token: Int32) -> Int32:
        """The first."""
        return Int32(0)


class OneTokenMore(decode_kernel.Turbo4Decode):
    """Counts a token past the last of a request, wherever its tile has room."""

    def left(self, stop: Int32, first: Int32) -> Int32:
        """One more."""
        return stop - first + 1


class WarpsApart(decode_kernel.Turbo4Decode):
    """Reads what other warps of the CTA write without waiting for them."""

    def sync(self) -> None:
        """No barrier."""


RACES = {WarpsApart.__name__: WarpsApart}  # only the race detector is sure to find these
FAULTS = {
    kernel.__name__: kernel for kernel in (QueryNotRotated, NoKeyNorms, NoValueNorms, FirstPageAlone, OneTokenMore)
}
