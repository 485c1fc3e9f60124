"""Make maps of token slots as a serving engine's allocator does, and draw what a page table assumes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def slots_of(lengths: Sequence[int], page: int, width: int, seed: int, first_page: int = 0) -> Tensor:
    """Give each request pages of random order: int32 [R, width], the slot of each token, -1 past its end.

    Args:
        lengths: tokens of requests. page: tokens of a page. width: of the map.
        seed: of the order. first_page: the lowest page that is given.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    order = (first_page + torch.randperm(sum(counts), generator=generator)).split(counts)
    slots = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for row, (length, pages) in enumerate(zip(lengths, order, strict=True)):
        tokens = torch.arange(length)
        slots[row, :length] = (pages[tokens // page] * page + tokens % page).int()
    return slots


def text_example() -> tuple[Tensor, Tensor, Tensor]:
    """Return the example of a public text: one request of 300 tokens in slots 14 to 313; map, requests, lengths."""
    slots = torch.arange(14, 314, dtype=torch.int32)[None]
    return slots, torch.zeros(1, dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
