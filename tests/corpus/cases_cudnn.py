"""cuDNN's Python frontend (nvidia-cudnn-frontend on PyPI): DeepSeek sparse attention and its indexer.

What they exercise: gathering copies, `.ws` MMA, A from tensor memory with two different halves (1-CTA and 2-CTA).
"""

from __future__ import annotations

import torch
from corpus import U_BF16, Case, Check, attention, attention_check, normal

MODULE = "cudnn"
LANES = frozenset({"tmem_lane_quarter"})  # see data/emulator/findings.md


def sparse_attention(heads: int = 64, topk: int = 128, queries: int = 2, keys: int = 512) -> list[Check]:
    """Every query attends to its own top-k of one KV head of 512, with a sink per head."""
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import sparse_attention_forward_wrapper

    d = 512
    q, kv, sink = normal(queries, heads, d), normal(keys, d), torch.randn(heads)
    chosen = torch.stack([torch.randperm(keys)[:topk] for _ in range(queries)]).to(torch.int32)
    out = sparse_attention_forward_wrapper(q, kv, chosen, attn_sink=sink, indexer_topk=0)["out"]
    rows = []
    for i in range(queries):
        mine = kv[chosen[i].long()][None, :, None]
        rows.append(attention(q[i][None, None], mine, mine, d**-0.5, sink=sink)[0][0])
    return [attention_check("out", out, torch.cat(rows), kv, U_BF16)]


def indexer() -> list[Check]:
    """Scores sum_h w_h relu(q_h . k); the wrapper masks keys that a query may not see yet with -inf.

    Query i sees key j when (j + 1) * ratio <= i + 1: a compressed entry is complete when its last token is there.
    """
    from cudnn.deepseek_sparse_attention.indexer_forward.api import indexer_forward_wrapper

    queries, keys, heads, d, ratio = 128, 256, 64, 128, 4
    q, k, w = normal(1, queries, heads, d), normal(1, keys, 1, d), torch.randn(1, queries, heads)
    result = indexer_forward_wrapper(q, k, w, ratio=ratio)
    scores = next(t for t in result.values() if isinstance(t, torch.Tensor)).reshape(queries, -1).float()
    products = torch.einsum("qhd,kd->qhk", q[0].float(), k[0, :, 0].float())
    want = (torch.relu(products) * w[0, :, :, None]).sum(1)[:, : scores.shape[1]]
    visible = (torch.arange(scores.shape[1]) + 1) * ratio <= torch.arange(queries)[:, None] + 1
    masked = scores[~visible]
    return [
        Check("visible scores", scores[visible], want[visible], 1e-5, 0.0, 1e-3, "fp32 sums of exact products"),
        Check("masked", torch.isneginf(masked), torch.ones_like(masked), 0.0, 0.0, 0.0, "exactly these keys"),
    ]


CASES = [
    Case("cudnn_sparse_attention", MODULE, sparse_attention, lints=LANES),
    Case("cudnn_sparse_attention_512", MODULE, lambda: sparse_attention(topk=512, queries=1, keys=1024), lints=LANES),
    Case(  # its error is real: see data/emulator/findings.md
        "cudnn_sparse_attention_128_heads",
        MODULE,
        lambda: sparse_attention(heads=128),
        errors=frozenset({"mbarrier_phase_unordered"}),
    ),
    Case(  # its error is real: see data/emulator/findings.md
        "cudnn_indexer",
        MODULE,
        indexer,
        lints=frozenset({"race_through_completion"}),
        errors=frozenset({"race_tensor", "tmem_after_free"}),
    ),
]
