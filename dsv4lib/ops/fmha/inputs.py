"""Make inputs that make a wrong attention kernel visible.

Heads of different scale, so that no row can stand in for another; index lists with holes; rows of the pool that no
token may read are NaN; outputs start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from dsv4lib.formats import kv_entry
from dsv4lib.ops.fmha import window

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call of the kernel.

    Attributes:
        q: [T, H, D]; pool: [R, D] compressed entries; span: [W, D] window rows.
        index: int32 [T, K], -1 skipped; first, count: int32 [T], the entries as a range, or how many of ``index``.
        window_first, window_count: int32 [T], rows of ``span``.
        sink: fp32 [H]; cos, sin: fp32 [T, 32]; scale: of the dot products.
        pool_pages, span_pages: (pages, page size) of 584-byte entries that hold ``pool`` and ``span``; see `paged`.
        chunks: lengths of the chunks that the tokens are, of which some may share tiles; empty: none may.
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
    pool_pages: tuple[torch.Tensor, int] | None = None
    span_pages: tuple[torch.Tensor, int] | None = None
    chunks: tuple[int, ...] = ()

    def to(self, device: str) -> Case:
        """Return the same case with its tensors on ``device``."""

        def moved(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(moved, x))
            return x.to(device) if isinstance(x, torch.Tensor) else x

        return Case(**{f.name: moved(getattr(self, f.name)) for f in fields(self)})

    def outputs(self, splits: int | None = None, raw: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Make (o, lse) full of NaN.

        fp32 with a leading extent for a partial kernel, and pairs instead of LSEs for a raw one. Each token has a guard
        row after its last head, see `guards_written`.
        """
        lead = () if splits is None else (splits,)
        dtype = self.q.dtype if splits is None else torch.float32
        nan = float("nan")
        tokens, heads, depth = self.q.shape
        o = self.q.new_full((*lead, tokens, heads + 1, depth), nan, dtype=dtype)
        lse = self.q.new_full((*lead, tokens, heads + 1, 2 if raw else 1), nan, dtype=torch.float32)
        return o[..., :heads, :], lse[..., :heads, :] if raw else lse[..., :heads, 0]

    def groups(self, cluster: int) -> torch.Tensor:
        """Group tokens for a kernel that lets them share tiles.

        As many as fit, never over the end of a chunk.
        """
        return window.token_groups(self.chunks or (1,) * len(self.q), self.q.shape[1], cluster).to(self.q.device)

    def keys(self, entries: str, window: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows [R + W, D] and row numbers [T, K'] (-1 = none).

        `reference.fmha.sparse` takes them.
        """
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


def paged(
    one: Case, page_size: int, window_page_size: int | None = None, padding: int = 0, seed: int | None = None
) -> Case:
    """Return the same case with its keys in 584-byte entries.

    Its bf16 rows become what the entries hold.

    Rows that are NaN (they must not be read), the ends of last pages, two further pages and the padding are 0xFF: NaN.

    Args:
        one: a bf16 case with D 512.
        page_size: entries a page of the pool. window_page_size: of the window; None: the same.
        padding: bytes between two pages.
        seed: the pool's pages lie in a random order (the entries must be read by index); None: in order.
    """
    pool_pages, pool, place = _pages(one.pool, page_size, padding, seed)
    span_pages, span, _ = _pages(one.span, window_page_size or page_size, padding, None)
    index = torch.where(one.index >= 0, place[one.index.clamp_min(0).long()], -1).int()
    return replace(one, pool=pool, span=span, index=index, pool_pages=pool_pages, span_pages=span_pages)


def _pages(rows: torch.Tensor, page_size: int, padding: int, seed: int | None) -> tuple:
    """Return ((pages, page size), what all their slots hold, slot of each row)."""
    count = -(-len(rows) // page_size) + 2
    order = torch.arange(count)
    if seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    row = torch.arange(len(rows))
    place = order[row // page_size] * page_size + row % page_size
    wide = torch.full((count, kv_entry.LAYOUT.page_bytes(page_size) + padding), 0xFF, dtype=torch.uint8)
    pages = wide[:, : wide.shape[1] - padding]
    there = ~rows.isnan().any(-1)
    kv_entry.append(pages, page_size, torch.where(there, place, -1), rows.nan_to_num())
    held, _ = kv_entry.gather(pages, page_size, torch.arange(count * page_size))
    return (pages, page_size), held, place


def guards_written(o: torch.Tensor, lse: torch.Tensor) -> int:
    """Count values of the guard rows of `Case.outputs` that are no longer NaN.

    These are pad rows of a tile that leaked.
    """
    heads = o.shape[-2]
    guards = o._base[..., heads:, :], lse._base[..., heads:, :]
    return sum(int((~guard.isnan()).sum()) for guard in guards)


def _range(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    place = torch.arange(max(int(count.max()), 1))
    return torch.where(place < count[:, None], first[:, None] + place, -1)


def decode_case(heads: int, positions: list[int], seed: int = 0) -> Case:
    """Make a case of one token a request, window keys in rings of 128 slots.

    Rings are stacked; slots never written are NaN.

    Args:
        heads: H. positions: of the newest token of each request; -1: a request without keys.
        seed: of the random numbers.
    """
    one = case(heads, [0] * len(positions), [0] * len(positions), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rings = torch.full((len(positions), window.WINDOW, 512), float("nan"), dtype=one.q.dtype)
    for ring, position in zip(rings, positions, strict=True):
        first = max(0, position - window.WINDOW + 1)
        keys = torch.randn(position + 1 - first, 512, generator=generator).to(one.q.dtype)
        window.append(ring, keys, first)
    first, count = window.ring_rows(torch.tensor(positions).clamp_min(0))
    count[torch.tensor(positions) < 0] = 0
    return replace(one, span=rings.flatten(0, 1), window_first=first, window_count=count)


def prefill_case(heads: int, starts: list[int], tokens: int, seed: int = 0) -> Case:
    """Make chunks of ``tokens`` tokens of several requests in one call.

    An HCA layer sees them so.

    Keys before a chunk come out of its request's ring. Entries are ranges of the pool, complete at the end of the
    chunk: early queries must not read the last of them. A NaN row ends each request's entries.

    Args:
        heads: H. starts: position of the first token of each chunk. tokens: T of each. seed: of the random numbers.
    """
    one = case(heads, [0] * (tokens * len(starts)), [0] * (tokens * len(starts)), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    nan_row = torch.full((1, 512), float("nan"), dtype=one.q.dtype)
    pool, spans, firsts, counts = [], [], [], []
    window_rows = []
    for start in starts:
        complete = (start + tokens) // window.HCA_RATE
        firsts.append(torch.full((tokens,), sum(map(len, pool)), dtype=torch.int32))
        counts.append(window.entry_limit(start + torch.arange(tokens)))
        pool += [torch.randn(complete, 512, generator=generator).to(one.q.dtype), nan_row]
        ring = nan_row.repeat(window.WINDOW, 1)
        known = torch.randn(min(start, window.WINDOW), 512, generator=generator).to(one.q.dtype)
        window.append(ring, known, start - len(known))
        first, count = window.span_rows(start, tokens)
        window_rows.append((first + sum(map(len, spans)), count))
        spans.append(window.span(ring, torch.randn(tokens, 512, generator=generator).to(one.q.dtype), start))
    return replace(
        one,
        pool=torch.cat(pool),
        span=torch.cat(spans),
        first=torch.cat(firsts),
        count=torch.cat(counts),
        window_first=torch.cat([first for first, _ in window_rows]).int(),
        window_count=torch.cat([count for _, count in window_rows]),
        chunks=(tokens,) * len(starts),
    )


def case(
    heads: int,
    counts: list[int],
    windows: list[int],
    top_k: int = 0,
    head_dim: int = 512,
    dtype: str = "bf16",
    seed: int = 0,
) -> Case:
    """Make a case with T = ``len(counts)`` tokens.

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
        index=torch.where(place < count[:, None], index, rows - 1).int(),  # past the count: a row that is NaN
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
