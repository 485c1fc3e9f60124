"""Rows of `template_op`. given: gate, up bf16 [T, d]. Outputs: out bf16 [T, d]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.template_op import op
from dsv4lib.reference import template_op as oracle


def rows() -> list[Row]:
    """Few and many tokens of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (1, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    d = inputs.MODELS[model].hidden

    def given(generator: torch.Generator) -> Given:
        return {"gate": inputs.normals(generator, tokens, d), "up": inputs.normals(generator, tokens, d)}

    return Row(
        "template_op",
        f"{model} T {tokens}",
        bytes=6 * tokens * d,
        flops=0,
        given=given,
        check=_check,
        providers=(
            providers.in_place("ours", lambda g: {"out": torch.empty_like(g["up"])}, _ours),
            providers.compiled(_plain, "gate", "up"),
        ),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    inputs.close(outputs, {"out": oracle.template_op(given["gate"].double(), given["up"].double())})


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.template_op(given["gate"], given["up"], out=out["out"])


def _plain(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
    return {"out": (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()}
