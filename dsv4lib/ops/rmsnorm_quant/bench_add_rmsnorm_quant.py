"""Time `add_rmsnorm_quant`: h = x + residual, its norm, quantised. The normed row itself is not stored.

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
from dsv4lib.ops.rmsnorm_quant import peers_add_rmsnorm_quant as peers
from dsv4lib.ops.rmsnorm_quant.bench import BLOCKS, check_codes
from dsv4lib.ops.rmsnorm_quant.op import add_rmsnorm_quant

EPS = 1e-6
MODELS = {"Flash": 4096, "Pro": 7168}
TOKENS = (*inputs.DECODE, inputs.PREFILL)
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
    """The sum to a unit of bf16, then its norm's codes."""
    total = given["x"].float() + given["residual"].float()
    wrong = (out["h"].float() - total).abs() > 2.0**-8 * total.abs()
    assert not bool(wrong.any()), f"h: {int(wrong.sum())} of {wrong.numel()}"
    check_codes(given, out["h"], out)


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
    """List decode and prefill of both models, without goals.

    DSV4 does not have this op (mHC replaced the addition).
    """
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
