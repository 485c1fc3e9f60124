"""Peers of `rmsnorm`. Weights go to them in bf16, as engines keep them; the rows' are exact there."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider


def providers() -> tuple[Provider, ...]:
    """vLLM, quack, TileKernels."""
    return Provider("vLLM CUDA", _vllm), Provider("quack", _quack), Provider("TileKernels", _tile_kernels)


def _vllm(given: Given) -> peers.Bound:
    operator = peers.vllm_operators("_C_stable_libtorch", "_C").rms_norm
    x, weight, y = given["x"], given["weight"].bfloat16(), torch.empty_like(given["x"])
    return peers.bound(lambda: operator(y, x, weight, given["eps"]), y=lambda _: y)


def _quack(given: Given) -> peers.Bound:
    norm = peers.load("quack.rmsnorm", "cutlass").rmsnorm_fwd
    x, weight = given["x"], given["weight"].bfloat16()
    return peers.bound(lambda: norm(x, weight, eps=given["eps"]), y=lambda out: out[0])


def _tile_kernels(given: Given) -> peers.Bound:
    norm = peers.load("tile_kernels", "tilelang").quant.norm_forward
    x, weight, y = given["x"], given["weight"].bfloat16(), torch.empty_like(given["x"])
    return peers.bound(lambda: norm(x, weight, given["eps"], out=y), y=lambda _: y)
