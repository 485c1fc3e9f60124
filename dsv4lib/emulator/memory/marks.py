"""Mark which words of global memory are accessed, so that clusters in several processes can be kept apart.

One byte for each 4-byte word of every allocation: READ, WRITTEN or both. Native code sets them for loads and stores
(``native/access_log.py``), asynchronous units through `Marks.ranges`. A mark may say too much, never too little. While
marks are set, allocations must stay as they are: `Marks.current`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.memory.gmem import GlobalMemory

READ, WRITTEN = 1, 2
BLOCK = 64  # words: what is accessed is listed by blocks, so that it costs what it is, not the span that it lies in


@dataclass(frozen=True)
class Touched:
    """What has been accessed of one allocation.

    Attributes:
        index: of the allocation, by address; blocks: of `BLOCK` words each, those with an access.
        read, written: packed bits, one a word of these blocks.
        words: the written words that are all inside the allocation; edges: of the others the bytes that are.
    """

    index: int
    blocks: np.ndarray
    read: np.ndarray
    written: np.ndarray
    words: np.ndarray
    edges: np.ndarray

    def marks(self) -> np.ndarray:
        """Unpack the marks, uint8[blocks, BLOCK]."""
        shape = len(self.blocks), BLOCK
        read, written = (np.unpackbits(bits, count=shape[0] * shape[1]) for bits in (self.read, self.written))
        return (read * np.uint8(READ) + written * np.uint8(WRITTEN)).reshape(shape)

    def accessed(self) -> np.ndarray:
        """Number the words that are accessed, from the start of the allocation."""
        return _numbers(self.blocks, self.marks() != 0)


def _numbers(blocks: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Number chosen words, bool[blocks, BLOCK], from the start of their allocation."""
    row, column = np.nonzero(chosen)
    return blocks[row] * BLOCK + column


class Marks:
    """Marks of all allocations of a device, none set at first.

    Attributes:
        address: of the table by which native code finds the marks of a word: of each allocation the address that the
            mark of word 0 of all memory would have.
    """

    def __init__(self, gmem: GlobalMemory):
        self._gmem, self._version = gmem, gmem.version
        self._native = gmem.native_table
        self._allocations = list(gmem)
        self._starts = np.array([a.start for a in self._allocations], np.int64)
        counts = [(a.end + 3 >> 2) - (a.start >> 2) for a in self._allocations]
        self._flags = [np.zeros(-(-count // BLOCK) * BLOCK, np.uint8) for count in counts]
        bases = [f.ctypes.data - (a.start >> 2) for f, a in zip(self._flags, self._allocations, strict=True)]
        self._table = np.array(bases, np.int64)
        self.address = self._table.ctypes.data

    @property
    def current(self) -> bool:
        """Tell whether the allocations are still those that have marks."""
        return self._gmem.version == self._version

    def fit(self, table: np.ndarray) -> bool:
        """Tell whether native code that finds allocations by a table may set marks."""
        return table is self._native and self.current

    def ranges(self, starts: Any, nbytes: int, write: bool) -> None:
        """Mark ``nbytes`` at each address, as far as the allocation goes in which it lies."""
        starts = np.asarray(starts).astype(np.int64).reshape(-1)
        if not len(starts) or nbytes <= 0:
            return
        index = np.searchsorted(self._starts, starts, side="right") - 1
        for i in np.unique(index[index >= 0]).tolist():
            flags, base = self._flags[i], self._allocations[i].start >> 2
            count = (self._allocations[i].end + 3 >> 2) - base
            mine = starts[index == i]
            first, last = (mine >> 2) - base, (mine + nbytes + 3 >> 2) - base
            words = first[:, None] + np.arange(int((last - first).max()))
            words = np.minimum(np.minimum(words, last[:, None] - 1), count - 1)
            flags[words] |= np.uint8(WRITTEN if write else READ)

    def touched(self) -> list[Touched]:
        """List what has been accessed, with what was written."""
        found = []
        for i, flags in enumerate(self._flags):
            rows = flags.reshape(-1, BLOCK)
            blocks = np.flatnonzero(flags.view(np.uint64).reshape(len(rows), -1).any(1))
            if len(blocks):
                marks = rows[blocks]
                written = marks & WRITTEN != 0
                inside, edges = self._places(i, _numbers(blocks, written))
                words, memory = self._words(i)[inside], self._memory(i)[edges]
                found.append(Touched(i, blocks, np.packbits(marks & READ), np.packbits(written), words, memory))
        return found

    def conflicts(self, other: Touched, strict: bool) -> bool:
        """Tell whether accesses that come later depend on those marked here.

        Args:
            other: what is accessed later.
            strict: it is also a conflict to write what was read here.
        """
        mine, theirs = self._flags[other.index].reshape(-1, BLOCK)[other.blocks], other.marks()
        if ((mine & WRITTEN != 0) & (theirs != 0)).any():
            return True
        return strict and bool(((mine & READ != 0) & (theirs & WRITTEN != 0)).any())

    def apply(self, other: Touched) -> None:
        """Take over what was accessed later: marks, and the data that was written."""
        marks = other.marks()
        inside, edges = self._places(other.index, _numbers(other.blocks, marks & WRITTEN != 0))
        self._words(other.index)[inside] = other.words
        self._memory(other.index)[edges] = other.edges
        self._flags[other.index].reshape(-1, BLOCK)[other.blocks] |= marks

    def _memory(self, index: int) -> np.ndarray:
        """All bytes of an allocation."""
        allocation = self._allocations[index]
        return self._gmem.view(allocation.start, allocation.nbytes)

    def _words(self, index: int) -> np.ndarray:
        """The words that are all inside an allocation."""
        skipped = -self._allocations[index].start % 4
        memory = self._memory(index)[skipped:]
        return memory[: len(memory) // 4 * 4].view(np.uint32)

    def _places(self, index: int, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find words by number: those all inside the allocation in `_words`, the bytes of the others in `_memory`."""
        allocation = self._allocations[index]
        first = words * 4 - allocation.start % 4  # byte of the allocation
        inside = (first >= 0) & (first + 4 <= allocation.nbytes)
        edges = (first[~inside, None] + np.arange(4)).reshape(-1)
        edges = edges[(edges >= 0) & (edges < allocation.nbytes)]
        return words[inside] - (allocation.start % 4 > 0), edges
