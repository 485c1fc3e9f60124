"""Who wrote and who read every 4-byte cell of shared or tensor memory last.

A cell holds numbers of *accesses*; a table says for each number which agent made it in which epoch at which
instruction. A read counts until the next write, which has a higher number, so nothing is ever cleared. Two accesses
conflict if one writes, their bytes overlap, and the later one's clock does not cover the earlier one's epoch. A write
that is ordered after all reads since the last write is ordered after that write as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.emulator.hazards.clocks import CARRIED, STRICT

ALL_BYTES = 15
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
TENSOR_COLUMNS = 512
_FIRST = np.zeros(1, np.int64)
_CHUNK = np.complex128  # any 16-byte type: four cells moved in one go


class Accesses:
    """The table of accesses: agent, epoch, instruction, bytes of the cell and lanes, by number from 1."""

    def __init__(self) -> None:
        self.count = 1
        self.entry = np.zeros(1024, np.int32)
        self.epoch = np.zeros(1024, np.uint32)
        self.pc = np.zeros(1024, np.int32)
        self.mask = np.zeros(1024, np.uint8)
        self.lanes = np.zeros(1024, np.uint32)

    def add(self, entry: int, epoch: int, pcs: Any, mask: int = ALL_BYTES, lanes: Any = 0) -> int:
        """Number of the first of as many accesses as there are ``pcs``; ``lanes``: masks of theirs, 0 = unknown."""
        single = isinstance(pcs, int)
        first, self.count = self.count, self.count + (1 if single else len(pcs))
        while self.count > len(self.entry):
            for name in ("entry", "epoch", "pc", "mask", "lanes"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        new = first if single else slice(first, self.count)
        self.entry[new], self.epoch[new], self.pc[new], self.mask[new] = entry, epoch, pcs, mask
        self.lanes[new] = lanes
        return first


def by_instruction(pcs: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct instructions of some accesses, which one each access is of, and the lanes of each as masks."""
    bits = _BITS[lanes]
    if pcs[0] == pcs[-1] and (pcs == pcs[0]).all():
        return pcs[:1], np.zeros(1, np.int64), np.bitwise_or.reduce(bits, keepdims=True)
    distinct, which = np.unique(pcs, return_inverse=True)
    masks = np.zeros(len(distinct), np.uint32)
    np.bitwise_or.at(masks, which, bits)
    return distinct, which, masks


class Cells:
    """Cells of a memory, as a view of an array of its shape."""

    def __init__(self, view: Callable[[np.ndarray], np.ndarray]):
        self.view = view

    def get(self, array: np.ndarray) -> np.ndarray:
        """uint32, any shape."""
        return self.view(array)

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number, or to one each."""
        self.view(array)[...] = ids

    def first(self, position: int) -> str:
        """Where the cell at a flat position lies, for reports."""
        return ""


class Block(Cells):
    """Columns of some lanes of tensor memory, column by column."""

    def __init__(self, lane: int, lanes: int, column: int, columns: int):
        self.lane, self.lanes, self.column = lane, lanes, column
        self.where = slice(lane, lane + lanes), slice(column, column + columns)

    def get(self, array: np.ndarray) -> np.ndarray:
        """uint32[columns, lanes]."""
        return array[self.where].T

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number."""
        array[self.where] = ids

    def first(self, position: int) -> str:
        """Byte address, were the lanes behind each other."""
        lane, column = self.lane + position % self.lanes, self.column + position // self.lanes
        return f"{4 * (lane * TENSOR_COLUMNS + column):#x}"


class Words(Cells):
    """Cells by flat number."""

    def __init__(self, index: Any):
        self.index = index

    def get(self, array: np.ndarray) -> np.ndarray:
        """uint32[n]."""
        return array.reshape(-1)[self.index]

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number, or to one each."""
        array.reshape(-1)[self.index] = ids

    def first(self, position: int) -> str:
        """Byte address."""
        if isinstance(self.index, slice):
            return f"{4 * (self.index.start + position):#x}"
        return f"{4 * int(self.index.reshape(-1)[position]):#x}"


class Chunks(Cells):
    """Groups of four cells (16 bytes of shared memory) by chunk number."""

    def __init__(self, index: np.ndarray):
        self.index = index

    def get(self, array: np.ndarray) -> np.ndarray:
        """uint32[4 n]."""
        return array[: len(array) & ~3].view(_CHUNK)[self.index].reshape(-1).view(np.uint32)

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number."""
        array[: len(array) & ~3].view(_CHUNK)[self.index] = np.full(4, ids, np.uint32).view(_CHUNK)[0]

    def first(self, position: int) -> str:
        """Byte address."""
        return f"{16 * int(self.index.reshape(-1)[position // 4]):#x}"


