"""Rows of `rmsnorm`.

given: x bf16 [T, d], weight fp32 [d] (exact in bf16), eps float. Outputs: y bf16 [T, d].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Row
from dsv4lib.ops.rmsnorm import op, peers
from dsv4lib.reference import rmsnorm as oracle


def rows() -> list[Row]:
    """All tokens of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    d, eps = inputs.MODELS[model].hidden, inputs.MODELS[model].rms_eps

    def given(generator: torch.Generator) -> Given:
        weight = (1 + 0.2 * torch.randn(d, generator=generator, device=generator.device)).bfloat16().float()
        return {"x": inputs.normals(generator, tokens, d), "weight": weight, "eps": eps}

    return Row(
        "rmsnorm",
        f"{model} T {tokens}",
        bytes=4 * tokens * d + 4 * d,
        flops=0,
        given=given,
        check=_check,
        providers=(
            providers.in_place("ours", lambda g: {"y": torch.empty_like(g["x"])}, _ours),
            providers.compiled(_plain, "x", "weight", "eps"),
            providers.functional("torch rms_norm", _library),
            providers.in_cpp(_in_cpp),
            *peers.providers(),
        ),
        copy_goal=0.9 if tokens == inputs.PREFILL else None,
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    inputs.close(outputs, {"y": oracle.rmsnorm(given["x"].double(), given["weight"].double(), given["eps"])})


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.rmsnorm(given["x"], given["weight"], given["eps"], out=out["y"])


def _in_cpp(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    from dsv4lib.ops.rmsnorm import cpp

    x, weight, eps, y = given["x"], given["weight"], given["eps"], torch.empty_like(given["x"])
    return lambda: cpp.rmsnorm(x, weight, eps, out=y), {"y": y}


def _plain(x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    return {"y": oracle.rmsnorm(x.float(), weight, eps).bfloat16()}


def _library(given: Given) -> dict[str, Tensor]:
    x, weight = given["x"], given["weight"]
    return {"y": torch.rms_norm(x, x.shape[1:], weight.bfloat16(), given["eps"])}
