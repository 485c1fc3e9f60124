"""cuDNN's Python frontend, continued: native sparse attention, the compressor of DeepSeek-V4, backward, top-k, GEMM.

What they exercise beyond cases_cudnn: mma.sync and cp.async on SM100, radix selection with shared atomics, fp32
reductions into global memory, SwiGLU epilogues.
"""

from __future__ import annotations

import math

import torch
from cases_cudnn import MODULE
from corpus import BF16, U_BF16, Case, Check, attention, attention_check, normal, rounded

COMPLETION = frozenset({"race_through_completion"})  # see data/emulator/findings.md


def selected_blocks(topk: int = 2, block: int = 64) -> list[Check]:
    """NSA: each token attends to its own blocks of 64 keys; 16 query heads share a KV head."""
    from cudnn.native_sparse_attention.selection.api import selection_attention_wrapper

    tokens, heads, d = 256, 16, 128
    q, k, v = normal(tokens, heads, d), normal(tokens, 1, d), normal(tokens, 1, d)
    chosen = torch.stack([torch.randperm(tokens // block)[:topk] for _ in range(tokens)])
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    counts = torch.full((tokens, 1), topk, dtype=torch.int32)
    out = selection_attention_wrapper(
        q, k, v, chosen[:, None].to(torch.int32), counts, starts, starts, block_size=block, scale_softmax=d**-0.5
    )["o_tensor"]
    visible = torch.zeros(tokens, tokens // block, dtype=torch.bool).scatter_(1, chosen, True)
    scores = torch.einsum("qhd,kd->hqk", q.float(), k[:, 0].float()) * d**-0.5
    scores = scores.masked_fill(~visible.repeat_interleave(block, 1), -torch.inf)
    want = torch.einsum("hqk,kd->qhd", torch.softmax(scores, -1), v[:, 0].float())
    return [attention_check("o", out, want, v, U_BF16)]


def compressed_attention() -> list[Check]:
    """NSA: attention over keys that stand for blocks, here of one token; causal."""
    from cudnn.native_sparse_attention.compression.api import compression_attention_wrapper

    q, k, v = normal(1, 2, 256, 128), normal(1, 1, 256, 128), normal(1, 1, 256, 128)
    out = compression_attention_wrapper(q, k, v, scale_softmax=128**-0.5)["o_tensor"]
    want, _ = attention(*(t.transpose(1, 2) for t in (q, k, v)), 128**-0.5, causal=True)
    return [attention_check("o", out.transpose(1, 2), want, v, U_BF16)]


def compressor(ratio: int, overlap: bool, d: int = 128) -> list[Check]:
    """DeepSeek-V4's pooling: a softmax over the scores of a block, for each feature; overlapping blocks see the first
    half of the features of the block before, too."""
    from cudnn.csa.compressor.api import csa_compressor_forward_wrapper

    blocks, halves = 5, 1 + overlap
    tokens = blocks * ratio
    kv, score, ape = normal(tokens, halves * d), normal(tokens, halves * d), torch.randn(ratio, halves * d)
    starts = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([0, blocks], dtype=torch.int32)
    out = csa_compressor_forward_wrapper(kv, score, ape, *starts, ratio=ratio, head_dim=d, coff=halves)["out"]
    values = kv.float().reshape(blocks, ratio, halves, d)
    logits = (score.float().reshape(blocks, ratio, -1) + ape).reshape(blocks, ratio, halves, d)
    if overlap:
        values = torch.cat([torch.cat([torch.zeros(1, ratio, d), values[:-1, :, 0]]), values[:, :, 1]], 1)
        before = torch.cat([torch.full((1, ratio, d), -torch.inf), logits[:-1, :, 0]])
        logits = torch.cat([before, logits[:, :, 1]], 1)
    else:
        values, logits = values[:, :, 0], logits[:, :, 0]
    return [rounded("out", out, (torch.softmax(logits, 1) * values).sum(1), slack=1e-3)]


def top_k(columns: int = 4096, k: int = 512) -> list[Check]:
    """The k largest of each row, in any order; one row is shorter than k."""
    from cudnn.deepseek_sparse_attention.indexer_top_k.api import indexer_top_k_wrapper

    lengths = torch.tensor([columns, 3000, 300], dtype=torch.int32)
    x = torch.randn(3, columns)
    result = indexer_top_k_wrapper(x, lengths, k)
    checks = []
    for row, n in enumerate(lengths.tolist()):
        want = x[row, :n].topk(min(n, k)).values
        index = result["indices"][row]
        got = x[row][index[index >= 0].long()].sort(descending=True).values
        checks.append(Check(f"row {row}", got, want, 0.0, 0.0, 0.0, "selection is exact"))
    return checks


def sparse_attention_backward(heads: int = 64, topk: int = 128) -> list[Check]:
    """dQ, dKV and the gradient of the sinks of `cases_cudnn.sparse_attention`."""
    from cudnn.deepseek_sparse_attention.sparse_attention_backward.api import sparse_attention_backward_wrapper

    queries, keys, d = 2, 256, 512
    q, kv, sink, dout = normal(queries, heads, d), normal(keys, d), torch.randn(heads), normal(queries, heads, d)
    chosen = torch.stack([torch.randperm(keys)[:topk] for _ in range(queries)])
    inputs = [t.float().requires_grad_(True) for t in (q, kv, sink)]
    with torch.enable_grad():
        scores = torch.einsum("qhd,qkd->qhk", inputs[0], inputs[1][chosen]) * d**-0.5
        column = inputs[2][None, :, None].expand(queries, heads, 1)
        p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        out = torch.einsum("qhk,qkd->qhd", p, inputs[1][chosen])
        wants = torch.autograd.grad(out, inputs, dout.float())
    lse = torch.logsumexp(scores.detach(), -1)
    got = sparse_attention_backward_wrapper(
        q, kv, out.detach().to(BF16), dout, lse, sink, chosen.to(torch.int32), softmax_scale=d**-0.5
    )
    bound = 4 * U_BF16 / math.sqrt(3)
    reason = "P, dS and the result rounded to bf16"
    return [
        Check(name, got[name].reshape(w.shape), w, bound, 1.01 * U_BF16, 0.03 * float(w.abs().max()), reason)
        for name, w in zip(("dq", "dkv", "d_sink"), wants, strict=True)
    ]


def gemm_swiglu() -> list[Check]:
    """Blocks of 32 columns alternate between what is gated and its gate; the product itself is returned too."""
    from cudnn.gemm.cutedsl.dense.swiglu.api import gemm_swiglu_wrapper_sm100

    m, n, k = 256, 256, 128
    a, b = normal(1, m, k).permute(1, 2, 0), (torch.randn(1, n, k) / math.sqrt(k)).to(BF16).permute(1, 2, 0)
    result = gemm_swiglu_wrapper_sm100(a, b)
    both = a[..., 0].float() @ b[..., 0].float().t()
    up, gate = both.reshape(m, -1, 2, 32).unbind(2)
    want = (up * torch.nn.functional.silu(gate)).reshape(m, n // 2)
    return [
        Check("ab", result["ab12_tensor"][..., 0], both, 1e-6, 0.0, 1e-5, "fp32 sums of exact products"),
        rounded("c", result["c_tensor"][..., 0], want, 2.0**-11, slack=1e-3),
    ]


CASES = [
    # Its last bulk stores are not waited for.
    Case(
        "cudnn_selected_blocks",
        MODULE,
        selected_blocks,
        slow=True,
        errors=frozenset({"lane_outside_mask"}),
        lints=frozenset({"async_read_after_exit"}),
    ),
    Case("cudnn_compressed_attention", MODULE, compressed_attention),
    Case("cudnn_compressor_4", MODULE, lambda: compressor(4, overlap=True)),
    Case("cudnn_compressor_128", MODULE, lambda: compressor(128, overlap=False)),
    Case("cudnn_top_k", MODULE, top_k),
    Case("cudnn_sparse_attention_backward", MODULE, sparse_attention_backward, lints=COMPLETION),
    Case("cudnn_gemm_swiglu", MODULE, gemm_swiglu),
]
