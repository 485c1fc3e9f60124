"""Access whole register fragments. Many 32-bit registers of a warp as one uint32[n, 32] array.

Register offsets of an instruction are looked up once; registers that follow each other (the usual case, because
registers are laid out in order of first use) are one slice of the register file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Instr, Operand, Reg, Sink

ROW_BYTES = 4 * LANES
_HALF = 64  # registers are 64-byte aligned

# What a program keeps: (instruction, where) by identity of the instruction, of its first register, and by count.
_KEPT = "rows of registers"
Known = dict[tuple[int, int, int], tuple[Instr, slice | np.ndarray | None]]


def _rows(warp: Warp, instr: Instr, items: Sequence[Operand]) -> slice | np.ndarray | None:
    """Where the registers are: a slice of bytes, 64-byte row numbers int64[2 n], or None if some are no registers."""
    kept = warp.program.kept
    known: Known = kept[_KEPT] if _KEPT in kept else kept.setdefault(_KEPT, {})
    key = (id(instr), id(items[0]), len(items))
    found = known.get(key)
    if found is not None and found[0] is instr:
        return found[1]
    where: slice | np.ndarray | None = None
    if all(isinstance(item, Reg) for item in items):
        if any(warp.program.bits[item.index] != 32 for item in items):
            raise EmulatorError("32-bit registers are needed")
        offsets = np.array([warp.program.offset[item.index] for item in items], np.int64)
        if (np.diff(offsets) == ROW_BYTES).all():
            where = slice(int(offsets[0]), int(offsets[0]) + ROW_BYTES * len(items))
        else:
            where = (offsets[:, None] // _HALF + np.arange(2)).reshape(-1)
    known[key] = instr, where
    return where


class Rows:
    """32-bit registers of a warp at one instruction, for repeated use.

    Attributes:
        view: uint32[n, 32] of the registers if they follow each other, else None.
    """

    __slots__ = ("_halves", "_items", "_warp", "_where", "view")

    def __init__(self, warp: Warp, instr: Instr, items: Sequence[Operand]):
        self._warp, self._items = warp, items
        self._where = where = _rows(warp, instr, items)
        self.view: np.ndarray | None = None
        if isinstance(where, slice):
            self.view = warp.regs[where].view(np.uint32).reshape(-1, LANES)
        elif where is not None:
            self._halves = warp.regs.view(np.uint32).reshape(-1, _HALF // 4)

    def read(self) -> np.ndarray:
        """Copy all lanes, uint32[n, 32]."""
        if self.view is not None:
            return self.view.copy()
        if self._where is not None:
            return self._halves.take(self._where, 0).reshape(-1, LANES)
        return np.stack([self._warp.read(item, np.uint32) for item in self._items])

    def write(self, values: np.ndarray | np.uint32) -> None:
        """Write uint32[n, 32], or one value everywhere, in all lanes; ``_`` is skipped."""
        if self.view is not None:
            self.view[...] = values
        elif self._where is not None:
            self._halves[self._where] = values if values.ndim == 0 else values.reshape(-1, _HALF // 4)
        else:
            warp = self._warp
            for item, row in zip(self._items, np.broadcast_to(values, (len(self._items), LANES)), strict=True):
                if not isinstance(item, Sink):
                    offset = warp.program.offset[item.index]
                    warp.regs[offset : offset + ROW_BYTES].view(np.uint32)[:] = row


def read_rows(warp: Warp, instr: Instr, items: Sequence[Operand]) -> np.ndarray:
    """Copy n 32-bit operands, all lanes, uint32[n, 32]."""
    return Rows(warp, instr, items).read()


def write_rows(warp: Warp, instr: Instr, items: Sequence[Operand], values: np.ndarray | np.uint32) -> None:
    """Write uint32[n, 32], or one value, to n 32-bit registers in all lanes.

    ``_`` is skipped.
    """
    Rows(warp, instr, items).write(values)
