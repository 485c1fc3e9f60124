"""Time `inv_rope_quant`. Attention output [T, H, 512] is rotated back and quantised to E4M3 1x128.

Given: o bf16 [T, H, 512]; positions int64 [T]; cos_sin fp32 [131072, 64], 32 cosines and 32 sines a position.
Outputs: codes E4M3 [T, H, 512] (uint8 or float8_e4m3fn); scales [T, H, 4], UE8M0 bytes (uint8) or fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4lib.bench.ops import inputs, providers, rope_inputs
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.ops.inv_rope_quant import peers
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant

DIM, GROUP = 512, 128
MODELS = {"Flash": 64, "Pro": 128}
TOKENS = (*inputs.DECODE, inputs.PREFILL)
GOAL = 0.4  # at 4096 tokens


def _given(generator: torch.Generator, tokens: int, heads: int) -> Given:
    return {
        "o": inputs.normals(generator, tokens, heads, DIM),
        "positions": rope_inputs.positions(generator, tokens),
        "cos_sin": rope_inputs.table(generator.device),
    }


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    """Half a step of E4M3 at the provider's own scale, which may be any that neither saturates nor wastes two bits."""
    want = rope_inputs.rotate(given["o"].float(), given["cos_sin"][given["positions"]], inverse=True)
    amax = want.unflatten(-1, (-1, GROUP)).abs().amax(-1).clamp_min(1e-4)
    scale = rope_inputs.scale_values(out["scales"])
    assert bool(((scale >= amax / 448.0 * (1 - 2.0**-7)) & (scale <= amax / 448.0 * 2.02)).all()), "scales"
    spread = scale.repeat_interleave(GROUP, -1)
    found = rope_inputs.e4m3_values(out["codes"]) * spread
    # 2^-4: half a unit of 3 bits; 2^-10: half a subnormal step; 2^-8: bf16 between rotation and quantisation.
    allowed = (2.0**-4 + 2.0**-8) * want.abs() + 2.0**-10 * spread
    wrong = (found - want).abs() > allowed
    assert not bool(wrong.any()), f"codes: {int(wrong.sum())} of {wrong.numel()}"


def _ours(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    o = given["o"]
    codes = torch.empty(o.shape, dtype=torch.uint8, device=o.device)
    scales = torch.empty(*o.shape[:-1], DIM // GROUP, dtype=torch.uint8, device=o.device)

    def call() -> None:
        inv_rope_quant(o, given["positions"], given["cos_sin"], out=(codes, scales), backend="native")

    return call, {"codes": codes, "scales": scales}


def _plain(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> dict[str, torch.Tensor]:
    x = rope_inputs.rotate(o.float(), cos_sin[positions], inverse=True).unflatten(-1, (-1, GROUP))
    scale = rope_inputs.power_scale(x.abs().amax(-1, keepdim=True), 448.0, 1e-4)
    return {"codes": (x / scale).flatten(-2).to(torch.float8_e4m3fn), "scales": scale[..., 0]}


def rows() -> list[Row]:
    """The cells of the issue's table, and decode."""
    compiled = providers.compiled(_plain, "o", "positions", "cos_sin")
    return [
        Row(
            op="inv_rope_quant",
            shape=f"{model} T {tokens}",
            bytes=tokens * heads * (3 * DIM + DIM // GROUP) + 264 * tokens,
            flops=0,
            given=lambda generator, t=tokens, h=heads: _given(generator, t, h),
            check=_check,
            providers=(Provider("ours", _ours), compiled, *peers.providers()),
            goal=GOAL if tokens == inputs.PREFILL else None,
        )
        for model, heads in MODELS.items()
        for tokens in TOKENS
    ]
