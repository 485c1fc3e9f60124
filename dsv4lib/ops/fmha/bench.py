"""Time `fmha` on a Hopper. Steps of DSV4 over 584-byte entries, window and entries by index as the model has.

Decode: tokens of as many requests. Prefill: neighbours of one request, which select entries of one pool.

given: q bf16 [T, H, 512]; pages uint8 [P, bytes] of 64 entries, of window and of compressed entries alike; window int32
[T, 128] and index int32 [T, K], rows of them, or None, with counts int32 [T]; sink fp32 [H]. Output: o bf16 [T, H,
512].

Bytes: Q and O once, an entry for every key of every token of decode, every entry of a prefill once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.formats import kv_entry
from dsv4lib.ops.fmha import peers
from dsv4lib.ops.fmha.op import Fp8Pages, Selected, fmha
from dsv4lib.reference import fmha as reference

PAGE = 64
CONTEXT = 32768
BOUND = 3e-3  # relative L2 of a step: P and O in bf16
PREFILL_KINDS = {"Flash": (LayerKind.CSA,), "Pro": (LayerKind.CSA,)}
KINDS = {"Flash": (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA), "Pro": (LayerKind.CSA, LayerKind.HCA)}


class Shape(NamedTuple):
    """Attention of a layer."""

    name: str
    heads: int
    window: int
    entries: int


def shape(config: ModelConfig, kind: LayerKind) -> Shape:
    """Return the keys of a token after `CONTEXT` others."""
    entries = 0
    if kind is not LayerKind.SWA:
        entries = CONTEXT // config.rate(kind)
    if kind is LayerKind.CSA:
        entries = min(entries, config.index_topk)
    return Shape(str(kind), config.n_heads, config.window, entries)


def rows() -> list[Row]:
    """Decode of both models at 32,768 tokens, and a chunk of prefill after so many."""
    decode = [
        _row(model, shape(inputs.MODELS[model], kind), tokens)
        for model, kinds in KINDS.items()
        for kind in kinds
        for tokens in inputs.DECODE
    ]
    return decode + [
        _prefill_row(model, shape(inputs.MODELS[model], kind), CONTEXT // inputs.MODELS[model].rate(kind))
        for model, kinds in PREFILL_KINDS.items()
        for kind in kinds
    ]


def _row(model: str, one: Shape, tokens: int) -> Row:
    keys = one.window + one.entries
    return Row(
        "fmha",
        f"{model} {one.name} T {tokens}",
        bytes=tokens * (keys * kv_entry.LAYOUT.entry_bytes + 4 * one.heads * kv_entry.HEAD_DIM),
        flops=4 * tokens * keys * one.heads * kv_entry.HEAD_DIM,
        given=lambda generator: given_of(one, tokens, generator),
        check=check,
        providers=(providers.in_place("ours", new, _ours), *peers.providers()),
    )


def _prefill_row(model: str, one: Shape, pool: int) -> Row:
    tokens, keys = inputs.PREFILL, one.window + one.entries
    rows = pool + one.window - 1 + tokens
    return Row(
        "fmha",
        f"{model} {one.name} prefill T {tokens}",
        bytes=rows * kv_entry.LAYOUT.entry_bytes + 4 * tokens * one.heads * kv_entry.HEAD_DIM,
        flops=4 * tokens * keys * one.heads * kv_entry.HEAD_DIM,
        given=lambda generator: prefill_of(one, tokens, pool, generator),
        check=check,
        providers=(providers.in_place("ours", new, _ours), *peers.providers(), *peers.prefill_providers()),
    )


def prefill_of(one: Shape, tokens: int, pool: int, generator: torch.Generator) -> Given:
    """Make a chunk. Every token selects of ``pool`` entries; its window ends with its own row, after them."""
    device = generator.device
    place = torch.arange(one.window, dtype=torch.int32, device=device)
    window = pool + torch.arange(tokens, dtype=torch.int32, device=device)[:, None] + place
    index = torch.rand(tokens, pool, generator=generator, device=device).topk(one.entries).indices.int()
    return _given(one, pool + one.window - 1 + tokens, window, index, generator)


def given_of(one: Shape, tokens: int, generator: torch.Generator) -> Given:
    """Make a step: every token reads rows of its own, in any order."""
    keys = one.window + one.entries
    rows = max(4096, 2 * tokens * keys)
    rows = -(-rows // PAGE) * PAGE
    picks = torch.randperm(rows, generator=generator, device=generator.device)[: tokens * keys].int().view(tokens, keys)
    index = picks[:, one.window :].contiguous() if one.entries else None
    return _given(one, rows, picks[:, : one.window].contiguous(), index, generator)


def _given(one: Shape, rows: int, window: Tensor, index: Tensor | None, generator: torch.Generator) -> Given:
    """Make pages of so many entries, and Q."""
    device, tokens, count = generator.device, len(window), -(-rows // PAGE)
    kv = torch.randn(count * PAGE, kv_entry.HEAD_DIM, generator=generator, device=device).bfloat16()
    pages = kv_entry.LAYOUT.allocate(count, PAGE).to(device)
    kv_entry.append(pages, PAGE, torch.arange(count * PAGE, device=device), kv)
    return {
        "q": torch.randn(tokens, one.heads, kv_entry.HEAD_DIM, generator=generator, device=device).bfloat16(),
        "pages": pages,
        "window": window,
        "window_count": torch.full((tokens,), one.window, dtype=torch.int32, device=device),
        "index": index,
        "count": torch.full((tokens,), one.entries, dtype=torch.int32, device=device),
        "sink": torch.randn(one.heads, generator=generator, device=device),
    }


def new(given: Given) -> dict[str, Tensor]:
    """Allocate the output."""
    return {"o": torch.empty_like(given["q"])}


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    pool, index = Fp8Pages(given["pages"], PAGE), given["index"]
    entries = None if index is None else Selected(pool, index, given["count"])
    window = Selected(pool, given["window"], given["window_count"])
    fmha(given["q"], entries, window, sink=given["sink"], o=out["o"], backend="native")


def check(given: Given, out: Mapping[str, Tensor]) -> None:
    """Compare with fp64 of what the entries hold.

    Raises:
        AssertionError: a token is off by more than rounding.
    """
    lists = [x for x in (given["index"], given["window"]) if x is not None]
    for token in range(len(given["q"])):
        picks = torch.cat([x[token] for x in lists]).long()
        keys, _ = kv_entry.gather(given["pages"], PAGE, picks)
        q, sink = given["q"][token, None].double()[None], given["sink"].double()
        index = torch.arange(len(picks), device=picks.device)[None, None]
        (want,), _ = reference.sparse(q, keys.double()[None], index, sink, kv_entry.HEAD_DIM**-0.5)
        error = float((out["o"][token].double() - want[0]).norm() / want.norm())
        assert error <= BOUND, f"o: token {token} is off by {error:.3g} of its size"
