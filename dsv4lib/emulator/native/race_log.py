"""Judge the access log (access_log.py) in native code. It is the race detector's way through what is in order.

Almost every access is ordered after everything that touched its words before. `judge` looks at a whole log first and
changes nothing; only if every access is covered does it note them in the shadows (checks/shadow.py and
checks/global_memory.py, whose arrays it works on). In any doubt it leaves the log to the Python code, which knows how
to report conflicts. `sweep` does the same for one access to many cells; `late` only compares.

All are written with llvmlite.ir. Times are logical: an access is an agent's epoch, as there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from llvmlite import ir

from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, COUNTS, GENERIC, GLOBAL, LOG, STRONG, WRITE
from dsv4lib.emulator.native.code import Code

# What `judge` returns beside LEFT: noted; nothing done, strong accesses first or a read that a strong write hides.
DONE, ORDERING = 0, 2
KEYS = 64  # entries of Launch.STAMPS an instruction: by memory and bytes
_MANY = 8  # cells that `sweep` looks at together
ALL_BYTES = 15  # of a word
ROWS = 3  # of a clock (checks/clocks.py): the first two are read here
SYNC = 16  # bit beside them, as in checks/global_memory.py

_I32, _I64 = ir.IntType(32), ir.IntType(64)


class Launch(IntEnum):
    """int64 fields about a launch. STAMPS: (pass << 32 | access) by instruction * KEYS + key; REGIONS: their blocks."""

    LOG, STAMPS, PASS, TABLE, REGIONS, COUNT = range(6)


class Group(IntEnum):
    """int64 fields about a cluster. WARPS: uint32[warps, ROWS, SIZE] clocks; SHADOWS: a `Memory` block for each CTA."""

    WARPS, EPOCHS, SIZE, TABLE, SHADOWS, CTAS, BASE = range(7)


class Table(IntEnum):
    """int64 fields of a table of accesses. Its columns (of 32 bits), how many there are, for how many there is room."""

    ENTRY, EPOCH, PC, MASK, LANES, COUNT, ROOM = range(7)


class Memory(IntEnum):
    """int64 fields about a shared or tensor memory. CELLS to TO: by agent; ENTRIES: agents that have read.

    An agent's reads are all in [LOW, HIGH), and cell & COLUMNS of them in [FROM, TO).
    """

    TABLE, WRITER, WORDS, COLUMNS, CELLS, LATEST, NUMBER, LOW, HIGH, FROM, TO, ENTRIES, READERS, UNDER = range(14)


class Box(IntEnum):
    """int64 fields about cells of a memory. WIDTH of them from START + PITCH * i on, for every i below ROWS.

    With INDEX, the address of int64[ROWS], what is there at i takes the place of i.
    """

    INDEX, ROWS, START, PITCH, WIDTH = range(5)


class Area(IntEnum):
    """int64 fields about an allocation of global memory. START, END: its bytes; BASE: its first word / 4."""

    START, END, BASE, WRITER, FIRST, LATEST, VALUES, UNDER, WRITTEN, READ_FROM = range(10)


class _Judge(Code):
    """Builds `judge`. Phase 0 looks, 1 notes what reads, 2 notes what writes."""

    def __init__(self) -> None:
        super().__init__("judge", [_I64] * 5)
        self.launch, self.group, self.me, self.n, ordered = self.args
        self.near, self.far = self.load(self.group, Group.TABLE), self.load(self.launch, Launch.TABLE)
        self.size = self.load(self.group, Group.SIZE)
        row = self.b.mul(self.b.mul(self.me, self.size), _I64(4 * ROWS))
        self.strict = self.b.add(self.load(self.group, Group.WARPS), row)
        self.carried = self.b.add(self.strict, self.b.mul(self.size, _I64(4)))
        self.epoch = self.load(self.load(self.group, Group.EPOCHS), self.me, _I32)
        self.base = self.load(self.group, Group.BASE)
        self.region = self.variable()  # of the latest global access
        self.first_word, self.bits, self.lanes = self.variable(), self.variable(), self.variable()
        self.hides = self.variable()  # a strong write of shared memory has been seen in phase 0
        self.phase = self.variable()
        with self.loop(lambda: self.test("<", self.get(self.phase), 3)):
            self.store(self.b.add(self.load(self.launch, Launch.PASS), _I64(1)), self.launch, Launch.PASS)
            with self.each(self.n) as i:
                self._entry(i, ordered)
            self.add(self.phase)
        self.b.ret(_I64(DONE))

    def looking(self) -> Any:
        """Is this phase 0?"""
        return self.test("==", self.get(self.phase), 0)

    def _entry(self, i: Any, ordered: Any) -> None:
        """One entry of the log."""
        self.entry = self.b.add(self.load(self.launch, Launch.LOG), self.b.mul(i, _I64(LOG.itemsize)))
        self.pc, self.mask = self.load(self.entry, 0, _I32), self.load(self.entry, 1, _I32)
        self.code = self.load(self.entry, 1)
        orders = self.test("==", self.b.and_(self.code, _I64(STRONG | COUNTS)), STRONG)
        self.give_up(self.b.and_(orders, self.test("==", ordered, 0)), ORDERING)
        self.writes, self.strong = self.bit(self.code, WRITE), self.bit(self.code, STRONG)
        self._look_for_hidden(self.b.and_(self.looking(), self.test("==", ordered, 0)))
        now = self.b.select(self.writes, _I64(2), _I64(1))
        self.nbytes = self.b.and_(self.code, _I64(BYTES))
        with self.when(self.b.or_(self.looking(), self.test("==", now, self.get(self.phase)))):
            lane = self.variable()
            with self.loop(lambda: self.test("<", self.get(lane), abi.LANES)):
                with self.when(self._active(self.get(lane))):
                    self._lane(lane)
                self.add(lane)

    def _look_for_hidden(self, condition: Any) -> None:
        """Leave to Python a log with a weak read of shared memory after a strong write (flags.hidden_reads)."""
        near = self.b.and_(condition, self.b.not_(self.bit(self.code, GLOBAL)))
        weak = self.b.not_(self.b.or_(self.writes, self.strong))
        hidden = self.b.and_(weak, self.test("!=", self.get(self.hides), 0))
        self.give_up(self.b.and_(near, hidden), ORDERING)
        with self.when(self.b.and_(near, self.b.and_(self.writes, self.strong))):
            self.b.store(_I64(1), self.hides)

    def _active(self, lane: Any) -> Any:
        return self.b.trunc(self.b.lshr(self.mask, lane), ir.IntType(1))

    def _address(self, lane: Any) -> Any:
        return self.load(self.entry, self.b.add(lane, _I64(2)))

    def _part(self, address: Any) -> Any:
        """Bytes of a word that an access of less than a word takes."""
        ones = self.b.sub(self.b.shl(_I64(1), self.nbytes), _I64(1))
        return self.b.shl(ones, self.b.and_(address, _I64(3)))

    def _lane(self, lane: Any) -> None:
        """The access of one lane, and of later ones that take other bytes of the same word."""
        address = self._address(self.get(lane))
        self.b.store(self.b.shl(_I64(1), self.get(lane)), self.lanes)
        self.b.store(_I64(15), self.bits)
        with self.when(self.test("<", self.nbytes, 4)):
            self.b.store(self._part(address), self.bits)
            more = self.variable(1)
            with self.loop(lambda: self.test("!=", self.get(more), 0)):
                self.b.store(_I64(0), more)
                following = self.b.add(self.get(lane), _I64(1))
                with self.when(self.b.and_(self.test("<", following, abi.LANES), self._active(following))):
                    neighbour = self._address(following)
                    same = self.test("<", self.b.xor(address, neighbour), 4)
                    with self.when(same):
                        self.b.store(self.b.or_(self.get(self.bits), self._part(neighbour)), self.bits)
                        self.b.store(self.b.or_(self.get(self.lanes), self.b.shl(_I64(1), following)), self.lanes)
                        self.b.store(following, lane)
                        self.b.store(_I64(1), more)
        many = self.b.lshr(self.b.add(self.nbytes, _I64(3)), _I64(2))
        generic, window = self.bit(self.code, GENERIC), self.b.lshr(address, _I64(56))
        far = self.b.or_(self.bit(self.code, GLOBAL), self.b.and_(generic, self.test("==", window, 0)))
        with self.when(far):
            self._global(address, many)
        inside = self.b.or_(self.b.not_(generic), self.test("==", window, abi.SHARED_WINDOW >> 56))
        with self.when(self.b.and_(self.b.not_(far), inside)):
            self._shared(self.b.and_(address, _I64(0xFFFFFFFF)), many)

    # --- shared memory ----------------------------------------------------------------------------------------------

    def _shared(self, address: Any, many: Any) -> None:
        rank, offset = self.b.lshr(address, _I64(24)), self.b.and_(address, _I64(0xFFFFFF))
        self.give_up(self.test(">=", rank, self.load(self.group, Group.CTAS)))
        block = self.load(self.load(self.group, Group.SHADOWS), rank)
        word, writer = self.b.lshr(offset, _I64(2)), self.load(block, Memory.WRITER)
        self.give_up(self.test(">", self.b.add(word, many), self.load(block, Memory.WORDS)))
        cells = self.load(self.load(block, Memory.CELLS), self.me)
        with self.b.if_else(self.looking()) as (look, note):
            with look:
                # A warp's first read of a memory makes its cells.
                self.give_up(self.b.and_(self.b.not_(self.writes), self.test("==", cells, 0)))
                with self.each(many) as i:
                    self._look_shared(block, self.load(writer, self.b.add(word, i), _I32), self.b.add(word, i))
            with note:
                number = self._number(self.near, self.me, 0, self._sync())
                into = self.b.select(self.writes, writer, cells)
                with self.each(many) as i:
                    self._cover(self.near, writer, self.load(block, Memory.UNDER), self.b.add(word, i))
                    self.store(number, into, self.b.add(word, i), _I32)
                with self.when(self.b.not_(self.writes)):
                    self.store(self.epoch, self.load(block, Memory.LATEST), self.me, _I32)
                    count = self.load(self.near, Table.COUNT)
                    self.store(count, self.load(block, Memory.NUMBER), self.me)
                    for low, high in ((Memory.LOW, Memory.HIGH), (Memory.FROM, Memory.TO)):
                        self.store(0, self.load(block, low), self.me)
                        self.store(self.load(block, Memory.WORDS), self.load(block, high), self.me)

    def _look_shared(self, block: Any, old: Any, word: Any) -> None:
        """Leave the log to Python unless the word's last write, and for a write its reads since, are covered."""
        with self.when(self.test("!=", old, 0)), self.when(self._late_shared(old)):
            self.give_up(self.b.or_(self.b.not_(self.writes), unread(self, block, word, old)))
        with self._beneath(self.near, old, self.load(block, Memory.UNDER), word) as under:
            self.give_up(self._late_shared(under))
        with self.when(self.writes), self.each(self.load(block, Memory.READERS)) as i:
            agent = self.load(self.load(block, Memory.ENTRIES), i)
            latest = self.load(self.load(block, Memory.LATEST), agent, _I32)
            with self.when(self.test(">", latest, self.load(self.strict, agent, _I32))):
                since = self.load(self.load(self.load(block, Memory.CELLS), agent), word, _I32)
                with self.when(self.test(">", since, old)):
                    self.give_up(self._late_shared(since))

    def _is_weak(self, table: Any, number: Any) -> Any:
        return self.b.not_(self.bit(self.load(self.load(table, Table.MASK), number, _I32), SYNC))

    @contextmanager
    def _beneath(self, table: Any, old: Any, under: Any, word: Any) -> Iterator[Any]:
        """If the access is strong, and the word's last write is: the weak one that this one has hidden, if any."""
        with self.when(self.b.and_(self.strong, self.test("!=", old, 0))):
            number = self.load(under, word, _I32)
            with self.when(self.b.and_(self.test("!=", number, 0), self.b.not_(self._is_weak(table, old)))):
                yield number

    def _cover(self, table: Any, writer: Any, under: Any, word: Any) -> None:
        """Keep the weak write of a word that a strong one is about to hide."""
        with self.when(self.b.and_(self.writes, self.strong)):
            old = self.load(writer, word, _I32)
            with self.when(self.b.and_(self.test("!=", old, 0), self._is_weak(table, old))):
                self.store(old, under, word, _I32)

    def _late_shared(self, number: Any) -> Any:
        return uncovered(self, self.near, number, self.strict, self.b.or_(self.get(self.bits), self._sync()))

    def _sync(self) -> Any:
        """Bit of a strong access."""
        return self.b.select(self.strong, _I64(SYNC), _I64(0))

    # --- global memory ----------------------------------------------------------------------------------------------

    def _global(self, address: Any, many: Any) -> None:
        end = self.b.add(address, self.nbytes)
        self._find(address, end)
        area = self.get(self.region)
        self.give_up(self.test("==", area, 0))
        written = self.test("!=", self.load(area, Area.WRITTEN), 0)
        self.give_up(self.b.and_(self.writes, self.b.not_(written)))  # reads that wait come before the first write
        word = self.b.sub(self.b.lshr(address, _I64(2)), self.load(area, Area.BASE))
        writer, first, latest = (self.load(area, name) for name in (Area.WRITER, Area.FIRST, Area.LATEST))
        with self.when(self.b.and_(self.looking(), written)), self.each(many) as i:
            at = self.b.add(word, i)
            old = self.load(writer, at, _I32)
            self._look_global(old)
            with self._beneath(self.far, old, self.load(area, Area.UNDER), at) as under:
                self._look_global(under)
            with self.when(self.writes):
                for reads in (first, latest):
                    since = self.load(reads, at, _I32)
                    with self.when(self.test(">", since, old)):
                        self._look_global(since)
        with self.when(self.b.not_(self.looking())):
            number = self._number(self.far, self.b.add(self.base, self.me), 32, self._sync())
            with self.each(many) as i:
                at = self.b.add(word, i)
                with self.b.if_else(self.writes) as (write, read):
                    with write:
                        self._cover(self.far, writer, self.load(area, Area.UNDER), at)
                        self.store(number, writer, at, _I32)
                        value = self.load(_I64(0), self.b.add(self.load(area, Area.BASE), at), _I32)
                        self.store(value, self.load(area, Area.VALUES), at, _I32)
                    with read:
                        with self.when(self.test("<=", self.load(first, at, _I32), self.load(writer, at, _I32))):
                            self.store(number, first, at, _I32)
                        self.store(number, latest, at, _I32)
                        self.store(1, area, Area.READ_FROM)

    def _find(self, address: Any, end: Any) -> None:
        """Set ``region`` to the block of the allocation that holds [address, end), 0 = unknown."""

        def holds(block: Any) -> Any:
            after = self.test(">=", address, self.load(block, Area.START))
            return self.b.and_(after, self.test("<=", end, self.load(block, Area.END)))

        missed = self.variable(1)
        known = self.get(self.region)
        with self.when(self.test("!=", known, 0)), self.when(holds(known)):
            self.b.store(_I64(0), missed)
        with self.when(self.test("!=", self.get(missed), 0)):
            self.b.store(_I64(0), self.region)
            with self.each(self.load(self.launch, Launch.COUNT)) as i:
                block = self.load(self.load(self.launch, Launch.REGIONS), i)
                with self.when(holds(block)):
                    self.b.store(block, self.region)

    def _look_global(self, number: Any) -> None:
        """Leave the log to Python unless an access (0 = none) is of this cluster and covered, or no conflict."""
        with self.when(self.test("!=", number, 0)):
            theirs, bits = self.load(self.load(self.far, Table.MASK), number, _I32), self.get(self.bits)
            common = self.test("!=", self.b.and_(theirs, bits), 0)
            apart = self.b.not_(self.b.and_(self.bit(theirs, SYNC), self.strong))
            with self.when(self.b.and_(common, apart)):
                agent = self.b.sub(self.load(self.load(self.far, Table.ENTRY), number, _I32), self.base)
                self.give_up(self.test(">=", agent, self.size))
                epoch = self.load(self.load(self.far, Table.EPOCH), number, _I32)
                self.give_up(self.test(">", epoch, self.load(self.carried, agent, _I32)))

    # --- tables -----------------------------------------------------------------------------------------------------

    def _number(self, table: Any, agent: Any, memory: int, sync: Any) -> Any:
        """Number of the access: one for all of an instruction in this phase that take the same bytes of a word."""
        bits = self.b.or_(self.get(self.bits), sync)
        key = self.b.add(self.b.mul(self.pc, _I64(KEYS)), self.b.or_(bits, _I64(memory)))
        stamps, now = self.load(self.launch, Launch.STAMPS), self.load(self.launch, Launch.PASS)
        number = self.variable(self.load(stamps, key))
        with self.when(self.test("!=", self.b.lshr(self.get(number), _I64(32)), now)):
            count = self.load(table, Table.COUNT)
            enter(self, table, count, agent, self.epoch, self.pc, bits, 0)
            self.b.store(self.b.or_(self.b.shl(now, _I64(32)), count), number)
            self.store(self.get(number), stamps, key)
        found = self.b.and_(self.get(number), _I64(0xFFFFFFFF))
        column = self.load(table, Table.LANES)
        self.store(self.b.or_(self.load(column, found, _I32), self.get(self.lanes)), column, found, _I32)
        return found


