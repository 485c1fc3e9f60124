"""Time peers of `add_rmsnorm_quant` in pairs. No package has FP8 of 128 with power-of-two scales in one kernel.

Weights go to them in bf16, as engines keep them.
"""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.ops.quantize.peers import vllm_cast


def providers() -> tuple[Provider, ...]:
    """List pairs of a norm and a cast, and kernels that do both.

    vLLM's one kernel with exact scales, TileKernels' one kernel for MXFP8.
    """
    return (
        Provider("vLLM norm, vLLM cast", lambda given: _two(given, tile_kernels=False)),
        Provider("vLLM norm, TileKernels cast", lambda given: _two(given, tile_kernels=True)),
        Provider("TileKernels norm, its cast", _tile_kernels_pair),
        Provider("vLLM fused, scales as they are", _vllm),
        Provider("TileKernels fused", _tile_kernels),
    )


def _only(given: Given, recipe: str) -> None:
    if given["recipe"] != recipe:
        raise Absent(f"it is for {recipe}")


def _two(given: Given, tile_kernels: bool) -> peers.Bound:
    """In place on copies of its own: the second call normalises what the first left."""
    norm = peers.vllm_operators("_C_stable_libtorch", "_C").fused_add_rms_norm
    cast = peers.load("tile_kernels", "tilelang").quant.per_token_cast if tile_kernels else None
    _only(given, "fp8")
    y, h, weight = given["x"].clone(), given["residual"].clone(), given["weight"].bfloat16()
    call, *out = vllm_cast(y)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        norm(y, h, weight, given["eps"])
        if cast is not None:
            return cast(y, "e4m3", 128, round_sf=True)
        call()
        return out

    return peers.bound(run, h=lambda _: h, codes=lambda out: out[0], scales=lambda out: out[1])


def _tile_kernels_pair(given: Given) -> peers.Bound:
    quant = peers.load("tile_kernels", "tilelang").quant
    _only(given, "fp8")
    x, residual, weight = given["x"], given["residual"], given["weight"].bfloat16()
    y, h = torch.empty_like(x), torch.empty_like(x)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        quant.norm_forward(x, weight, given["eps"], residual, out=y, residual_out=h)
        return quant.per_token_cast(y, "e4m3", 128, round_sf=True)

    return peers.bound(run, h=lambda _: h, codes=lambda out: out[0], scales=lambda out: out[1])


def _vllm(given: Given) -> peers.Bound:
    operator = peers.vllm_operators("_C_stable_libtorch", "_C").rms_norm_per_block_quant
    _only(given, "fp8")
    x, h, weight = given["x"], given["residual"].clone(), given["weight"].bfloat16()
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = peers.new(x, len(x), x.shape[1] // 128, dtype=torch.float32)
    return peers.bound(
        lambda: operator(codes, x, weight, scales, given["eps"], None, h, 128, False),
        h=lambda _: h,
        codes=lambda _: codes,
        scales=lambda _: scales,
    )


def _tile_kernels(given: Given) -> peers.Bound:
    fused = peers.load("tile_kernels", "tilelang").quant.norm_forward_and_per_token_cast
    _only(given, "mxfp8")
    x, residual, weight, h = given["x"], given["residual"], given["weight"].bfloat16(), torch.empty_like(given["x"])
    options = {"residual": residual, "residual_out": h, "round_sf": True}
    return peers.bound(
        lambda: fused(x, weight, given["eps"], "e4m3", 32, **options),
        h=lambda _: h,
        codes=lambda out: out[0][0],
        scales=lambda out: out[0][1],
    )
