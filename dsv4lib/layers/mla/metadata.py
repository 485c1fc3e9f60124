"""Hold what a decode step needs beside queries and cache: page table, lengths, workspace. Memory comes from a pool.

A step that allocates its page table anew pays for it and cannot be captured. Here tables are kept by bucket of the
longest request and of the batch, so a serving run allocates a few times and not once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.mla.config import MLAConfig
from dsv4lib.ops.mla_decode.splits import FILL, mla_workspace_size

BUCKETS = 1024, 4096, 16384, 65536  # tokens


class MLADecodeMetadata(NamedTuple):
    """What `mla_decode` takes beside queries and cache.

    Attributes:
        block_kv_indices: int32 [B, N], the page table, N pages of whole tiles. seq_lens: int32 [B].
        workspace: uint8, of splits; None where there are none.
    """

    block_kv_indices: Tensor
    seq_lens: Tensor
    workspace: Tensor | None

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.seq_lens)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are cut."""
        return sum(x.nbytes for x in self if x is not None)

    def rows(self, batch: int) -> MLADecodeMetadata:
        """Cut the first rows; memory and workspace are the same."""
        return MLADecodeMetadata(self.block_kv_indices[:batch], self.seq_lens[:batch], self.workspace)


def width_of(config: MLAConfig, tokens: int) -> int:
    """Count the pages of so many tokens, in whole tiles."""
    pages = max(1, -(-tokens // config.page_size))
    return -(-pages // config.pack) * config.pack


def workspace_bytes(config: MLAConfig, width: int, batch: int) -> int:
    """Count the bytes that any batch up to ``batch`` needs with a table of ``width`` pages."""
    size = width * config.page_size
    return max(mla_workspace_size(size, b, num_kv_splits=config.num_kv_splits) for b in range(1, batch + 1))


def make(
    config: MLAConfig, batch: int, width: int, device: torch.device, fill: int, table: Tensor | None = None
) -> MLADecodeMetadata:
    """Allocate metadata.

    Args:
        config: of the attention. batch: rows. width: pages of a row. device: of the tensors.
        fill: of the page table. table: to use as page table; None: a new one.
    """
    if table is None:
        table = torch.empty(batch, width, dtype=torch.int32, device=device)
    table.fill_(fill)
    lengths = torch.full((batch,), 1, dtype=torch.int32, device=device)
    size = workspace_bytes(config, width, batch)
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    return MLADecodeMetadata(table, lengths, workspace)


class MetadataPool:
    """Metadata of eager steps, kept by bucket. What was taken last is overwritten by what is taken next.

    Args:
        config: of the attention. device: of the tensors. buckets: tokens of the longest request, ascending; those
            that pass the longest context are left out, and it is the last.

    Attributes:
        allocations: how many have been made.
    """

    def __init__(self, config: MLAConfig, device: torch.device, buckets: Sequence[int] = BUCKETS) -> None:
        if list(buckets) != sorted(set(buckets)) or min(buckets, default=1) < 1:
            raise ArgumentError("buckets", tuple(buckets), "ascending numbers of tokens")
        self.config, self.device = config, device
        self.buckets = (*(b for b in buckets if b < config.max_context_len), config.max_context_len)
        self.kept: dict[tuple[int, int], MLADecodeMetadata] = {}
        self.allocations = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(one.nbytes for one in self.kept.values())

    def bucket(self, tokens: int) -> int:
        """Return the smallest bucket for so many tokens.

        Raises:
            ArgumentError: more than the longest context.
        """
        for one in self.buckets:
            if tokens <= one:
                return one
        raise ArgumentError("seq_lens", tokens, f"at most max_context_len={self.config.max_context_len}")

    def take(self, batch: int, tokens: int) -> MLADecodeMetadata:
        """Return metadata of ``batch`` rows of up to ``tokens`` tokens, its page table all -1."""
        key = self.bucket(tokens), 1 << (batch - 1).bit_length()
        if key not in self.kept:
            self.kept[key] = make(self.config, key[1], width_of(self.config, key[0]), self.device, FILL)
            self.allocations += 1
        found = self.kept[key].rows(batch)
        found.block_kv_indices.fill_(FILL)
        return found
