"""The sum over a token's experts, and the shared expert."""

from __future__ import annotations

import torch


def moe_combine(
    y: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor | None = None, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """``out[t] = sum_s weights[t, s] y[row_of[t, s]] + shared[t]``, slots in order.

    Args:
        y: ``[R, d]``; a row that no slot names may hold anything.
        row_of: ``[T, k]``; numbers outside 0 .. R - 1 are skipped.
        weights: ``[T, k]``; None: ones.
        shared: ``[T, d]`` or None.

    Returns:
        ``[T, d]`` in the type of ``y``.
    """
    out = y.new_zeros(row_of.shape[0], y.shape[1])
    for slot in range(row_of.shape[1]):
        row = row_of[:, slot].long()
        named = ((row >= 0) & (row < y.shape[0])).nonzero()[:, 0]
        one = y[row[named]]
        out[named] += one if weights is None else weights[named, slot, None] * one
    return out if shared is None else out + shared
