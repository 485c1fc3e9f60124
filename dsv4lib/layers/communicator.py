"""Say what layers need of the other ranks. A `Communicator` is of one rank alone; `dsv4lib.parallel` has the others.

| method     | every rank gives              | every rank gets                                             |
|------------|-------------------------------|-------------------------------------------------------------|
| `sum`      | an addend fp32 [T, N]         | their sum, added in fp32 in the order of the ranks          |
| `columns`  | its columns [T, N_r]          | all columns [T, N]                                          |
| `rows`     | its rows [T_r, ..]            | all rows [T, ..]                                            |
| `pick`     | rows [T, N], some of them its | each row of the rank that has it                            |
| `counts`   | numbers for each rank         | the numbers that the ranks have for it                      |
| `exchange` | rows, some for each rank      | the rows that the ranks have for it, by rank                |
| `any`      | a truth value                 | whether one is true                                         |

What a rank has of N things is `part_of`: N r / n up to N (r + 1) / n, rounded down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def part_of(total: int, index: int, count: int) -> range:
    """Return what part ``index`` of ``count`` has of ``total`` things in order."""
    return range(total * index // count, total * (index + 1) // count)


class Communicator:
    """A group of one rank: every method returns what it is given.

    Attributes:
        rank: of this process in the group. size: ranks of the group.
    """

    rank, size = 0, 1

    def own(self, total: int) -> range:
        """Return what this rank has of ``total`` things."""
        return part_of(total, self.rank, self.size)

    def owner(self, numbers: Tensor, total: int) -> Tensor:
        """Return the rank that has each of some things; -1 for numbers outside 0 .. total - 1."""
        ends = torch.tensor([part_of(total, r, self.size).stop for r in range(self.size)], device=numbers.device)
        found = torch.searchsorted(ends, numbers.long().contiguous(), right=True)
        return torch.where((numbers >= 0) & (numbers < total), found, -1)

    def sum(self, x: Tensor) -> Tensor:
        """Add what the ranks give, fp32 [T, N], in their order."""
        return x

    def columns(self, x: Tensor, total: int) -> Tensor:
        """Put the ranks' columns side by side: [T, total]."""
        return x

    def rows(self, x: Tensor, total: int) -> Tensor:
        """Put the ranks' rows one after the other: [total, ..]."""
        return x

    def pick(self, x: Tensor, owner: Tensor) -> Tensor:
        """Take each row [T, N] of the rank ``owner`` [T]; of rank 0 where that is negative."""
        return x

    def counts(self, *send: Sequence[int]) -> list[list[int]]:
        """Give each rank a number of every sequence; get those of each."""
        return [list(one) for one in send]

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows: the first ``send[0]`` to rank 0 and so on. Returns those received, ``receive[r]`` of rank r."""
        return x

    def any(self, value: bool, what: str = "any") -> bool:
        """Tell whether a rank gives True. ``what``: the call's name."""
        return value


ALONE = Communicator()


class Groups(NamedTuple):
    """The groups that a rank's layers speak to.

    Attributes:
        tensor: ranks that share the heads, the vocabulary and the tokens of a step.
        experts: ranks that share the routed experts.
    """

    tensor: Communicator = ALONE
    experts: Communicator = ALONE


SINGLE = Groups()
