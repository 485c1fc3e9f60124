"""Make a paged cache of latents and queries, for tests and pages.

Everything that must not be read is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.ops.mla_decode.op import ENTRY, LATENT
from dsv4lib.ops.mla_decode.splits import pad_page_table

NOWHERE = 1 << 30  # a page that no cache has: who reads it is stopped by the emulator


class Case(NamedTuple):
    """Arguments of `mla_decode`.

    Attributes:
        q_nope: [B, H, 512]. q_pe: [B, H, 64]. kv_cache: [P, page, 576]. seq_lens: int32 [B]. page_table: int32 [B, N].
    """

    q_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    seq_lens: Tensor
    page_table: Tensor

    def to(self, device: Any) -> Case:
        """Copy all to a device."""
        return Case(*(one.to(device) for one in self))


def case(
    lengths: list[int],
    heads: int,
    page_size: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
    spread: float = 1.0,
    past: int = -1,
    shuffled: bool = True,
) -> Case:
    """Make requests of these lengths, with pages in random order.

    Entries past a length and pages that no request has are NaN; so are queries of requests without tokens.

    Args:
        lengths: of requests, 0 or less: a padded row. heads: H. page_size: tokens of a page.
        dtype, kv_dtype: of queries and of the cache; None: that of queries.
        seed: of the numbers. spread: standard deviation of queries, that of entries is 1.
        past: what the page table holds past a length. shuffled: False: pages in order.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-max(length, 0) // page_size) for length in lengths]
    count = sum(pages) + 2  # two that no request has
    order = torch.arange(count)
    if shuffled:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((count, page_size, ENTRY), float("nan"))
    table = torch.full((len(lengths), max(1, *pages)), past, dtype=torch.int32)
    first = 0
    for b, (length, own) in enumerate(zip(lengths, pages, strict=True)):
        table[b, :own] = order[first : first + own]
        entries = torch.full((own * page_size, ENTRY), float("nan"))
        entries[: max(length, 0)] = torch.randn(max(length, 0), ENTRY, generator=generator)
        cache[order[first : first + own]] = entries.view(own, page_size, ENTRY)
        first += own
    q = spread * torch.randn(len(lengths), heads, ENTRY, generator=generator)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    q[seq_lens <= 0] = float("nan")
    padded = pad_page_table(table, page_size)
    padded[:, table.shape[1] :] = past
    q_nope, q_pe = (x.to(dtype).contiguous() for x in (q[..., :LATENT], q[..., LATENT:]))
    return Case(q_nope, q_pe, cache.to(kv_dtype or dtype), seq_lens, padded)
