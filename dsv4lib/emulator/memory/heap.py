"""Serve ``malloc`` and ``free`` of kernels, first fit.

All from one range of global memory.

It lives as long as the device's memory: what one launch allocates, another may free. Its size is CUDA's default
(``cudaLimitMallocHeapSize``). Source: CUDA programming guide, "Dynamic Global Memory Allocation and Operations".
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dsv4lib.emulator.machine.cta import aligned_zeros

HEAP_BYTES = 8 << 20
ALIGN = 16


class Registry(Protocol):
    """Global memory, as the heap needs it."""

    def register_array(self, array: np.ndarray, name: str) -> None:
        """Make an array of the host a range of global memory."""


class Heap:
    """Pieces of ``HEAP_BYTES`` of ``gmem``."""

    def __init__(self, gmem: Registry):
        self._memory = aligned_zeros(HEAP_BYTES, 256)
        gmem.register_array(self._memory, "heap of malloc")
        self.start = self._memory.ctypes.data
        self._taken: dict[int, int] = {}  # bytes by address

    def allocate(self, nbytes: int) -> int:
        """Allocate ``nbytes`` and return the address.

        0 if there is no room or ``nbytes`` is 0.
        """
        if nbytes == 0:
            return 0
        size, at = -(-nbytes // ALIGN) * ALIGN, self.start
        for begin in sorted(self._taken):
            if begin - at >= size:
                break
            at = begin + self._taken[begin]
        if at + size > self.start + HEAP_BYTES:
            return 0
        self._taken[at] = size
        return at

    def free(self, address: int) -> bool:
        """Give back what `allocate` returned, or 0; False if it is neither."""
        return address == 0 or self._taken.pop(address, None) is not None
