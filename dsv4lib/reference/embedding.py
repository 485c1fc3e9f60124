"""Look up token embeddings and start the residual streams.

mHC keeps ``n_hc`` copies of the residual.
"""

from __future__ import annotations

import torch


def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Look up rows: tokens ``[...]`` int64, weight ``[vocab, d]`` -> ``[..., d]``."""
    return weight[tokens]


def init_streams(h: torch.Tensor, hc_mult: int) -> torch.Tensor:
    """Start all streams as plain copies of the embedding. ``[..., d]`` -> ``[..., hc_mult, d]``."""
    return h.unsqueeze(-2).expand(*h.shape[:-1], hc_mult, h.shape[-1])
