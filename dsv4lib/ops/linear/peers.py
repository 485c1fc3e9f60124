"""Time DeepGEMM's FP8 GEMM and einsum beside `linear` on a Hopper. Fp32 scales are of 128 of K and of 128 x 128."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.formats import ue8m0
from dsv4lib.ops.linear.peers_torch import operands

ROOM = 4  # tokens: columns of scales start on 16 bytes


def providers() -> tuple[Provider, ...]:
    """DeepGEMM as vLLM brings it: `fp8_gemm_nt`, and `fp8_einsum` of groups."""
    return (Provider("DeepGEMM", _deep_gemm),)


def _deep_gemm(given: Given) -> peers.Bound:
    module = peers.load("vllm.third_party.deep_gemm")
    if peers.capability() != 90:
        raise Absent("fp32 scales are those of its kernels of sm_90")
    if given["x"].dim() == 3:
        return _einsum(module, given)
    x, x_scales, w, w_scales = operands(given, ROOM)
    y = peers.new(x, x.shape[0], w.shape[0], dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        module.fp8_gemm_nt((x, x_scales), (w, w_scales), y)
        return y

    return peers.bound(run, y=lambda out: out[: len(given["x"])])


def _einsum(module: object, given: Given) -> peers.Bound:
    x, w = (given[name].view(torch.float8_e4m3fn) for name in ("x", "w"))
    groups, tokens, blocks = given["x_scales"].shape
    columns = torch.zeros(groups, blocks, -(-tokens // ROOM) * ROOM, device=x.device).permute(2, 0, 1)[:tokens]
    columns.copy_(ue8m0.decode(given["x_scales"]).transpose(0, 1))
    w_scales = ue8m0.decode(given["w_scales"])
    y = peers.new(x, tokens, groups, w.shape[1], dtype=torch.bfloat16)
    recipe = 1, 128, 128

    def run() -> torch.Tensor:
        module.fp8_einsum("bhr,hdr->bhd", (x.transpose(0, 1), columns), (w, w_scales), y, recipe=recipe)
        return y

    return peers.bound(run, y=lambda out: out.transpose(0, 1))
