"""Time `rmsnorm_quant`. The norm of a query's latent (q_lora wide) is quantised for the projection that reads it.

Given: x bf16 [T, d]; weight fp32 [d], exact in bf16; eps; recipe "fp8" (E4M3 1x128).
Outputs: codes uint8 or float8_e4m3fn [T, d]; scales [T, d/128], uint8 (UE8M0) or fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4lib.bench.ops import inputs, providers, rope_inputs
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.formats import e2m1, e4m3
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm.op import rmsnorm
from dsv4lib.ops.rmsnorm_quant import peers
from dsv4lib.ops.rmsnorm_quant.op import Normed, rmsnorm_quant

BLOCKS = {"fp8": 128, "mxfp8": 32, "nvfp4": 16}
RECIPE = "fp8"


def _given(generator: torch.Generator, tokens: int, d: int, eps: float) -> Given:
    weight = (1 + 0.2 * torch.randn(d, generator=generator, device=generator.device)).bfloat16().float()
    return {"x": inputs.normals(generator, tokens, d), "weight": weight, "eps": eps, "recipe": RECIPE}


def check_codes(given: Given, h: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
    """Check codes of the norm of h. Half a step at the provider's own scales, and bf16 before them.

    Raises:
        AssertionError: scales, or codes, are not those of the recipe.
    """
    h = h.float()
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
    # Past E2M1's largest value a scale that was rounded down saturates: 2^-4 more.
    extra = 2.0**-8 + (2.0**-4 if given["recipe"] == "nvfp4" else 0)
    wrong = (codes * spread - want).abs() > (unit + extra) * want.abs() + small * spread
    assert not bool(wrong.any()), f"codes: {int(wrong.sum())} of {wrong.numel()}"


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    check_codes(given, given["x"], out)


def _outputs(given: Given) -> dict[str, torch.Tensor]:
    x = given["x"]
    scales = torch.empty(len(x), x.shape[1] // BLOCKS[RECIPE], dtype=torch.uint8, device=x.device)
    return {"codes": torch.empty_like(x, dtype=torch.uint8), "scales": scales}


def _ours(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    target = Normed(out["codes"], out["scales"])
    rmsnorm_quant(given["x"], given["weight"], RECIPE, eps=given["eps"], out=target, backend="native")


def _two_launches(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    y = rmsnorm(given["x"], given["weight"], given["eps"], backend="native")
    quantize(y, RECIPE, out=(out["codes"], out["scales"], None), backend="native")


def _plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, torch.Tensor]:
    h = x.float()
    y = (weight * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).bfloat16().float()
    groups = y.unflatten(-1, (-1, BLOCKS[RECIPE]))
    scale = rope_inputs.power_scale(groups.abs().amax(-1, keepdim=True), 448.0, 1e-4)
    return {"codes": (groups / scale).flatten(-2).to(torch.float8_e4m3fn), "scales": scale[..., 0]}


def rows() -> list[Row]:
    """Decode and prefill of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    d, eps = inputs.MODELS[model].q_lora_rank, inputs.MODELS[model].rms_eps
    return Row(
        op="rmsnorm_quant",
        shape=f"{model} {RECIPE} T {tokens}",
        bytes=tokens * (3 * d + d // BLOCKS[RECIPE]) + 4 * d,
        flops=0,
        given=lambda generator: _given(generator, tokens, d, eps),
        check=_check,
        providers=(
            providers.in_place("ours", _outputs, _ours),
            providers.in_place("ours, two launches", _outputs, _two_launches),
            providers.compiled(_plain, "x", "weight", "eps"),
            *peers.providers(),
        ),
    )
