"""Compute which rows a query reads. A request's ring in decode, a chunk's span in prefill, the entries it may see.

A query at position t sees the window positions max(0, t - 127) .. t, its own included, and the compressed entries that
are complete at t: floor((t + 1) / rate). The kernel takes consecutive rows, (first, count) a query:

    decode    a ring of 128 slots a request, slot = position mod 128: keys come in rotated order, on which attention
              does not depend
    prefill   a span of 127 + T rows a chunk of T tokens: row r is position start - 127 + r

Source: DSV4 paper (sliding window, HCA); `dsv4lib.reference.fmha.window_visible`, `.compressor.visible_count`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from dsv4lib.errors import ArgumentError

WINDOW = 128  # keys a query sees, its own included; slots of a ring
HCA_RATE = 128  # tokens of a compressed entry


def _positions(name: str, positions: torch.Tensor) -> None:
    if positions.dim() != 1 or positions.is_floating_point() or bool((positions < 0).any()):
        raise ArgumentError(name, f"{positions.dtype}{list(positions.shape)}", "a vector of integers >= 0")


def ring_rows(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first, count) int32 [R] of window rows in stacked rings.

    Rings are [128 R, D]; request r's newest token: ``positions[r]``.

    Raises:
        ArgumentError: positions that are not a vector of integers >= 0.
    """
    _positions("positions", positions)
    first = WINDOW * torch.arange(len(positions), device=positions.device)
    return first.int(), (positions + 1).clamp_max(WINDOW).int()


def append(ring: torch.Tensor, rows: torch.Tensor, start: int) -> None:
    """Write rows [T, D] of the positions ``start`` .. into a ring [128, D]; of more than 128 only the last 128 stay."""
    kept = rows[-WINDOW:]
    last = start + len(rows)
    ring[torch.arange(last - len(kept), last, device=ring.device) % WINDOW] = kept


def span(ring: torch.Tensor, chunk: torch.Tensor, start: int) -> torch.Tensor:
    """Return [127 + T, D] for a chunk.

    First the 127 positions before ``start`` from the ring, oldest first, then its rows.

    Rows of positions below 0 are whatever the ring holds; `span_rows` gives them to no query.
    """
    before = torch.arange(start + 1, start + WINDOW, device=ring.device) % WINDOW  # start - 127 mod 128 = start + 1
    return torch.cat((ring[before], chunk))


def span_rows(start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first, count) int32 [T] of window rows in a chunk's span.

    The chunk has ``tokens`` tokens and starts at position ``start``.

    Raises:
        ArgumentError: start < 0 or tokens < 1.
    """
    for name, value, least in (("start", start, 0), ("tokens", tokens, 1)):
        if value < least:
            raise ArgumentError(name, value, f"at least {least}")
    positions = start + torch.arange(tokens)
    oldest = (positions - WINDOW + 1).clamp_min(0)
    return (oldest - start + WINDOW - 1).int(), (positions - oldest + 1).int()


def token_groups(lengths: Sequence[int], heads: int, cluster: int = 1) -> torch.Tensor:
    """Return int32 [G, 2], (first token, tokens). Chunks of ``lengths`` tokens go in groups that fit 64 rows a CTA.

    No group reaches over the end of a chunk: its tokens see windows of one span and a growing range of entries.

    Raises:
        ArgumentError: a length below 1, or more heads than rows.
    """
    room = 64 * cluster // heads if heads > 0 else 0
    if room < 1:
        raise ArgumentError("heads", heads, f"1 to {64 * cluster}")
    if not lengths or min(lengths) < 1:
        raise ArgumentError("lengths", lengths, "at least 1 each")
    ends = itertools.accumulate(lengths)
    return torch.tensor(
        [
            (first, min(room, end - first))
            for end, length in zip(ends, lengths, strict=True)
            for first in range(end - length, end, room)
        ]
    ).int()


def entry_limit(positions: torch.Tensor, rate: int = HCA_RATE) -> torch.Tensor:
    """Entries complete at each position, int32: floor((t + 1) / rate).

    Raises:
        ArgumentError: positions that are not a vector of integers >= 0.
    """
    _positions("positions", positions)
    return ((positions + 1) // rate).int()
