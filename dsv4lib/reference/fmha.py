"""Compute core attention. One query head against shared keys that are also the values, with a learned sink.

One softmax over the union {window keys} + {compressed entries} + {sink}, the sink having value zero::

    s_j = scale * (q . kv_j)
    o   = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})

The sink is a raw logit per head (not multiplied by the scale) and shrinks the output also where the window is all there
is. Source: DSV4 paper eq. 27 (sink in the denominator).
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError


def window_visible(query_positions: torch.Tensor, key_positions: torch.Tensor, window: int) -> torch.Tensor:
    """Keys at positions t - window + 1 .. t, the query's own included: ``[T]``, ``[S]`` -> bool ``[T, S]``."""
    distance = query_positions[:, None] - key_positions[None, :]
    return (distance >= 0) & (distance < window)


def visible_from_limit(limit: torch.Tensor, size: int) -> torch.Tensor:
    """First ``limit`` of ``size`` entries: ``[T]`` -> bool ``[T, size]``."""
    return torch.arange(size, device=limit.device) < limit[:, None]


def visible_from_indices(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Entries named by ``indices`` ``[..., K]`` (-1 names none): bool ``[..., size]``."""
    if indices.numel() and int(indices.max()) >= size:
        raise ArgumentError("indices", int(indices.max()), f"-1 or an entry below {size}")
    # One extra column takes the -1 picks and is cut off again.
    seen = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    return seen.scatter(-1, torch.where(indices < 0, size, indices), True)[..., :size]


def sink_softmax(s: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """``p_j = e^{s_j} / (sum_j e^{s_j} + e^{sink})`` without overflow.

    s ``[..., H, S]`` with -inf for keys not visible, sink ``[H]`` or None. sink = -inf is no sink, +inf gives 0, and a
    row without keys is 0.
    """
    sink = s.new_full((s.shape[-2],), float("-inf")) if sink is None else sink
    sink = sink.to(s.dtype)[:, None]
    largest = sink.expand(*s.shape[:-1], 1)
    if s.shape[-1]:
        largest = torch.maximum(largest, s.amax(-1, keepdim=True))
    # Finite, so that inf - inf never appears; a constant for the gradient, since p does not depend on it.
    finite = torch.finfo(s.dtype)
    largest = largest.detach().clamp(finite.min, finite.max)
    e = torch.exp(s - largest)
    total = e.sum(-1, keepdim=True) + torch.exp(sink - largest)
    return e / torch.where(total == 0, 1, total)


def attend(
    q: torch.Tensor, kv: torch.Tensor, visible: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one list of keys.

    Args:
        q: ``[B, T, H, D]``.
        kv: ``[B, S, D]``, keys and values.
        visible: bool, broadcast to ``[B, T, S]``.
        sink: ``[H]`` or None.
        scale: of the dot products.

    Returns:
        o ``[B, T, H, D]``, and ``lse = log sum_j e^{s_j}`` ``[B, T, H]`` *without* the sink; -inf without keys.
    """
    if q.dim() != 4 or kv.dim() != 3 or kv.shape[0] != q.shape[0] or kv.shape[2] != q.shape[3]:
        raise ArgumentError("kv.shape", tuple(kv.shape), f"[B, S, D] matching q [B, T, H, D] = {tuple(q.shape)}")
    if sink is not None and sink.shape != (q.shape[2],):
        raise ArgumentError("sink.shape", tuple(sink.shape), f"[H] = ({q.shape[2]},)")
    s = scale * torch.einsum("bthd,bsd->bths", q, kv)
    s = s.masked_fill(~visible.expand(q.shape[0], q.shape[1], kv.shape[1]).unsqueeze(2), float("-inf"))
    o = torch.einsum("bths,bsd->bthd", sink_softmax(s, sink), kv)
    return o, torch.logsumexp(s, dim=-1)


def fmha(
    q: torch.Tensor,
    window_kv: torch.Tensor,
    window_mask: torch.Tensor,
    entries: torch.Tensor | None,
    entries_mask: torch.Tensor | None,
    sink: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to window keys, compressed entries and the sink in one softmax.

    Window keys ``[B, S1, D]``, entries ``[B, S2, D]`` (None for SWA).

    Masks are bool, True = visible, broadcast to ``[B, T, S1]`` and ``[B, T, S2]``. Returns as :func:`attend`.
    """
    if entries is None or entries_mask is None:
        return attend(q, window_kv, window_mask, sink, scale)
    batch, length = q.shape[:2]
    masks = [m.expand(batch, length, m.shape[-1]) for m in (window_mask, entries_mask)]
    return attend(q, torch.cat((window_kv, entries), dim=1), torch.cat(masks, dim=-1), sink, scale)


def sparse(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sink: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over index lists, as kernels take them. indices int64 ``[B, T, K]`` into kv ``[B, S, D]``, -1 skipped.

    An index listed twice counts twice. Returns as :func:`attend`.
    """
    if indices.numel() and int(indices.max()) >= kv.shape[1]:
        raise ArgumentError("indices", int(indices.max()), f"-1 or a row of kv below {kv.shape[1]}")
    batch = torch.arange(kv.shape[0], device=kv.device)[:, None, None]
    keys = kv[batch, indices.clamp_min(0)]
    s = scale * torch.einsum("bthd,btkd->bthk", q, keys)
    s = s.masked_fill((indices < 0).unsqueeze(2), float("-inf"))
    return torch.einsum("bthk,btkd->bthd", sink_softmax(s, sink), keys), torch.logsumexp(s, dim=-1)


def merge_raw(
    o: torch.Tensor, reference: torch.Tensor, total: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join parts that are not normalised. Part i has ``o_i = sum_j e^{s_j - m_i} kv_j``, ``l_i = sum_j e^{s_j - m_i}``.

    o ``[S, ..., H, D]``, reference m and total l ``[S, ..., H]`` (m is -inf where a part has no keys), sink ``[H]`` ->
    (o ``[..., H, D]``, lse ``[..., H]`` without the sink, -inf and zeros where no part has a key).
    """
    largest = reference.amax(0)
    weights = (reference - largest.masked_fill(largest.isinf(), 0.0)).exp()
    sums = (weights * total).sum(0)
    below = sums if sink is None else sums + (sink - largest).exp()
    combined = (weights[..., None] * o).sum(0) / below[..., None]
    return combined.masked_fill((sums == 0)[..., None], 0.0), largest + sums.log()


def merge(
    o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor, sink: torch.Tensor | None = None
) -> torch.Tensor:
    """Join two branches computed without sink. o = ``(e^l1 o1 + e^l2 o2) / (e^l1 + e^l2 + e^sink)``.

    o ``[..., H, D]``, lse ``[..., H]``, sink ``[H]`` -> ``[..., H, D]``. The sink belongs to the union, not to a part.
    """
    weights = sink_softmax(torch.stack((lse1, lse2), dim=-1), sink)
    return weights[..., :1] * o1 + weights[..., 1:] * o2
