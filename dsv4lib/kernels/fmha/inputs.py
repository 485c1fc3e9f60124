"""Inputs that make a wrong attention kernel visible.

Heads of different scale, so that no row can stand in for another; index lists with holes; rows of the pool that nobody
may read are NaN; outputs start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    Attributes:
        q: [T, H, D]; pool: [R, D] compressed entries; span: [W, D] window rows.
        index: int32 [T, K], -1 skipped; first, count: int32 [T], the entries as a range, or how many of ``index``.
        window_first, window_count: int32 [T], rows of ``span``.
        sink: fp32 [H]; cos, sin: fp32 [T, 32]; scale: of the dot products.
    """

    q: torch.Tensor
    pool: torch.Tensor
    span: torch.Tensor
    index: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    window_first: torch.Tensor
    window_count: torch.Tensor
    sink: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float

    def to(self, device: str) -> Case:
        """The same case with its tensors on ``device``."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Case(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in moved.items()})

    def outputs(self, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) full of NaN; fp32 with a leading extent for a partial kernel."""
        lead = () if splits is None else (splits,)
        dtype = self.q.dtype if splits is None else torch.float32
        nan = float("nan")
        o = self.q.new_full((*lead, *self.q.shape), nan, dtype=dtype)
        return o, self.q.new_full((*lead, *self.q.shape[:2]), nan, dtype=torch.float32)

    def keys(self, entries: str, window: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(all rows [R + W, D], row numbers [T, K'], -1 = none) as `reference.fmha.sparse` takes them."""
        lists = []
        if entries == "index":
            place = torch.arange(self.index.shape[1])
            lists.append(torch.where(place < self.count[:, None], self.index, -1))
        if entries == "range":
            lists.append(_range(self.first, self.count))
        if window:
            own = _range(self.window_first, self.window_count)
            lists.append(torch.where(own >= 0, own + self.pool.shape[0], -1))
        return torch.cat((self.pool, self.span)), torch.cat(lists, 1).long()


def _range(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    place = torch.arange(max(int(count.max()), 1))
    return torch.where(place < count[:, None], first[:, None] + place, -1)


def case(
    heads: int,
    counts: list[int],
    windows: list[int],
    top_k: int = 0,
    head_dim: int = 512,
    dtype: str = "bf16",
    seed: int = 0,
) -> Case:
    """A case with T = ``len(counts)`` tokens.

    Args:
        heads: H.
        counts: entries of each token (of its index list or its range).
        windows: window keys of each token.
        top_k: width of the index lists; 0: the largest count. One index in ten is -1.
        head_dim, dtype, seed: D, "bf16" or "fp16", of the random numbers.

    Ranges and windows of the tokens overlap by half, so that a token that reads its neighbour's keys is wrong.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, width = len(counts), max(top_k, *counts, 1)
    step, window_step = -(-max(*counts, 2) // 2), -(-max(*windows, 2) // 2)
    rows = max(step * (tokens - 1) + max(*counts, 1), width) + 7
    span_rows = window_step * (tokens - 1) + max(*windows, 1) + 3
    index = torch.stack([torch.randperm(rows - 1, generator=generator)[:width] for _ in range(tokens)]).int()
    index[torch.rand(tokens, width, generator=generator) < 0.1] = -1
    place = torch.arange(width)
    count = torch.tensor(counts).int()
    scales = torch.logspace(-2, 2, heads, base=2.0)[None, :, None]
    angle = normal(tokens, 32)
    pool, span = normal(rows, head_dim).to(TYPES[dtype]), normal(span_rows, head_dim).to(TYPES[dtype])
    made = Case(
        q=(normal(tokens, heads, head_dim) * scales).to(TYPES[dtype]),
        pool=pool,
        span=span,
        index=torch.where(place < count[:, None], index, rows - 1).int(),  # behind the count: a row that is NaN
        first=(torch.arange(tokens) * step).int(),
        count=count,
        window_first=(torch.arange(tokens) * window_step).int(),
        window_count=torch.tensor(windows).int(),
        sink=normal(heads),
        cos=angle.cos(),
        sin=angle.sin(),
        scale=head_dim**-0.5,
    )
    pool[-1], span[-3:] = float("nan"), float("nan")
    return made
