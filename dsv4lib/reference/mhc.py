"""Run manifold-constrained hyper-connections (mHC). ``n`` residual streams feed a sublayer and take its output back.

One site (two per layer) computes from the streams X ``[..., n, d]``::

    z     = flatten(X)                                         n * d values
    m     = (fn z) / sqrt(mean(z^2) + rms_eps)                 n pre, n post, n * n comb values, in this order
    pre   = sigmoid(s_pre * m_pre + b_pre) + hc_eps
    post  = 2 * sigmoid(s_post * m_post + b_post)
    C     = sinkhorn(s_comb * m_comb + b_comb)                 n x n, row-major, near doubly stochastic
    x     = sum_i pre_i X_i                                    the sublayer's input (before its RMSNorm)
    X'_j  = post_j F(x) + sum_i C[i, j] X_i                    C transposed acts on the streams

Source: DSV4 paper, mHC section; the order of eps and normalisations is that of the released inference code.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError


def mixes(streams: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """``m = (fn z) / sqrt(mean(z^2) + rms_eps)`` with ``z = flatten(streams)``.

    streams ``[..., n, d]``, fn ``[M, n * d]`` -> ``[..., M]``. The norm has no weight and comes after the product.
    """
    if streams.dim() < 2 or fn.shape[-1] != streams.shape[-2] * streams.shape[-1]:
        allowed = f"[M, n * d] matching streams of shape {tuple(streams.shape)}"
        raise ArgumentError("fn.shape", tuple(fn.shape), allowed)
    z = streams.flatten(-2)
    return (z @ fn.mT) * torch.rsqrt(z.square().mean(-1, keepdim=True) + rms_eps)


def split(values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut ``[..., n * (2 + n)]`` into pre, post and comb.

    pre ``[..., n]``, post ``[..., n]`` and comb ``[..., n, n]`` (row-major).
    """
    if values.shape[-1] != n * (2 + n):
        raise ArgumentError("values.shape[-1]", values.shape[-1], f"n * (2 + n) = {n * (2 + n)}")
    pre, post, comb = values.split((n, n, n * n), dim=-1)
    return pre, post, comb.unflatten(-1, (n, n))


def pre_weights(logits: torch.Tensor, hc_eps: float) -> torch.Tensor:
    """``sigmoid(logits) + hc_eps``: how much of each stream the sublayer reads."""
    return torch.sigmoid(logits) + hc_eps


def post_weights(logits: torch.Tensor) -> torch.Tensor:
    """Return ``2 sigmoid(logits)``.

    It is how strongly each stream takes the sublayer's output: 1 at logit 0, no eps.
    """
    return 2 * torch.sigmoid(logits)


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Return a near doubly stochastic matrix of logits ``[..., n, n]``.

    ``iters`` row/column pairs, ending with columns.

    The first row step is the softmax, without eps in its denominator and with eps added to its result.
    """
    c = torch.softmax(logits, dim=-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iters: int,
    hc_eps: float,
    rms_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All three coefficient sets of one site.

    Args:
        streams: ``[..., n, d]``.
        fn: ``[n * (2 + n), n * d]``; base ``[n * (2 + n)]``; both ordered pre, post, comb.
        scale: ``[3]``: s_pre, s_post, s_comb.
        base: see fn.
        iters: Sinkhorn row/column pairs.
        hc_eps: eps of pre and Sinkhorn.
        rms_eps: eps of the normalisation of the mixes.

    Returns:
        pre ``[..., n]``, post ``[..., n]``, comb ``[..., n, n]``.
    """
    n = streams.shape[-2]
    m_pre, m_post, m_comb = split(mixes(streams, fn, rms_eps), n)
    b_pre, b_post, b_comb = split(base, n)
    pre_w = pre_weights(scale[0] * m_pre + b_pre, hc_eps)
    post_w = post_weights(scale[1] * m_post + b_post)
    comb = sinkhorn(scale[2] * m_comb + b_comb, iters, hc_eps)
    return pre_w, post_w, comb


def pre(streams: torch.Tensor, pre_w: torch.Tensor) -> torch.Tensor:
    """Return the sublayer input ``x = sum_i pre_i X_i``.

    streams ``[..., n, d]``, pre_w ``[..., n]`` -> ``[..., d]``.
    """
    return (pre_w.unsqueeze(-1) * streams).sum(-2)


def post(y: torch.Tensor, streams: torch.Tensor, post_w: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Write back: ``X'_j = post_j y + sum_i comb[i, j] X_i``.

    y ``[..., d]``, streams ``[..., n, d]``, post_w ``[..., n]``, comb ``[..., n, n]`` -> ``[..., n, d]``.
    """
    return post_w.unsqueeze(-1) * y.unsqueeze(-2) + comb.mT @ streams


def head_collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    hc_eps: float,
    rms_eps: float,
) -> torch.Tensor:
    """Collapse the streams before the final norm. ``h = sum_i w_i X_i``, ``w = sigmoid(scale m + base) + hc_eps``.

    streams ``[..., n, d]``, fn ``[n, n * d]``, scale ``[1]``, base ``[n]`` -> ``[..., d]``. No Sinkhorn, post or comb.
    """
    return pre(streams, pre_weights(scale * mixes(streams, fn, rms_eps) + base, hc_eps))
