"""Faults of the embedding kernel, injected one at a time. A class is the kernel with one thing replaced.

`FAULTS` holds them by name.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32

from dsv4lib.ops.embedding import kernel as embedding_kernel


class PaddingIsRowZero(embedding_kernel.Embedding):
    """Clamps negative ids to 0: padding gets the row of a token."""

    def row_of(self, number: Any, rows: Int32) -> Int32:
        """Never negative."""
        return cutlass.max(super().row_of(number, rows), Int32(0))


class LastRowForgotten(embedding_kernel.Embedding):
    """Stops a row early: the last id of the vocabulary counts as past the end."""

    def row_of(self, number: Any, rows: Int32) -> Int32:
        """One row fewer."""
        return super().row_of(number, rows - 1)


class RowOfTheNext(embedding_kernel.Embedding):
    """Counts ids from 1."""

    def row_of(self, number: Any, rows: Int32) -> Int32:
        """One on."""
        return super().row_of(number + 1, rows)


FAULTS = {kernel.__name__: kernel for kernel in (PaddingIsRowZero, LastRowForgotten, RowOfTheNext)}
