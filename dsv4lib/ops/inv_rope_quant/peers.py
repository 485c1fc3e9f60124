"""Time a peer of `inv_rope_quant`: vLLM's Triton kernel. Groups of heads are those of the model's output projection."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider

HEADS = 8  # of a group, in both models


def providers() -> tuple[Provider, ...]:
    """vLLM's."""
    return (Provider("vLLM Triton", _vllm),)


def _vllm(given: Given) -> peers.Bound:
    run = peers.load("vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant").fused_inv_rope_fp8_quant
    o = given["o"]
    tokens, heads, dim = o.shape

    def joined(x: torch.Tensor) -> torch.Tensor:
        """[T, groups, heads * n] as [T, H, n], in memory order."""
        return x.reshape(tokens, heads, -1)

    return peers.bound(
        lambda: run(o, given["positions"], given["cos_sin"], heads // HEADS, HEADS, dim - 64, 64),
        codes=lambda out: joined(out[0].view(torch.uint8)),
        scales=lambda out: joined(out[1]),
    )
