"""Peers of `add_rmsnorm`. Weights go to them in bf16, as engines keep them; the rows' are exact there."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider


def providers() -> tuple[Provider, ...]:
    """Return vLLM, quack, TileKernels.

    vLLM runs in place, on copies: its second call normalises what the first left.
    """
    return Provider("vLLM CUDA", _vllm), Provider("quack", _quack), Provider("TileKernels", _tile_kernels)


def _vllm(given: Given) -> peers.Bound:
    operator = peers.vllm_operators("_C_stable_libtorch", "_C").fused_add_rms_norm
    y, h, weight = given["x"].clone(), given["residual"].clone(), given["weight"].bfloat16()
    return peers.bound(lambda: operator(y, h, weight, given["eps"]), h=lambda _: h, y=lambda _: y)


def _quack(given: Given) -> peers.Bound:
    norm = peers.load("quack.rmsnorm", "cutlass").rmsnorm_fwd
    x, residual, weight = given["x"], given["residual"], given["weight"].bfloat16()
    return peers.bound(
        lambda: norm(x, weight, residual=residual, eps=given["eps"]), y=lambda out: out[0], h=lambda out: out[1]
    )


def _tile_kernels(given: Given) -> peers.Bound:
    norm = peers.load("tile_kernels", "tilelang").quant.norm_forward
    x, residual, weight = given["x"], given["residual"], given["weight"].bfloat16()
    y, h = torch.empty_like(x), torch.empty_like(x)
    return peers.bound(
        lambda: norm(x, weight, given["eps"], residual, out=y, residual_out=h), h=lambda _: h, y=lambda _: y
    )
