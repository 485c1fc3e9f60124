"""View bytes of a tensor as 32-bit words.

Kernels load and store several codes at once.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError

WORD = 4  # bytes


def as_words(name: str, x: torch.Tensor) -> torch.Tensor:
    """View uint8 [.., 4 n] as int32 [.., n].

    Raises:
        ArgumentError: elements that are not side by side, or rows that do not start on 4 bytes.
    """
    if x.shape[-1] % WORD:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), f"a multiple of {WORD} bytes in the last dimension")
    if x.shape[-1] and x.stride(-1) != 1:
        raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
    strides = [stride if extent > 1 else WORD for stride, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
    if any(stride % WORD for stride in strides) or x.data_ptr() % WORD or x.storage_offset() % WORD:
        raise ArgumentError(f"{name}.stride()", x.stride(), f"rows that start on {WORD} bytes")
    return x.as_strided(x.shape, (*strides, 1)).view(torch.int32)
