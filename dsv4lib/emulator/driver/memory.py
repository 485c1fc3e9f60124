"""Register host memory as device memory. It is storages of tensors that a kernel may be given.

A storage is registered when a tensor of it is handed over: wrapped for the DSL, or read for its address. The registry
holds no reference: memory that its owner has freed is dropped before the next launch, so a kernel that follows a stale
pointer faults instead of reading whatever lies there now.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.memory.gmem import GlobalMemory


@dataclass(frozen=True)
class _Owned:
    """A registration: its size, whether its owner is gone, and a reference that keeps the owner alive."""

    nbytes: int
    gone: Callable[[], bool]
    hold: Callable[[], Any]


class Tracker:
    """Keeps the registrations of tensors in a `GlobalMemory` up to date."""

    def __init__(self, gmem: GlobalMemory):
        self.gmem = gmem
        self._owned: dict[int, _Owned] = {}  # by start

    def tensor(self, tensor: Any, label: str = "") -> None:
        """Register the storage of a torch tensor."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        start, nbytes = storage.data_ptr(), storage.nbytes()
        known = self._owned.get(start)
        if nbytes == 0 or (known is not None and known.nbytes == nbytes and not known.gone()):
            return
        shape = "x".join(map(str, tensor.shape))
        weak = StorageWeakRef(storage)
        owned = _Owned(nbytes, weak.expired, lambda: torch.UntypedStorage._new_with_weak_ptr(weak.cdata))
        self._add(start, owned, label or f"tensor {shape} {tensor.dtype}", padded=True)

    def array(self, array: np.ndarray, label: str = "") -> None:
        """Register the memory of a numpy array: of the array that owns it."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        reference = weakref.ref(array)
        low, high = np.lib.array_utils.byte_bounds(array)
        owned = _Owned(high - low, lambda: reference() is None, reference)
        self._add(low, owned, label or f"array {array.shape} {array.dtype}")

    def span(self, start: int, nbytes: int, owner: Any, label: str) -> None:
        """Register a range for the lifetime of ``owner``, unless it is held already.

        An allocation may hold it.

        An allocation whose owner is gone holds nothing: its memory may have been given out again.
        """
        known = self.gmem.find(start, nbytes)
        if nbytes == 0 or (known is not None and not self._gone(known.start)):
            return
        reference = weakref.ref(owner)
        self._add(start, _Owned(nbytes, lambda: reference() is None, reference), label)

    def hold(self) -> list[Any]:
        """Hold strong references to all owners, for a launch that runs later."""
        self.sweep()
        return [owned.hold() for owned in self._owned.values()]

    def sweep(self) -> None:
        """Drop what has been freed."""
        for start in [start for start, owned in self._owned.items() if owned.gone()]:
            self._remove(start)

    def clear(self) -> None:
        """Drop everything."""
        for start in list(self._owned):
            self._remove(start)

    def _gone(self, start: int) -> bool:
        return start in self._owned and self._owned[start].gone()

    def _remove(self, start: int) -> None:
        del self._owned[start]
        self.gmem.unregister(start)

    def _add(self, start: int, new: _Owned, label: str, padded: bool = False) -> None:
        """Register, replacing what overlaps: stale entries, and spans known before their whole buffer was.

        Two live spans that share a part only (views of one buffer, each by itself) become one.
        """
        end = start + new.nbytes
        known = self.gmem.find(start, new.nbytes)
        if self.gmem.multicast(start) or (known is not None and known.start not in self._owned):
            return  # memory that the device itself has allocated
        clash = [s for s, old in self._owned.items() if s < end and start < s + old.nbytes]
        for other in clash:
            old = self._owned[other]
            if other <= start and end <= other + old.nbytes and not old.gone():
                return  # already inside a live one
            if not old.gone():
                start, end = min(start, other), max(end, other + old.nbytes)
                new = _united(end - start, new, old)
            self._remove(other)
        self.gmem.register(start, new.nbytes, label, padded=padded)
        self._owned[start] = new


def _united(nbytes: int, *parts: _Owned) -> _Owned:
    """Memory that lives as long as one of its parts' owners."""
    return _Owned(nbytes, lambda: all(p.gone() for p in parts), lambda: [p.hold() for p in parts])


def extent(shape: tuple[int, ...], strides: tuple[int, ...], bits: int) -> tuple[int, int]:
    """Compute a strided tensor's (first, past last) byte relative to its pointer.

    >>> extent((4, 3), (8, 1), 16)
    (0, 54)
    """
    if math.prod(shape) == 0:
        return 0, 0
    low = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0)
    return low * bits // 8, -(-(high + 1) * bits // 8)
