"""Find the request of a packed batch that a piece of work belongs to, by a warp.

A batch is a table int32 [B, 4], on 16 bytes: first row, rows, position of the first row, row of the state or ring. A
request without rows (0 or any negative number: padding) may hold anything else and stand anywhere; first rows of the
others do not decrease. One with a negative position or place is left out. It is the same for all layers of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES = 32
LAST = LANES - 1


class Request(NamedTuple):
    """Hold a request's first row, rows, first position and place.

    The place is the row of its state or ring.
    """

    row: Int32
    count: Int32
    start: Int32
    place: Int32


@cute.jit
def fetch_request(requests: cute.Tensor, number: Int32):
    """Fetch request ``number``; it has no rows past the last one."""
    rRequest = cute.make_rmem_tensor(4, Int32)
    rRequest.fill(0)
    if number < requests.shape[0]:
        cute.autovec_copy(cute.local_tile(requests[number, None], (4,), (0,)), rRequest)
    return Request(*[rRequest[i] for i in range(4)])


@cute.jit
def find_request(requests: cute.Tensor, number: Int32, rate: cutlass.Constexpr, spare: cutlass.Constexpr):
    """Find the last request with rows whose first is not above ``number``.

    All lanes of a warp call it.

    The first number of request b is (its first row) / rate + spare b. A lane looks at one request of 32, all at once.

    Returns:
        the members of `Request`, then the request's first number; no rows where there is no such request.
    """
    lane = cute.arch.lane_idx()
    row, count, start, place, base = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for first in cutlass.range(0, requests.shape[0], LANES, unroll=1):
        mine = fetch_request(requests, first + lane)
        key = mine.row // rate + spare * (first + lane)
        before = cute.arch.vote_ballot_sync((mine.count > 0) & (key <= number))
        source = cutlass.max(LAST - cute.arch.clz(before), 0)
        found = [cute.arch.shuffle_sync(x, source) for x in (*mine, key)]
        if before != 0:
            row, count, start, place, base = found[0], found[1], found[2], found[3], found[4]
    return row, count, start, place, base
