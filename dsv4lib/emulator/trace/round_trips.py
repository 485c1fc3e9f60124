"""Find round trips through tensor memory. They are cells that one thread loads and another thread stores again.

A kernel that corrects its accumulator loads a cell into a register, changes it and stores it back. Load and store each
have a map from threads and registers to cells. Where the maps differ, every element arrives, finite and plausible, in
another's cell: a round trip that should change nothing permutes the accumulator.

A kernel may exchange registers between threads on purpose; so this is a query of a trace, not a hazard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from dsv4lib.emulator.trace.trace import Trace, unpack_lanes
from dsv4lib.emulator.units.tcgen05_ldst import fragment
from dsv4lib.emulator.units.tmem import COLUMNS, LANES

_OPCODE = re.compile(r"tcgen05\.(?:ld|st)\.sync\.aligned\.(32x32b|16x64b|16x128b|16x256b)\.x(\d+)\b")
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}


@dataclass(frozen=True)
class Moved:
    """Cells that came back from another thread.

    Attributes:
        cells: how many stores of cells; lane, column: the first of them.
        loaded_by, stored_by: threads of the warp.
        load_line, store_line: PTX lines.
    """

    cells: int
    lane: int
    column: int
    loaded_by: int
    stored_by: int
    load_line: int
    store_line: int

    def __str__(self) -> str:
        first = f"lane {self.lane}, column {self.column} by thread {self.loaded_by}, stored by thread {self.stored_by}"
        return f"{self.cells:,} cells are loaded by one thread and stored by another, first {first}"


def moved(trace: Trace) -> list[Moved]:
    """Find cells that a warp loads by one map and stores by another.

    By pair of instructions.

    Loads and stores with packing, and those of other shapes than a plain fragment, are not looked at.
    """
    opcodes = dict(zip(trace.lines.tolist(), trace.opcodes.tolist(), strict=True))
    found: dict[tuple[int, int], Moved] = {}
    for cta in np.unique(trace.tmem["cta"]):
        thread = np.full((LANES, COLUMNS), -1, np.int64)  # that loaded a cell since it was written last
        loaded_at = np.full((LANES, COLUMNS), -1, np.int64)
        for row in trace.tmem[trace.tmem["cta"] == cta]:
            cells = _cells(row, opcodes.get(int(row["line"]), "")) if row["what"] in ("ld", "st") else None
            if cells is None:
                if row["write"]:
                    thread[unpack_lanes(row["lanes"]), row["column"] : row["end"]] = -1
                continue
            owner = np.broadcast_to(np.arange(32), cells.shape).reshape(-1)
            where = np.unravel_index(cells.reshape(-1), thread.shape)
            if row["what"] == "st":
                wrong = np.nonzero((thread[where] >= 0) & (thread[where] != owner))[0]
                if len(wrong):
                    lane, column = (int(axis[wrong[0]]) for axis in where)
                    key = int(loaded_at[lane, column]), int(row["line"])
                    new = Moved(0, lane, column, int(thread[lane, column]), int(owner[wrong[0]]), *key)
                    before = found.get(key, new)
                    found[key] = replace(before, cells=before.cells + len(wrong))
                thread[where] = -1
            else:
                thread[where], loaded_at[where] = owner, row["line"]
    return list(found.values())


def _cells(row: np.void, opcode: str) -> np.ndarray | None:
    """int64[registers, 32]: cell, lane * 512 + column, of each register of each thread; None for other shapes."""
    match = _OPCODE.search(opcode)
    if match is None or "pack::16b" in opcode:
        return None
    cells, _ = fragment(match[1], int(match[2]) * _REGISTERS[match[1]], False, 0)
    return cells + int(unpack_lanes(row["lanes"]).argmax()) * COLUMNS + int(row["column"])
