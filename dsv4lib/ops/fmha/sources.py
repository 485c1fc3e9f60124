"""Describe what `fmha` reads keys from: pools, gathered entries, rings."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.kv_entry import MAX_PAGE
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha.window import WINDOW


class Fp8Pages(NamedTuple):
    """Hold a pool of 584-byte entries.

    An entry has 448 FP8 values, 64 bf16 values, 8 scales; `formats.kv_entry`.

    Attributes:
        pages: uint8 [P, S], a page in S bytes or fewer, pages on 16 bytes, anywhere apart.
        page: entries of a page, any number.
    """

    pages: Tensor
    page: int


class Selected(NamedTuple):
    """Entries by index (CSA), or a window in pages anywhere. Token t sees rows ``index[t]`` of a pool.

    Attributes:
        pool: [R, D], or pages [P, page, D] of any size, or `Fp8Pages`; a row's number counts through the pages.
        index: int32 [T, K]; a row named twice counts twice. Of entries a negative number names no row and may stand
            anywhere; of a window the first ``count[t]`` are rows.
        count: int32 [T]: only the first ``count[t]`` are looked at, of a negative one none; None: all K.
    """

    pool: Tensor | Fp8Pages
    index: Tensor
    count: Tensor | None = None


class Rows(NamedTuple):
    """Consecutive rows (HCA entries, the window of a prefill): token t sees ``first[t] .. first[t] + count[t] - 1``.

    Attributes:
        pool: as in `Selected`.
        first, count: int32 [T]; a count that is not positive: no rows, whatever ``first`` is.
        most: no count is larger; a number of the host, because nothing is read from the GPU. None: the most that there
            can be: all rows of a pool of entries, 128 of a window.
    """

    pool: Tensor | Fp8Pages
    first: Tensor
    count: Tensor
    most: int | None = None


class Gathered(NamedTuple):
    """Entries that were gathered before. Token t sees the first ``count[t]`` rows of ``kv[t]``; None: all K.

    Attributes:
        kv: [T, K, D]. count: int32 [T] or None; negative: none.
    """

    kv: Tensor
    count: Tensor | None = None


class Ring(NamedTuple):
    """The window of a decode step: slot = position mod S. Two small kernels make `Rows` of it; `rows` does it once
    for all layers of a step.

    Attributes:
        rings: [B, S, D], or `Fp8Pages` of S entries, a page a request; S <= 128.
        request_ids: int32 [T], whose ring token t reads; negative: a padded row, without keys.
        swa_lens: int32 [B], keys in each ring: min(position + 1, S), not positive: none; rings after the last of them
            are spare.
    """

    rings: Tensor | Fp8Pages
    request_ids: Tensor
    swa_lens: Tensor

    def rows(self) -> Rows:
        """Return the same window as rows of the stacked rings.

        Raises:
            ArgumentError: rings or lists of the wrong shape or type, or (on the CPU) a request that has no ring.
        """
        paged = isinstance(self.rings, Fp8Pages)
        shape = (*self.rings.pages.shape[:1], self.rings.page, 0) if paged else tuple(self.rings.shape)
        if len(shape) != 3 or shape[1] > WINDOW:
            raise ArgumentError("window.rings.shape", shape, f"[B, S, D] or Fp8Pages with S <= {WINDOW}")
        for name, x in (("request_ids", self.request_ids), ("swa_lens", self.swa_lens)):
            if x.dtype != torch.int32 or x.dim() != 1:
                raise ArgumentError(f"window.{name}", f"{x.dtype}{list(x.shape)}", "torch.int32[any]")
        ids, slots, requests = self.request_ids, shape[1], min(shape[0], len(self.swa_lens))
        if ids.device != self.swa_lens.device:
            raise ArgumentError(
                "window.swa_lens.device", str(self.swa_lens.device), f"that of request_ids, {ids.device}"
            )
        real = not torch.compiler.is_compiling() and type(ids) is Tensor  # neither traced nor a fake
        if real and ids.device.type == "cpu":
            if bool((ids >= requests).any()):
                wrong = ids[ids >= requests].tolist()[:8]
                raise ArgumentError("window.request_ids", wrong, f"0 to {requests - 1}, or negative")
            if bool((self.swa_lens > slots).any()):
                raise ArgumentError("window.swa_lens", self.swa_lens.tolist()[:8], f"{slots} or fewer")
        if requests == 0:
            return Rows(self.rings, ids, torch.zeros_like(ids), slots)
        there = (ids >= 0) & (ids < requests)
        ids = torch.where(there, ids, 0)
        return Rows(self.rings, ids * slots, torch.where(there, self.swa_lens[ids], 0), slots)


def _flat(name: str, pool: Tensor | Fp8Pages) -> tuple[Tensor, int]:
    """Return (pool as the op takes it, entries of a page): rows [R, D] and 0, or bytes of pages; always a view."""
    if isinstance(pool, Fp8Pages):
        if pool.pages.dtype != torch.uint8 or pool.pages.dim() != 2:
            raise ArgumentError(f"{name}.pages", f"{pool.pages.dtype}{list(pool.pages.shape)}", "uint8 [P, S]")
        if not 1 <= pool.page <= MAX_PAGE:
            raise ArgumentError(f"{name}.page", pool.page, f"1 to {MAX_PAGE}")
        return pool.pages, pool.page
    if pool.dim() < 2:
        raise ArgumentError(f"{name}.shape", tuple(pool.shape), "[R, D] or [P, page, D]")
    if pool.numel() == 0:
        pool = pool.new_empty(math.prod(pool.shape[:-1]), pool.shape[-1])
    while pool.dim() > 2:
        pages, page = pool.shape[-3:-1]
        if pages > 1 and page > 1 and pool.stride(-3) != page * pool.stride(-2):
            raise ArgumentError(f"{name}.stride()", pool.stride(), "pages that follow each other without a gap")
        pool = pool.flatten(-3, -2)  # of an extent of 1 the stride says nothing
    return pool, 0


class Keys(NamedTuple):
    """A source of keys as the op takes it: row r of a pool counts through all pages.

    Attributes:
        pool: rows [R, D], or bytes of pages. page: entries of an FP8 page; 0: the pool has rows.
        first, count: int32 [T], a token's first row (None with an index) and rows. most: no count is larger.
    """

    pool: Tensor
    first: Tensor | None
    count: Tensor
    page: int
    most: int

    @property
    def rows(self) -> int:
        """Count the rows of the pool, through all pages."""
        return len(self.pool) * max(self.page, 1)


def entries_of(entries: Selected | Rows | Gathered | None, q: Tensor) -> tuple[Keys | None, Tensor | None]:
    """Make keys of entries, and their index."""
    if entries is None:
        return None, None
    if isinstance(entries, Gathered):
        if entries.kv.dim() != 3 or entries.kv.shape[0] != q.shape[0]:
            raise ArgumentError("entries.kv.shape", tuple(entries.kv.shape), f"[{q.shape[0]}, K, D]")
        tokens, width, _ = entries.kv.shape
        first = width * torch.arange(tokens, device=q.device, dtype=torch.int32)
        count = torch.full_like(first, width) if entries.count is None else entries.count
        entries = Rows(entries.kv, first, count, width)
    if isinstance(entries, Rows):
        pool, page = _flat("entries.pool", entries.pool)
        return Keys(pool, entries.first, entries.count, page, _most("entries", entries.most, pool, page)), None
    return _selected("entries", entries, q)


def _selected(name: str, keys: Selected, q: Tensor) -> tuple[Keys, Tensor]:
    if keys.index.dim() != 2:
        raise ArgumentError(f"{name}.index.shape", tuple(keys.index.shape), "[T, K]")
    width, count = keys.index.shape[1], keys.count
    if count is None:
        count = torch.full((q.shape[0],), width, device=q.device, dtype=torch.int32)
    pool, page = _flat(f"{name}.pool", keys.pool)
    return Keys(pool, None, count, page, width), keys.index


def window_of(window: Ring | Rows | Selected | None, q: Tensor) -> tuple[Keys | None, Tensor | None]:
    """Make keys of a window, and their index."""
    if window is None:
        return None, None
    if isinstance(window, Selected):
        return _selected("window", window, q)
    if isinstance(window, Ring):
        window = window.rows()
    pool, page = _flat("window.pool", window.pool)
    most = WINDOW if window.most is None else _most("window", window.most, pool, page)
    return Keys(pool, window.first, window.count, page, most), None


def _most(name: str, given: int | None, pool: Tensor, page: int) -> int:
    """Bound the lists: the pool's rows, or ``given`` where that is less."""
    if given is not None and not 0 <= given < 1 << 31:
        raise ArgumentError(f"{name}.most", given, "0 to 2^31 - 1, or None")
    rows = pool.shape[0] * max(page, 1)
    return rows if given is None else min(given, rows)
