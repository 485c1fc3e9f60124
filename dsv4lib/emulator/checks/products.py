"""Find accumulators of tcgen05.mma that overlap in tensor memory, by their use.

Every cell remembers the product that wrote it last: the columns of its accumulator D. Accumulators may lie over each
other if one is no longer needed. What shows that it was: a load, or an accumulation, that meets columns of a product
together with columns of another one that was written over part of it in the same lanes. What accumulates onto a part of
one product adds to it. Cells that threads or copies have written belong to no product.

Source: PTX ISA, "tcgen05.mma", matrix D in tensor memory.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dsv4lib.emulator.errors import Place

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.shadow import Cells
    from dsv4lib.emulator.machine.cta import Cta

KIND = "tmem_product_overlap"


class Product(NamedTuple):
    """Columns [start, end) of an accumulator, in the lanes of a mask."""

    start: int
    end: int
    lanes: int

    def meets(self, other: Product) -> bool:
        """Tell whether two accumulators overlap without being the same."""
        lanes = self.lanes & other.lanes
        return bool(lanes) and self != other and self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"columns {self.start} to {self.end - 1}"


class Products:
    """Products in the tensor memory of the CTAs of one launch."""

    def __init__(self, machine: Any):
        self.machine = machine
        self._cells: dict[Cta, np.ndarray] = {}  # int16[128, 512]: number of the product of a cell, 0 = none
        self._known: list[Product] = [Product(0, 0, 0)]
        self._numbers: dict[Product, int] = {}
        self._places: dict[Cta, dict[int, Place | None]] = {}
        self._latest: dict[Cta, Cells] = {}  # of the product that wrote last, if nothing else has since
        self._lanes: dict[Cells, int] = {}

    def writes(self, cta: Cta, cells: Cells, column: int, width: int, accumulates: bool, where: Any) -> None:
        """Record that a product writes, or accumulates onto, columns; ``where()`` is its place."""
        if accumulates and self._latest.get(cta) is cells:
            return
        product, place = Product(column, column + width, self._lanes_of(cells)), where()
        number = self._numbers.get(product)
        if number is None:
            number = self._numbers[product] = len(self._known)
            self._known.append(product)
        owners = self._cells.get(cta)
        if owners is None:
            owners = self._cells[cta] = np.zeros((128, 512), np.int16)
        self._latest[cta] = cells
        if accumulates:
            found = cells.get(owners)
            whole = int(found.flat[0])
            if whole and (found == whole).all() and _within(product, self._known[whole]):
                return  # it adds to a part of a product, which stays one
            self._look(cta, found, place, product)
        cells.put(owners, number)
        self._places.setdefault(cta, {})[number] = place

    def _lanes_of(self, cells: Cells) -> int:
        mask = self._lanes.get(cells)
        if mask is None:
            present = np.zeros((128, 512), bool)
            cells.put(present, True)
            mask = self._lanes[cells] = sum(1 << int(lane) for lane in np.nonzero(present.any(1))[0])
        return mask

    def exited(self, cta: Cta) -> None:
        """Forget a CTA that has exited."""
        for table in (self._cells, self._places, self._latest):
            table.pop(cta, None)

    def overwritten(self, cta: Cta, cells: Cells) -> None:
        """Record that cells were written by something else, allocated or freed."""
        if cta in self._cells:
            cells.put(self._cells[cta], 0)
            self._latest.pop(cta, None)

    def read(self, cta: Cta, cells: Cells, place: Any) -> None:
        """Check the products that a load meets; ``place()`` is its place."""
        if cta in self._cells:
            found = cells.get(self._cells[cta])
            if found.min() != found.max():
                self._look(cta, found, place(), None)

    def _look(self, cta: Cta, found: np.ndarray, place: Place | None, own: Product | None) -> None:
        """Report products that meet each other, or the one that accumulates without being part of it."""
        numbers = [n for n in np.unique(found).tolist() if n]
        met = next(((a, b) for a, b in itertools.combinations(numbers, 2) if self._pair(a, b)), None)
        if met is None and own is not None:
            apart = [n for n in numbers if own.meets(other := self._known[n]) and not _within(own, other)]
            met = (apart[0], self._numbers[own]) if apart else None
        if met is None:
            return
        one, other = (self._known[n] for n in met)
        text = f"products in {one} and in {other} of tensor memory of {cta} overlap, and both are used"
        self.machine.report(KIND, text, place, owner=self._places.get(cta, {}).get(met[1]), cta=cta.ctaid)

    def _pair(self, a: int, b: int) -> bool:
        return self._known[a].meets(self._known[b])


def _within(one: Product, other: Product) -> bool:
    """Do the columns of one accumulator lie inside those of the other?"""
    inner, outer = sorted((one, other), key=lambda p: p.end - p.start)
    return outer.start <= inner.start and inner.end <= outer.end
