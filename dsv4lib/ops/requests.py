"""The table of a packed batch of requests, made once a step for all layers; `compressor` and `kv_append` take it."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.typed import typed


@typed
def plan(offsets: Tensor, starts: Tensor, places: Tensor) -> Tensor:
    """int32 ``[B, 4]``: first row, rows, position of the first row, row of the state or ring.

    Args:
        offsets: ``[B + 1]``, first row of each request and the number of rows.
        starts: ``[B]``, position of a request's first row; negative: leave it out.
        places: ``[B]``, its row of the state or ring, none twice.
    """
    return torch.stack((offsets[:-1], offsets.diff(), starts, places), 1).to(torch.int32).contiguous()


def check_values(requests: Tensor, tokens: int, places: int) -> None:
    """Values of a table, on the CPU.

    Raises:
        ArgumentError: rows that are not in order, apart and below ``tokens``; places not below ``places``, or twice.
    """
    row, count, _, place = requests[(requests[:, 1] > 0) & (requests[:, 2] >= 0)].long().unbind(1)
    for column, wrong, allowed in (
        (0, (requests[:, 0].diff() < 0).any() | (requests[:, :2] < 0).any(), "first rows in order"),
        (1, (row + count > tokens).any() | (row[1:] < (row + count)[:-1]).any(), f"rows apart, below {tokens}"),
        (3, (place >= places).any() | (place < 0).any(), f"0..{places - 1}"),
        (3, torch.tensor(len(place.unique()) != len(place)), "each place once"),
    ):
        if bool(wrong):
            raise ArgumentError(f"requests[:, {column}]", requests[:, column].tolist()[:8], allowed)
