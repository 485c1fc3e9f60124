"""RMSNorm, with and without a weight."""

from __future__ import annotations

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise: ``y = weight * x / sqrt(mean(x^2) + eps)`` over the last dim.

    ``weight=None`` stands for ones.

    x ``[..., D]``, weight ``[D]`` -> ``[..., D]``. The released code multiplies in fp32 and rounds once at the end.
    """
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else weight * y
