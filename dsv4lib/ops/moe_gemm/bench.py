"""Time `moe_gemm` on a Hopper. It is gate/up with SwiGLU and requantisation, and down, of all experts of a layer.

given: w uint8, MXFP4 weights as `sm90.layout.tile_weights` makes them, [E, N / 64, K / step, bytes], random bits; x and
x_scales: tokens in the order of the experts, MXFP8 (uint8 [R, K], swizzled scales; in mode "w4a8_row" alike in 128 of
K), or bf16 [R, K] and None; counts, offsets int32 [E], routing fp32 [R] (gate/up alone); mode, expected. Every token
goes to k random experts. Outputs: h uint8 [R, N / 2] and h_scales (W4A16: h bf16), or y bf16 [R, N].

Bytes: packed weights of as many experts as random routing is expected to reach, tokens in, results out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.formats import e4m3, fp8_block, mxfp4, scale_swizzle, ue8m0
from dsv4lib.ops.moe_dispatch.size import max_rows
from dsv4lib.ops.moe_gemm import op
from dsv4lib.ops.moe_gemm.sm90.layout import (
    BLOCK,
    CHUNK_K,
    FORMS,
    TILE_M,
    step_of,
    tile_bytes,
    tiled_shape,
    untile_weights,
)
from dsv4lib.reference import moe_dispatch as routes_of
from dsv4lib.reference.moe_gemm import swiglu

ARCHS = ("sm_90a",)  # of the rows
EXPONENTS = 118, 124  # E8M0 bytes of weights: 2^-9 to 2^-4
LIMIT = 10.0
CHECKED = 24  # rows: of few experts, whose weights are decoded to fp64
OUTPUTS = {"w4a8": "mxfp8", "w4a16": "bf16", "w4a8_row": "mxfp8"}  # of gate/up: what down reads
DECODED = "w4a8", "w4a16"  # modes of decode; "w4a8_row" is for many tokens


class Gemm(NamedTuple):
    """A GEMM of a layer: N and K of its weights."""

    model: str
    name: str
    experts: int
    k_experts: int
    n: int
    k: int


def rows() -> list[Row]:
    """Decode of both models, tokens that leave an expert a few rows, W4A16 for Flash; and a chunk of prefill."""
    found = []
    for model, config in inputs.MODELS.items():
        d, width, common = config.hidden, config.expert_width, (config.n_experts, config.experts_per_token)
        for gemm in (Gemm(model, "gate/up", *common, 2 * width, d), Gemm(model, "down", *common, d, width)):
            for mode in DECODED if model == "Flash" else ("w4a8",):
                found += [_row(gemm, mode, tokens) for tokens in inputs.DECODE]
            found += [_row(gemm, mode, inputs.PREFILL) for mode in OUTPUTS]
    return found


def tokens_in_bf16(mode: str, tokens: int) -> bool:
    """Tell whether tokens stay bf16: a chunk of prefill does, as mode "mxfp4_mixed" of `layers.experts` has it."""
    return mode == "w4a16" or (mode == "w4a8" and tokens == inputs.PREFILL)


def _row(gemm: Gemm, mode: str, tokens: int) -> Row:
    first, routes = gemm.name == "gate/up", tokens * gemm.k_experts
    active = gemm.experts * (1 - (1 - gemm.k_experts / gemm.experts) ** tokens)
    weight = tile_bytes(mode, step_of(gemm.k)) / (TILE_M * step_of(gemm.k))
    x_bytes = 2 if tokens_in_bf16(mode, tokens) else 1 + 1 / BLOCK
    out = gemm.n / 2 * x_bytes if first else 2 * gemm.n

    def given(generator: torch.Generator) -> Given:
        return {**_groups(gemm, tokens, first, generator), **_operands(gemm, mode, tokens, generator)}

    return Row(
        "moe_gemm",
        f"{gemm.model} {gemm.name} {mode} T {tokens}",
        bytes=round(active * gemm.n * gemm.k * weight + routes * (gemm.k * x_bytes + out)),
        flops=2 * routes * gemm.n * gemm.k,
        given=given,
        check=_check,
        providers=(providers.in_place("ours", new_outputs, _ours),),
    )


def _groups(gemm: Gemm, tokens: int, first: bool, generator: torch.Generator) -> Given:
    """Routes sorted by expert."""
    device = generator.device
    experts = torch.rand(tokens, gemm.experts, generator=generator, device=device).topk(gemm.k_experts).indices.int()
    weights = torch.rand(experts.shape, generator=generator, device=device) + 0.1
    size = max_rows(tokens, gemm.k_experts, gemm.experts)
    found = routes_of.moe_dispatch(experts, weights, gemm.experts, size)
    routing = found.row_weight if first else None
    expected = -(-tokens * gemm.k_experts // gemm.experts)
    return {"offsets": found.offsets[:-1], "counts": found.counts, "routing": routing, "expected": expected}


def _operands(gemm: Gemm, mode: str, tokens: int, generator: torch.Generator) -> Given:
    """Weights of random bits; tokens of normals, the same ones over and over in the order of the rows."""
    device, step = generator.device, step_of(gemm.k)
    shape = gemm.experts, gemm.n // TILE_M, gemm.k // step
    w = torch.randint(0, 256, (*shape, tile_bytes(mode, step)), generator=generator, device=device, dtype=torch.uint8)
    start, end = TILE_M * step // 2, TILE_M * step // 2 + TILE_M * step // BLOCK
    low, high = (byte + FORMS[mode].bias for byte in EXPONENTS)
    size = (*shape, end - start)
    w[..., start:end] = torch.randint(low, high, size, generator=generator, device=device, dtype=torch.uint8)
    w[..., end:] = 0
    if mode == "w4a8_row":
        w[..., end:] = w[..., start:end].unflatten(-1, (TILE_M, -1)).amax((2, 4))[:, :, None]
    x = inputs.normals(generator, tokens, gemm.k)
    order = torch.arange(max_rows(tokens, gemm.k_experts, gemm.experts), device=device) % tokens
    if tokens_in_bf16(mode, tokens):
        return {"mode": mode, "w": w, "x": x[order], "x_scales": None}
    block = CHUNK_K if mode == "w4a8_row" else BLOCK
    q = fp8_block.quantize_activation(x, block)
    scales = q.scales.repeat_interleave(block // BLOCK, -1)[order]
    return {"mode": mode, "w": w, "x": q.codes[order], "x_scales": scale_swizzle.swizzle(scales)}


def new_outputs(given: Given) -> dict[str, Tensor]:
    """Allocate what a GEMM writes."""
    features, _, _ = tiled_shape(tuple(given["w"].shape), given["mode"])
    x, width = given["x"], features // 2
    if given["routing"] is None:
        return {"y": x.new_empty(len(x), features, dtype=torch.bfloat16)}
    if given["x_scales"] is None:
        return {"h": x.new_empty(len(x), width, dtype=torch.bfloat16)}
    scales = scale_swizzle.swizzled_bytes(len(x), -(-width // BLOCK))
    codes, scales = (x.new_zeros(*shape, dtype=torch.uint8) for shape in ((len(x), width), (scales,)))
    return {"h": codes, "h_scales": scales}


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    first = given["routing"] is not None
    op.moe_gemm(
        (given["x"], given["x_scales"]),
        (given["w"], None),
        given["offsets"],
        given["counts"],
        mode=given["mode"],
        routing=given["routing"],
        swiglu=first,
        out_format="bf16" if given["x_scales"] is None or not first else OUTPUTS[given["mode"]],
        limit=LIMIT,
        expected=given["expected"],
        out=(out["h"], out.get("h_scales")) if first else (out["y"], None),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    """The first `CHECKED` rows against fp64 of the operands: each row's error beside its size."""
    rows = _first_rows(given)
    truth = torch.cat([_truth(given, expert, own) for expert, own in rows])
    picked = torch.cat([own for _, own in rows])
    if "y" in outputs:
        name, found, bound = "y", outputs["y"][picked].double(), 2.0**-8
    elif "h_scales" not in outputs:
        name, found, bound = "h", outputs["h"][picked].double(), 2.0**-8
    else:  # MXFP8 keeps three bits after the first
        name, bound = "h", 2.0**-4
        scales = scale_swizzle.unswizzle(outputs["h_scales"], len(given["x"]), truth.shape[1] // BLOCK)[picked]
        factors = ue8m0.decode(scales, torch.float64).repeat_interleave(BLOCK, -1)
        found = e4m3.decode(outputs["h"][picked], torch.float64) * factors
    size = truth.square().mean(1).sqrt()
    error = ((found - truth).square().mean(1).sqrt() / size).nan_to_num(float("inf"))
    assert float(error.max()) <= bound, f"{name}: a row is off by {float(error.max()):.3g} of its size"


def _first_rows(given: Given) -> list[tuple[int, Tensor]]:
    """(expert, numbers of its rows) until there are `CHECKED`."""
    found, left = [], CHECKED
    for expert, (start, count) in enumerate(zip(given["offsets"].tolist(), given["counts"].tolist(), strict=True)):
        if count and left > 0:
            found.append((expert, torch.arange(start, start + min(count, left), device=given["x"].device)))
            left -= count
    return found


def _truth(given: Given, expert: int, own: Tensor) -> Tensor:
    """What an expert makes of some of its rows, fp64."""
    packed = untile_weights(given["w"][expert : expert + 1], given["mode"])
    w, x = mxfp4.dequantize(mxfp4.MXFP4Tensor(*packed), torch.float64)[0], given["x"][own]
    if given["x_scales"] is not None:
        scales = scale_swizzle.unswizzle(given["x_scales"], len(given["x"]), w.shape[1] // BLOCK)[own]
        x = e4m3.decode(x, torch.float64) * ue8m0.decode(scales, torch.float64).repeat_interleave(BLOCK, -1)
    y = x.double() @ w.T
    if given["routing"] is None:
        return y
    gate, up = y.unflatten(1, (-1, 2, 8)).unbind(2)
    return swiglu(gate, up, LIMIT).flatten(1) * given["routing"][own, None].double()
