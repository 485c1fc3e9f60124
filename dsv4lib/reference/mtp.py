"""Make the input of the MTP block (depth 1). The backbone's streams are combined with the next token's embedding.

    X'_i = h_proj RMSNorm(X_i; hnorm) + e_proj RMSNorm(embed(token t + 1); enorm)        at position t

X are the four streams after the last layer, *before* head collapse and final norm. A normal layer follows (SWA, score
router, own mHC), then the block's own head collapse and norm, and the shared LM head predicts token t + 2.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rmsnorm


def combine(
    streams: torch.Tensor,
    next_embedding: torch.Tensor,
    hnorm: torch.Tensor,
    enorm: torch.Tensor,
    h_proj: torch.Tensor,
    e_proj: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The block's input streams.

    streams ``[B, T, n, d]``, next_embedding ``[B, T, d]``, norms ``[d]``, projections ``[d, d]`` -> ``[B, T, n, d]``.
    The same weights serve all streams; each is normed by itself over d.
    """
    if streams.dim() != 4 or next_embedding.shape != (*streams.shape[:2], streams.shape[3]):
        allowed = f"[B, T, d] matching streams {tuple(streams.shape)}"
        raise ArgumentError("next_embedding.shape", tuple(next_embedding.shape), allowed)
    h = linear(rmsnorm.rmsnorm(streams, hnorm, eps), h_proj)
    e = linear(rmsnorm.rmsnorm(next_embedding, enorm, eps), e_proj)
    return h + e.unsqueeze(-2)
