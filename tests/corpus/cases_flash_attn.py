"""FlashAttention 4 (flash-attn-4 on PyPI): forward for SM100 and SM90, and MLA dense and with gathered keys.

What they exercise: MMA with A from tensor memory, softmax with exp2 on the FMA pipe (add.rm.f32x2), split keys, 2-CTA
MMA, gathering by cp.async, `.ws` MMA whose A halves differ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from corpus import BF16, FP8, U_BF16, U_E4M3, Case, Check, attention, attention_check, normal

MODULE = "flash_attn.cute"

# Lints; see data/emulator/findings.md.
LEFTOVER = frozenset({"mbarrier_tx_leftover"})
DOUBLE_ARRIVE = frozenset({"cluster_double_arrive"})
UNFENCED = frozenset({"missing_proxy_fence_cp_async"})
PHASES = frozenset({"barrier_phase_mixed"})  # real: see data/emulator/findings.md


def _log_sum_exp(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> Check:
    """Computed from unrounded P, so fp32 with approximated exp2 and log2 for every input format."""
    return Check("lse", got, want, 1e-4, 0.0, 1e-3, "fp32 with exp2 by a polynomial of relative error 1e-4")


def _growth(keys: int) -> torch.Tensor:
    """Factors from 8 to 1/2 of the keys in order: the kernels go from the last tile to the first."""
    return torch.linspace(8.0, 0.5, keys)[None, :, None, None]


def forward(
    queries: int = 256,
    keys: int = 256,
    heads: int = 1,
    kv_heads: int = 1,
    d: int = 128,
    dv: int | None = None,
    causal: bool = False,
    dtype: torch.dtype = BF16,
    growing: bool = False,
    **options: Any,
) -> list[Check]:
    """softmax(Q K^T / sqrt(d)) V with its log-sum-exp.

    ``growing``: keys are the longer the later they are read; the running maximum rises and the output is rescaled.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k = normal(1, queries, heads, d).to(dtype), normal(1, keys, kv_heads, d).to(dtype)
    k = (k.float() * _growth(keys)).to(dtype) if growing else k
    v = normal(1, keys, kv_heads, dv or d).to(dtype)
    out, lse = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **options)[:2]
    want, want_lse = attention(q, k, v, 1 / math.sqrt(d), causal)
    u = U_E4M3 if dtype == FP8 else U_BF16
    return [attention_check("out", out, want, v, u), _log_sum_exp(lse, want_lse, dtype)]


def mla(
    queries: int = 1,
    keys: int = 256,
    heads: int = 128,
    topk: int = 0,
    causal: bool = False,
    dtype: torch.dtype = BF16,
    growing: bool = False,
) -> list[Check]:
    """Absorbed MLA: rope part of 64, latent part of 512 that is also V; one KV head; optionally top-k keys a query.

    ``growing``: as for `forward`; keys are chosen in order then.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    d, dv = 64, 512
    q, k = normal(1, queries, heads, d).to(dtype), normal(1, keys, 1, d).to(dtype)
    qv, v = normal(1, queries, heads, dv).to(dtype), normal(1, keys, 1, dv).to(dtype)
    v = (v.float() * _growth(keys)).to(dtype) if growing else v
    scale = 1 / math.sqrt(d + dv)
    indices = None
    if topk:
        chosen = torch.stack([torch.randperm(keys)[:topk] for _ in range(queries)])
        indices = (chosen.sort(-1).values if growing else chosen)[None].to(torch.int32).contiguous()
    out, lse = _flash_attn_fwd(
        q, k, v, qv=qv, causal=causal, return_lse=True, gather_kv_indices=indices, softmax_scale=scale
    )[:2]
    both_q, both_k = torch.cat([q.float(), qv.float()], -1), torch.cat([k.float(), v.float()], -1)
    u = U_E4M3 if dtype == FP8 else U_BF16
    if topk:
        rows = []
        for i in range(queries):
            chosen = indices[0, i].long()
            rows.append(attention(both_q[:, i : i + 1], both_k[:, chosen], v[:, chosen], scale)[0])
        return [attention_check("out", out, torch.cat(rows, 1), v, u)]
    want, want_lse = attention(both_q, both_k, v, scale, causal)
    return [attention_check("out", out, want, v, u), _log_sum_exp(lse.permute(0, 2, 1), want_lse, dtype)]


CASES = [
    Case("fa4", MODULE, forward, lints=LEFTOVER),
    Case("fa4_causal", MODULE, lambda: forward(causal=True), lints=LEFTOVER),
    Case("fa4_rescaled", MODULE, lambda: forward(keys=512, growing=True), lints=LEFTOVER),
    Case("fa4_gqa", MODULE, lambda: forward(queries=64, keys=512, heads=4), lints=LEFTOVER),
    Case("fa4_decode", MODULE, lambda: forward(queries=1, keys=512, heads=8), lints=LEFTOVER),
    Case("fa4_split", MODULE, lambda: forward(queries=64, keys=512, num_splits=2), lints=LEFTOVER),
    Case("fa4_d192", MODULE, lambda: forward(d=192, dv=128), lints=LEFTOVER),
    Case("fa4_d256", MODULE, lambda: forward(d=256), lints=LEFTOVER),
    Case("fa4_fp8", MODULE, lambda: forward(dtype=FP8), lints=LEFTOVER),
    Case("fa4_mla", MODULE, mla, lints=DOUBLE_ARRIVE),
    Case("fa4_mla_causal", MODULE, lambda: mla(queries=2, causal=True), lints=DOUBLE_ARRIVE),
    Case("fa4_mla_rescaled", MODULE, lambda: mla(growing=True), lints=DOUBLE_ARRIVE),
    # The 1-CTA kernels rescale O without tcgen05.wait::st: right only if stores complete before the MMA reads.
    Case(
        "fa4_mla_fp8",
        MODULE,
        lambda: mla(dtype=FP8),
        schedule="oldest_first",
        lints=UNFENCED,
        errors=frozenset({"missing_tcgen05_wait", "race_tensor", "tmem_after_free"}),
        unstable="wrong",
    ),
    Case("fa4_mla_gather", MODULE, lambda: mla(queries=2, keys=512, topk=256), lints=DOUBLE_ARRIVE | UNFENCED),
    Case(
        "fa4_mla_gather_64_heads",
        MODULE,
        lambda: mla(queries=2, keys=512, heads=64, topk=256),
        lints=UNFENCED,
        errors=PHASES,
    ),
    Case(
        "fa4_mla_gather_64_heads_rescaled",
        MODULE,
        lambda: mla(queries=2, keys=512, heads=64, topk=256, growing=True),
        lints=UNFENCED,
        errors=PHASES | {"missing_tcgen05_wait", "race_tensor"},
        unstable="wrong",
    ),
    Case("fa4_sm90", MODULE, forward, arch="sm_90a"),
    Case("fa4_causal_sm90", MODULE, lambda: forward(causal=True), arch="sm_90a"),
]