@dataclass
class Actor:
    """Who makes an access: its entry and epoch, and the clock it acts under (both rows)."""

    entry: int
    epoch: int
    clock: np.ndarray


@dataclass
class _Readers:
    """Reads by one agent: the last one of every cell; the epoch of the latest of all, and the highest number."""

    cells: np.ndarray
    latest: int = 0
    number: int = 0

    def since(self, cells: Cells, low: int) -> np.ndarray | None:
        """The reads of some cells; None if each is older than access ``low``."""
        if self.number <= low:
            return None
        found = cells.get(self.cells)
        return found if found.size and np.maximum.reduce(found, axis=None) > low else None


@dataclass(frozen=True)
class Conflict:
    """An access and the earlier one (by number) that it is not ordered after, at a flat position of the cells.

    ``carried``: it would be, if completions published what their issuers knew.
    """

    earlier: int
    position: int
    what: str
    carried: bool = False


class Shadow:
    """Shadow of one memory of ``shape`` cells."""

    def __init__(self, shape: tuple[int, ...], accesses: Accesses):
        self.shape = shape
        self.accesses = accesses
        self.writer = np.zeros(shape, np.uint32)
        self.readers: dict[int, _Readers] = {}
        self.last: Any = None  # key of the latest access: its repetition changes nothing

    def read(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a read; the first conflict with an earlier write."""
        conflict = self._first(cells.get(self.writer), actor, mask, "read after write")
        readers = self.readers.get(actor.entry)
        if readers is None:
            readers = self.readers[actor.entry] = _Readers(np.zeros(self.shape, np.uint32))
        cells.put(readers.cells, ids)
        readers.latest, readers.number = actor.epoch, self.accesses.count
        return conflict

    def write(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a write; the first conflict with an earlier read or write."""
        old = np.array(cells.get(self.writer))
        low = int(np.minimum.reduce(old, axis=None)) if old.size else 0
        conflict = None
        for entry, readers in self.readers.items():
            if _harmless(conflict) and readers.latest > actor.clock[STRICT, entry]:
                since = readers.since(cells, low)
                if since is not None:
                    found = self._first(np.where(since > old, since, 0), actor, mask, "write after read")
                    conflict = found or conflict
        if _harmless(conflict) and self._first(old, actor, mask, ""):
            for readers in self.readers.values():
                since = readers.since(cells, low)
                if since is not None:
                    old[since > old] = 0
            conflict = self._first(old, actor, mask, "write after write") or conflict
        cells.put(self.writer, ids)
        return conflict

    def _first(self, ids: np.ndarray, actor: Actor, mask: int, what: str) -> Conflict | None:
        """The first access that the clock does not cover, preferably in neither row."""
        flat = ids.reshape(-1)
        found = self._late(flat, actor.clock[STRICT], mask)
        if found is None:
            return None
        worse = self._late(flat, actor.clock[CARRIED], mask)
        return Conflict(*(worse or found), what, carried=worse is None)

    def _late(self, flat: np.ndarray, clock: np.ndarray, mask: int) -> tuple[int, int] | None:
        """(number, position) of the first access that one row of a clock does not cover."""
        table = self.accesses
        if not len(flat):
            return None
        low, high = np.minimum.reduce(flat), np.maximum.reduce(flat)
        if low == high:
            high = int(high)
            late = table.epoch[high] > clock[table.entry[high]] and table.mask[high] & mask
            return (high, 0) if late else None
        # Neighbours mostly have the same access: look at the first cell of each run.
        starts = np.concatenate([_FIRST, np.flatnonzero(flat[1:] != flat[:-1]) + 1])
        runs = flat[starts]
        bad = (table.epoch[runs] > clock[table.entry[runs]]) & (table.mask[runs] & mask != 0)
        at = int(bad.argmax())
        return (int(runs[at]), int(starts[at])) if bad[at] else None


def _harmless(conflict: Conflict | None) -> bool:
    """May a worse one be looked for?"""
    return conflict is None or conflict.carried
