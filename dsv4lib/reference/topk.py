"""Pick the top-k in a defined order.

Two implementations can thus be compared by their indices.

Higher score first; of equal scores the lower index first; missing picks are -1. (``torch.topk`` leaves ties open, and
its choice differs by shape, which makes prefill and decode differ where scores are exactly 0.)
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError


def topk(scores: torch.Tensor, k: int, limit: torch.Tensor | None = None) -> torch.Tensor:
    """Indices of the k best scores among the first ``limit`` of each row.

    Args:
        scores: ``[..., S]``; NaN is not allowed.
        k: picks per row, >= 1; may exceed S.
        limit: int64, broadcast against ``scores.shape[:-1]``; None for S.

    Returns:
        int64 ``[..., k]``, best first, padded with -1 where a row has fewer than k candidates.
    """
    if k < 1:
        raise ArgumentError("k", k, "an integer >= 1")
    if torch.isnan(scores).any():
        raise ArgumentError("scores", "a tensor with NaN", "numbers")
    size = scores.shape[-1]
    candidates = torch.full(scores.shape[:-1], size, device=scores.device)
    if limit is not None:
        candidates = torch.minimum(candidates, limit)
    index = torch.arange(size, device=scores.device)
    beyond = index >= candidates.unsqueeze(-1)
    # -inf alone would tie with a real score of -inf at a higher index; candidates first, then by score.
    order = torch.argsort(scores.detach(), dim=-1, descending=True, stable=True)
    late = beyond.expand(scores.shape).gather(-1, order).to(torch.int8)
    order = order.gather(-1, torch.argsort(late, dim=-1, stable=True))[..., :k]
    rank = torch.arange(order.shape[-1], device=scores.device)
    picks = torch.where(rank < candidates.unsqueeze(-1), order, -1)
    return torch.nn.functional.pad(picks, (0, k - picks.shape[-1]), value=-1)
