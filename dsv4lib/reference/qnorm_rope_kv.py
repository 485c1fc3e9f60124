"""Compute queries and the key-value vector from a layer's normed input.

One vector per token is both key and value.

    qr = RMSNorm(wq_a x; q_norm)            shared by the queries and the lightning indexer
    q  = rope(RMSNorm(wq_b qr))             per head, the norm has no weight and covers all D dims
    kv = rope(RMSNorm(wkv x; kv_norm))      norm first, rope last; K = V = kv, one head

The same for SWA, CSA and HCA layers, apart from the rope frequencies. DSV4 paper, attention section.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rmsnorm, rope

Codec = Callable[[torch.Tensor], torch.Tensor]
"""Rounds a tensor to a storage format and back (fake quantisation): ``[..., D] -> [..., D]``."""


def q_latent(x: torch.Tensor, wq_a: torch.Tensor, q_norm: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``qr = RMSNorm(wq_a x)``. x ``[..., d]``, wq_a ``[R, d]``, q_norm ``[R]`` -> ``[..., R]``."""
    return rmsnorm.rmsnorm(linear(x, wq_a), q_norm, eps)


def split_heads(q: torch.Tensor, n_heads: int) -> torch.Tensor:
    """``[..., n_heads * D]`` -> ``[..., n_heads, D]``."""
    if q.shape[-1] % n_heads:
        raise ArgumentError("n_heads", n_heads, f"a divisor of the last dim {q.shape[-1]}")
    return q.unflatten(-1, (n_heads, q.shape[-1] // n_heads))


def q_heads(q: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm every head over its D dims (no weight), then rotate its last dims.

    q ``[B, T, H, D]``, positions ``[T]`` -> ``[B, T, H, D]``.
    """
    return rope.apply(rmsnorm.rmsnorm(q, None, eps), positions[:, None], freqs)


def kv_vector(
    kv: torch.Tensor,
    kv_norm: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
    kv_codec: Codec | None = None,
) -> torch.Tensor:
    """Norm with weight, rotate, and round as the cache would.

    kv ``[B, T, D]`` (= wkv x), kv_norm ``[D]``, positions ``[T]`` -> ``[B, T, D]``.
    """
    kv = rope.apply(rmsnorm.rmsnorm(kv, kv_norm, eps), positions, freqs)
    return kv if kv_codec is None else kv_codec(kv)


def qnorm_rope_kv(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    eps: float,
    kv_codec: Codec | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the fused operator. :func:`q_heads` of q ``[B, T, H, D]`` and :func:`kv_vector` of kv ``[B, T, D]``."""
    return q_heads(q, positions, freqs, eps), kv_vector(kv, kv_norm, positions, freqs, eps, kv_codec)
