"""Which request of a packed batch a piece of work belongs to, found by a warp.

A batch is a table int32 [B, 4], on 16 bytes: first row, rows, position of the first row (negative: nobody), row of the
state or ring. First rows do not decrease. It is the same for all layers of a step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LANES = 32


@cute.jit
def fetch_request(requests: cute.Tensor, number: Int32):
    """Request ``number``: first row, rows, position, place; no rows behind the last one."""
    rRequest = cute.make_rmem_tensor(4, Int32)
    rRequest.fill(0)
    if number < requests.shape[0]:
        cute.autovec_copy(cute.local_tile(requests[number, None], (4,), (0,)), rRequest)
    return [rRequest[i] for i in range(4)]


@cute.jit
def find_request(requests: cute.Tensor, number: Int32, rate: cutlass.Constexpr, spare: cutlass.Constexpr):
    """The last request whose first number is not above ``number``; all lanes of a warp together.

    The first number of request b is (its first row) / rate + spare b. A lane looks at one request of 32, all at once.

    Returns:
        what `fetch_request` returns, then the request's first number; no rows where there is no such request.
    """
    lane = cute.arch.lane_idx()
    row, count, start, place, base = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    for first in cutlass.range(0, requests.shape[0], LANES, unroll=1):
        mine = fetch_request(requests, first + lane)
        key = Int32(0x7FFFFFFF)
        if first + lane < requests.shape[0]:
            key = mine[0] // rate + spare * (first + lane)
        before = cute.arch.popc(cute.arch.vote_ballot_sync(key <= number))
        source = cutlass.max(before - 1, 0)
        found = [cute.arch.shuffle_sync(x, source) for x in (*mine, key)]
        if before > 0:
            row, count, start, place, base = found[0], found[1], found[2], found[3], found[4]
    return row, count, start, place, base
