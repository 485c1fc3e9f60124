"""Take tokens to the ranks that have their experts, and what these make of them back.

    routes = Routes(experts, count, group)                      experts int32 [T, k], of this rank's tokens
    rows   = routes.send(x), ...                                bf16 [R, d]: tokens of all ranks for experts of this one
    y      = routes.back(each row's experts, in slot order)     bf16 [T k, d], at `routes.row_of` int32 [T, k]

A token goes once to each rank that has an expert of it. A row for each of its experts comes back, as the expert wrote
it: the home rank adds them in the order of slots, as one rank does with all experts. Bits do not depend on the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.layers.communicator import Communicator, part_of


class Received(NamedTuple):
    """Tokens for the experts of this rank.

    Attributes:
        x: bf16 [R, d], by rank of origin. experts: int32 [R, k], numbers among this rank's; -1: of another rank, none.
        weights: fp32 [R, k].
    """

    x: Tensor
    experts: Tensor
    weights: Tensor


class Routes:
    """Where the tokens of a rank go, and the places of what comes back.

    Args:
        experts: int32 [T, k], numbers among all experts; others (-1) go nowhere.
        count: of all experts. group: the ranks that share them.

    Attributes:
        row_of: int32 [T, k], row of what `back` returns; -1: none.
        arriving: of each rank, the valid routes that come from it to experts of this one.
    """

    def __init__(self, experts: Tensor, count: int, group: Communicator) -> None:
        self.group, self.count, self.experts = group, count, experts
        owner = group.owner(experts, count)
        flat = owner.flatten()
        self.per_rank = (flat[:, None] == torch.arange(group.size, device=flat.device)).sum(0).tolist()
        order = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]  # by rank, then token, then slot
        self.row_of = torch.full_like(flat, -1, dtype=torch.int32)
        self.row_of[order] = torch.arange(len(order), dtype=torch.int32, device=flat.device)
        self.row_of = self.row_of.view_as(experts)
        needed = [(owner == r).any(1).nonzero()[:, 0] for r in range(group.size)]
        self.tokens, self.sent = torch.cat(needed), [len(one) for one in needed]
        self.received, self.arriving = group.counts(self.sent, self.per_rank)
        self.to = torch.repeat_interleave(torch.tensor(self.sent)).to(experts.device)

    def send(self, x: Tensor, weights: Tensor) -> Received:
        """Send tokens bf16 [T, d] and weights fp32 [T, k] to the ranks of their experts."""
        group, k = self.group, self.experts.shape[1]
        parts = [part_of(self.count, r, group.size) for r in range(group.size)]
        bounds = torch.tensor([[part.start, part.stop] for part in parts], dtype=torch.int32, device=x.device)
        first, last = bounds[self.to].split(1, 1)
        chosen = self.experts[self.tokens]
        local = torch.where((chosen >= first) & (chosen < last), chosen - first, -1)
        beside = torch.cat((local, weights[self.tokens].contiguous().view(torch.int32)), 1)
        way = self.sent, self.received
        rows, beside = group.exchange(x[self.tokens], *way), group.exchange(beside, *way)
        return Received(rows, beside[:, :k].contiguous(), beside[:, k:].contiguous().view(torch.float32))

    def back(self, y: Tensor, row_of: Tensor) -> Tensor:
        """Send the rows y [.., d] of routes ``row_of`` int32 [R, k] (-1: none) to where their tokens came from."""
        return self.group.exchange(y[row_of[row_of >= 0].long()], self.arriving, self.per_rank)
