"""Rows of `moe_dispatch`.

given: experts int32 [T, k] (no expert twice in a token), weights fp32 [T, k], count int (E), align int (128), size int
(R, rows that suffice for any experts). Outputs, as in `ops.moe_dispatch.Dispatch`: counts int32 [E], offsets int32
[E + 1], rows int32 [R], row_of int32 [T, k], row_weight fp32 [R].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.ops.moe_dispatch import op
from dsv4lib.ops.moe_dispatch.size import max_rows
from dsv4lib.reference import moe_dispatch as oracle

ALIGN = 128


def rows() -> list[Row]:
    """All tokens of both models."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    count, k = inputs.MODELS[model].n_experts, inputs.MODELS[model].experts_per_token
    size = max_rows(tokens, k, count, ALIGN)

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        experts = torch.rand(tokens, count, generator=generator, device=device).topk(k).indices.int()
        weights = torch.rand(tokens, k, generator=generator, device=device) + 0.1
        return {"experts": experts.contiguous(), "weights": weights, "count": count, "align": ALIGN, "size": size}

    return Row(
        "moe_dispatch",
        f"{model} T {tokens}",
        bytes=4 * (3 * tokens * k + 2 * size + 2 * count + 1),
        flops=0,
        given=given,
        check=_check,
        providers=(
            Provider("ours", _ours),
            providers.compiled(_plain, "experts", "weights", "count", "align", "size", name="torch.compile (sort)"),
        ),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    arguments = (given[name] for name in ("experts", "weights", "count", "size", "align"))
    inputs.same_bytes(outputs, oracle.moe_dispatch(*arguments)._asdict())


def _ours(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    experts, weights, options = given["experts"], given["weights"], {"count": given["count"], "align": given["align"]}
    i32 = {"dtype": torch.int32, "device": experts.device}
    out = op.Dispatch(
        torch.empty(given["count"], **i32),
        torch.empty(given["count"] + 1, **i32),
        torch.empty(given["size"], **i32),
        torch.empty(experts.shape, **i32),
        torch.empty(given["size"], dtype=torch.float32, device=experts.device),
    )
    return lambda: op.moe_dispatch(experts, weights, **options, out=out), out._asdict()


def _plain(experts: Tensor, weights: Tensor, count: int, align: int, size: int) -> dict[str, Tensor]:
    """By a stable sort of the routes, without a wait of the host."""
    flat, device = experts.flatten().long(), experts.device
    owner, routes = flat.sort(stable=True)
    counts = torch.zeros(count, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + align - 1) // align * align).cumsum(0)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64, device=device), ends))
    row = offsets[owner] + torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[owner]
    row_of = torch.empty_like(flat).scatter_(0, routes, row)
    tokens = torch.full((size,), -1, dtype=torch.int32, device=device)
    tokens.scatter_(0, row, (routes // experts.shape[1]).int())
    row_weight = torch.zeros(size, device=device).scatter_(0, row, weights.flatten()[routes])
    shaped = row_of.int().view(experts.shape)
    return {
        "counts": counts.int(),
        "offsets": offsets.int(),
        "rows": tokens,
        "row_of": shaped,
        "row_weight": row_weight,
    }
