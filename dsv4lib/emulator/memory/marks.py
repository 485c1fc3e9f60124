"""Mark which words of global memory are accessed, so that clusters in several processes can be kept apart.

One byte for each 4-byte word of every allocation: READ, WRITTEN or both. Native code sets them for loads and stores
(``native/access_log.py``), asynchronous units through `Marks.ranges`. A mark may say too much, never too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.memory.gmem import GlobalMemory

READ, WRITTEN = 1, 2


@dataclass(frozen=True)
class Touched:
    """What has been accessed of one allocation.

    Attributes:
        index: of the allocation, by address; first: word of it at which the marks begin.
        read, written: packed bits, one a word; count: of words.
        data: the bytes of the written words, those outside of the allocation left out.
    """

    index: int
    first: int
    count: int
    read: np.ndarray
    written: np.ndarray
    data: np.ndarray

    def marks(self) -> np.ndarray:
        """Unpack the marks, uint8[count]."""
        read, written = (np.unpackbits(bits, count=self.count) for bits in (self.read, self.written))
        return read * np.uint8(READ) + written * np.uint8(WRITTEN)


class Marks:
    """Marks of all allocations of a device, none set at first.

    Attributes:
        address: of the table by which native code finds the marks of a word: of each allocation the address that the
            mark of word 0 of all memory would have.
    """

    def __init__(self, gmem: GlobalMemory):
        self._gmem = gmem
        self._allocations = list(gmem)
        self._starts = np.array([a.start for a in self._allocations], np.int64)
        self._flags = [np.zeros((a.end + 3 >> 2) - (a.start >> 2), np.uint8) for a in self._allocations]
        bases = [f.ctypes.data - (a.start >> 2) for f, a in zip(self._flags, self._allocations, strict=True)]
        self._table = np.array(bases, np.int64)
        self.address = self._table.ctypes.data

    def ranges(self, starts: Any, nbytes: int, write: bool) -> None:
        """Mark ``nbytes`` at each address. What lies outside of the first address's allocation is looked up again."""
        starts = np.asarray(starts).astype(np.int64).reshape(-1)
        if not len(starts) or nbytes <= 0:
            return
        index = np.searchsorted(self._starts, starts, side="right") - 1
        for i in np.unique(index[index >= 0]).tolist():
            flags, base = self._flags[i], self._allocations[i].start >> 2
            mine = starts[index == i]
            first, last = (mine >> 2) - base, (mine + nbytes + 3 >> 2) - base
            words = first[:, None] + np.arange(int((last - first).max()))
            words = np.minimum(np.minimum(words, last[:, None] - 1), len(flags) - 1)
            flags[words] |= np.uint8(WRITTEN if write else READ)

    def touched(self) -> list[Touched]:
        """List what has been accessed, with what was written."""
        found = []
        for i, flags in enumerate(self._flags):
            if flags.any():
                first = int((flags != 0).argmax())
                count = len(flags) - first - int((flags[::-1] != 0).argmax())
                marks = flags[first : first + count]
                written = marks & WRITTEN != 0
                data = self._bytes(i, first, written)
                found.append(
                    Touched(i, first, count, np.packbits(marks & READ), np.packbits(written), data[0][data[1]])
                )
        return found

    def conflicts(self, other: Touched, strict: bool) -> bool:
        """Tell whether accesses that come later depend on those marked here.

        Args:
            other: what is accessed later.
            strict: it is also a conflict to write what was read here.
        """
        mine, theirs = self._flags[other.index][other.first : other.first + other.count], other.marks()
        if ((mine & WRITTEN != 0) & (theirs != 0)).any():
            return True
        return strict and bool(((mine & READ != 0) & (theirs & WRITTEN != 0)).any())

    def apply(self, other: Touched) -> None:
        """Take over what was accessed later: marks, and the data that was written."""
        marks = other.marks()
        view, chosen = self._bytes(other.index, other.first, marks & WRITTEN != 0)
        view[chosen] = other.data
        self._flags[other.index][other.first : other.first + other.count] |= marks

    def _bytes(self, index: int, first: int, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Memory of an allocation from a word on, and which of its bytes belong to chosen words."""
        allocation = self._allocations[index]
        begin = 4 * ((allocation.start >> 2) + first)
        low, high = max(begin, allocation.start), min(begin + 4 * len(words), allocation.end)
        return self._gmem.view(low, high - low), np.repeat(words, 4)[low - begin : high - begin]
