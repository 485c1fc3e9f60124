"""FlashAttention 4, continued: masks, paged keys, sequences of different lengths, and the backward pass.

What they exercise beyond cases_flash_attn: loads by cp.async and by page table, partly filled tiles, dQ summed by bulk
reductions of fp32 in global memory (SM100, SM90), mma.sync (SM80).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from cases_flash_attn import LEFTOVER, MODULE, UNFENCED
from corpus import BF16, U_BF16, Case, Check, attention_check, normal

# Lints; see data/emulator/findings.md.
SAME_VALUE = frozenset({"race_global_same_value"})
COMPLETION = frozenset({"race_through_completion"})


def _scores(q: torch.Tensor, k: torch.Tensor, cap: float | None = None) -> torch.Tensor:
    """Scaled logits (heads, queries, keys) of one sequence; q (queries, heads, d), k (keys, KV heads, d)."""
    k = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / math.sqrt(q.shape[-1])
    return scores if cap is None else cap * torch.tanh(scores / cap)


def _output(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(scores) V: (queries, heads, d)."""
    v = v.float().repeat_interleave(scores.shape[0] // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)


def masked(
    queries: int = 200, keys: int = 328, left: int | None = None, right: int | None = None, cap: float | None = None
) -> list[Check]:
    """A sliding window (keys from i - left to i + right, aligned at the end) or capped logits; ragged sizes."""
    from flash_attn.cute.interface import _flash_attn_fwd

    d = 128
    q, k, v = normal(queries, 2, d), normal(keys, 1, d), normal(keys, 1, d)
    options: dict[str, Any] = {"window_size_left": left, "window_size_right": right, "softcap": cap}
    out = _flash_attn_fwd(q[None], k[None], v[None], **options)[0][0]
    scores = _scores(q, k, cap)
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    hidden |= offset < -left if left is not None else False
    hidden |= offset > right if right is not None else False
    return [attention_check("out", out, _output(scores.masked_fill(hidden, -torch.inf), v), v, U_BF16)]


def ragged_batch(causal: bool = True) -> list[Check]:
    """Three sequences of 37, 200 and 128 tokens in one call."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    d, lengths = 128, [37, 200, 128]
    starts = torch.tensor([0, 37, 237, 365], dtype=torch.int32)
    q, k, v = (normal(365, 1, d) for _ in range(3))
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=200, max_seqlen_k=200, causal=causal
    )
    out = out[0] if isinstance(out, tuple) else out
    parts = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        later = torch.ones(len(qs), len(qs)).triu(1).bool() if causal else torch.zeros(len(qs), len(qs)).bool()
        parts.append(_output(_scores(qs, ks).masked_fill(later, -torch.inf), vs))
    return [attention_check("out", out, torch.cat(parts), v, U_BF16)]


def paged(page: int = 128, used: int = 300) -> list[Check]:
    """Keys lie in pages in random order; the last one is partly filled."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    d, pages = 128, 384 // page
    q, cache_k, cache_v = normal(1, 64, 2, d), normal(pages + 2, page, 1, d), normal(pages + 2, page, 1, d)
    table = torch.randperm(pages + 2)[:pages][None].to(torch.int32)
    out = flash_attn_varlen_func(
        q, cache_k, cache_v, page_table=table, seqused_k=torch.tensor([used], dtype=torch.int32)
    )
    out = out[0] if isinstance(out, tuple) else out
    k, v = (cache[table[0].long()].reshape(-1, 1, d)[:used] for cache in (cache_k, cache_v))
    return [attention_check("out", out[0], _output(_scores(q[0], k), v), v, U_BF16)]


def backward(
    queries: int = 256, keys: int = 256, heads: int = 1, kv_heads: int = 1, d: int = 128, causal: bool = False
) -> list[Check]:
    """dQ, dK, dV of attention with a random output gradient."""
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v = (normal(1, n, h, d) for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    dout = normal(1, queries, heads, d)
    inputs = [t[0].float().requires_grad_(True) for t in (q, k, v)]
    later = torch.ones(queries, keys).triu(keys - queries + 1).bool() if causal else None
    with torch.enable_grad():
        scores = _scores(*inputs[:2])
        scores = scores if later is None else scores.masked_fill(later, -torch.inf)
        out = _output(scores, inputs[2])
        wants = torch.autograd.grad(out, inputs, dout[0].float())
    lse = torch.logsumexp(scores.detach(), -1)[None].contiguous()
    got = _flash_attn_bwd(q, k, v, out.detach()[None].to(BF16), dout, lse, causal=causal)
    # P, dS and the output are rounded to bf16: three independent errors of each product, and the result's own.
    bound = 4 * U_BF16 / math.sqrt(3)
    return [
        Check(name, g[0], w, bound, 1.01 * U_BF16, 0.03 * float(w.abs().max()), "P, dS and the result rounded to bf16")
        for name, g, w in zip(("dq", "dk", "dv"), got, wants, strict=False)
    ]


CASES = [
    Case("fa4_window", MODULE, lambda: masked(left=100, right=0), lints=LEFTOVER),
    Case("fa4_softcap", MODULE, lambda: masked(cap=2.0), lints=LEFTOVER),
    Case("fa4_ragged_batch", MODULE, ragged_batch, lints=LEFTOVER),
    Case("fa4_paged", MODULE, paged, lints=LEFTOVER),
    Case("fa4_paged_16", MODULE, lambda: paged(16), lints=LEFTOVER | UNFENCED),
    Case("fa4_backward", MODULE, backward, lints=SAME_VALUE | COMPLETION),
    Case("fa4_backward_causal_gqa", MODULE, lambda: backward(heads=2, causal=True), lints=SAME_VALUE | COMPLETION),
    Case("fa4_backward_d64", MODULE, lambda: backward(d=64), lints=SAME_VALUE),
    Case("fa4_window_sm90", MODULE, lambda: masked(left=100, right=0), arch="sm_90a"),
    Case("fa4_ragged_batch_sm90", MODULE, ragged_batch, arch="sm_90a"),
    Case("fa4_paged_sm90", MODULE, paged, arch="sm_90a"),
    Case("fa4_backward_sm90", MODULE, backward, arch="sm_90a", lints=SAME_VALUE),
    Case(  # nothing uses what was never written: see data/emulator/findings.md
        "fa4_sm80",
        MODULE,
        lambda: masked(left=None, right=0),
        arch="sm_80",
        lints=frozenset({"uninitialised_smem_unused"}),
    ),
]
