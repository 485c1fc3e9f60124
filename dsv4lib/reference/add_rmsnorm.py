"""Add the residual, then apply RMSNorm."""

from __future__ import annotations

import torch

from dsv4lib.reference.rmsnorm import rmsnorm


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (h, y): ``h = x + residual``, ``y = rmsnorm(h)``. x, residual are ``[..., D]`` and weight ``[D]`` or None.

    ``dtype``: h is rounded to it before the norm reads it, as it is where h is stored; None: it is not.
    """
    h = x + residual
    if dtype is not None:
        h = h.to(dtype).to(x.dtype)
    return h, rmsnorm(h, weight, eps)
