"""Time peers of `mhc`. vLLM's is DeepGEMM's projection between two TileLang kernels; TileKernels' is the write-back."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Given, Provider

ITERS, EPS, POST = 20, 1e-6, 2.0
MODULE = "vllm.model_executor.kernels.mhc.tilelang"


def providers() -> tuple[Provider, ...]:
    """Write-back, then coefficients, mixture and norm; and vLLM's call for all of it."""
    return (
        Provider("vLLM post, pre + norm", _pair),
        Provider("TileKernels post, vLLM pre, norm", _mixed),
        Provider("vLLM post + pre + norm", _fused),
    )


def _arguments(given: Given) -> tuple[tuple, dict]:
    """Of the second part: weights and constants, by position and by name."""
    weights = given["fn"], given["scale"], given["base"]
    return (*weights, EPS, EPS, EPS, POST, ITERS), {"norm_weight": given["weight"].bfloat16(), "norm_eps": EPS}


def _pair(given: Given) -> peers.Bound:
    module = peers.load(MODULE, "tilelang")
    streams, f, post, comb = (given[name] for name in ("streams", "f", "post", "comb"))
    site, norm = _arguments(given)

    def run() -> tuple[torch.Tensor, ...]:
        new = module.mhc_post_tilelang(f, streams, post[..., None], comb)
        return new, *module.mhc_pre_tilelang(new, *site, **norm)

    return _read(run)


def _mixed(given: Given) -> peers.Bound:
    module, post = peers.load(MODULE, "tilelang"), peers.load("tile_kernels", "tilelang").mhc.mhc_post_fwd
    streams, f, weights, comb = (given[name][None] for name in ("streams", "f", "post", "comb"))  # one sequence
    site, norm = _arguments(given)

    def run() -> tuple[torch.Tensor, ...]:
        new = post(f, streams, weights[..., None], comb)[0]
        return new, *module.mhc_pre_tilelang(new, *site, **norm)

    return _read(run)


def _fused(given: Given) -> peers.Bound:
    module = peers.load(MODULE, "tilelang")
    inputs = given["f"], given["streams"], given["post"][..., None], given["comb"]
    site, norm = _arguments(given)
    return _read(lambda: module.mhc_fused_post_pre_tilelang(*inputs, *site, **norm))


def _read(run) -> peers.Bound:
    return peers.bound(
        run, streams=lambda out: out[0], post=lambda out: out[1][..., 0], comb=lambda out: out[2], y=lambda out: out[3]
    )
