"""Make inputs of `indexer_logits`, and judge it, for tests, stages and the bench. Pages are in any order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib.formats import e4m3, fp8_block, indexer_key, mxfp4
from dsv4lib.ops.indexer_logits.op import LAYOUTS, KeyPages, Visible
from dsv4lib.ops.indexer_q.op import IndexerQueries

DIM = indexer_key.DIM


class Case(NamedTuple):
    """A call and its numbers.

    Attributes:
        queries, keys, visible: as the op takes them.
        values: fp64 [T, H, 128] of the queries. keys_of: fp64 [B, S, 128] of each request.
    """

    queries: IndexerQueries
    keys: KeyPages
    visible: Visible
    values: torch.Tensor
    keys_of: torch.Tensor

    @property
    def variant(self) -> str:
        """Format of queries and keys."""
        return "fp8" if self.queries.scales is None else "fp4"

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute scores and the sums of their magnitudes, fp64 [T, S], from the values."""
        keys, weights = self.keys_of[self.visible.requests.clamp(min=0).long()], self.queries.weights.double()
        votes = torch.einsum("thd,tsd->ths", self.values, keys).relu()
        return torch.einsum("ths,th->ts", votes, weights), torch.einsum("ths,th->ts", votes, weights.abs())

    def written(self, columns: int) -> torch.Tensor:
        """Tell which scores of ``columns`` are to be written, bool [T, columns]."""
        seen = self.visible.lengths.masked_fill(self.visible.requests < 0, 0)
        return torch.arange(columns) < seen[:, None]

    def error(self, found: torch.Tensor) -> float:
        """Return a score's largest error relative to the sum of its terms' magnitudes."""
        want, size = self.wanted()
        written = self.written(want.shape[1])
        error = (found[:, : want.shape[1]].double() - want).abs() / size.clamp_min(1e-300)
        return float(error[written & (size > 0)].max()) if bool((written & (size > 0)).any()) else 0.0

    def torch_error(self) -> float:
        """Return the error of the same sums in fp32 by PyTorch."""
        keys = self.keys_of[self.visible.requests.clamp(min=0).long()].float()
        votes = torch.einsum("thd,tsd->ths", self.values.float(), keys).relu()
        return self.error(torch.einsum("ths,th->ts", votes, self.queries.weights))


def quantised(q: torch.Tensor, variant: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Quantise heads [T, H, 128]. Codes, scales (fp4), what FP8's scales multiply weights by, values in fp64."""
    if variant == "fp4":
        made = mxfp4.quantize(q)
        return made.packed, made.scales, torch.ones(q.shape[:2]), mxfp4.dequantize(made, torch.float64)
    made = fp8_block.quantize_activation(q, DIM)
    factor = torch.exp2(made.scales[..., 0].float() - 127)
    return made.codes.view(torch.uint8), None, factor, e4m3.decode(made.codes, torch.float64)


def case(
    variant: str,
    requests: list[int],
    lengths: list[int],
    *,
    heads: int = 64,
    page_size: int = 64,
    seed: int = 0,
    keys: torch.Tensor | None = None,
) -> Case:
    """Make a call.

    Args:
        variant: "fp8" or "fp4". requests, lengths: of each token.
        heads, page_size: see the op.
        keys: [B, S, 128] to store; None: normals whose size grows over the entries by 1,000.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(requests), heads, DIM, generator=generator)
    codes, scales, factor, values = quantised(q, variant)
    weights = torch.randn(len(requests), heads, generator=generator) * factor
    count, longest = max(requests) + 1, max(1, *lengths)
    width = -(-longest // page_size)
    if keys is None:
        size = torch.logspace(-1, 2, width * page_size)[:, None]
        keys = torch.randn(count, width * page_size, DIM, generator=generator) * size
    pages = LAYOUTS[variant].allocate(count * width + 2, page_size)
    pages.random_(256, generator=generator)  # what no length reaches may be anything
    table = torch.randperm(count * width + 2, generator=generator)[: count * width].int().view(count, width)
    for own, places in zip(keys, table.long(), strict=True):
        index = (places[:, None] * page_size + torch.arange(page_size)).flatten()[: len(own)]
        indexer_key.append(pages, page_size, index, own, variant)
    reach = torch.arange(keys.shape[1])
    index = table.long()[:, reach // page_size] * page_size + reach % page_size
    stored = indexer_key.gather(pages, page_size, index, variant, torch.float64)[0]
    visible = Visible(table, torch.tensor(requests, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
    return Case(IndexerQueries(codes, scales, weights), KeyPages(pages, page_size), visible, values, stored)
