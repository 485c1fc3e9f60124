"""Time peers of `rmsnorm_quant`. vLLM's norm and cast, vLLM's one kernel with exact scales, TileKernels' norm and cast.

Weights go to them in bf16, as engines keep them.
"""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider
from dsv4lib.ops.quantize.peers import vllm_cast


def providers() -> tuple[Provider, ...]:
    """Pairs of a norm and a cast, and one kernel."""
    return (
        Provider("vLLM norm, vLLM cast", _vllm_pair),
        Provider("TileKernels norm, its cast", _tile_kernels_pair),
        Provider("vLLM fused, scales as they are", _vllm),
    )


def _vllm_pair(given: Given) -> peers.Bound:
    norm = peers.vllm_operators("_C_stable_libtorch", "_C").rms_norm
    x, weight, y = given["x"], given["weight"].bfloat16(), torch.empty_like(given["x"])
    cast, *out = vllm_cast(y)

    def run() -> list[torch.Tensor]:
        norm(y, x, weight, given["eps"])
        cast()
        return out

    return peers.bound(run, codes=lambda out: out[0], scales=lambda out: out[1])


def _tile_kernels_pair(given: Given) -> peers.Bound:
    quant = peers.load("tile_kernels", "tilelang").quant
    x, weight, y = given["x"], given["weight"].bfloat16(), torch.empty_like(given["x"])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        quant.norm_forward(x, weight, given["eps"], out=y)
        return quant.per_token_cast(y, "e4m3", 128, round_sf=True)

    return peers.bound(run, codes=lambda out: out[0], scales=lambda out: out[1])


def _vllm(given: Given) -> peers.Bound:
    operator = peers.vllm_operators("_C_stable_libtorch", "_C").rms_norm_per_block_quant
    x, weight = given["x"], given["weight"].bfloat16()
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = peers.new(x, len(x), x.shape[1] // 128, dtype=torch.float32)
    return peers.bound(
        lambda: operator(codes, x, weight, scales, given["eps"], None, None, 128, False),
        codes=lambda _: codes,
        scales=lambda _: scales,
    )
