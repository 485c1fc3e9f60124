"""Who wrote and who read every 4-byte cell of shared or tensor memory last.

A cell holds numbers of *accesses*; a table says for each number which agent made it in which epoch at which
instruction. A read counts until the next write, which has a higher number, so nothing is ever cleared. Two accesses
conflict if one writes, their bytes overlap, and the later one's clock does not cover the earlier one's epoch. A write
that is ordered after all reads since the last write is ordered after that write as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from dsv4lib.emulator.hazards.clocks import CARRIED, STRICT
from dsv4lib.emulator.native import race_log

ALL_BYTES = 15
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
TENSOR_COLUMNS = 512
_CHUNK = np.complex128  # any 16-byte type: four cells moved in one go


class Fields:
    """A block of int64 fields that native code reads, named by an IntEnum; ``values``: to read and change them here."""

    def __init__(self, names: type[IntEnum]):
        array = np.zeros(len(names), np.int64)
        self.address = array.ctypes.data
        self.values = memoryview(array)

    def set(self, *values: int) -> None:
        """Set the first fields."""
        for i, value in enumerate(values):
            self.values[i] = value


class Accesses:
    """The table of accesses: agent, epoch, instruction, bytes of the cell and lanes, by number from 1.

    ``block``: the table for native code (`race_log.Table`).
    """

    def __init__(self) -> None:
        self.count = 1
        self.block = Fields(race_log.Table)
        self.entry = np.zeros(1024, np.int32)
        self.epoch = np.zeros(1024, np.uint32)
        self.pc = np.zeros(1024, np.int32)
        self.mask = np.zeros(1024, np.uint8)
        self.lanes = np.zeros(1024, np.uint32)
        self._moved()

    def _moved(self) -> None:
        columns = self.entry, self.epoch, self.pc, self.mask, self.lanes
        self.block.set(*(column.ctypes.data for column in columns), self.count)

    def reserve(self, count: int) -> None:
        """Make room for so many accesses more."""
        if self.count + count <= len(self.entry):
            return
        while self.count + count > len(self.entry):
            for name in ("entry", "epoch", "pc", "mask", "lanes"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._moved()

    def add(self, entry: int, epoch: int, pcs: Any, mask: int = ALL_BYTES, lanes: Any = 0) -> int:
        """Number of the first of as many accesses as there are ``pcs``; ``lanes``: masks of theirs, 0 = unknown."""
        single = isinstance(pcs, int)
        new = 1 if single else len(pcs)
        self.reserve(new)
        first, self.count = self.count, self.count + new
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


Box = tuple[np.ndarray | None, int, int, int, int]  # indices, rows, start, pitch, width (see race_log.sweep)


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

    def box(self, shadow: np.ndarray) -> Box | None:
        """The cells for `race_log.sweep`; None if they are no such thing."""
        cells = self.view(shadow)
        if cells.ndim != 2 or cells.strides[1] != 4 or cells.strides[0] % 4:
            return None
        start = address_of(cells) - address_of(shadow) >> 2
        return None, cells.shape[0], start, cells.strides[0] >> 2, cells.shape[1]

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

    def box(self, shadow: np.ndarray) -> Box | None:
        """The cells for `race_log.sweep`."""
        lanes, columns = self.where
        start = self.lane * TENSOR_COLUMNS + columns.start
        return None, self.lanes, start, TENSOR_COLUMNS, columns.stop - columns.start

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

    def box(self, shadow: np.ndarray) -> Box | None:
        """The cells for `race_log.sweep`."""
        if isinstance(self.index, slice):
            return None, 1, self.index.start, 0, self.index.stop - self.index.start
        return np.ascontiguousarray(self.index, np.int64), self.index.size, 0, 1, 1

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

    def box(self, shadow: np.ndarray) -> Box | None:
        """The cells for `race_log.sweep`."""
        return np.ascontiguousarray(self.index, np.int64), self.index.size, 0, 4, 4

    def first(self, position: int) -> str:
        """Byte address."""
        return f"{16 * int(self.index.reshape(-1)[position // 4]):#x}"


@dataclass
class Actor:
    """Who makes an access: its entry and epoch, and the clock it acts under (both rows)."""

    entry: int
    epoch: int
    clock: np.ndarray


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
    """Shadow of one memory of ``shape`` cells, for so many ``agents``.

    Attributes:
        writer: last write of every cell; readers: by agent, its last read of every cell.
        latest: by agent, the epoch of its latest read; number: by agent, no number of a read of its is above.
        block: the same for native code (`race_log.Memory`).
    """

    def __init__(self, shape: tuple[int, ...], accesses: Accesses, agents: int):
        self.shape = shape
        self.accesses = accesses
        self.writer = np.zeros(shape, np.uint32)
        self.readers: dict[int, np.ndarray] = {}
        self.latest = np.zeros(agents, np.uint32)
        self.number, self._cells, self._low, self._high, self._entries = np.zeros((5, agents), np.int64)
        self._native, self._sweep = race_log.late(), race_log.sweep()
        self.block = Fields(race_log.Memory)
        arrays = self._cells, self.latest, self.number, self._low, self._high, self._entries
        self.block.set(self.writer.ctypes.data, self.writer.size, *(array.ctypes.data for array in arrays))
        self.last: Any = None  # key of the latest access: its repetition changes nothing

    def read(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a read; the first conflict with an earlier write."""
        entry = actor.entry
        reads = self.readers.get(entry)
        if reads is None:
            reads = np.zeros(self.shape, np.uint32)
            self._cells[entry], self._entries[len(self.readers)] = reads.ctypes.data, entry
            self._low[entry] = self.writer.size
            self.readers[entry] = reads
            self.block.values[race_log.Memory.READERS] = len(self.readers)
        if self._swept(cells, actor, ids, mask, False):
            return None
        conflict = self._first(cells.get(self.writer), actor, mask, "read after write")
        cells.put(reads, ids)
        self.latest[entry], self.number[entry] = actor.epoch, self.accesses.count
        self._low[entry], self._high[entry] = 0, self.writer.size
        return conflict

    def write(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a write; the first conflict with an earlier read or write."""
        if self._swept(cells, actor, ids, mask, True):
            return None
        old = np.array(cells.get(self.writer))
        low = int(np.minimum.reduce(old, axis=None)) if old.size else 0
        conflict = None
        behind = self.latest > actor.clock[STRICT]
        if behind.any():
            for entry in self.readers:
                if _harmless(conflict) and behind[entry]:
                    since = self._since(entry, cells, low)
                    if since is not None:
                        found = self._first(np.where(since > old, since, 0), actor, mask, "write after read")
                        conflict = found or conflict
        if _harmless(conflict) and self._first(old, actor, mask, ""):
            for entry in self.readers:
                since = self._since(entry, cells, low)
                if since is not None:
                    old[since > old] = 0
            conflict = self._first(old, actor, mask, "write after write") or conflict
        cells.put(self.writer, ids)
        return conflict

    def _swept(self, cells: Cells, actor: Actor, ids: Any, mask: int, write: bool) -> bool:
        """Has native code recorded the access? Not if it may be a conflict."""
        box = cells.box(self.writer) if isinstance(ids, int) else None
        if box is None:
            return False
        index, *rest = box
        table, clock = self.accesses, actor.clock
        who = actor.entry, actor.epoch, table.count, ids, mask, write
        at = 0 if index is None else address_of(index)
        done = self._sweep(self.block.address, table.block.address, address_of(clock), *who, at, *rest)
        return done == race_log.DONE

    def _since(self, entry: int, cells: Cells, low: int) -> np.ndarray | None:
        """An agent's reads of some cells; None if each is older than access ``low``."""
        if self.number[entry] <= low:
            return None
        found = cells.get(self.readers[entry])
        return found if found.size and np.maximum.reduce(found, axis=None) > low else None

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
        if not len(flat):
            return None
        flat = np.ascontiguousarray(flat)
        clock = np.ascontiguousarray(clock)
        at = self._native(address_of(flat), len(flat), address_of(clock), self.accesses.block.address, mask)
        return (int(flat[at]), at) if at >= 0 else None


def address_of(array: np.ndarray) -> int:
    """Of its first element."""
    return array.__array_interface__["data"][0]


def _harmless(conflict: Conflict | None) -> bool:
    """May a worse one be looked for?"""
    return conflict is None or conflict.carried
