"""Time peers of `indexer_q`: vLLM's Triton and CuTe DSL kernels. They have no Hadamard rotation."""

from __future__ import annotations

from functools import partial

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider


def providers() -> tuple[Provider, ...]:
    """Both of vLLM's; it takes CuTe DSL's where that is installed."""
    return Provider("vLLM Triton", partial(_vllm, dsl=False)), Provider("vLLM CuTe DSL", partial(_vllm, dsl=True))


def _vllm(given: Given, dsl: bool) -> peers.Bound:
    others = ("cutlass", "quack") if dsl else ()
    module = peers.load("vllm.models.deepseek_v4.common.ops.fused_indexer_q", *others)
    fp4 = given["variant"] == "fp4"
    if given["hadamard"]:
        raise Absent("vLLM's has no Hadamard rotation")
    if fp4 and peers.capability() < 100:
        raise Absent("its conversion to E2M1 is an instruction of sm_100")
    q, heads, dim = given["q"], *given["q"].shape[1:]
    inputs = given["positions"], q, given["cos_sin"], given["weights"], dim**-0.5, heads**-0.5, fp4

    def run() -> tuple:
        before, module.has_cutedsl = module.has_cutedsl, lambda: dsl
        try:
            return module.fused_indexer_q_rope_quant(*inputs)
        finally:
            module.has_cutedsl = before

    if not fp4:
        return peers.bound(run, codes=lambda out: out[0], weights=lambda out: out[1])
    return peers.bound(
        run,
        codes=lambda out: out[0][0],
        scales=lambda out: out[0][1].view(torch.uint8).view(*q.shape[:2], -1),
        weights=lambda out: out[1],
    )