def enter(code: Code, table: Any, number: Any, *columns: Any) -> None:
    """Append an access to a table: agent, epoch, instruction, bytes, lanes. ``number`` is its count so far."""
    for name, value in zip((Table.ENTRY, Table.EPOCH, Table.PC, Table.MASK, Table.LANES), columns, strict=True):
        code.store(value, code.load(table, name), number, _I32)
    code.store(code.b.add(number, _I64(1)), table, Table.COUNT)


def unread(code: Code, memory: Any, cell: Any, number: Any) -> Any:
    """i1: was a cell not read since access ``number``?

    A write that comes after all reads since the one before comes after that one too, though its clock may not say so.
    """
    found = code.variable(1)
    with code.each(code.load(memory, Memory.READERS)) as i:
        agent = code.load(code.load(memory, Memory.ENTRIES), i)
        since = code.load(code.load(code.load(memory, Memory.CELLS), agent), cell, _I32)
        with code.when(code.test(">", since, number)):
            code.b.store(_I64(0), found)
    return code.test("!=", code.get(found), 0)


def uncovered(code: Code, table: Any, number: Any, clock: Any, bits: Any) -> Any:
    """Decide whether a clock row does not cover an access to some bytes, i1. Two strong accesses do not conflict."""
    agent = code.load(code.load(table, Table.ENTRY), number, _I32)
    epoch = code.load(code.load(table, Table.EPOCH), number, _I32)
    common = code.b.and_(code.load(code.load(table, Table.MASK), number, _I32), bits)
    conflict = code.b.and_(code.bit(common, ALL_BYTES), code.b.not_(code.bit(common, SYNC)))
    return code.b.and_(code.test(">", epoch, code.load(clock, agent, _I32)), conflict)


