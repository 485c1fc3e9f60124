"""Store picks as indices, or as rows of a pool that a request's pages lie in.

page p of request r is table[r, p]          pick i   ->   table[r, i // size] * size + i % size
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Pages(NamedTuple):
    """Pages of requests, int32 [R, W]. requests: int32 [B], the request of a row of scores, negative: none."""

    table: cute.Tensor
    requests: cute.Tensor


class Picks(NamedTuple):
    """The picks of a row of scores, and where they lie.

    Attributes:
        out: int32 [k]. table: int32 [W], pages of the row's request, or None. request: its number, negative: none.
    """

    out: cute.Tensor
    table: Any
    request: Any


def picks_of(mPicks: cute.Tensor, pages: Any, row: Int32) -> Picks:
    """Return the picks of a row."""
    if pages is None:
        return Picks(mPicks[row, None], None, None)
    request = pages.requests[row]
    return Picks(mPicks[row, None], pages.table[cutlass.max(request, 0), None], request)


def place(picks: Picks, index: Int32, size: int) -> Int32:
    """Return what is stored for a pick. Its row in pages of ``size``, -1 without a page; where size is 0 its index."""
    if not size:
        return index
    last = picks.table.shape[0] - 1
    page = picks.table[cutlass.min(index // size, last)]
    there = cutlass.min(cutlass.min(page, picks.request), last - index // size)
    return cutlass.select_(there < 0, Int32(-1), page * size + index % size)
