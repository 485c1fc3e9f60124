"""Bind public kernels of attention and routed experts to rows of a decode step, as vLLM 0.26 brings them.

FlashMLA's schedule and triton_kernels' lists of routes are made once, before the time: engines share the first between
layers, the second costs a few launches more a layer. The shared expert is not added by triton_kernels either.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.config import FLASH
from dsv4lib.layers.experts import Experts
from dsv4lib.ops.fmha import peers as fmha_peers
from dsv4lib.ops.moe_gemm.sm90.layout import untile_weights

ALTERNATE = 8  # rows of gates, then as many of values, in tiled weights of gate/up
WARPS = 8
SLOTS = 64  # of an index list of FlashMLA


def attention() -> Provider:
    """Return FlashMLA's sparse decode."""
    return Provider("FlashMLA", _flash_mla)


def experts() -> Provider:
    """Return triton_kernels' two GEMMs: MXFP4 weights, bf16 activations, SwiGLU in the first, then the sum."""
    return Provider("triton_kernels, W4A16", _triton_kernels)


def _flash_mla(given: Given) -> peers.Bound:
    module = fmha_peers.flash_mla()
    entries = (given["entries"], _padded(given["rows"])) if "entries" in given else None
    window = given["window"], given["window_rows"]
    return fmha_peers.sparse_decode(module, given["q"], window, entries, given["sink"])


def _padded(rows: Tensor) -> Tensor:
    """Fill index lists up with -1."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % SLOTS), value=-1)


def _module(name: str) -> ModuleType:
    """Import a module of triton_kernels, which imports itself by that name; vLLM has it among its third parties."""
    if not peers.installed("triton_kernels"):
        folder = Path(peers.load("vllm", "triton").__file__).parent / "third_party"
        if not (folder / "triton_kernels").is_dir():
            raise Absent("this vllm has no triton_kernels")
        sys.path.append(str(folder))
    return peers.load(f"triton_kernels.{name}")


def _triton_kernels(given: Given) -> peers.Bound:
    ogs = _module("matmul_ogs")
    if peers.capability() != 90:
        raise Absent("it is compared on sm_90")
    _module("matmul_ogs_details.opt_flags").update_opt_flags_constraints({"split_k": 1})  # as vLLM does on a Hopper
    from dsv4lib.bench.decode_step.triton_swiglu import clamped_swiglu

    routes, gather, scatter = _routes(given["picks"], given["scores"])
    stack: Experts = given["experts"]
    first, second = (_weights(codes, codes is stack.first_codes) for codes in (stack.first_codes, stack.second_codes))
    specs = ogs.FnSpecs("clamped_swiglu", clamped_swiglu, ("limit",))
    activation = ogs.FusedActivation(specs, (FLASH.swiglu_limit,), 2)
    plans = [ogs.PrecisionConfig(weight_scale=scales) for _, scales in (first, second)]

    def run() -> Tensor:
        common = {"fused_activation": activation, "precision_config": plans[0]}
        h = ogs.matmul_ogs(given["x"], first[0], None, routes, gather_indx=gather, **common)
        common = {"precision_config": plans[1], "gammas": routes.gate_scal}
        return ogs.matmul_ogs(h, second[0], None, routes, scatter_indx=scatter, **common)

    return peers.bound(run, y=lambda out: out.view(given["x"].shape).double() + given["shared"].double())


def _routes(picks: Tensor, scores: Tensor) -> tuple:
    """Sort routes by expert: its RoutingData, GatherIndx and ScatterIndx."""
    routing = _module("routing")
    flat = picks.flatten()
    order = torch.argsort(flat, stable=True)
    back = torch.argsort(order, stable=True).int()
    counts = torch.bincount(flat, minlength=FLASH.n_experts).int()
    data = routing.compute_expt_data(counts, FLASH.n_experts, len(flat))
    weights = scores.flatten()[order]
    routes = routing.RoutingData(weights, counts, FLASH.n_experts, picks.shape[1], data)
    order = order.int()
    return routes, routing.GatherIndx(order, back), routing.ScatterIndx(back, order)


def _weights(tiled: Tensor, gated: bool) -> tuple:
    """Lay weights and scales out for a Hopper as vLLM does; gates and values alternate row by row."""
    tensors, layouts = _module("tensor"), _module("tensor_details.layout")
    codes, scales = untile_weights(tiled, "w4a8")
    if gated:
        pairs = (-1, 2, ALTERNATE)
        codes, scales = (w.unflatten(1, pairs).transpose(2, 3).flatten(1, 3).contiguous() for w in (codes, scales))
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    values = tensors.wrap_torch_tensor(codes.transpose(1, 2), dtype=tensors.FP4)
    values = tensors.convert_layout(values, layout, **options)
    layout, options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=WARPS)
    return values, tensors.convert_layout(tensors.wrap_torch_tensor(scales.transpose(1, 2)), layout, **options)
