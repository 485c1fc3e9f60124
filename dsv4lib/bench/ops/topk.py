"""Rows of the bench for `topk`: fp32 scores of the indexer, every row full, 512 (Flash) and 1024 (Pro) picks.

Given: ``scores`` fp32 [B, L], ``lengths`` int32 [B], ``k``. Output: ``indices`` int32 [B, k], in any order.
Attention, which reads them, does not care for order, and peers leave ties open: right is any selection with the
scores of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from dsv4lib.bench.ops import ways
from dsv4lib.bench.ops.case import Given, Row, Way
from dsv4lib.bench.ops.peers import topk as peers
from dsv4lib.ops import topk as op

LENGTHS, BATCHES = (1024, 8192, 32768, 262144), (1, 8, 32, 128)
PICKS = {"Flash": 512, "Pro": 1024}
PREFILL = 4096, 8192  # queries, entries


def rows() -> list[Row]:
    """All cells of decode, and a chunk of prefill."""
    cells = [(model, batch, length) for model in PICKS for length in LENGTHS for batch in BATCHES]
    return [_row(*cell) for cell in cells + [(model, *PREFILL) for model in PICKS]]


def _row(model: str, batch: int, length: int) -> Row:
    k = PICKS[model]
    big = (batch, length) == (128, 262144)
    return Row(
        op="topk",
        shape=f"{model} k {k} L {length} T {batch}",
        bytes=4 * batch * (length + 1 + k),
        flops=0,
        given=partial(_given, batch, length, k),
        check=_check,
        ways=(_ours(), ways.functional("torch.topk", _torch_topk), *peers.ways()),
        goal=None if batch == PREFILL[0] else 0.5 if big else 1.0,
    )


def _given(batch: int, length: int, k: int, generator: torch.Generator) -> Given:
    device = generator.device
    scores = torch.randn(batch, length, generator=generator, device=device)
    scores *= torch.linspace(0.3, 8, batch, device=device)[:, None]  # a scale of its own a row
    return {"scores": scores, "lengths": torch.full((batch,), length, dtype=torch.int32, device=device), "k": k}


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    scores, k, found = given["scores"], given["k"], out["indices"].long()
    assert found.shape == (len(scores), k), f"indices: {tuple(found.shape)}"
    assert bool(((found >= 0) & (found < given["lengths"][:, None])).all()), "indices: one beyond its row"
    ranked = found.sort(-1).values
    assert bool((ranked[:, 1:] > ranked[:, :-1]).all()), "indices: one is there twice"
    want = scores.topk(k, dim=-1).values  # scores of ties are the same, and every row is full
    have = scores.gather(-1, found).sort(-1, descending=True).values
    wrong = (have != want).any(-1)
    assert not bool(wrong.any()), f"indices: {int(wrong.sum())} rows do not have the best {k}"


def _ours() -> Way:
    def outputs(given: Given) -> Mapping[str, torch.Tensor]:
        scores = given["scores"]
        return {"indices": torch.empty(len(scores), given["k"], dtype=torch.int32, device=scores.device)}

    def write(given: Given, out: Mapping[str, torch.Tensor]) -> None:
        op.topk(given["scores"], given["k"], given["lengths"], out=out["indices"], backend="native")

    return ways.in_place("ours", outputs, write)


def _torch_topk(given: Given) -> Mapping[str, torch.Tensor]:
    return {"indices": given["scores"].topk(given["k"], dim=-1, sorted=False).indices}
