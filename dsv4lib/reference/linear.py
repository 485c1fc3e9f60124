"""A linear layer, alone or in groups of equal size: y = alpha * x W^T."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, w: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x by w^T and scale by alpha.

    x ``[..., T, K]``, w ``[..., N, K]`` with the same leading dimensions, alpha ``[...]`` -> ``[..., T, N]``.
    """
    y = x @ w.mT
    return y if alpha is None else y * alpha[..., None, None]