@functools.cache
def judge() -> Callable[[int, int, int, int, int], int]:
    """Judge logged accesses: DONE, LEFT or ORDERING.

    ``judge(Launch block, Group block, warp of the cluster, entries, ordered) -> DONE, LEFT or ORDERING``.

    ``ordered``: the strong accesses have been seen to. The tables must have room for 16 accesses an entry.
    """
    address = _Judge().compile()
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(address)


@functools.cache
def late() -> Callable[[int, int, int, int, int], int]:
    """Find the first access that a clock row does not cover; -1: all covered.

    ``late(uint32[n] accesses, n, row of a clock, Table block, bytes) -> position``.
    """
    code = Code("late", [_I64] * 5)
    ids, n, clock, table, bits = code.args
    before = code.variable()
    with code.each(n) as i:
        number = code.load(ids, i, _I32)
        with code.when(code.test("!=", number, code.get(before))):  # neighbours mostly have the same access
            code.b.store(number, before)
            with code.when(uncovered(code, table, number, clock, bits)):
                code.b.ret(i)
    code.b.ret(_I64(-1))
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(code.compile())


class _Sweep(Code):
    """Builds `sweep`."""

    def __init__(self) -> None:
        super().__init__("sweep", [_I64] * 6)
        self.memory, self.clock, actor, at, writes, box = self.args
        me, epoch, pc, lanes = (half for both in (actor, at) for half in self._halves(both))
        self.index, self.rows, self.start, self.pitch, self.width = (self.load(box, name) for name in Box)
        self.table, self.bits = self.load(self.memory, Memory.TABLE), _I64(ALL_BYTES)
        number = self.load(self.table, Table.COUNT)
        self.give_up(self.test(">=", number, self.load(self.table, Table.ROOM)))
        writer, cells = self.load(self.memory, Memory.WRITER), self.load(self.memory, Memory.CELLS)
        self.writes = writes = self.test("!=", writes, 0)
        # An agent's first read of a memory makes its cells.
        self.give_up(self.b.and_(self.b.not_(writes), self.test("==", self.load(cells, me), 0)))
        self._look(writer, None)
        with self.when(writes), self.each(self.load(self.memory, Memory.READERS)) as i:
            agent = self.load(self.load(self.memory, Memory.ENTRIES), i)
            latest = self.load(self.load(self.memory, Memory.LATEST), agent, _I32)
            with self.when(self.test(">", latest, self.load(self.clock, agent, _I32))):
                self._look(self.load(cells, agent), writer, agent)
        enter(self, self.table, number, me, epoch, pc, self.bits, lanes)
        with self.b.if_else(writes) as (write, read):
            with write:
                self._put(writer, number)
            with read:
                self._put(self.load(cells, me), number)
                self._extend(me)
                latest = self.load(self.memory, Memory.LATEST)
                with self.when(self.test(">", epoch, self.load(latest, me, _I32))):  # operations may read out of order
                    self.store(epoch, latest, me, _I32)
                self.store(self.b.add(number, _I64(1)), self.load(self.memory, Memory.NUMBER), me)
        self.b.ret(_I64(DONE))

    def _halves(self, both: Any) -> tuple[Any, Any]:
        """The lower and the upper 32 bits."""
        return self.b.and_(both, _I64(0xFFFFFFFF)), self.b.lshr(both, _I64(32))

    @contextmanager
    def _each_row(self) -> Iterator[Any]:
        """Number of the first cell of each row."""
        with self.each(self.rows) as i:
            place = self.variable(i)
            with self.when(self.test("!=", self.index, 0)):
                self.b.store(self.load(self.index, i), place)
            yield self.b.add(self.start, self.b.mul(self.get(place), self.pitch))

    def _bounds(self, agent: Any, first: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
        """For a row and for its columns: first cell, end, where the agent's bounds are."""
        for start, *names in (
            (first, Memory.LOW, Memory.HIGH),
            (self.b.and_(first, self.load(self.memory, Memory.COLUMNS)), Memory.FROM, Memory.TO),
        ):
            low, high = (self.b.add(self.load(self.memory, name), self.b.mul(agent, _I64(8))) for name in names)
            yield start, self.b.add(start, self.width), low, high

    def _extend(self, agent: Any) -> None:
        """Note where the agent has read."""
        with self._each_row() as first:
            for start, end, low, high in self._bounds(agent, first):
                with self.when(self.test("<", start, self.load(low, 0))):
                    self.store(start, low, 0)
                with self.when(self.test(">", end, self.load(high, 0))):
                    self.store(end, high, 0)

    def _look(self, accesses: Any, writer: Any, reader: Any = None) -> None:
        """Leave it to Python unless all ``accesses`` (of a ``reader``: since those of the ``writer``) are covered."""
        before = self.variable()
        size = self.load(self.memory, Memory.WORDS)
        with self._each_row() as first:
            end = self.b.add(first, self.width)
            self.give_up(self.b.or_(self.test(">=", first, size), self.test(">", end, size)))
            touched = ir.IntType(1)(1)
            for start, stop, low, high in [] if reader is None else self._bounds(reader, first):
                within = self.b.and_(self.test("<", start, self.load(high, 0)), self.test(">", stop, self.load(low, 0)))
                touched = self.b.and_(touched, within)
            with self.when(touched):
                self._look_along(accesses, writer, first, before)

    def _look_along(self, accesses: Any, writer: Any, first: Any, before: Any) -> None:
        """`_look` at a row."""
        done = self.variable()
        with self.loop(lambda: self.test("<=", self.b.add(self.get(done), _I64(_MANY)), self.width)):
            cell = self.b.add(first, self.get(done))
            with self.when(self._news(accesses, writer, cell, self.get(before))), self.each(_I64(_MANY)) as j:
                self._look_at(accesses, writer, self.b.add(cell, j), before)
            self.add(done, _MANY)
        with self.loop(lambda: self.test("<", self.get(done), self.width)):
            self._look_at(accesses, writer, self.b.add(first, self.get(done)), before)
            self.add(done)

    def _news(self, accesses: Any, writer: Any, cell: Any, before: Any) -> Any:
        """i1: is there anything to look at in `_MANY` cells? Neighbours mostly have the same access."""
        kind = ir.VectorType(_I32, _MANY)
        numbers = self.b.load(self.at(accesses, cell, _I32), align=4, typ=kind)
        one = self.b.insert_element(ir.Constant(kind, ir.Undefined), self.b.trunc(before, _I32), _I32(0))
        zeros = ir.Constant(kind, None)
        other = self.b.icmp_unsigned("!=", numbers, self.b.shuffle_vector(one, one, zeros))
        if writer is not None:
            written = self.b.load(self.at(writer, cell, _I32), align=4, typ=kind)
            other = self.b.and_(other, self.b.icmp_unsigned(">", numbers, written))
        bits = ir.IntType(_MANY)
        return self.b.icmp_unsigned("!=", self.b.bitcast(other, bits), bits(0))

    def _look_at(self, accesses: Any, writer: Any, cell: Any, before: Any) -> None:
        """`_look` at one cell."""
        number = self.load(accesses, cell, _I32)
        other = self.test("!=", number, self.get(before))
        if writer is not None:
            other = self.b.and_(other, self.test(">", number, self.load(writer, cell, _I32)))
        with self.when(other):
            conflicting = uncovered(self, self.table, number, self.clock, self.bits)
            with self.b.if_else(conflicting) as (late, fine):
                with late:
                    read = self.b.not_(unread(self, self.memory, cell, number)) if writer is None else ir.IntType(1)(0)
                    self.give_up(self.b.not_(self.b.and_(self.writes, read)))
                with fine:
                    self.b.store(number, before)

    def _put(self, into: Any, number: Any) -> None:
        with self._each_row() as first, self.each(self.width) as j:
            self.store(number, into, self.b.add(first, j), _I32)


@functools.cache
def sweep() -> Callable[..., int]:
    """``sweep(Memory block, row of the clock, actor, at, write, Box block) -> DONE``: an access to whole cells.

    ``actor``: agent | epoch << 32; ``at``: instruction | lanes << 32. LEFT if the access is not covered, the table is
    full or the agent has not read this memory before: then nothing has changed.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(_Sweep().compile())
