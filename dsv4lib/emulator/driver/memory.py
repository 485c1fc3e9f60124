"""Which host memory counts as device memory: storages of tensors that a kernel may be given.

A storage is registered when a tensor of it is handed over: wrapped for the DSL, or asked for its address. The registry
holds no reference: memory that its owner has freed is dropped before the next launch, so a kernel that follows a stale
pointer faults instead of reading whatever lies there now.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from dsv4lib.emulator.memory.gmem import GlobalMemory

Gone = Callable[[], bool]


class Tracker:
    """Keeps the registrations of tensors in a `GlobalMemory` up to date."""

    def __init__(self, gmem: GlobalMemory):
        self.gmem = gmem
        self._owned: dict[int, tuple[int, Gone]] = {}  # start -> (bytes, has its owner gone?)

    def tensor(self, tensor: Any, label: str = "") -> None:
        """Register the storage of a torch tensor."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        known = self._owned.get(start)
        if nbytes == 0 or (known is not None and known[0] == nbytes and not known[1]()):
            return
        shape = "x".join(map(str, tensor.shape))
        label = label or f"tensor {shape} {tensor.dtype}"
        self._add(start, nbytes, StorageWeakRef(storage).expired, label, padded=True)

    def array(self, array: np.ndarray, label: str = "") -> None:
        """Register the memory of a numpy array: of the array that owns it."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        reference = weakref.ref(array)
        low, high = np.lib.array_utils.byte_bounds(array)
        self._add(low, high - low, lambda: reference() is None, label or f"array {array.shape} {array.dtype}")

    def span(self, start: int, nbytes: int, owner: Any, label: str) -> None:
        """Register a range that lives as long as ``owner``, unless an allocation holds it already."""
        if nbytes == 0 or self.gmem.find(start, nbytes) is not None:
            return
        reference = weakref.ref(owner)
        self._add(start, nbytes, lambda: reference() is None, label)

    def sweep(self) -> None:
        """Drop what has been freed."""
        for start in [start for start, (_, gone) in self._owned.items() if gone()]:
            self._remove(start)

    def clear(self) -> None:
        """Drop everything."""
        for start in list(self._owned):
            self._remove(start)

    def _remove(self, start: int) -> None:
        del self._owned[start]
        self.gmem.unregister(start)

    def _add(self, start: int, nbytes: int, gone: Gone, label: str, padded: bool = False) -> None:
        """Register, replacing what overlaps: stale entries, and spans known before their whole buffer was."""
        end = start + nbytes
        clash = [s for s, (n, _) in self._owned.items() if s < end and start < s + n]
        for other in clash:
            count, other_gone = self._owned[other]
            if other <= start and end <= other + count and not other_gone():
                return  # already inside a live one
            self._remove(other)
        self.gmem.register(start, nbytes, label, padded=padded)
        self._owned[start] = (nbytes, gone)


def extent(shape: tuple[int, ...], strides: tuple[int, ...], bits: int) -> tuple[int, int]:
    """(first, past last) byte a strided tensor touches, relative to its data pointer.

    >>> extent((4, 3), (8, 1), 16)
    (0, 54)
    """
    if math.prod(shape) == 0:
        return 0, 0
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0)
    return low * bits // 8, -(-(high + 1) * bits // 8)
