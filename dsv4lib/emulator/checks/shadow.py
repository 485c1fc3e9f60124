"""Keep last writer and readers of every 4-byte cell of shared or tensor memory.

A cell holds numbers of *accesses*; a table says for each number which agent made it in which epoch at which
instruction. A read counts until the next write, which has a higher number, so nothing is ever cleared. Two accesses
conflict if one writes, their bytes overlap, and the later one's clock does not cover the earlier one's epoch. A write
that is ordered after all reads since the last write is ordered after that write as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, STRICT, Clocks, address_of
from dsv4lib.emulator.native import race_log
from dsv4lib.emulator.native.race_log import ALL_BYTES, SYNC

_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
TENSOR_LANES, TENSOR_COLUMNS = 128, 512
_TENSOR_CELLS = np.arange(TENSOR_LANES * TENSOR_COLUMNS).reshape(TENSOR_LANES, TENSOR_COLUMNS)
_CHUNK = np.complex128  # any 16-byte type: four cells moved in one go


class Fields:
    """A block of int64 fields that native code reads, named by an IntEnum. ``values``: to read and change them here."""

    def __init__(self, names: type[IntEnum]):
        array = np.zeros(_length(names), np.int64)
        self.address = address_of(array)
        self.values = memoryview(array)

    def set(self, *values: int) -> Fields:
        """Set the first fields; returns itself."""
        for i, value in enumerate(values):
            self.values[i] = value
        return self


_length = functools.cache(len)  # an enumeration counts its members anew each time


class Accesses:
    """The table of accesses. Agent, epoch, instruction, bytes of the cell and lanes, by number from 1.

    ``block``: the table for native code (`race_log.Table`).
    """

    def __init__(self) -> None:
        self.block = Fields(race_log.Table)
        self._use(np.zeros((5, 1024), np.uint32))
        self.block.values[race_log.Table.COUNT] = 1

    @property
    def count(self) -> int:
        """Get the number of the next access."""
        return self.block.values[race_log.Table.COUNT]

    def _use(self, columns: np.ndarray) -> None:
        self._columns, room = columns, columns.shape[1]
        self.entry, self.epoch, self.pc, self.mask, self.lanes = columns
        first = address_of(columns)
        self.block.set(*range(first, first + 20 * room, 4 * room))
        self.block.values[race_log.Table.ROOM] = room

    def reserve(self, count: int) -> None:
        """Make room for so many accesses more."""
        room = self._columns.shape[1]
        if self.count + count > room:
            more = np.zeros((5, max(room, self.count + count - room)), np.uint32)
            self._use(np.concatenate([self._columns, more], 1))

    def rows(self, first: int) -> np.ndarray:
        """Copy the accesses from one on, uint32[5, accesses]: agent, epoch, instruction, bytes, lanes."""
        return self._columns[:, first : self.count].copy()

    def extend(self, rows: np.ndarray) -> None:
        """Add accesses as `rows` returns them."""
        first, new = self.count, rows.shape[1]
        self.reserve(new)
        self._columns[:, first : first + new] = rows
        self.block.values[race_log.Table.COUNT] = first + new

    def add(self, entry: int, epoch: int, pcs: Any, mask: int = ALL_BYTES, lanes: Any = 0) -> int:
        """Add an access for each of ``pcs``; return the first one's number. ``lanes``: masks, 0 = unknown."""
        single = isinstance(pcs, int)
        new = 1 if single else len(pcs)
        self.reserve(new)
        first = self.count
        self.block.values[race_log.Table.COUNT] = end = first + new
        new = first if single else slice(first, end)
        self.entry[new], self.epoch[new], self.pc[new], self.mask[new] = entry, epoch, pcs, mask
        self.lanes[new] = lanes
        return first


