"""What all layers of a step share: which token belongs where, made once from lengths that the host knows.

A step is T tokens of B requests, packed: request b has ``counts[b]`` consecutive tokens from position ``starts[b]`` on,
and lives at place ``places[b]`` of the caches. Every array is a function of these three lists, so decode, chunks of any
length and any mixture of both are one path. A request without tokens (count 0) is padding; so are the rows after the
last token up to ``rows``: position -1, no keys, nothing written.

Caches are addressed by absolute position: a place has ``capacity`` window rows and the entries of ``capacity`` tokens,
each in pages of its own that follow each other. A rejected draft is thereby overwritten by the token that replaces it,
before anything reads it: readers go by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.requests import plan

PAGE = 64  # entries of a page


class Entries(NamedTuple):
    """Compressed entries of one rate in a step.

    Attributes:
        slots: int32 [T], where the entry goes that a token closes; negative: it closes none.
        visible: int32 [T], entries that a token sees. first: int32 [T], row of its request's first one.
        table: int32 [places, W], pages of each place.
    """

    slots: Tensor
    visible: Tensor
    first: Tensor
    table: Tensor


class Angles(NamedTuple):
    """Cosines and sines of one base: cos, sin fp32 [P, 32] by position; rows fp32 [T, 64] of the tokens."""

    cos: Tensor
    sin: Tensor
    rows: Tensor


class Step(NamedTuple):
    """Arrays of a step; see the module docstring.

    Attributes:
        tokens: int64 [T]. requests: int32 [B, 4] (`ops.common.requests`). single: one token a request.
        places: int32 [T], place of a token; negative: padding.
        window_slots: int32 [T], row of a token in the window pool. window_first, window_count: int32 [T], rows it sees.
        entries: of CSA and HCA. angles: by kind of layer.
    """

    tokens: Tensor
    requests: Tensor
    single: bool
    places: Tensor
    window_slots: Tensor
    window_first: Tensor
    window_count: Tensor
    entries: dict[LayerKind, Entries]
    angles: dict[LayerKind, Angles]


class Layout(NamedTuple):
    """How caches are laid out: places, and tokens that each can hold."""

    places: int
    capacity: int

    def pages(self, rate: int) -> int:
        """Pages of entries of a place."""
        return -(-self.capacity // rate // PAGE) or 1


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
    place = torch.tensor(list(places)).repeat_interleave(repeat)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    position = torch.arange(total) - (offsets[:-1] - torch.tensor(list(starts))).repeat_interleave(repeat)
    pad = rows - total
    flat = torch.tensor([t for one in tokens for t in one] + [0] * pad)
    place, position = (torch.nn.functional.pad(t.long(), (0, pad), value=-1) for t in (place, position))
    real = position >= 0

    def i32(x: Tensor, padding: int = -1) -> Tensor:
        return torch.where(real, x, padding).int().to(device)

    entries = {}
    for kind in (LayerKind.CSA, LayerKind.HCA):
        rate, pages = config.rate(kind), layout.pages(config.rate(kind))
        first = place * pages * PAGE
        closes = (position + 1) % rate == 0
        slots = torch.where(closes, first + position // rate, -1)
        table = torch.arange(layout.places * pages, dtype=torch.int32).view(layout.places, pages)
        entries[kind] = Entries(i32(slots), i32((position + 1) // rate, 0), i32(first, 0), table.to(device))
    angles = {}
    for kind, (cos, sin) in tables.items():
        at = position.clamp(min=0).to(cos.device)
        angles[kind] = Angles(cos, sin, torch.cat((cos[at], sin[at]), 1))
    given = (offsets, torch.tensor([s if n else 0 for s, n in zip(starts, counts, strict=True)]))
    single = rows == len(counts) and all(n == 1 for n in counts)
    table = plan(*given, torch.tensor([p if n else -1 for p, n in zip(places, counts, strict=True)]))
    return Step(
        tokens=flat.to(device),
        requests=table.to(device),
        single=single,
        places=i32(place),
        window_slots=i32(place * layout.capacity + position),
        window_first=i32(place * layout.capacity + (position - config.window + 1).clamp(min=0), 0),
        window_count=i32((position + 1).clamp(max=config.window), 0),
        entries=entries,
        angles=angles,
    )
