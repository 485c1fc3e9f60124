"""Time `mega_moe` on a Blackwell: the routed experts of a layer, all on one rank, beside the ops one after the other.

given: x and x_scale uint8, MXFP8 or NVFP4 of normals; topk_idx int64 [T, k], random experts; topk_weights fp32 [T, k];
l1, l2 packed E2M1 of random bits and swizzled scales; factors of NVFP4; layout. Output: y bf16 [T, H].

Bytes: weights of as many experts as random routing is expected to reach, tokens in, results out. What a rank sends to
others is not in it: one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row
from dsv4lib.config import ModelConfig
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer
from dsv4lib.ops.mega_moe.inputs import Factors, rows_of, x_scale_of_all
from dsv4lib.ops.mega_moe.layout import QUANTISED, Layout
from dsv4lib.ops.mega_moe.op import mega_moe
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.reference import mega_moe as oracle

SCALES = {"w4a8": (118, 121), "nvfp4": (48, 72)}  # bytes of weights: E8M0 from 2^-9 to 2^-7; E4M3 from 2^-1 below 2^2
ALPHA = 2.0**-9  # global scale of NVFP4 weights
NAMES = {"w4a8": "W4A8", "nvfp4": "NVFP4"}
CLAMP = 10.0
CHECKED = 4  # tokens, whose experts are decoded to fp64
BOUND = 2.0**-5  # of a token's size: h may differ by a rounding here and there


def rows() -> list[Row]:
    """Decode of both models in both formats, and a chunk of prefill."""
    sizes = (*inputs.DECODE, inputs.PREFILL)
    return [
        _row(model, config, mode, tokens)
        for mode in NAMES
        for model, config in inputs.MODELS.items()
        for tokens in sizes
    ]


def _row(model: str, config: ModelConfig, mode: str, tokens: int) -> Row:
    experts, k, hidden, width = config.n_experts, config.experts_per_token, config.hidden, config.expert_width
    active = experts * (1 - (1 - k / experts) ** tokens)
    layout = Layout(1, experts, tokens, k, hidden, width, mode)
    weight = 0.5 + 1 / layout.format.group
    token = layout.code_bytes(hidden) + layout.scales(hidden) + 2 * hidden

    def given(generator: torch.Generator) -> Given:
        return _given(generator, layout)

    return Row(
        "mega_moe",
        f"{model} {NAMES[mode]} T {tokens}",
        bytes=round(active * 3 * width * hidden * weight + tokens * token),
        flops=2 * tokens * k * 3 * width * hidden,
        given=given,
        check=_check,
        providers=(Provider("ours", _ours), Provider("our ops, 4 launches", _one_by_one)),
    )


def _given(generator: torch.Generator, layout: Layout) -> Given:
    device, tokens = generator.device, layout.max_tokens
    codes, scales, _ = rows_of(inputs.normals(generator, tokens, layout.hidden), layout.mode)
    chosen = torch.rand(tokens, layout.experts, generator=generator, device=device).topk(layout.topk).indices
    weights = torch.rand(chosen.shape, generator=generator, device=device) + 0.1
    l1 = _weights(generator, layout, 2 * layout.intermediate, layout.hidden)
    l2 = _weights(generator, layout, layout.hidden, layout.intermediate)
    operands = {"l1": l1.codes, "l1_scales": l1.scales, "l2": l2.codes, "l2_scales": l2.scales}
    tokens_in = {"x": codes, "x_scale": scales, "topk_idx": chosen, "topk_weights": weights}
    return {**tokens_in, **operands, **_factors(layout, device)._asdict(), "layout": layout}


def _weights(generator: torch.Generator, layout: Layout, features: int, k: int) -> Operand:
    """Random bits."""
    device, u8 = generator.device, torch.uint8
    codes = torch.randint(0, 256, (layout.experts, features, k // 2), generator=generator, device=device, dtype=u8)
    size = layout.experts, scale_swizzle.swizzled_bytes(features, layout.scales(k))
    return Operand(codes, torch.randint(*SCALES[layout.mode], size, generator=generator, device=device, dtype=u8))


def _factors(layout: Layout, device: torch.device) -> Factors:
    """Return the same factors for all experts, or none."""
    if layout.mode != "nvfp4":
        return Factors()
    h_scale = CLAMP**2 / nvfp4.RANGE
    full, each = torch.full, (layout.experts,)
    alphas = full((*each, 2), ALPHA * float(x_scale_of_all()), device=device)
    return Factors(alphas, full(each, ALPHA * h_scale, device=device), full(each, h_scale, device=device))


def _operands(given: Given) -> tuple[Operand, Operand]:
    return Operand(given["l1"], given["l1_scales"]), Operand(given["l2"], given["l2_scales"])


def _factors_of(given: Given) -> Factors:
    return Factors(*(given[name] for name in Factors._fields))


def _blackwell(x: Tensor) -> None:
    """Raise `Absent` where no kernel of ours runs."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 10:
        raise Absent("needs a Blackwell")


