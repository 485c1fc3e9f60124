"""Attend to a paged cache of latents, one query token a request.

This is MLA as absorbed, MQA of 576 and 512 dims:

    s_t = sm_scale * (q_nope . c_t + q_pe . r_t)        entry t: latent c_t (512 dims), rotated key r_t (64)
    o = sum_t softmax(s)_t c_t                          lse = ln sum_t e^{s_t}

The projections W_UK and W_UV are outside: q_nope = q W_UK of a head, and o is multiplied by W_UV afterwards. Keys and
values of all heads are the same entries.

FP8: queries are q_scale times what is stored, entries kv_scale times. A length of 0 or less: o is 0, lse -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LATENT, ROPE = 512, 64


class MlaOutput(NamedTuple):
    """Output of an attention.

    Attributes:
        out: [B, H, 512]. lse: [B, H], natural logarithm of the sum of exponentials.
    """

    out: torch.Tensor
    lse: torch.Tensor


def entries(kv_cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Gather the first ``length`` entries of a request in fp64, [length, 576].

    Args:
        kv_cache: [P, page, 576]. pages: int32 [N], of the request; those past its length are not read.
    """
    page_size = kv_cache.shape[1]
    used = pages[: -(-length // page_size)].long()
    return kv_cache[used].double().flatten(0, 1)[:length]


def mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    sm_scale: float,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
) -> MlaOutput:
    """Attend in fp64.

    Args:
        q_nope: [B, H, 512]. q_pe: [B, H, 64]. kv_cache: [P, page, 576]. seq_lens: int32 [B]; more than the table has
            pages for: that many. page_table: int32 [B, N]. sm_scale: of logits. q_scale, kv_scale: see above.

    Returns:
        out fp64 [B, H, 512] and lse fp64 [B, H].
    """
    capacity = page_table.shape[1] * kv_cache.shape[1]
    out = q_nope.new_zeros(q_nope.shape, dtype=torch.float64)
    lse = torch.full_like(out[..., 0], -torch.inf)
    for b, length in enumerate(seq_lens.clamp(max=capacity).tolist()):
        if length <= 0:
            continue
        kv = kv_scale * entries(kv_cache, page_table[b], length)
        q = q_scale * torch.cat((q_nope[b].double(), q_pe[b].double()), -1)
        logits = sm_scale * q @ kv.T
        out[b], lse[b] = logits.softmax(-1) @ kv[:, :LATENT], logits.logsumexp(-1)
    return MlaOutput(out, lse)


def combine(out: torch.Tensor, lse: torch.Tensor) -> MlaOutput:
    """Combine splits of the tokens: weights e^{lse_i - lse}, lse = ln sum_i e^{lse_i}.

    Args:
        out: [splits, B, H, 512]. lse: [splits, B, H]; -inf: no tokens.
    """
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total).exp().masked_fill(total == -torch.inf, 0.0)
    return MlaOutput((weights[..., None] * out.double()).sum(0), total)
