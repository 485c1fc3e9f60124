"""Run the lightning indexer of CSA layers. It says which compressed entries a query attends to.

    iq     = codec(rope(wq_b qr))                                   index_heads x index_dim, no norm
    w      = weights_proj x * index_dim^-0.5 * index_heads^-0.5     one weight per head, may be negative
    score  = sum_h w_h ReLU(iq_h . ik_s)                            ReLU per head, before the sum
    picks  = top-k of the scores of the entries s < floor((t + 1) / rate)

Its keys ik come from a compressor of their own (:mod:`dsv4lib.reference.compressor` with width index_dim). The codec of
the released code is a Hadamard rotation followed by FP4 rounding; without rounding the rotation changes no score.
Source: DSV4 paper, CSA section.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import compressor, rope, topk
from dsv4lib.reference.qnorm_rope_kv import Codec, split_heads


def queries(
    qr: torch.Tensor,
    wq_b: torch.Tensor,
    n_heads: int,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    codec: Codec | None = None,
) -> torch.Tensor:
    """``iq = codec(rope(wq_b qr))``.

    qr ``[B, T, R]``, wq_b ``[HI * DI, R]``, positions ``[T]`` -> ``[B, T, HI, DI]``.
    """
    iq = rope.apply(split_heads(linear(qr, wq_b), n_heads), positions[:, None], freqs)
    return iq if codec is None else codec(iq)


def rotated(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Codec | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rotate queries by RoPE, then by ``rotation``: what is quantised.

    Args:
        q: ``[..., DI]`` as projected. cos, sin: ``[..., n]``, broadcast against the leading dims of q.
        rotation: of the last dim, by the Hadamard matrix in the released code; None: none.
        dtype: what each of the two is rounded to, bf16 in the released code, which stores them; None: nothing.
    """
    turned = compressor.rounded(rope.apply_tables(q, cos, sin), dtype)
    return turned if rotation is None else compressor.rounded(rotation(turned), dtype)


def head_weights(x: torch.Tensor, weights_proj: torch.Tensor, index_dim: int) -> torch.Tensor:
    """Return ``weights_proj x`` scaled by ``(index_dim * index_heads)^-0.5``. x ``[..., d]`` -> ``[..., HI]``."""
    return linear(x, weights_proj) * (index_dim * weights_proj.shape[0]) ** -0.5


def scores(iq: torch.Tensor, ik: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``sum_h w_h ReLU(iq_h . ik_s)``: iq ``[B, T, HI, DI]``, ik ``[B, S, DI]``, w ``[B, T, HI]`` -> ``[B, T, S]``."""
    if iq.shape[-1] != ik.shape[-1] or iq.shape[:-1] != w.shape:
        allowed = f"[B, S, DI] and w [B, T, HI] = {tuple(w.shape)} matching iq {tuple(iq.shape)}"
        raise ArgumentError("ik.shape", tuple(ik.shape), allowed)
    per_head = torch.relu(torch.einsum("bthd,bsd->bths", iq, ik))
    return torch.einsum("bths,bth->bts", per_head, w)


def select(index_scores: torch.Tensor, positions: torch.Tensor, rate: int, k: int) -> torch.Tensor:
    """Top-k among the entries each query may see, -1 padded.

    index_scores ``[B, T, S]``, positions ``[T]`` -> int64 ``[B, T, k]``.
    """
    return topk.topk(index_scores, k, compressor.visible_count(positions, rate))
