"""Peers of `linear` on a Hopper: DeepGEMM's FP8 GEMM, with fp32 scales of 128 of K and of 128 x 128."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.ops.linear.peers_torch import operands


def providers() -> tuple[Provider, ...]:
    """DeepGEMM as vLLM brings it."""
    return (Provider("DeepGEMM", _deep_gemm),)


def _deep_gemm(given: Given) -> peers.Bound:
    module = peers.load("vllm.third_party.deep_gemm")
    if peers.capability() != 90:
        raise Absent("fp32 scales are those of its kernels of sm_90")
    x, x_scales, w, w_scales = operands(given, 4)  # columns of scales start on 16 bytes
    y = peers.new(x, x.shape[0], w.shape[0], dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        module.fp8_gemm_nt((x, x_scales), (w, w_scales), y)
        return y

    return peers.bound(run, y=lambda out: out[: len(given["x"])])
