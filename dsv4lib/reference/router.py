"""Which experts a token goes to, and with what weight.

    a = sqrt(softplus(W x))                                  affinity to every expert
    score layers:  experts = top-k of a + bias               the bias selects, and only that
    hash layers:   experts = tid2eid[token id]               a fixed table
    weights        = a[experts] / sum(a[experts]) * routed_scaling      the learned gate in both cases

Source: DSV4 paper, MoE section; released inference code.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, softplus

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import topk


def affinity(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``sqrt(softplus(W x))``: x ``[..., d]``, weight ``[E, d]`` -> ``[..., E]``, > 0."""
    return torch.sqrt(softplus(linear(x, weight)))


def select_by_score(a: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    """Return experts with the k largest ``a + bias``, best first.

    Ties: lower number. ``[..., E]`` -> int64 ``[..., k]``.
    """
    if k > a.shape[-1]:
        raise ArgumentError("k", k, f"at most the {a.shape[-1]} experts")
    return topk.topk(a + bias, k)


def select_by_hash(tokens: torch.Tensor, tid2eid: torch.Tensor) -> torch.Tensor:
    """Return experts of each token id. tokens int64 ``[...]``, tid2eid int64 ``[vocab, k]`` -> int64 ``[..., k]``."""
    return tid2eid[tokens]


def expert_weights(a: torch.Tensor, experts: torch.Tensor, routed_scaling: float) -> torch.Tensor:
    """Affinities of the chosen experts, normed to the sum ``routed_scaling``.

    a ``[..., E]``, experts int64 ``[..., k]`` -> ``[..., k]``.
    """
    chosen = a.gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * routed_scaling


def score_route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, routed_scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts int64 ``[..., k]`` and weights ``[..., k]`` by score.

    See the module for the rule.
    """
    a = affinity(x, weight)
    experts = select_by_score(a, bias, k)
    return experts, expert_weights(a, experts, routed_scaling)


def hash_route(
    x: torch.Tensor, weight: torch.Tensor, tid2eid: torch.Tensor, tokens: torch.Tensor, routed_scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts by token id, weights from the gate; see the module for the rule."""
    experts = select_by_hash(tokens, tid2eid)
    return experts, expert_weights(affinity(x, weight), experts, routed_scaling)
