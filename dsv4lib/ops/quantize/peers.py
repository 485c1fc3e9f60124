"""Time peers of `quantize`. vLLM's FP8 of 128, and TileKernels' casts with power-of-two scales."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider

CASTS = {"fp8": ("e4m3", 128), "mxfp8": ("e4m3", 32), "mxfp4": ("e2m1", 32)}
LARGEST, LEAST = 448.0, 1e-10


def providers() -> tuple[Provider, ...]:
    """vLLM's CUDA, and TileKernels."""
    return Provider("vLLM CUDA", _vllm), Provider("TileKernels", _tile_kernels)


def vllm_cast(x: torch.Tensor) -> tuple[peers.Call, torch.Tensor, torch.Tensor]:
    """Return vLLM's FP8 of groups of 128. The call, its codes E4M3 and its scales fp32, powers of two."""
    operator = peers.vllm_operators("_C_stable_libtorch", "_C").per_token_group_fp8_quant
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = peers.new(x, len(x), x.shape[1] // 128, dtype=torch.float32)
    return (
        lambda: operator(x, codes, scales, 128, LEAST, -LARGEST, LARGEST, True, False, False),
        codes,
        scales,
    )


def _vllm(given: Given) -> peers.Bound:
    peers.need("vllm")
    if given["recipe"] != "fp8":
        raise Absent(f"{given['recipe']}: vLLM's operator on sm_90 is for groups of 128")
    call, codes, scales = vllm_cast(given["x"])
    return peers.bound(call, codes=lambda _: codes.view(torch.uint8), scales=lambda _: peers.exponent_bytes(scales))


def _tile_kernels(given: Given) -> peers.Bound:
    cast = peers.load("tile_kernels", "tilelang").quant.per_token_cast
    if given["recipe"] not in CASTS:
        raise Absent(f"{given['recipe']}: TileKernels has no global scale")
    form, x = CASTS[given["recipe"]], given["x"]
    return peers.bound(
        lambda: cast(x, *form, round_sf=True),
        codes=lambda out: out[0].view(torch.uint8),
        scales=lambda out: peers.exponent_bytes(out[1]),
    )
