"""Hold one line of a bench. It says what was measured, what it must reach, and the file it is recorded in."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("measured", "value", "unit", "floor", "verdict", "cores", "how")


@dataclass(frozen=True)
class Row:
    """One measurement. ``value`` in ``unit``, None if there is none and ``detail`` says why.

    ``floor`` is what it must reach, None where nothing was promised.
    """

    what: str
    value: float | None
    unit: str
    floor: float | None = None
    more_is_better: bool = False
    detail: str = ""
    broken: bool = False

    @property
    def reached(self) -> bool | None:
        """Tell whether the floor is reached. None without one, or if not measured; what failed has not reached it."""
        if self.broken:
            return False
        if self.floor is None or self.value is None:
            return None
        return self.value >= self.floor if self.more_is_better else self.value <= self.floor

    @property
    def verdict(self) -> str:
        """Judge in one word."""
        if self.value is None:
            return "failed" if self.broken else "skipped"
        return {True: "reached", False: "missed", None: ""}[self.reached]

    def skipped(self, reason: str) -> Row:
        """Return this row, not measured."""
        return dataclasses.replace(self, value=None, detail=reason)

    def failed(self, reason: str) -> Row:
        """Return this row, whose measurement failed."""
        return dataclasses.replace(self, value=None, detail=reason, broken=True)


def record(rows: Iterable[Row], path: Path) -> None:
    """Write the rows that were measured as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            if row.value is not None:
                floor = "" if row.floor is None else f"{row.floor:.4g}"
                cores = len(os.sched_getaffinity(0))
                writer.writerow([row.what, f"{row.value:.4g}", row.unit, floor, row.verdict, cores, row.detail])
