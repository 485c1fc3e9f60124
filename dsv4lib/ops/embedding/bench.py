"""Rows of `embedding`: a token's row, copied into the four residual streams.

given: tokens int64 [T], weight bf16 [V, d] (V of the models). Outputs: streams bf16 [T, 4, d].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.embedding import op

STREAMS = 4


def rows() -> list[Row]:
    """Decode and prefill of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    config = inputs.MODELS[model]

    def given(generator: torch.Generator) -> Given:
        draw = {"generator": generator, "device": generator.device}
        weight = torch.randn(config.vocab, config.hidden, dtype=torch.bfloat16, **draw)
        return {"tokens": torch.randint(config.vocab, (tokens,), **draw), "weight": weight}

    return Row(
        "embedding",
        f"{model} T {tokens}",
        bytes=tokens * (2 * config.hidden * (1 + STREAMS) + 8),
        flops=0,
        given=given,
        check=_check,
        providers=(
            providers.in_place("ours", _outputs, _ours),
            providers.compiled(_plain, "tokens", "weight"),
            providers.functional("torch, two launches", lambda g: _plain(g["tokens"], g["weight"])),
        ),
    )


def _outputs(given: Given) -> dict[str, Tensor]:
    weight = given["weight"]
    return {"streams": weight.new_empty(len(given["tokens"]), STREAMS, weight.shape[1])}


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    inputs.same_bytes(outputs, _plain(given["tokens"], given["weight"]))


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.embedding(given["tokens"], given["weight"], out=op.Embedded(out["streams"]), backend="native")


def _plain(tokens: Tensor, weight: Tensor) -> dict[str, Tensor]:
    return {"streams": weight[tokens][:, None].expand(-1, STREAMS, -1).contiguous()}
