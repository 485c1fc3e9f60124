"""Attend to a paged turbo4 cache, one query token a request.

    q' = R q             once a head; R flips signs and multiplies by the Hadamard matrix
    s_t = scale * n_t (q' . c_t)        the centroids of token t, its norm outside the product
    p = softmax(s)
    o = R^T sum_t (p_t m_t) d_t         values' norms folded into P, rotated back once

`elementwise` is the same without any of this: every vector dequantised and rotated back first. Both agree to rounding.

A cache is uint8 [P, heads, bytes of a page], pages as in `formats.turbo4`; entry t of request b is in page
table[b, t / page_size]. A length of 0 or less: O is 0 and the LSE is -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib.formats import turbo4
from dsv4lib.formats.turbo4 import Encoded


class Attention(NamedTuple):
    """Output of an attention.

    Attributes:
        o: [..., H, D]. lse: [..., H], natural logarithm of the sum of exponentials.
    """

    o: torch.Tensor
    lse: torch.Tensor


def rotated(q: torch.Tensor, k: Encoded, v: Encoded, scale: float, seed: int) -> Attention:
    """Attend in the rotated space.

    Args:
        q: fp64 [G, D], heads that share K and V. k, v: [n, D / 2] and [n]. scale: of logits. seed: of the rotation.
    """
    dim = q.shape[-1]
    table = turbo4.centroids(dim).to(q.device)
    logits = scale * k.norms.double() * (turbo4.rotate(q, seed) @ table[turbo4.unpack(k.packed).long()].T)
    p = logits.softmax(-1) * v.norms.double()
    return Attention(turbo4.unrotate(p @ table[turbo4.unpack(v.packed).long()], seed), logits.logsumexp(-1))


def elementwise(q: torch.Tensor, k: Encoded, v: Encoded, scale: float, seed: int) -> Attention:
    """Dequantise all elements, then attend; arguments as of `rotated`."""
    keys, values = (turbo4.decode(one, seed, torch.float64) for one in (k, v))
    logits = scale * q @ keys.T
    return Attention(logits.softmax(-1) @ values, logits.logsumexp(-1))


def entries(pages: torch.Tensor, dim: int, page_size: int, table: torch.Tensor, length: int) -> Encoded:
    """Gather the first ``length`` entries of all heads: [heads, length, D / 2] and [heads, length].

    Args:
        pages: uint8 [P, heads, bytes]. table: int32 [W], pages of the request.
    """
    used = table[: -(-length // page_size)].long()
    where = turbo4.layout(dim)
    heads = pages.shape[1]
    data, norms = where.views(pages[used].flatten(0, 1), page_size)
    data = data.unflatten(0, (len(used), heads)).transpose(0, 1).flatten(1, 2)[:, :length]
    norms = norms.unflatten(0, (len(used), heads)).transpose(0, 1).flatten(1, 2)[:, :length]
    return Encoded(data.contiguous(), norms.contiguous().view(torch.float16)[..., 0])


def turbo4_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
    seed: int,
) -> Attention:
    """Attend to the caches in fp64.

    Args:
        q: [B, H, D]. k_pages, v_pages: uint8 [P, heads, bytes], H a multiple of heads; may be the same.
        table: int32 [B, W]. lengths: int32 [B]. page_size: entries of a page. scale: of logits. seed: of the rotation.

    Returns:
        o fp64 [B, H, D] and lse fp64 [B, H].
    """
    batch, heads, dim = q.shape
    kv_heads = k_pages.shape[1]
    o = torch.zeros(batch, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full_like(o[..., 0], -torch.inf)
    for b, length in enumerate(lengths.tolist()):
        if length <= 0:
            continue
        k, v = (entries(pages, dim, page_size, table[b], length) for pages in (k_pages, v_pages))
        for h, group in enumerate(q[b].double().unflatten(0, (kv_heads, -1))):
            own = slice(h * len(group), (h + 1) * len(group))
            of_head = Encoded(k.packed[h], k.norms[h]), Encoded(v.packed[h], v.norms[h])
            o[b, own], lse[b, own] = rotated(group, *of_head, scale, seed)
    return Attention(o, lse)
