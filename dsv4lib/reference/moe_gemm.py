"""The experts: a clamped SwiGLU, routed and shared.

    gate = min(w1 x, limit)         only from above, before silu
    up   = clip(w3 x, -limit, limit)
    y    = w2 (silu(gate) * up * routing_weight)

The routing weight is applied before w2, as in the released code: exact arithmetic does not care, but a quantised
activation contains it. The shared expert is the same with weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from dsv4lib.errors import ArgumentError


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)``, elementwise."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    limit: float,
    routing_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run one expert.

    x ``[..., d]``, w1 (gate) and w3 (up) ``[I, d]``, w2 (down) ``[d, I]``, routing_weight ``[...]``.
    """
    h = swiglu(linear(x, w1), linear(x, w3), limit)
    if routing_weight is not None:
        h = h * routing_weight.unsqueeze(-1)
    return linear(h, w2)


def moe_gemm(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w1: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    w3: Sequence[torch.Tensor],
    limit: float,
) -> torch.Tensor:
    """Sum of the routed experts of each token.

    Args:
        x: ``[N, d]``.
        experts: int64 ``[N, k]``; one listed twice in a row counts twice.
        weights: ``[N, k]``.
        w1, w2, w3: one matrix per expert; see :func:`expert`.
        limit: of the SwiGLU clamp.

    Returns:
        ``[N, d]``; experts are added in the order of their numbers.
    """
    if experts.shape != weights.shape or experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ArgumentError(
            "experts.shape", tuple(experts.shape), f"[N, k] = weights {tuple(weights.shape)}, N = {x.shape[0]}"
        )
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < len(w1):
        raise ArgumentError("experts", f"{int(experts.min())}..{int(experts.max())}", f"numbers 0..{len(w1) - 1}")
    y = torch.zeros_like(x)
    for e in torch.unique(experts).tolist():
        token, slot = torch.where(experts == e)
        y = y.index_add(0, token, expert(x[token], w1[e], w2[e], w3[e], limit, weights[token, slot]))
    return y
