"""Share what all layers of a step need. Which token belongs where, made once from lengths that the host knows.

A step is T tokens of B requests, packed: request b has ``counts[b]`` consecutive tokens from position ``starts[b]`` on,
and lives at place ``places[b]`` of the caches. Every array is a function of these three lists, so decode, chunks of any
length and any mixture of both are one path. A request without tokens (count 0) is padding; so are the rows after the
last token up to ``rows``: position -1, no keys, nothing written.

Caches are addressed by absolute position, through tables of pages: whatever lays them out (places with pages of their
own, `make_step`, or `dsv4lib.cache`, `model.paged`) makes the same arrays. A rejected draft is overwritten by the token
that replaces it, before anything reads it: readers go by position.

Groups of caches have the names of `dsv4lib.cache`: window, mtp_window, csa, keys, hca, and csa_state, keys_state,
hca_state. Where a group's layers do not fit into one page they are in parts, each with tables of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.requests import plan

PAGE = 64  # entries of a page, or tokens of a page of a window
WINDOWS = "window", "mtp_window"
ENTRIES = {"csa": LayerKind.CSA, "keys": LayerKind.CSA, "hca": LayerKind.HCA}
STATES = "csa_state", "keys_state", "hca_state"


class Window(NamedTuple):
    """A part of a window group in a step.

    Attributes:
        slots: int32 [T], row of the pool that a token's KV goes to; negative: padding.
        rows: int32 [T, window], rows that a token reads, in order; it has `Step.window_count` of them.
    """

    slots: Tensor
    rows: Tensor


class Entries(NamedTuple):
    """A part of a group of compressed entries in a step.

    Attributes:
        slots: int32 [T], row of the pool that the entry goes to that a token closes; negative: it closes none.
        table: int32 [B, M], pages of each request.
        rows: int32 [T, K], rows of a token's entries 0 .. K - 1 where all of them are read (HCA), else None.
    """

    slots: Tensor
    table: Tensor
    rows: Tensor | None


class Angles(NamedTuple):
    """Cosines and sines of one base: cos, sin fp32 [P, 32] by position. Rows fp32 [T, 64] of the tokens."""

    cos: Tensor
    sin: Tensor
    rows: Tensor


class Step(NamedTuple):
    """Arrays of a step; see the module docstring.

    Attributes:
        tokens: int64 [T]. single: one token a request.
        request_ids: int32 [T], row of the tables of a token; negative: padding.
        window_count: int32 [T], rows of a window that a token sees. visible: int32 [T] by kind, entries that it sees.
        selected: int32 [T], entries of CSA that it reads: no more than the indexer picks.
        requests: of each state group by part int32 [B, 4] (`ops.common.requests`).
        windows, entries: of each group by part. angles: by kind of layer.
    """

    tokens: Tensor
    single: bool
    request_ids: Tensor
    window_count: Tensor
    visible: dict[LayerKind, Tensor]
    selected: Tensor
    requests: dict[str, list[Tensor]]
    windows: dict[str, list[Window]]
    entries: dict[str, list[Entries]]
    angles: dict[LayerKind, Angles]


class Layout(NamedTuple):
    """How caches are laid out: places, and tokens that each can hold."""

    places: int
    capacity: int

    def pages(self, rate: int) -> int:
        """Pages of entries of a place; rate 1: of its window."""
        return -(-self.capacity // rate // PAGE) or 1


def rows_of(table: Tensor, ids: Tensor, numbers: Tensor, each: int) -> Tensor:
    """Find rows of a pool through tables of pages, int32 [T, K].

    Args:
        table: int32 [B, M]; page i of a request is in column i mod M. ids: [T], row of it of each token, or negative.
        numbers: int [T, K], entries or positions; negative: none. each: of them in a page.

    Returns:
        page * each + place in it; -1 for none.
    """
    safe = numbers.clamp_min(0)
    pages = table[ids.clamp_min(0).long()[:, None], (safe // each % table.shape[1]).long()]
    return torch.where((numbers >= 0) & (ids >= 0)[:, None] & (pages >= 0), pages * each + safe % each, -1).int()


def window_rows(table: Tensor, ids: Tensor, positions: Tensor, window: int, each: int) -> Tensor:
    """List the window rows that tokens read, oldest first.

    Tokens are at ``positions`` [T]; int32 [T, window], -1 past the end.
    """
    first = (positions - window + 1).clamp_min(0)
    numbers = first[:, None] + torch.arange(window, device=positions.device, dtype=positions.dtype)
    return rows_of(table, ids, torch.where(numbers <= positions[:, None], numbers, -1), each)


def make_step(
    config: ModelConfig,
    layout: Layout,
    tables: dict[LayerKind, tuple[Tensor, Tensor]],
    tokens: Sequence[Sequence[int]],
    places: Sequence[int],
    starts: Sequence[int],
    rows: int | None = None,
    device: str | torch.device = "cpu",
) -> Step:
    """Make the arrays of a step.

    Args:
        config: of the model. layout: of the caches. tables: cosines and sines fp32 [P, 32] by kind of layer.
        tokens: of each request, oldest first. places, starts: of each request.
        rows: T, at least the number of tokens; None: so many.
        device: of the arrays.

    Raises:
        ArgumentError: a request past its capacity, a place that does not exist or comes twice, too few rows.
    """
    counts = [len(one) for one in tokens]
    total = sum(counts)
    rows = total if rows is None else rows
    if rows < total:
        raise ArgumentError("rows", rows, f"at least the {total} tokens")
    live = [p for p, n in zip(places, counts, strict=True) if n]
    if len(set(live)) != len(live) or any(not 0 <= p < layout.places for p in live):
        raise ArgumentError("places", list(places), f"0..{layout.places - 1}, each once")
    for start, count in zip(starts, counts, strict=True):
        if count and (start < 0 or start + count > layout.capacity):
            raise ArgumentError("starts", start, f"0..{layout.capacity - count}: places hold {layout.capacity} tokens")
    repeat = torch.tensor(counts)
    request = torch.arange(len(counts)).repeat_interleave(repeat)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    position = torch.arange(total) - (offsets[:-1] - torch.tensor(list(starts))).repeat_interleave(repeat)
    pad = rows - total
    flat = torch.tensor([t for one in tokens for t in one] + [0] * pad)
    request, position = (torch.nn.functional.pad(t.long(), (0, pad), value=-1) for t in (request, position))
    own = torch.tensor(list(places)).clamp_min(0)[:, None]

    def table(rate: int) -> Tensor:
        pages = layout.pages(rate)
        return (own * pages + torch.arange(pages)).int()

    used, entries = table(1), {}
    window = Window(
        rows_of(used, request, position[:, None], PAGE)[:, 0].to(device),
        window_rows(used, request, position, config.window, PAGE).to(device),
    )
    for name, kind in ENTRIES.items():
        rate = config.rate(kind)
        used = table(rate)
        closed = torch.where((position + 1) % rate == 0, position // rate, -1)
        slots = rows_of(used, request, torch.where(position >= 0, closed, -1)[:, None], PAGE)[:, 0].to(device)
        every = torch.arange(-(-layout.capacity // rate)).expand(rows, -1)
        listed = rows_of(used, request, every, PAGE).to(device) if kind is LayerKind.HCA else None
        entries[name] = [Entries(slots, used.to(device), listed)]
    given = (offsets, torch.tensor([s if n else 0 for s, n in zip(starts, counts, strict=True)]))
    state = plan(*given, torch.tensor([p if n else -1 for p, n in zip(places, counts, strict=True)])).to(device)
    return assembled(
        config,
        tables,
        flat.to(device),
        position.int().to(device),
        single=rows == len(counts) and all(n == 1 for n in counts),
        request_ids=request.int().to(device),
        requests={name: [state] for name in STATES},
        windows={name: [window] for name in WINDOWS},
        entries=entries,
    )


def assembled(
    config: ModelConfig, tables: dict[LayerKind, tuple[Tensor, Tensor]], tokens: Tensor, positions: Tensor, **given: Any
) -> Step:
    """Make a `Step` of tokens [T] and positions int32 [T] (negative: padding). ``given``: its other fields."""
    at, angles = positions.clamp_min(0).long(), {}
    for kind, (cos, sin) in tables.items():
        angles[kind] = Angles(cos, sin, torch.cat((cos[at], sin[at]), 1))
    visible = {k: (positions + 1) // config.rate(k) for k in set(ENTRIES.values())}  # none of padding, at -1
    count = (positions + 1).clamp(max=config.window)
    selected = visible[LayerKind.CSA].clamp(max=config.index_topk)
    return Step(tokens=tokens, window_count=count, visible=visible, selected=selected, angles=angles, **given)