def by_instruction(pcs: np.ndarray, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group accesses by instruction: the distinct ones, each access's, lane masks."""
    bits = _BITS[lanes]
    if pcs[0] == pcs[-1] and (pcs == pcs[0]).all():
        return pcs[:1], np.zeros(1, np.int64), np.bitwise_or.reduce(bits, keepdims=True)
    distinct, which = np.unique(pcs, return_inverse=True)
    masks = np.zeros(len(distinct), np.uint32)
    np.bitwise_or.at(masks, which, bits)
    return distinct, which, masks


class Cells:
    """View cells of tensor memory in whole runs of columns.

    The view is an array of tensor memory's shape.
    """

    def __init__(self, view: Callable[[np.ndarray], np.ndarray]):
        self.view = view
        cells = view(_TENSOR_CELLS)
        self._rows = np.ascontiguousarray(cells[..., 0]).reshape(-1)
        self._box = Fields(race_log.Box).set(address_of(self._rows), len(self._rows), 0, 1, cells.shape[-1])

    def get(self, array: np.ndarray) -> np.ndarray:
        """Get the cells, uint32, any shape."""
        return self.view(array)

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number, or to one each."""
        self.view(array)[...] = ids

    def box(self, scratch: Fields) -> int:
        """Get the address of a `race_log.Box` of the cells, perhaps in ``scratch``."""
        return self._box.address

    def first(self, position: int) -> str:
        """Say where the cell at a flat position lies, for reports."""
        return ""

    def word(self, position: int) -> int:
        """Get the number of the cell at a flat position in shared memory, -1 if it is not a word by itself."""
        return -1


class Block(Cells):
    """Columns of some lanes of tensor memory, column by column."""

    def __init__(self, lane: int, lanes: int, column: int, columns: int):
        self.lane, self.lanes, self.column = lane, lanes, column
        self.where = slice(lane, lane + lanes), slice(column, column + columns)
        start = lane * TENSOR_COLUMNS + column
        self._box = Fields(race_log.Box).set(0, lanes, start, TENSOR_COLUMNS, columns)

    def get(self, array: np.ndarray) -> np.ndarray:
        """Get the cells, uint32[columns, lanes]."""
        return array[self.where].T

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number."""
        array[self.where] = ids

    def first(self, position: int) -> str:
        """Say the byte address, as if the lanes followed each other."""
        lane, column = self.lane + position % self.lanes, self.column + position // self.lanes
        return f"{4 * (lane * TENSOR_COLUMNS + column):#x}"


class Words(Cells):
    """Cells by flat number."""

    def __init__(self, index: Any):
        self.index = index

    def get(self, array: np.ndarray) -> np.ndarray:
        """Get the cells, uint32[n]."""
        return array.reshape(-1)[self.index]

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number, or to one each."""
        array.reshape(-1)[self.index] = ids

    def box(self, scratch: Fields) -> int:
        """Get the address of a `race_log.Box` of the cells: ``scratch``."""
        index = self.index
        if isinstance(index, slice):
            return scratch.set(0, 1, index.start, 0, index.stop - index.start).address
        self.index = index = np.ascontiguousarray(index, np.int64)
        return scratch.set(address_of(index), index.size, 0, 1, 1).address

    def word(self, position: int) -> int:
        """Get the number of the cell."""
        return self.index.start + position if isinstance(self.index, slice) else int(self.index.reshape(-1)[position])

    def first(self, position: int) -> str:
        """Say the byte address."""
        return f"{4 * self.word(position):#x}"


class Chunks(Cells):
    """Groups of four cells (16 bytes of shared memory) by chunk number."""

    def __init__(self, index: np.ndarray):
        self.index = index

    def get(self, array: np.ndarray) -> np.ndarray:
        """Get the cells, uint32[4 n]."""
        return array[: len(array) & ~3].view(_CHUNK)[self.index].reshape(-1).view(np.uint32)

    def put(self, array: np.ndarray, ids: Any) -> None:
        """Set the cells to one number."""
        array[: len(array) & ~3].view(_CHUNK)[self.index] = np.full(4, ids, np.uint32).view(_CHUNK)[0]

    def box(self, scratch: Fields) -> int:
        """Get the address of a `race_log.Box` of the cells: ``scratch``."""
        self.index = index = np.ascontiguousarray(self.index, np.int64)
        return scratch.set(address_of(index), index.size, 0, 4, 4).address

    def first(self, position: int) -> str:
        """Say the byte address."""
        return f"{16 * int(self.index.reshape(-1)[position // 4]):#x}"


@functools.lru_cache(1 << 12)
def block_of(lane: int, lanes: int, column: int, columns: int) -> Block:
    """Make a `Block`, once."""
    return Block(lane, lanes, column, columns)


@functools.lru_cache(1 << 12)
def columns_of(column: int, columns: int, first: int = 0, end: int = TENSOR_LANES) -> Cells:
    """Make columns of tensor memory in the lanes from ``first`` to ``end``, once."""
    return Cells(lambda x: x[first:end, column : column + columns])


@dataclass
class Actor:
    """The agent of an access. Its entry and epoch, and the clock it acts under (both rows)."""

    entry: int
    epoch: int
    clock: np.ndarray


@dataclass(frozen=True)
class Conflict:
    """Hold an access and the earlier one (by number) that it is not ordered after.

    Positions of cells are flat.

    ``carried``: it would be, if completions published what their issuers knew.
    """

    earlier: int
    position: int
    what: str
    carried: bool = False


# What a conflict is called, by the kind of the agent that made the earlier access.
_KINDS = {
    "ld": "missing_tcgen05_wait",
    "st": "missing_tcgen05_wait",
    "bulk": "missing_bulk_wait",
    "cp.async": "missing_cp_async_wait",
    "exit": "peer_memory_after_exit",
}


def kind_of(
    conflict: Conflict, memory: str, clocks: Clocks, agent: int | None, earlier: tuple[int, int], same: bool
) -> str:
    """Choose the kind of hazard that a conflict is.

    Args:
        memory: "shared memory" or "tensor memory".
        agent: entry of the asynchronous agent that makes the access, if its own issuer made the earlier one.
        earlier: entry and epoch of the agent of the earlier access.
        same: the access is a write of threads and leaves every byte as it was.
    """
    if clocks.kinds[earlier[0]] == "exit":
        return _KINDS["exit"]
    if conflict.carried:
        return "race_through_completion"
    kind = _KINDS.get(clocks.kinds[agent], "") if agent is not None else ""
    if not kind and not clocks.waited_for(*earlier):
        kind = _KINDS.get(clocks.kinds[earlier[0]], "")
    if not kind and same and conflict.what == "write after write":
        kind = "race_shared_same_value"
    return kind or ("race_shared" if memory.startswith("shared") else "race_tensor")


class Shadow:
    """Shadow of one memory of ``shape`` cells, for so many ``agents``.

    Attributes:
        writer: last write of every cell; readers: by agent, its last read of every cell.
        under: where the last write is strong, such as an atomic: the weak one before it and its like, which it hides.
        latest: by agent, the latest epoch of its reads; number: by agent, no number of a read of its is above.
        block: the same for native code (`race_log.Memory`); address: of that.
    """

    def __init__(self, shape: tuple[int, ...], accesses: Accesses, agents: int):
        self.shape = shape
        self.accesses = accesses
        self.writer, self.under = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
        self.readers: dict[int, np.ndarray] = {}
        self.latest = np.zeros(agents, np.uint32)
        columns = np.zeros((7, agents), np.int64)
        self._cells, self.number, self._low, self._high, self._from, self._to, self._entries = columns
        first = address_of(columns)
        cells, *others = range(first, first + 56 * agents, 8 * agents)
        mask = -1 if len(shape) == 1 else shape[1] - 1  # of a cell's column
        self.block = Fields(race_log.Memory)
        table, writer, latest = accesses.block.address, address_of(self.writer), address_of(self.latest)
        self.block.set(table, writer, self.writer.size, mask, cells, latest, *others)
        self.block.values[race_log.Memory.UNDER] = address_of(self.under)
        self.address = self.block.address
        self._late_in = race_log.late()
        self.last: Any = None  # the latest access, if its repetition changes nothing

    def prepare(self, entry: int, write: bool) -> bool:
        """Make what native code needs to note an access of an agent. False if it was there."""
        table, known = self.accesses, write or entry in self.readers
        if known and table.count < len(table.entry):
            return False
        table.reserve(1)
        if not known:
            reads = self.readers[entry] = np.zeros(self.shape, np.uint32)
            self._cells[entry], self._entries[len(self.readers) - 1] = address_of(reads), entry
            self._low[entry] = self._from[entry] = self.writer.size
            self.block.values[race_log.Memory.READERS] = len(self.readers)
        return True

    def read(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a read; the first conflict with an earlier write."""
        entry = actor.entry
        self.prepare(entry, False)
        old = cells.get(self.writer)
        conflict = self._first(old, actor, mask, "read after write")
        if mask & SYNC and conflict is None:
            conflict = self._first(self._beneath(cells, old), actor, mask, "read after write")
        cells.put(self.readers[entry], ids)
        # Operations of one agent may read out of order: a later group may complete first.
        self.latest[entry] = max(self.latest[entry], actor.epoch)
        self.number[entry] = self.accesses.count
        self._low[entry] = self._from[entry] = 0
        self._high[entry] = self._to[entry] = self.writer.size
        return conflict

    def write(self, cells: Cells, actor: Actor, ids: Any, mask: int = ALL_BYTES) -> Conflict | None:
        """Record a write; the first conflict with an earlier read or write."""
        old = np.array(cells.get(self.writer))
        low = int(np.minimum.reduce(old, axis=None)) if old.size else 0
        conflict = None
        uncovered = self.latest > actor.clock[STRICT]
        if uncovered.any():
            for entry in self.readers:
                if _harmless(conflict) and uncovered[entry]:
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
        if mask & SYNC:
            old = np.array(cells.get(self.writer))
            hidden = self._beneath(cells, old)
            conflict = conflict or self._first(hidden, actor, mask, "write after write")
            cells.put(self.under, np.where(self.accesses.mask[old] & SYNC, hidden, old))
        cells.put(self.writer, ids)
        return conflict

    def _beneath(self, cells: Cells, old: np.ndarray) -> np.ndarray:
        """Weak writes of some cells that strong ones hide; ``old``: their last writes."""
        return np.where(self.accesses.mask[old] & SYNC, cells.get(self.under), 0)

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
        at = self._late_in(address_of(flat), len(flat), address_of(clock), self.accesses.block.address, mask)
        return (int(flat[at]), at) if at >= 0 else None


def _harmless(conflict: Conflict | None) -> bool:
    """May a worse one be looked for?"""
    return conflict is None or conflict.carried
