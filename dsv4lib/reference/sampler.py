"""Choose the next token. Greedy, temperature, top-p, reproducible from a generator.

Sampling divides the probabilities by Exp(1) noise and takes the argmax, as the released code does: the exponential race
picks token i with probability p_i, without a cumulative sum.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError


def _refuse_nan(logits: torch.Tensor) -> None:
    if torch.isnan(logits).any():
        raise ArgumentError("logits", "a tensor with NaN", "numbers")


def _check_top_p(top_p: float) -> None:
    if not 0 < top_p <= 1:
        raise ArgumentError("top_p", top_p, "a number in (0, 1]")


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit, of equal ones the lowest id: ``[..., V]`` -> int64 ``[...]``."""
    _refuse_nan(logits)
    return logits.argmax(-1)


def probabilities(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    """Compute ``softmax(logits / temperature)`` cut by ``top_p``, renormed.

    Kept is the smallest set of top tokens that holds ``top_p``.

    Args:
        logits: ``[..., V]``.
        temperature: > 0.
        top_p: in (0, 1]; of equal probabilities the lower id is kept first.

    Returns:
        ``[..., V]``, at least fp32, sums to 1.
    """
    if not 0 < temperature < float("inf"):
        raise ArgumentError("temperature", temperature, "a finite number > 0 (0 for greedy in sample)")
    _check_top_p(top_p)
    _refuse_nan(logits)
    p = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
    if top_p == 1:
        return p
    order = torch.argsort(p, dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)
    # A token stays while the tokens before it hold less than top_p; the first always stays.
    kept = torch.where(ranked.cumsum(-1) - ranked < top_p, ranked, 0)
    p = torch.zeros_like(p).scatter(-1, order, kept)
    return p / p.sum(-1, keepdim=True)


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw one token per row: ``[..., V]`` -> int64 ``[...]``. Temperature 0 is :func:`greedy`."""
    if temperature == 0:
        _check_top_p(top_p)
        return greedy(logits)
    p = probabilities(logits, temperature, top_p)
    noise = torch.empty_like(p).exponential_(1.0, generator=generator)
    return (p / noise.clamp_min(torch.finfo(p.dtype).tiny)).argmax(-1)
