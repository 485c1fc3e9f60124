"""Time `mega_moe` on a Blackwell: the routed experts of a layer, all on one rank, beside the ops one after the other.

given: x uint8 [T, H] and x_scale uint8 [T, H / 32], MXFP8 of normals; topk_idx int64 [T, k], random experts;
topk_weights fp32 [T, k]; l1, l2 packed MXFP4 of random bits and swizzled scales; layout. Output: y bf16 [T, H].

Bytes: weights of as many experts as random routing is expected to reach, tokens in, results out. What a rank sends to
others is not in it: one rank sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row
from dsv4lib.config import ModelConfig
from dsv4lib.formats import e4m3, fp8_block, scale_swizzle, ue8m0
from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer
from dsv4lib.ops.mega_moe.layout import GROUP, Layout
from dsv4lib.ops.mega_moe.op import mega_moe
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.reference import mega_moe as oracle

EXPONENTS = 118, 121  # E8M0 bytes of weights: 2^-9 to 2^-7
CLAMP = 10.0
CHECKED = 4  # tokens, whose experts are decoded to fp64
BOUND = 2.0**-5  # of a token's size: h in MXFP8 may differ by a rounding here and there
WEIGHT_BYTES = 0.5 + 1 / GROUP


def rows() -> list[Row]:
    """Decode of both models, and a chunk of prefill."""
    sizes = (*inputs.DECODE, inputs.PREFILL)
    return [_row(model, config, tokens) for model, config in inputs.MODELS.items() for tokens in sizes]


def _row(model: str, config: ModelConfig, tokens: int) -> Row:
    experts, k, hidden, width = config.n_experts, config.experts_per_token, config.hidden, config.expert_width
    active = experts * (1 - (1 - k / experts) ** tokens)
    layout = Layout(1, experts, tokens, k, hidden, width)

    def given(generator: torch.Generator) -> Given:
        return _given(generator, layout)

    return Row(
        "mega_moe",
        f"{model} W4A8 T {tokens}",
        bytes=round(active * 3 * width * hidden * WEIGHT_BYTES + tokens * hidden * (1 + 1 / GROUP + 2)),
        flops=2 * tokens * k * 3 * width * hidden,
        given=given,
        check=_check,
        providers=(Provider("ours", _ours), Provider("our ops, 4 launches", _one_by_one)),
    )


def _given(generator: torch.Generator, layout: Layout) -> Given:
    device, tokens = generator.device, layout.max_tokens
    q = fp8_block.quantize_activation(inputs.normals(generator, tokens, layout.hidden), GROUP)
    chosen = torch.rand(tokens, layout.experts, generator=generator, device=device).topk(layout.topk).indices
    weights = torch.rand(chosen.shape, generator=generator, device=device) + 0.1
    l1 = _weights(generator, layout.experts, 2 * layout.intermediate, layout.hidden)
    l2 = _weights(generator, layout.experts, layout.hidden, layout.intermediate)
    operands = {"l1": l1.codes, "l1_scales": l1.scales, "l2": l2.codes, "l2_scales": l2.scales}
    tokens_in = {"x": q.codes, "x_scale": q.scales, "topk_idx": chosen, "topk_weights": weights}
    return {**tokens_in, **operands, "layout": layout}


def _weights(generator: torch.Generator, experts: int, features: int, k: int) -> Operand:
    """Random bits."""
    device, u8 = generator.device, torch.uint8
    codes = torch.randint(0, 256, (experts, features, k // 2), generator=generator, device=device, dtype=u8)
    size = experts, scale_swizzle.swizzled_bytes(features, k // GROUP)
    return Operand(codes, torch.randint(*EXPONENTS, size, generator=generator, device=device, dtype=u8))


def _operands(given: Given) -> tuple[Operand, Operand]:
    return Operand(given["l1"], given["l1_scales"]), Operand(given["l2"], given["l2_scales"])


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
    return lambda: mega_moe(*tokens, *_operands(given), buffer, clamp=CLAMP, out=out), {"y": out}


def _one_by_one(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    """Bind dispatch, both GEMMs and combine; rows of tokens by torch's indexing are not in the time of ours."""
    x, layout = given["x"], given["layout"]
    _blackwell(x)
    l1, l2 = _operands(given)
    chosen, expected = given["topk_idx"].int(), -(-layout.max_tokens * layout.topk // layout.experts)
    out = torch.empty(layout.max_tokens, layout.hidden, dtype=torch.bfloat16, device=x.device)
    how = {"mode": "w4a8", "expected": expected}

    def call() -> None:
        routes = moe_dispatch(chosen, given["topk_weights"], count=layout.experts)
        rows = routes.rows.clamp(min=0).long()
        own = Operand(x[rows], scale_swizzle.swizzle(given["x_scale"][rows]))
        groups = routes.offsets[:-1], routes.counts
        routing = routes.row_weight
        h = moe_gemm(own, l1, *groups, **how, routing=routing, swiglu=True, out_format="mxfp8", limit=CLAMP)
        moe_combine(moe_gemm(h, l2, *groups, **how).codes, routes.row_of, out=out)

    return call, {"y": out}


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    """The first tokens against the oracle, each token's error beside its size."""
    from dsv4lib.ops.moe_gemm.operands import numbers  # needs the DSL

    own = slice(0, CHECKED)
    chosen = given["topk_idx"][own]
    used, places = chosen.unique(return_inverse=True)
    scales = ue8m0.decode(given["x_scale"][own], torch.float64).repeat_interleave(GROUP, -1)
    x = e4m3.decode(given["x"][own], torch.float64) * scales
    l1, l2 = (Operand(w.codes[used], w.scales[used]) for w in _operands(given))
    gate_up = numbers(*l1, "w4a8", True).unflatten(1, (-1, 2, 8))
    w1, w3 = (gate_up[:, :, i].flatten(1, 2) for i in (0, 1))
    routes = [(x, places, given["topk_weights"][own].double())]
    truth = oracle.mega_moe(routes, w1, numbers(*l2, "w4a8", True), w3, CLAMP)[0].double()
    size = truth.square().mean(1).sqrt()
    error = ((outputs["y"][own].double() - truth).square().mean(1).sqrt() / size).nan_to_num(float("inf"))
    assert float(error.max()) <= BOUND, f"y: a token is off by {float(error.max()):.3g} of its size"
