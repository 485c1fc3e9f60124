"""Peer of `qnorm_rope_kv`: vLLM's CUDA kernel, on pages of its own."""

from __future__ import annotations

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider


def providers() -> tuple[Provider, ...]:
    """vLLM's."""
    return (Provider("vLLM CUDA", _vllm),)


def _vllm(given: Given) -> peers.Bound:
    operators = peers.vllm_operators("_C_stable_libtorch", "_C")
    operator = operators.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
    q, kv, pages, slots = given["q"], given["kv"], given["pages"].clone(), given["indices"].long()
    places = given["positions"], given["cos_sin"]
    return peers.bound(
        lambda: operator(q, kv, pages, slots, *places, q.shape[1], given["eps"], given["page_size"]),
        q=lambda out: out,
        pages=lambda _: pages,
    )
