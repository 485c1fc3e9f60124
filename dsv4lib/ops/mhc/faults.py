"""Inject faults into the kernel of few tokens. Each class replaces one thing; `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from dsv4lib.ops.mhc import few_tokens


class WorkersApart(few_tokens.MhcFewTokens):
    """Reads what other warps write without waiting for them."""

    def sync_workers(self) -> None:
        """No barrier."""


class RowsAlone(few_tokens.MhcFewTokens):
    """Divides rows by their sums and leaves columns as they are: a softmax, not doubly stochastic."""

    @cute.jit
    def column_factor(self, rColumn: cute.Tensor, u: Float32, over: Float32, eps: Float32) -> tuple:
        """One."""
        return Float32(1.0), Float32(1.0)


FAULTS = {kernel.__name__: kernel for kernel in (WorkersApart, RowsAlone)}
