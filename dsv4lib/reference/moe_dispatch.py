"""Order rows as experts see tokens. It is a stable sort of the (token, slot) routes by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib.errors import ArgumentError


class Dispatch(NamedTuple):
    """Where each route went.

    Attributes:
        counts: int32 [E], routes to each expert.
        offsets: int32 [E + 1], each expert's first row; last, the rows of all.
        rows: int32 [R], the token of each row, -1: none.
        row_of: int32 [T, k], the row of each route, -1: none.
        row_weight: fp32 [R], the weight of each row's route, 0: none; None without weights.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    row_of: torch.Tensor
    row_weight: torch.Tensor | None


def moe_dispatch(
    experts: torch.Tensor, weights: torch.Tensor | None, count: int, rows: int, align: int = 128, max_m: int = 0
) -> Dispatch:
    """Sort rows by expert, each expert's in token order.

    Of one token: in slot order.

    Args:
        experts: ``[T, k]``; a number outside 0 .. count - 1 goes nowhere.
        weights: ``[T, k]`` or None.
        count: E.
        rows: R; rows past the last expert's are empty.
        align: an expert's first row is a multiple of it.
        max_m: not 0: every expert has so many rows, and starts at a multiple of it.

    Raises:
        ArgumentError: the rows do not suffice.
    """
    flat = experts.reshape(-1).long()
    routed = (flat >= 0) & (flat < count)
    counts = torch.bincount(flat[routed], minlength=count)
    sizes = torch.full_like(counts, max_m) if max_m else (counts + align - 1) // align * align
    offsets = torch.cat((counts.new_zeros(1), sizes.cumsum(0)))
    if int(offsets[-1]) > rows:
        raise ArgumentError("rows", rows, f"at least {int(offsets[-1])}")
    if max_m and bool((counts > max_m).any()):
        raise ArgumentError("max_m", max_m, f"at least {int(counts.max())}, the routes of one expert")
    routes = routed.nonzero()[:, 0]
    routes = routes[flat[routes].argsort(stable=True)]
    owner = flat[routes]
    row = offsets[owner] + torch.arange(len(routes), device=flat.device) - (counts.cumsum(0) - counts)[owner]
    row_of = torch.full_like(flat, -1)
    row_of[routes] = row
    token_of = torch.full((rows,), -1, dtype=torch.int32, device=flat.device)
    token_of[row] = (routes // experts.shape[1]).int()
    row_weight = None
    if weights is not None:
        row_weight = torch.zeros(rows, dtype=torch.float32, device=flat.device)
        row_weight[row] = weights.reshape(-1)[routes].float()
    return Dispatch(counts.int(), offsets.int(), token_of, row_of.view(experts.shape).int(), row_weight)
