"""Time peers of `router`.

A GEMM in fp32 sums and a selection, in the pairs that vLLM makes, and TileKernels' selection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider

Product = Callable[[], Tensor]
FEW = 16  # tokens that vLLM's own GEMMs take
CUDA_SHAPES = {(7168, 256), (7168, 384), (6144, 256)}  # (d, E) that vLLM has its CUDA GEMM for


def providers() -> tuple[Provider, ...]:
    """cuBLAS with each selection, and vLLM's two GEMMs for few tokens."""
    return (
        Provider("cuBLAS + vLLM Triton", lambda given: _triton(_cublas, given)),
        Provider("cuBLAS + vLLM CUDA", _cuda_selection),
        Provider("cuBLAS + TileKernels", _tile_kernels),
        Provider("vLLM CuTe DSL + Triton", lambda given: _triton(_cute_dsl, given)),
        Provider("vLLM CUDA + Triton", lambda given: _triton(_cuda, given)),
    )


def _cublas(given: Given) -> Product:
    x, weight = given["x"], given["weight"]
    logits = peers.new(x, len(x), len(weight), dtype=torch.float32)
    return lambda: torch.mm(x, weight.T, out_dtype=torch.float32, out=logits)


def _cute_dsl(given: Given) -> Product:
    module = peers.load("vllm.model_executor.kernels.linear.cute_dsl.ll_bf16", "cutlass", "quack")
    x, weight = given["x"], given["weight"]
    if len(x) > FEW:
        raise Absent(f"vLLM takes it for at most {FEW} tokens")
    return lambda: module.ll_bf16_gemm(x, weight)


def _cuda(given: Given) -> Product:
    operator = peers.vllm_operators("_moe_C_stable_libtorch", "_moe_C").dsv3_router_gemm
    x, weight = given["x"], given["weight"]
    if len(x) > FEW or (x.shape[1], len(weight)) not in CUDA_SHAPES:
        raise Absent(f"made for at most {FEW} tokens and d 7168 or 6144")
    logits = peers.new(x, len(x), len(weight), dtype=torch.float32)

    def product() -> Tensor:
        operator(logits, x, weight)
        return logits

    return product


def _triton(make: Callable[[Given], Product], given: Given) -> peers.Bound:
    module = peers.load("vllm.model_executor.layers.fused_moe.router.dsv4_topk")
    product, bias, k, factor = make(given), given["bias"], given["k"], given["factor"]
    if k != 6:
        raise Absent("only for 6 experts a token")
    return peers.bound(
        lambda: module.dsv4_topk(product(), bias, torch.int32, factor),
        weights=lambda out: out[0],
        experts=lambda out: out[1],
    )


def _cuda_selection(given: Given) -> peers.Bound:
    operator = peers.vllm_operators("_moe_C_stable_libtorch", "_moe_C").topk_softplus_sqrt
    product, x, k = _cublas(given), given["x"], given["k"]
    weights = peers.new(x, len(x), k, dtype=torch.float32)
    experts, order = (peers.new(x, len(x), k, dtype=torch.int32) for _ in range(2))

    def run() -> None:
        operator(weights, experts, order, product(), True, given["factor"], given["bias"], None, None)

    return peers.bound(run, weights=lambda _: weights, experts=lambda _: experts)


def _tile_kernels(given: Given) -> peers.Bound:
    select = peers.load("tile_kernels", "tilelang").moe.moe_topk_gate_forward
    product, x, k = _cublas(given), given["x"], given["k"]
    out = peers.new(x, len(x), k, dtype=torch.int64), peers.new(x, len(x), k, dtype=torch.float32)
    options = {"bias": given["bias"], "out": out}
    return peers.bound(
        lambda: select(product(), k, False, 0, given["factor"], 0, **options),
        experts=lambda _: out[0],
        weights=lambda _: out[1],
    )
