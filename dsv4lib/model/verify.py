"""Verify drafted tokens without changing the target model's distribution.

The output is distributed as if the target model had drawn every token itself.

Draft token x with draft probability q(x) and target probability p(x) is accepted with probability min(1, p(x) / q(x)).
The first rejected one is replaced by a draw from the residual, max(p - q, 0) normalised; if all are accepted, one more
token (the bonus) is drawn from the target. Source: Leviathan, Kalman, Matias 2023. So P(token = y) is
q(y) min(1, p(y) / q(y)) + (1 - sum_x min(p(x), q(x))) residual(y) = p(y).

Greedy verification is the same rule: p is 1 at the argmax and 0 elsewhere, so a draft is accepted where it matches and
the replacement is the argmax. A greedy draft is q with a single 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.model.noise import exponential, uniform
from dsv4lib.model.sampler import History, Settings, probabilities


class Verified(NamedTuple):
    """What came of K drafts a row.

    Attributes:
        tokens: int64 [B, K + 1]: accepted drafts, then one replacement or bonus, then -1. Padded rows are all -1.
        accepted: int64 [B], drafts accepted; so many tokens and one more are valid.
        broken: bool [B]: a distribution that was needed holds NaN.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    broken: torch.Tensor


def acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute the probability to accept a draft: min(1, p / q), elementwise.

    1 where q is 0: such a draft is never made.
    """
    return torch.where(q > 0, p / torch.where(q > 0, q, 1.0), 1.0).clamp(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the distribution of a replacement, [..., V].

    It is max(p - q, 0), divided by its sum; where that is 0 everywhere, it is p.
    """
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / torch.where(total > 0, total, 1.0), p)


def target_probabilities(
    logits: torch.Tensor, drafts: torch.Tensor, settings: Settings, history: History | None = None
) -> torch.Tensor:
    """Compute the distributions of K + 1 positions.

    Penalties count the drafts before each position.

    Args:
        logits: [B, K + 1, V] of the target, at the last token and at each draft.
        drafts: int64 [B, K], -1 where a row has fewer.
        settings: of the rows.
        history: before the drafts; not changed.

    Returns:
        [B, K + 1, V].
    """
    if logits.dim() != 3 or drafts.shape != (logits.shape[0], logits.shape[1] - 1):
        raise ArgumentError("drafts.shape", tuple(drafts.shape), f"[B, K] for logits {tuple(logits.shape)} [B, K+1, V]")
    counted = history.copy() if history is not None else None
    found = []
    for place in range(logits.shape[1]):
        if place and counted is not None:
            counted.add(drafts[:, place - 1])
        found.append(probabilities(logits[:, place], settings, counted))
    return torch.stack(found, dim=1)


def verify(
    drafts: torch.Tensor,
    target: torch.Tensor,
    settings: Settings,
    positions: torch.Tensor,
    draft: torch.Tensor | None = None,
) -> Verified:
    """Accept a prefix of each row's drafts and draw the token after it.

    Args:
        drafts: int64 [B, K]; -1 ends a row's drafts early.
        target: [B, K + 1, V], from `target_probabilities`.
        settings: of the rows.
        positions: int64 [B], place of the first draft in its sequence.
        draft: [B, K, V], what the drafts were drawn from; None: they are certain (a greedy draft).

    Returns:
        Tokens and counts; nothing is read back by the host.
    """
    batch, k = drafts.shape
    vocab = settings.vocab
    if tuple(target.shape) != (batch, k + 1, vocab) or batch != len(settings.active):
        raise ArgumentError("target.shape", tuple(target.shape), f"[B, K + 1, V] = {(batch, k + 1, vocab)}")
    if draft is not None and tuple(draft.shape) != (batch, k, vocab):
        raise ArgumentError("draft.shape", tuple(draft.shape), f"[B, K, V] = {(batch, k, vocab)}")
    p = target.to(torch.float64)
    real = drafts >= 0
    ids = drafts.clamp(min=0)[..., None]
    certain = torch.zeros(batch, k, vocab, dtype=torch.float64, device=p.device).scatter_(-1, ids, 1.0)
    q = certain if draft is None else draft.to(torch.float64)
    q = torch.where(real[..., None], q, 0.0)
    places = positions[:, None] + torch.arange(k + 1, device=p.device)
    seeds = settings.seed[:, None].expand_as(places)
    chance = acceptance(p[:, :k].gather(-1, ids)[..., 0], q.gather(-1, ids)[..., 0])
    passed = real & (uniform(seeds[:, :k], places[:, :k], "accept") < chance)
    accepted = passed.to(torch.int64).cumprod(-1).sum(-1)
    # With q = 0 after the last draft the residual is the target's own distribution: the bonus needs no other path.
    q = torch.cat((q, torch.zeros_like(p[:, :1])), dim=1)
    at = accepted[:, None, None].expand(-1, 1, vocab)
    last_p, last_q = p.gather(1, at)[:, 0], q.gather(1, at)[:, 0]
    place = positions + accepted
    race = residual(last_p, last_q) / exponential(settings.seed, place, "token", vocab)
    step = torch.arange(k + 1, device=p.device)
    tokens = torch.where(step < accepted[:, None], torch.nn.functional.pad(drafts, (0, 1), value=-1), -1)
    tokens = torch.where(step == accepted[:, None], race.argmax(-1)[:, None], tokens)
    tokens = torch.where(settings.active[:, None], tokens, -1)
    broken = settings.active & ~(last_p.isfinite().all(-1) & last_q.isfinite().all(-1))
    return Verified(tokens, torch.where(settings.active, accepted, 0), broken)
