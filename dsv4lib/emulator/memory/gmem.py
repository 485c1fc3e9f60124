"""Track global memory: which host bytes a kernel may touch.

"Device memory" is host memory, so every access must first be found in the registry of live allocations; anything else
would end in a segmentation fault of the caller's process. The sorted interval table is shared with native code, which
does the same check per lane (``native/memory.py``).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.errors import LaunchError, MemoryFault
from dsv4lib.emulator.memory.heap import Heap
from dsv4lib.emulator.native.abi import PADDED, READ_ONLY
from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class Allocation:
    """One registered range [start, start + nbytes).

    ``owner`` is kept alive as long as the range is registered; ``writable`` False makes stores fault; ``padded``: a
    CUDA allocator would have rounded the range up (`Settings.padding`); ``device``: whose symmetric memory it is.
    """

    start: int
    nbytes: int
    label: str
    writable: bool = True
    owner: Any = None
    padded: bool = False
    device: int | None = None

    @property
    def shared(self) -> bool:
        """Tell whether other devices see it too."""
        return self.device is not None

    @property
    def end(self) -> int:
        """First byte past the end of the range."""
        return self.start + self.nbytes

    def __str__(self) -> str:
        return f"{self.label} [{self.start:#x}, {self.end:#x}), {self.nbytes:,} bytes"


@dataclass(frozen=True)
class Multicast:
    """An address range that stands for the same buffer on several devices.

    ``targets`` are where each has it; ``owner`` keeps the range from being used for anything else.
    """

    start: int
    nbytes: int
    label: str
    targets: tuple[int, ...]
    owner: Any = None


class GlobalMemory:
    """Registry of allocations with bounds-checked, zero-copy access.

    Attributes:
        peers: the memories of the other devices of a group, by device number; named when an access goes astray.
    """

    def __init__(self) -> None:
        self.peers: dict[int, GlobalMemory] = {}
        self._multicast: dict[int, Multicast] = {}
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._views: dict[int, np.ndarray] = {}
        self._tables: tuple[np.ndarray, np.ndarray] | None = None  # made of the allocations when they are read
        self.version = 0  # changes with every registration: contexts re-read the table

    @functools.cached_property
    def heap(self) -> Heap:
        """Get the heap that ``malloc`` of kernels allocates from."""
        return Heap(self)

    def __len__(self) -> int:
        return len(self._allocations)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._allocations)

    def register(
        self,
        start: int,
        nbytes: int,
        label: str,
        *,
        writable: bool = True,
        owner: Any = None,
        padded: bool = False,
        device: int | None = None,
    ) -> Allocation:
        """Add the range [start, start + nbytes).

        Raises:
            LaunchError: it overlaps another registered range.
        """
        if nbytes <= 0:
            raise ArgumentError("nbytes", nbytes, "a positive number of bytes")
        i = bisect.bisect_right(self._starts, start)
        new = Allocation(start, nbytes, label, writable, owner, padded, device)
        for other in self._allocations[max(i - 1, 0) : i + 1]:
            if start < other.end and other.start < new.end:
                raise LaunchError(f"{new} overlaps {other}")
        self._starts.insert(i, start)
        self._allocations.insert(i, new)
        self._views[start] = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), np.uint8)
        self._changed()
        return new

    def register_array(self, array: np.ndarray, label: str, *, writable: bool = True) -> Allocation:
        """Add the memory of a C-contiguous numpy array, which is kept alive."""
        if not array.flags.c_contiguous:
            raise ArgumentError("array", array.strides, "a C-contiguous array")
        return self.register(array.ctypes.data, array.nbytes, label, writable=writable, owner=array)

    def unregister(self, start: int) -> None:
        """Remove the range that begins at ``start``.

        Raises:
            ArgumentError: no range begins there.
        """
        i = bisect.bisect_left(self._starts, start)
        if i == len(self._starts) or self._starts[i] != start:
            raise ArgumentError("start", hex(start), "the start of a registered allocation")
        del self._starts[i], self._allocations[i], self._views[start]
        self._changed()

    def add_multicast(self, multicast: Multicast) -> None:
        """Make a multicast range known; ordinary accesses to it stay errors."""
        self._multicast[multicast.start] = multicast

    def multicast(self, address: int, nbytes: int = 1) -> tuple[int, ...]:
        """Translate an access through a multicast range to every device's address. () if it is none."""
        for known in self._multicast.values():
            if known.start <= address and address + nbytes <= known.start + known.nbytes:
                return tuple(target + address - known.start for target in known.targets)
        return ()

    @contextmanager
    def registered(self, array: np.ndarray, label: str, *, writable: bool = True) -> Iterator[Allocation]:
        """Register an array for the duration of a ``with`` block."""
        allocation = self.register_array(array, label, writable=writable)
        try:
            yield allocation
        finally:
            self.unregister(allocation.start)

    def find(self, address: int, nbytes: int = 1) -> Allocation | None:
        """Find the allocation that holds all of [address, address + nbytes), or None."""
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        found = self._allocations[i]
        return found if address + nbytes <= found.end else None

    def view(self, address: int, nbytes: int, write: bool = False) -> np.ndarray:
        """View memory as uint8[nbytes], without a copy.

        Raises:
            MemoryFault: any byte lies outside, or ``write`` on read-only memory.
        """
        found = self.find(address, nbytes)
        if found is None or (write and not found.writable):
            raise MemoryFault(self.explain(address, nbytes, write))
        offset = address - found.start
        return self._views[found.start][offset : offset + nbytes]

    def gather(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Copy ``nbytes`` bytes from each address: uint8[len(addresses), nbytes]."""
        out = np.empty((len(addresses), nbytes), np.uint8)
        for base, rows, offsets in self._ranges(addresses, nbytes, write=False):
            windows = np.lib.stride_tricks.sliding_window_view(base, nbytes)
            out[rows] = windows[offsets]
        return out

    def scatter(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store row i of ``values`` (uint8[n, nbytes]) at ``addresses[i]``. Of overlapping rows the last one wins."""
        nbytes = values.shape[1]
        for base, rows, offsets in self._ranges(addresses, nbytes, write=True):
            windows = np.lib.stride_tricks.sliding_window_view(base, nbytes, writeable=True)
            windows[offsets] = values[rows]

    def explain(self, address: int, nbytes: int, write: bool = False) -> str:
        """Explain why an access is wrong: nearest allocation and the distance to it."""
        verb = "store" if write else "load"
        what = f"{verb} of {nbytes} bytes at {address:#x}"
        holder = self.find(address)
        if holder is not None and address + nbytes > holder.end:
            return f"{what} runs {address + nbytes - holder.end} bytes over the end of {holder}"
        if holder is not None:
            return f"{what} hits read-only {holder}"
        for known in self._multicast.values():
            if known.start <= address < known.start + known.nbytes:
                return f"{what} hits the multicast range of {known.label}: only multimem and TMA stores may use it"
        for number, other in self.peers.items():
            if (theirs := other.find(address)) is not None:
                return f"{what} hits {theirs} of device {number}: only symmetric memory is shared between devices"
        if not self._allocations:
            return f"{what}: no global memory is allocated"
        i = bisect.bisect_right(self._starts, address)
        near = self._allocations[max(i - 1, 0) : i + 1]
        below = [
            (address - a.end, f"{address - a.end + 1} bytes past the last byte of {a}")
            for a in near
            if a.end <= address
        ]
        above = [(a.start - address, f"{a.start - address} bytes before {a}") for a in near if a.start > address]
        return f"{what} is outside every allocation; nearest: {min(below + above)[1]}"

    def _ranges(
        self, addresses: np.ndarray, nbytes: int, write: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Group row addresses by allocation: (uint8 view of the allocation, row numbers, byte offsets in it)."""
        if len(addresses) == 0:
            return
        wanted = addresses.astype(np.uint64)
        starts, ends = self.table[:, 0], self.table[:, 1]
        index = np.searchsorted(starts, wanted, side="right").astype(np.int64) - 1
        bad = index < 0
        if not bad.all():  # not `wanted + nbytes > end`: addresses just below 2^64 would wrap
            bad |= (wanted >= ends[np.maximum(index, 0)]) | (ends[np.maximum(index, 0)] - wanted < np.uint64(nbytes))
        if bad.any():
            raise MemoryFault(self.explain(int(wanted[bad][0]), nbytes, write))
        for i in np.unique(index):
            allocation = self._allocations[i]
            rows = np.nonzero(index == i)[0]
            if write and not allocation.writable:
                raise MemoryFault(self.explain(int(wanted[rows[0]]), nbytes, write))
            yield self._views[allocation.start], rows, (wanted[rows] - np.uint64(allocation.start)).astype(np.int64)

    @property
    def table(self) -> np.ndarray:
        """Get (start, end) of every allocation, by start."""
        return self._made()[0]

    @property
    def native_table(self) -> np.ndarray:
        """Get the table as native code reads it: with marks of what is read-only or padded."""
        return self._made()[1]

    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        if self._tables is None:
            table = np.array([(a.start, a.end) for a in self._allocations], np.uint64).reshape(-1, 2)
            native = table.copy()
            native[[not a.writable for a in self._allocations], 1] |= np.uint64(READ_ONLY)
            native[[a.padded for a in self._allocations], 1] |= np.uint64(PADDED)
            self._tables = table, native
        return self._tables

    def _changed(self) -> None:
        self._tables = None
        self.version += 1
