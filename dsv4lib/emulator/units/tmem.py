"""Hold tensor memory of one CTA. It has 128 lanes x 512 columns of 32 bits, its allocator and what checks need.

Addresses are ``lane << 16 | column``. Columns are allocated in powers of two from 32 on, always all 128 lanes.

Source: PTX ISA, "Tensor Memory", "Tensor Memory Allocation and Management Instructions" and "Access restrictions".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.errors import EmulatorError, HazardError, Place

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

LANES, COLUMNS = 128, 512
GRANULE = 32
QUARTER = 32  # lanes a warp can reach: 32 * (warp % 4) onwards


@dataclass(eq=False)
class PairRequest:
    """A tcgen05.alloc with cta_group::2 that waits for the other CTA of the pair."""

    columns: int
    granted: int = -1


class Tmem:
    """Tensor memory.

    Attributes:
        data: uint32[128, 512]; floats is the same memory as float32.
        init: bool[128, 512], written since it was allocated.
        owner: int16[512], number of the allocation that holds the column (from 1), 0 = free, -1 = freed again.
        allocations: columns by first column.
        relinquished: the CTA gave up the right to allocate.
        requests: pair allocations that wait for the peer.
        freed: where columns were freed last.
    """

    def __init__(self) -> None:
        self.data = np.zeros((LANES, COLUMNS), np.uint32)
        self.floats = self.data.view(np.float32)
        self.init = np.zeros((LANES, COLUMNS), bool)
        self.owner = np.zeros(COLUMNS, np.int16)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
        self.requests: list[PairRequest] = []
        self.freed: Place | None = None
        self._count = 0
        self._usable: set[tuple[int, int]] = set()  # spans that `fault` has found allocated
        self._written: set[tuple[int, ...]] = set()  # blocks that are known to be written

    def free_at(self, column: int, columns: int) -> bool:
        """Tell whether these columns are free."""
        return column + columns <= COLUMNS and bool((self.owner[column : column + columns] <= 0).all())

    def find(self, columns: int) -> int | None:
        """Find the first column of a free block, aligned to the granule. None if there is none."""
        return next((c for c in range(0, COLUMNS - columns + 1, GRANULE) if self.free_at(c, columns)), None)

    def take(self, column: int, columns: int) -> None:
        """Allocate a free block; its content is undefined."""
        self._count += 1
        self.owner[column : column + columns] = self._count
        self.init[:, column : column + columns] = False
        self.allocations[column] = columns
        self.changed()

    def release(self, address: int, columns: int) -> None:
        """Free an allocation.

        Raises:
            HazardError: no allocation of that size starts there.
        """
        held = self.allocations.get(address & 0xFFFF)
        if address >> 16 or held != columns:
            have = ", ".join(f"{n} columns at {c}" for c, n in sorted(self.allocations.items())) or "none"
            raise HazardError(f"tcgen05.dealloc of {columns} columns at {address:#x}; allocations: {have}")
        del self.allocations[address]
        self.owner[address : address + columns] = -1
        self.changed()

    def changed(self) -> None:
        """Forget known spans and blocks of changed cells.

        Cells change when allocated, freed or made unwritten.
        """
        self._usable.clear()
        self._written.clear()

    def written(self, key: tuple[int, ...], init: np.ndarray) -> bool:
        """Tell whether every cell of a block has been written. ``init``: the part of `init` for ``key``."""
        if key in self._written:
            return True
        if not init.all():
            return False
        self._written.add(key)
        return True

    def write(self, key: tuple[int, ...], init: np.ndarray) -> None:
        """Mark every cell of a block written; arguments as for `written`."""
        if key not in self._written:
            init[...] = True
            self._written.add(key)

    def fault(self, column: int, columns: int) -> tuple[str, str] | None:
        """Explain what is wrong with these columns. Returns (hazard kind, message), None if allocated."""
        end = column + columns
        if (column, columns) in self._usable:
            return None
        if end <= COLUMNS and (self.owner[column:end] > 0).all():
            self._usable.add((column, columns))
            return None
        if column + columns > COLUMNS:
            return "tmem_outside_allocation", f"columns {column} to {column + columns - 1}, tensor memory has {COLUMNS}"
        bad = column + np.nonzero(self.owner[column : column + columns] <= 0)[0]
        freed = bool((self.owner[bad] < 0).any())
        kind = "tmem_after_free" if freed else "tmem_outside_allocation"
        return kind, f"columns {bad[0]} to {bad[-1]} are {'freed' if freed else 'not allocated'}"


def check_columns(columns: int) -> None:
    """Refuse column counts that alloc and dealloc do not take.

    Raises:
        EmulatorError: not a power of two from 32 to 512.
    """
    if columns not in (32, 64, 128, 256, 512):
        raise EmulatorError(f"{columns} tensor-memory columns: a power of two from 32 to 512 is needed")


def tmem_of(cta: Cta) -> Tmem:
    """Get a CTA's tensor memory, created at the first use.

    Raises:
        EmulatorError: the target has none.
    """
    if cta.tmem is None:
        arch = str(cta.machine.arch)
        if not arch.startswith(("sm_100", "sm_101", "sm_103", "sm_110")):
            raise EmulatorError(f"{arch} has no tensor memory")
        cta.tmem = Tmem()
    return cta.tmem


def report_leak(cta: Cta) -> None:
    """Report allocations that a CTA still holds when its last warp has exited."""
    if cta.tmem is not None and cta.tmem.allocations:
        held = ", ".join(f"{n} at {c}" for c, n in sorted(cta.tmem.allocations.items()))
        place = cta.warps[0].place() if cta.warps else None
        cta.machine.report("tmem_leak", f"{cta} exits with tensor memory allocated: columns {held}", place)


def check_span(cta: Cta, column: int, columns: int, what: str, place: Place | None) -> bool:
    """Report the use of columns that are not allocated. False if they do not even exist."""
    tmem = tmem_of(cta)
    found = tmem.fault(column, columns)
    if found is not None:
        owner = tmem.freed if found[0] == "tmem_after_free" else None
        text = f"{what} uses tensor memory: {found[1]}"
        cta.machine.report(found[0], text, place, owner=owner, column=column, columns=columns)
    return column + columns <= COLUMNS
