"""Rows of `moe_combine`.

given: y bf16 [R, d], R = 6 T (every route its row, in the order of the experts: far apart), row_of int32 [T, 6],
weights fp32 [T, 6], shared bf16 [T, d]. Outputs: out bf16 [T, d].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.moe_combine import op
from dsv4lib.reference import moe_combine as oracle


def rows() -> list[Row]:
    """All tokens of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    config = inputs.MODELS[model]
    d, k = config.hidden, config.experts_per_token

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        row_of = torch.randperm(tokens * k, generator=generator, device=device).int().view(tokens, k)
        weights = torch.rand(tokens, k, generator=generator, device=device) + 0.1
        weights *= config.routed_scaling / weights.sum(-1, keepdim=True)
        y, shared = inputs.normals(generator, tokens * k, d), inputs.normals(generator, tokens, d)
        return {"y": y, "row_of": row_of, "weights": weights, "shared": shared}

    return Row(
        "moe_combine",
        f"{model} T {tokens}",
        bytes=2 * tokens * d * (k + 2) + 8 * tokens * k,
        flops=0,
        given=given,
        check=_check,
        providers=(
            providers.in_place("ours", lambda g: {"out": torch.empty_like(g["shared"])}, _ours),
            providers.compiled(_plain, "y", "row_of", "weights", "shared"),
        ),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    y, weights, shared = (given[name].double() for name in ("y", "weights", "shared"))
    inputs.close(outputs, {"out": oracle.moe_combine(y, given["row_of"], weights, shared)})


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.moe_combine(given["y"], given["row_of"], given["weights"], given["shared"], out=out["out"])


def _plain(y: Tensor, row_of: Tensor, weights: Tensor, shared: Tensor) -> dict[str, Tensor]:
    return {"out": ((y[row_of].float() * weights[..., None]).sum(1) + shared.float()).bfloat16()}
