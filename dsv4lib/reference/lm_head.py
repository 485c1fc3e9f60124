"""Turn hidden states to logits. Released code has fp32 weights and accumulation, not tied to the embedding."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def lm_head(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``logits = W h``: h ``[..., d]``, weight ``[vocab, d]`` -> ``[..., vocab]``."""
    return linear(h, weight)
