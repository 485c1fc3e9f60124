"""Place accumulator, A and scale factors of tcgen05.mma in tensor memory.

Source: PTX ISA, "Data Path Layout Organization" (layouts A to G), "Packing formats of elements in Tensor and Shared
memory", "Scale Factor A ID" and "Scale Factor B ID". What the ISA shows only in figures agrees with the TMEM layouts of
the CUTLASS MMA atoms.

| layout | M | form | lanes |
| --- | --- | --- | --- |
| A | 256 | cta_group::2 | 128 rows in each CTA, row i in lane i |
| B | 128 | cta_group::2 | 64 rows in each CTA; the left half of N in lanes 0-63, the right half in 64-127 |
| D | 128 | cta_group::1, also .ws | row i in lane i |
| E | 64 | .ws | like B in one CTA |
| F | 64 | cta_group::1 | row i in lane 32 (i / 16) + i % 16, plus 16 if the address says lane 16 |
| G | 32 | .ws | four quarters of N in the four lane quarters |

In B, E and G every group of lanes multiplies the A of its own lanes if A comes from tensor memory. In B each half of
the lanes also has the scale factors of its own half of N and no others, though the ISA says that all are in every
quarter: compiler and CUTLASS (``ScaleFactorDuplicated2by2``) agree on it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dsv4lib.emulator.checks.shadow import Cells, columns_of
from dsv4lib.emulator.units.tmem import COLUMNS, LANES, QUARTER


@dataclass(frozen=True)
class Region:
    """A block of the accumulator in one CTA.

    Attributes:
        cta: 0 or 1 in the pair.
        rows, columns: which part of the M x N product.
        lane, lanes: where it is.
        split: layout F: 16 of every 32 lanes.
    """

    cta: int
    rows: slice
    columns: slice
    lane: int
    lanes: int
    split: bool = False

    def view(self, array: np.ndarray, base_lane: int, column: int, count: int) -> np.ndarray:
        """View the part of a [128, 512] array. It is (lanes, count), or (4, 16, count) for layout F."""
        if self.split:
            return _split_view(array, base_lane, column, count)
        return array[self.lane : self.lane + self.lanes, column : column + count]

    def key(self, base_lane: int, column: int, count: int) -> tuple[int, ...]:
        """Make the key of the cells of ``view`` (`Tmem.written`). It is (first lane, lanes, column, columns)."""
        return (base_lane, -16, column, count) if self.split else (self.lane, self.lanes, column, count)

    def cells(self, base_lane: int, column: int, count: int) -> Cells:
        """Get the cells of ``view`` for the race detector; one object for the same cells."""
        if self.split:
            return _split_cells(base_lane, column, count)
        return columns_of(column, count, self.lane, self.lane + self.lanes)

    def part(self, product: np.ndarray) -> np.ndarray:
        """Get the matching part of the M x N product, in the shape of ``view``."""
        block = product[self.rows, self.columns]
        return block.reshape(4, 16, -1) if self.split else block


def _split_view(array: np.ndarray, base_lane: int, column: int, count: int) -> np.ndarray:
    """(4, 16, count) of layout F."""
    return array.reshape(4, QUARTER, COLUMNS)[:, base_lane : base_lane + 16, column : column + count]


@functools.lru_cache(1 << 10)
def _split_cells(base_lane: int, column: int, count: int) -> Cells:
    return Cells(lambda x: _split_view(x, base_lane, column, count))


@functools.cache
def regions(m: int, n: int, cta_group: int, ws: bool) -> tuple[Region, ...]:
    """Split the accumulator into blocks, for a shape that was accepted."""
    if cta_group == 1 and m == 64 and not ws:
        return (Region(0, slice(0, 64), slice(0, n), 0, 64, split=True),)
    rows = m // cta_group
    groups = LANES // rows  # of lanes: 1 in layouts A and D, 2 in B and E, 4 in G
    width = n // groups
    return tuple(
        Region(cta, slice(cta * rows, (cta + 1) * rows), slice(g * width, (g + 1) * width), g * rows, rows)
        for cta in range(cta_group)
        for g in range(groups)
    )


def lanes_allowed(m: int, cta_group: int, ws: bool) -> tuple[int, ...]:
    """List lanes that the addresses of D and A may name."""
    return (0, 16) if cta_group == 1 and m == 64 and not ws else (0,)


def columns_used(n: int, placed: tuple[Region, ...]) -> int:
    """Count tensor-memory columns of the accumulator."""
    return placed[0].columns.stop - placed[0].columns.start


def by_row(cells: np.ndarray, rows: int) -> np.ndarray:
    """Order scale-factor cells (128, columns) as (4, rows). Row r is lane r % 32 of column r / 32, in every quarter."""
    return np.ascontiguousarray(cells.reshape(4, QUARTER, -1).transpose(0, 2, 1)).reshape(4, -1)[:, :rows].copy()
