"""Make the table of a packed batch of requests, once a step for all layers.

`compressor` and `kv_append` take it.

Padding: a request without rows (0, or any negative number of them) may hold anything else; one with a negative position
or place is left out. Neither is read or written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.typed import typed

INTS = torch.int32, torch.int64
TOP = (1 << 31) - 1


@typed
def plan(offsets: Tensor, starts: Tensor, places: Tensor) -> Tensor:
    """Make the table, int32 ``[B, 4]``. Columns: first row, rows, position of the first row, row of the state or ring.

    Args:
        offsets: int32 or int64 ``[B + 1]``, first row of each request and the number of rows. Where they do not grow, a
            request has no rows.
        starts: int32 or int64 ``[B]``, position of a request's first row; negative: leave it out.
        places: int32 or int64 ``[B]``, its row of the state or ring, none twice; negative: leave it out.

    Raises:
        ArgumentError: a wrong type, shape or device, or (on the CPU) a number that is not an int32 one.
    """
    for name, x, shape in (
        ("offsets", offsets, "[B + 1], at least 1"),
        ("starts", starts, "[B]"),
        ("places", places, "[B]"),
    ):
        if x.dtype not in INTS:
            raise ArgumentError(f"{name}.dtype", str(x.dtype), "torch.int32 or torch.int64")
        if x.dim() != 1 or len(x) != (len(offsets) - (name != "offsets")) or len(offsets) < 1:
            allowed = shape if name == "offsets" else f"{shape} with B = {len(offsets) - 1}, one less than offsets"
            raise ArgumentError(f"{name}.shape", tuple(x.shape), allowed)
        if x.device != offsets.device:
            raise ArgumentError(f"{name}.device", str(x.device), f"that of offsets, {offsets.device}")
        real = not torch.compiler.is_compiling() and type(x) is Tensor  # neither traced nor a fake
        if real and x.device.type == "cpu" and bool(((x > TOP) | (x < -TOP - 1)).any()):
            raise ArgumentError(name, x[(x > TOP) | (x < -TOP - 1)].tolist()[:8], "numbers of 32 bits")
    return torch.stack((offsets[:-1], offsets.diff(), starts, places), 1).to(torch.int32).contiguous()


def used_of(requests: Tensor) -> Tensor:
    """Return int64 requests of a table that have rows, a position and a place. The others are padding."""
    _, count, start, place = requests.unbind(1)
    return requests[(count > 0) & (start >= 0) & (place >= 0)].long()


def check_values(requests: Tensor, tokens: int, places: int) -> None:
    """Check the values of a table, on the CPU.

    Raises:
        ArgumentError: rows that are not in order, apart and below ``tokens``; places not below ``places``, or twice.
    """
    rows = requests[requests[:, 1] > 0].long()  # those of a request that is left out are its own, too
    row, count, _, place = used_of(requests).unbind(1)
    for column, wrong, allowed in (
        (0, (rows[:, 0].diff() < 0).any() | (rows[:, 0] < 0).any(), "first rows in order, 0 or more"),
        (1, (row + count > tokens).any() | (row[1:] < (row + count)[:-1]).any(), f"rows apart, below {tokens}"),
        (3, (place >= places).any(), f"0..{places - 1}, or negative"),
        (3, torch.tensor(len(place.unique()) != len(place)), "each place once"),
    ):
        if bool(wrong):
            raise ArgumentError(f"requests[:, {column}]", requests[:, column].tolist()[:8], allowed)
