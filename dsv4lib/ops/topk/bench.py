"""Time `topk`. Its rows are fp32 scores of the indexer, every row full, 512 (Flash) and 1024 (Pro) picks.

Scores are normals in rows that say nothing else. Two shapes have a row for each other distribution, too, because how
long a selection takes depends on how many scores are alike, and on their order.

Given: ``scores`` fp32 [B, L], ``lengths`` int32 [B], ``k``. Output: ``indices`` int32 [B, k], in any order.
Attention, which reads them, does not care for order, and peers leave ties open: right is any selection with the
scores of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from dsv4lib.bench.ops import providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.ops.topk import op, peers

LENGTHS, BATCHES = (1024, 8192, 32768, 262144), (1, 8, 32, 128)
PICKS = {"Flash": 512, "Pro": 1024}
PREFILL = 4096, 8192  # queries, entries
HARD = ("Flash", 32, 32768), ("Pro", 128, 262144)  # shapes with a row for each distribution


def _relus(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """What an indexer of 16 heads gives: a sum of ReLUs, none of them 0."""
    total = torch.zeros_like(x)
    for _ in range(16):
        total += torch.randn(x.shape, generator=generator, device=x.device).relu_()
    return total


def _mostly_zero(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """ReLUs of which fewer than there are picks are above 0: the last picks are zeros."""
    return (x - 3.1).relu_()


def _outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normals, one of 4096 a million times as large."""
    rare = torch.rand(x.shape, generator=generator, device=x.device) < 1 / 4096
    return torch.where(rare, x * 1e6, x)


def _rising(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each score beats all before it."""
    return torch.arange(x.shape[1], device=x.device).float().expand_as(x).contiguous()


DISTRIBUTIONS = {
    "sum of ReLUs": _relus,
    "outliers": _outliers,
    "zeros at the cut": _mostly_zero,
    "1 +- 1e-5": lambda x, generator: 1 + 1e-5 * x,
    "rising": _rising,
    "8 values": lambda x, generator: torch.randint(8, x.shape, generator=generator, device=x.device).float(),
    "all equal": lambda x, generator: torch.full_like(x, 0.5),
}
"""Scores by name, of normals of the same shape and a generator."""


def rows() -> list[Row]:
    """All cells of decode, and a chunk of prefill."""
    cells = [(model, batch, length) for model in PICKS for length in LENGTHS for batch in BATCHES]
    cells += [(*cell, kind) for kind in DISTRIBUTIONS for cell in HARD]
    return [_row(*cell) for cell in cells + [(model, *PREFILL) for model in PICKS]]


def _row(model: str, batch: int, length: int, kind: str = "") -> Row:
    k = PICKS[model]
    big = (batch, length) == (128, 262144) and not kind
    return Row(
        op="topk",
        shape=f"{model} k {k} L {length} T {batch}" + (f", {kind}" if kind else ""),
        bytes=4 * batch * (length + 1 + k),
        flops=0,
        given=partial(_given, batch, length, k, kind),
        check=_check,
        providers=(
            _ours(),
            providers.functional("torch.topk", _torch_topk),
            providers.in_cpp(_in_cpp),
            *peers.providers(),
        ),
        goal=None if batch == PREFILL[0] else 0.5 if big else 1.0,
    )


def _given(batch: int, length: int, k: int, kind: str, generator: torch.Generator) -> Given:
    device = generator.device
    scores = torch.randn(batch, length, generator=generator, device=device)
    if kind:
        scores = DISTRIBUTIONS[kind](scores, generator)
    else:
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


def _ours() -> Provider:
    def outputs(given: Given) -> Mapping[str, torch.Tensor]:
        scores = given["scores"]
        return {"indices": torch.empty(len(scores), given["k"], dtype=torch.int32, device=scores.device)}

    def write(given: Given, out: Mapping[str, torch.Tensor]) -> None:
        op.topk(given["scores"], given["k"], given["lengths"], out=out["indices"], backend="native")

    return providers.in_place("ours", outputs, write)


def _in_cpp(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    from dsv4lib.ops.topk import cpp

    scores, lengths, k = given["scores"], given["lengths"], given["k"]
    out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    return lambda: cpp.topk(scores, k, lengths, out=out), {"indices": out}


def _torch_topk(given: Given) -> Mapping[str, torch.Tensor]:
    return {"indices": given["scores"].topk(given["k"], dim=-1, sorted=False).indices}
