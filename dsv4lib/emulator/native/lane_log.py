"""Compare the lanes of a warp in the access log (access_log.py): who wrote, and who read, a word of shared memory.

For every word two records, of the last write and the last read: after how many synchronisations of the warp, by which
lane, which bytes, at which instruction. Two lanes conflict if one of them writes and the other reads, their bytes
overlap, and no synchronisation has had both since. Not looked at: strong accesses, and two lanes that write one word;
of several conflicts in a log the first alone is described.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from llvmlite import ir

from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, GENERIC, GLOBAL, LOG, STRONG, WRITE
from dsv4lib.emulator.native.code import Code

_I32, _I64 = ir.IntType(32), ir.IntType(64)
RECORD = 4  # words of 32 bits: synchronisations, warp and lane, bytes, instruction
MANY = 255  # in place of a lane: several


class Lanes(IntEnum):
    """int64 fields about a cluster. TABLES: of each CTA; COMMON: uint32[warps, 32, 32], COUNTS: uint32[warps].

    FOUND: entry of the log * 32 + lane of the first conflict; OTHER, PC: warp and lane, and instruction, of the other.
    """

    TABLES, CTAS, WORDS, COMMON, COUNTS, FOUND, OTHER, PC = range(8)


class _Compare(Code):
    """Builds `compare`."""

    def __init__(self) -> None:
        super().__init__("compare", [_I64] * 4)
        self.block, log, n, self.me = self.args
        self.conflicts = self.variable()
        common = self.load(self.block, Lanes.COMMON)
        self.common = self.b.add(common, self.b.mul(self.me, _I64(4 * abi.LANES * abi.LANES)))
        self.now = self.load(self.load(self.block, Lanes.COUNTS), self.me, _I32)
        with self.each(n) as i:
            self.entry = self.b.add(log, self.b.mul(i, _I64(LOG.itemsize)))
            self.pc, mask = self.load(self.entry, 0, _I32), self.load(self.entry, 1, _I32)
            self.code = self.load(self.entry, 1)
            with (
                self.when(self.b.not_(self.b.or_(self.bit(self.code, STRONG), self.bit(self.code, GLOBAL)))),
                self.each(_I64(abi.LANES)) as lane,
                self.when(self.b.trunc(self.b.lshr(mask, lane), ir.IntType(1))),
            ):
                self._lane(i, lane)
        self.b.ret(self.get(self.conflicts))

    def _lane(self, i: Any, lane: Any) -> None:
        address = self.load(self.entry, self.b.add(lane, _I64(2)))
        shared = self.test("==", self.b.lshr(address, _I64(56)), abi.SHARED_WINDOW >> 56)
        with self.when(self.b.or_(self.b.not_(self.bit(self.code, GENERIC)), shared)):
            low, nbytes = self.b.and_(address, _I64(0xFFFFFFFF)), self.b.and_(self.code, _I64(BYTES))
            rank, offset = self.b.lshr(low, _I64(24)), self.b.and_(low, _I64(0xFFFFFF))
            first, many = self.b.lshr(offset, _I64(2)), self.b.lshr(self.b.add(nbytes, _I64(3)), _I64(2))
            ones = self.b.sub(self.b.shl(_I64(1), nbytes), _I64(1))
            part = self.b.shl(ones, self.b.and_(offset, _I64(3)))
            bits = self.b.select(self.test("<", nbytes, 4), part, _I64(15))
            inside = self.test("<=", self.b.add(first, many), self.load(self.block, Lanes.WORDS))
            with self.when(self.b.and_(self.test("<", rank, self.load(self.block, Lanes.CTAS)), inside)):
                table = self.load(self.load(self.block, Lanes.TABLES), rank)
                with self.each(many) as k:
                    at = self.b.add(table, self.b.mul(self.b.add(first, k), _I64(8 * RECORD)))
                    self._word(at, i, lane, bits)

    def _word(self, wrote: Any, i: Any, lane: Any, bits: Any) -> None:
        """One word: the record of its write, and that of its read after it."""
        read, who = self.b.add(wrote, _I64(4 * RECORD)), self.b.or_(self.b.shl(self.me, _I64(8)), lane)
        writes = self.bit(self.code, WRITE)
        other = self.b.select(writes, read, wrote)
        self._look(other, i, lane, bits, who)
        mine = self.b.select(writes, wrote, read)
        known, before = self.load(mine, 1, _I32), self.load(mine, 0, _I32)
        again = self.b.and_(self._same_warp(known), self.test("==", before, self.now))
        several = self.b.and_(self.b.and_(again, self.b.not_(writes)), self.test("!=", known, who))
        name = self.b.select(several, self.b.or_(who, _I64(MANY)), who)
        taken = self.b.select(several, self.b.or_(bits, self.load(mine, 2, _I32)), bits)
        for field, value in enumerate((self.now, name, taken, self.pc)):
            self.store(value, mine, field, _I32)

    def _same_warp(self, who: Any) -> Any:
        return self.test("==", self.b.lshr(who, _I64(8)), self.me)

    def _look(self, record: Any, i: Any, lane: Any, bits: Any, who: Any) -> None:
        """Note a conflict with the record, if it is one."""
        then, theirs = self.load(record, 0, _I32), self.load(record, 1, _I32)
        overlap = self.test("!=", self.b.and_(self.load(record, 2, _I32), bits), 0)
        other = self.b.and_(theirs, _I64(255))
        several = self.test("==", other, MANY)
        pair = self.b.add(self.b.mul(lane, _I64(abi.LANES)), self.b.select(several, lane, other))
        since = self.load(self.common, pair, _I32)
        apart = self.b.and_(self.test("!=", theirs, who), self.test("<=", since, then))
        with self.when(self.b.and_(self.b.and_(overlap, self._same_warp(theirs)), apart)):
            with self.when(self.test("==", self.get(self.conflicts), 0)):
                place = self.b.add(self.b.mul(i, _I64(abi.LANES)), lane)
                for field, value in ((Lanes.FOUND, place), (Lanes.OTHER, theirs)):
                    self.store(value, self.block, field)
                self.store(self.load(record, 3, _I32), self.block, Lanes.PC)
            self.add(self.conflicts)


@functools.cache
def compare() -> Callable[[int, int, int, int], int]:
    """Count conflicts between lanes: ``compare(Lanes block, log, entries, warp of the cluster)``."""
    address = _Compare().compile()
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)
