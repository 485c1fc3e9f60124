"""Rows of `add_rmsnorm_quant`: h = x + residual, its norm, quantised; the normed row itself is not stored.

Given: x, residual bf16 [T, d]; weight fp32 [d], exact in bf16; eps; recipe "fp8" (E4M3 1x128), "mxfp8" (E4M3 1x32) or
"nvfp4" (E2M1 1x16); global_scale fp32 [1] for nvfp4, else None.
Outputs: h bf16 [T, d]; codes uint8 or float8_e4m3fn [T, d], nvfp4: uint8 [T, d/2], low nibble first; scales
[T, d/block], uint8 (UE8M0, nvfp4: E4M3) or fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4lib.bench.ops import inputs, providers, rope_inputs
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row
from dsv4lib.formats import e2m1, e4m3
from dsv4lib.ops.add_rmsnorm_quant import peers
from dsv4lib.ops.add_rmsnorm_quant.op import add_rmsnorm_quant

EPS = 1e-6
MODELS = {"Flash": 4096, "Pro": 7168}
TOKENS = (*inputs.DECODE, inputs.PREFILL)
BLOCKS = {"fp8": 128, "mxfp8": 32, "nvfp4": 16}
GLOBAL = 8.0 / (6 * 448)  # what calibration gives for normed rows of this spread


def _given(generator: torch.Generator, tokens: int, d: int, recipe: str) -> Given:
    device = generator.device
    return {
        "x": inputs.normals(generator, tokens, d),
        "residual": inputs.normals(generator, tokens, d),
        "weight": (1 + 0.2 * torch.randn(d, generator=generator, device=device)).bfloat16().float(),
        "eps": EPS,
        "recipe": recipe,
        "global_scale": torch.full((1,), GLOBAL, device=device) if recipe == "nvfp4" else None,
    }


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    """The sum to a unit of bf16, then the codes: half a step at the provider's own scales, and bf16 before them."""
    total = given["x"].float() + given["residual"].float()
    wrong = (out["h"].float() - total).abs() > 2.0**-8 * total.abs()
    assert not bool(wrong.any()), f"h: {int(wrong.sum())} of {wrong.numel()}"
    h = out["h"].float()
    want = given["weight"] * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + given["eps"])
    block = BLOCKS[given["recipe"]]
    amax = want.unflatten(-1, (-1, block)).abs().amax(-1)
    if given["recipe"] == "nvfp4":
        scale = e4m3.decode(out["scales"].view(torch.uint8)) * given["global_scale"]
        least, most = amax / 6.0 * (1 - 2.0**-4 - 2.0**-7), amax / 6.0 * (1 + 2.0**-4 + 2.0**-7)
        codes, unit, small = e2m1.decode(e2m1.unpack(out["codes"])), 2.0**-2, 2.0**-2
    else:
        scale = rope_inputs.scale_values(out["scales"])
        least, most = amax.clamp_min(1e-4) / 448.0 * (1 - 2.0**-7), amax.clamp_min(1e-4) / 448.0 * 2.02
        codes, unit, small = rope_inputs.e4m3_values(out["codes"]), 2.0**-4, 2.0**-10
    assert bool(((scale >= least) & (scale <= most)).all()), "scales"
    spread = scale.repeat_interleave(block, -1)
    # Behind E2M1's largest value a scale that was rounded down saturates: 2^-4 more.
    extra = 2.0**-8 + (2.0**-4 if given["recipe"] == "nvfp4" else 0)
    wrong = (codes * spread - want).abs() > (unit + extra) * want.abs() + small * spread
    assert not bool(wrong.any()), f"codes: {int(wrong.sum())} of {wrong.numel()}"


def _ours(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    arguments = given["x"], given["residual"], given["weight"], given["recipe"]
    options = {"eps": given["eps"], "global_scale": given["global_scale"], "backend": "native"}
    out = add_rmsnorm_quant(*arguments, **options)

    def call() -> None:
        add_rmsnorm_quant(*arguments, **options, out=out)

    return call, {"h": out.h, "codes": out.codes, "scales": out.scales}


def _compiled(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    if given["recipe"] == "nvfp4":
        raise Absent("torch has no conversion to E2M1")
    block, eps = BLOCKS[given["recipe"]], given["eps"]

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        total = (x.float() + residual.float()).bfloat16()
        h = total.float()
        y = (weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).bfloat16().float()
        groups = y.unflatten(-1, (-1, block))
        scale = rope_inputs.power_scale(groups.abs().amax(-1, keepdim=True), 448.0, 1e-4)
        codes = (groups / scale).flatten(-2).to(torch.float8_e4m3fn)
        return {"h": total, "codes": codes, "scales": scale[..., 0]}

    return providers.compiled(plain, "x", "residual", "weight").bind(given)


def rows() -> list[Row]:
    """Decode and prefill of both models; DSV4 does not have this op (mHC replaced the addition): no goals."""
    code_bits = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}
    return [
        Row(
            op="add_rmsnorm_quant",
            shape=f"{model} {recipe} T {tokens}",
            bytes=tokens * (6 * d + d * code_bits[recipe] // 8 + d // block) + 4 * d,
            flops=0,
            given=lambda generator, t=tokens, n=d, r=recipe: _given(generator, t, n, r),
            check=_check,
            providers=(Provider("ours", _ours), Provider("torch.compile", _compiled), *peers.providers()),
        )
        for model, d in MODELS.items()
        for recipe, block in BLOCKS.items()
        for tokens in TOKENS
    ]
