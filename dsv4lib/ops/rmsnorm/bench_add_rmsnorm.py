"""Time `add_rmsnorm`, which DSV4 does not have: mHC replaced the addition. Nothing is promised.

given: x, residual bf16 [T, d], weight fp32 [d] (exact in bf16), eps float. Outputs: h = x + residual and
y = rmsnorm(h), bf16 [T, d].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.rmsnorm import op
from dsv4lib.ops.rmsnorm import peers_add_rmsnorm as peers
from dsv4lib.reference import add_rmsnorm as oracle


def rows() -> list[Row]:
    """All tokens of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    d, eps = inputs.MODELS[model].hidden, inputs.MODELS[model].rms_eps

    def given(generator: torch.Generator) -> Given:
        weight = (1 + 0.2 * torch.randn(d, generator=generator, device=generator.device)).bfloat16().float()
        x, residual = (inputs.normals(generator, tokens, d) for _ in range(2))
        return {"x": x, "residual": residual, "weight": weight, "eps": eps}

    return Row(
        "add_rmsnorm",
        f"{model} T {tokens}",
        bytes=8 * tokens * d + 4 * d,
        flops=0,
        given=given,
        check=_check,
        providers=(
            providers.in_place("ours", lambda g: {name: torch.empty_like(g["x"]) for name in "hy"}, _ours),
            providers.compiled(_plain, "x", "residual", "weight", "eps"),
            *peers.providers(),
        ),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    x, residual, weight = (given[name].double() for name in ("x", "residual", "weight"))
    h, y = oracle.add_rmsnorm(x, residual, weight, given["eps"], torch.bfloat16)
    inputs.close(outputs, {"h": h, "y": y})


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.add_rmsnorm(given["x"], given["residual"], given["weight"], given["eps"], out=(out["h"], out["y"]))


def _plain(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    h, y = oracle.add_rmsnorm(x.float(), residual.float(), weight, eps, torch.bfloat16)
    return {"h": h.bfloat16(), "y": y.bfloat16()}