def _ours(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    x, layout = given["x"], given["layout"]
    _blackwell(x)
    buffer = SymmetricBuffer.alone(layout, str(x.device))
    out = torch.empty(layout.max_tokens, layout.hidden, dtype=torch.bfloat16, device=x.device)
    buffer.stage(x, given["x_scale"], given["topk_idx"], given["topk_weights"])
    tokens = buffer.x, buffer.x_scales, buffer.topk_idx, buffer.topk_weights
    factors = _factors_of(given)._asdict()
    return lambda: mega_moe(*tokens, *_operands(given), buffer, **factors, clamp=CLAMP, out=out), {"y": out}


def _one_by_one(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    """Bind dispatch, both GEMMs and combine; rows of tokens by torch's indexing are not in the time of ours."""
    x, layout = given["x"], given["layout"]
    _blackwell(x)
    (l1, l2), factors, mode = _operands(given), _factors_of(given), layout.mode
    chosen, expected = given["topk_idx"].int(), -(-layout.max_tokens * layout.topk // layout.experts)
    out = torch.empty(layout.max_tokens, layout.hidden, dtype=torch.bfloat16, device=x.device)
    how = {"mode": mode, "expected": expected}
    first: dict[str, Any] = {"swiglu": True, "out_format": QUANTISED[mode], "out_global": factors.l2_act_scales}
    if factors.l1_alphas is not None:
        first["alpha"], first["alpha_up"] = (alpha.contiguous() for alpha in factors.l1_alphas.unbind(1))

    def call() -> None:
        routes = moe_dispatch(chosen, given["topk_weights"], count=layout.experts)
        rows = routes.rows.clamp(min=0).long()
        own = Operand(x[rows], scale_swizzle.swizzle(given["x_scale"][rows]))
        groups = routes.offsets[:-1], routes.counts
        routing = routes.row_weight
        h = moe_gemm(own, l1, *groups, **how, **first, routing=routing, limit=CLAMP)
        moe_combine(moe_gemm(h, l2, *groups, **how, alpha=factors.l2_alphas).codes, routes.row_of, out=out)

    return call, {"y": out}


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    """The first tokens against the oracle, each token's error beside its size."""
    from dsv4lib.ops.moe_gemm.operands import numbers  # needs the DSL

    own, mode = slice(0, CHECKED), given["layout"].mode
    chosen = given["topk_idx"][own]
    used, places = chosen.unique(return_inverse=True)
    x = numbers(given["x"][own], scale_swizzle.swizzle(given["x_scale"][own]), mode, False)
    l1, l2 = (Operand(w.codes[used], w.scales[used]) for w in _operands(given))
    w13, w2, h_scales = numbers(*l1, mode, True), numbers(*l2, mode, True), given["l2_act_scales"]
    if h_scales is not None:
        h_scales = h_scales[used]
        w13, w2 = w13 * given["l1_alphas"][0, 0].double(), w2 * given["l2_alphas"][0].double() / h_scales[0].double()
    gate_up = w13.unflatten(1, (-1, 2, 8))
    w1, w3 = (gate_up[:, :, i].flatten(1, 2) for i in (0, 1))
    routes = [(x, places, given["topk_weights"][own].double())]
    truth = oracle.mega_moe(routes, w1, w2, w3, CLAMP, oracle.Rounding(h_scales))[0].double()
    size = truth.square().mean(1).sqrt()
    error = ((outputs["y"][own].double() - truth).square().mean(1).sqrt() / size).nan_to_num(float("inf"))
    assert float(error.max()) <= BOUND, f"y: a token is off by {float(error.max()):.3g} of its size"
