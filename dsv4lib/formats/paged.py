"""Pages of quantised cache entries: all data of a page first, then all its scales.

Kernels load the data of a page with one TMA box and its scales with another, so an entry's scales are *not* next to
its data. An entry is addressed by index = page * page_size + slot; -1 means "nothing here" and is skipped.
Source: FlashMLA's paged layout for DSV4 and the indexer key caches of the serving engines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks


@dataclass(frozen=True)
class PageLayout:
    """Bytes of one kind of entry inside a page of ``n`` entries. n * data_bytes, n * scale_bytes, padding.

    Attributes:
        data_bytes: element bytes per entry.
        scale_bytes: scale bytes per entry.
        stride_multiple: the page stride is padded to a multiple of this many bytes.
    """

    data_bytes: int
    scale_bytes: int
    stride_multiple: int = 1

    @property
    def entry_bytes(self) -> int:
        """Return the data and scale bytes of one entry."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Stride in bytes of a page of ``page_size`` entries."""
        if not isinstance(page_size, int) or page_size < 1:
            raise ArgumentError("page_size", page_size, "an integer >= 1")
        return -(-page_size * self.entry_bytes // self.stride_multiple) * self.stride_multiple

    def scale_offset(self, page_size: int, slot: int, scale: int) -> int:
        """Return byte of a page at which scale ``scale`` of an entry is. Whatever adds and multiplies may be given."""
        return page_size * self.data_bytes + slot * self.scale_bytes + scale

    def allocate(self, num_pages: int, page_size: int) -> torch.Tensor:
        """Return zeroed pages, uint8 [num_pages, page_bytes]."""
        if not isinstance(num_pages, int) or num_pages < 0:
            raise ArgumentError("num_pages", num_pages, "an integer >= 0")
        return torch.zeros(num_pages, self.page_bytes(page_size), dtype=torch.uint8)

    def views(self, pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two parts of the pages, without a copy.

        They are data [P, n, data_bytes] and scales [P, n, scale_bytes].
        """
        if not isinstance(pages, torch.Tensor) or pages.dtype != torch.uint8:
            raise ArgumentError("pages", getattr(pages, "dtype", type(pages).__name__), "a uint8 tensor")
        if pages.dim() != 2 or pages.shape[1] != self.page_bytes(page_size) or pages.stride(1) != 1:
            allowed = f"[P, {self.page_bytes(page_size)}] for page_size={page_size}, bytes of a page adjacent"
            raise ArgumentError("pages", (tuple(pages.shape), pages.stride()), allowed)
        split, end = page_size * self.data_bytes, page_size * self.entry_bytes
        data = pages[:, :split].unflatten(1, (page_size, self.data_bytes))
        return data, pages[:, split:end].unflatten(1, (page_size, self.scale_bytes))

    def write(
        self, pages: torch.Tensor, page_size: int, indices: torch.Tensor, data: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Store entries in place.

        Args:
            pages: uint8 [P, page_bytes], changed in place.
            page_size: entries per page.
            indices: int32 or int64 [T]; page * page_size + slot, or -1 to drop the entry. No index twice.
            data: uint8 [T, data_bytes].
            scales: uint8 [T, scale_bytes].

        Raises:
            ArgumentError: a wrong shape, dtype or device, an index out of range or given twice; nothing is written.
        """
        data_view, scale_view = self.views(pages, page_size)
        valid = _valid(indices, pages, page_size)
        if indices.dim() != 1:
            raise ArgumentError("indices.shape", tuple(indices.shape), "one dimension [T]")
        for name, part, width in (("data", data, self.data_bytes), ("scales", scales, self.scale_bytes)):
            _checks.shape(name, _checks.as_bytes(name, part), (len(indices), width))
            _checks.same_device(name, part, "pages", pages)
        kept = indices[valid].to(torch.int64)
        if len(kept.unique()) != len(kept):
            raise ArgumentError("indices", indices.tolist(), "each index at most once")
        data_view[kept // page_size, kept % page_size] = data[valid]
        scale_view[kept // page_size, kept % page_size] = scales[valid]

    def read(
        self, pages: torch.Tensor, page_size: int, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fetch entries.

        Args:
            pages: uint8 [P, page_bytes].
            page_size: entries per page.
            indices: int32 or int64, any shape; -1 reads nothing.

        Returns:
            data uint8 [..., data_bytes], scales uint8 [..., scale_bytes], valid bool [...]. Bytes at -1 are zero.
        """
        data_view, scale_view = self.views(pages, page_size)
        valid = _valid(indices, pages, page_size)
        kept = indices[valid].to(torch.int64)
        data = pages.new_zeros(*indices.shape, self.data_bytes)
        scales = pages.new_zeros(*indices.shape, self.scale_bytes)
        data[valid] = data_view[kept // page_size, kept % page_size]
        scales[valid] = scale_view[kept // page_size, kept % page_size]
        return data, scales, valid


def _valid(indices: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Mask of the indices that name an entry; raises on what is neither an entry nor -1."""
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("indices", getattr(indices, "dtype", type(indices).__name__), "an int32 or int64 tensor")
    _checks.same_device("indices", indices, "pages", pages)
    entries = pages.shape[0] * page_size
    wrong = (indices < -1) | (indices >= entries)
    if bool(wrong.any()):
        raise ArgumentError("indices", indices[wrong][:4].tolist(), f"-1 (skip) or 0..{entries - 1}")
    return indices >= 0
