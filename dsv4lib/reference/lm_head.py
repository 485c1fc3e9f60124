"""LM head: hidden states to logits (fp32 weights and accumulation in the released code, not tied to the embedding)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def lm_head(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``logits = W h``: h ``[..., d]``, weight ``[vocab, d]`` -> ``[..., vocab]``."""
    return linear(h, weight)
