"""Store tables of predictions: dataclasses as CSV, a column a field."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Line = TypeVar("Line")
_READ = {"str": str, "int": int, "float": float}


def record(rows: Sequence[Any], path: Path) -> None:
    """Write dataclass instances of one type; floats with four digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(rows[0])])
        for row in rows:
            writer.writerow([f"{v:.4g}" if isinstance(v, float) else v for v in asdict(row).values()])


def recorded(kind: type[Line], path: Path) -> list[Line]:
    """Read what `record` wrote of instances of ``kind``."""
    with path.open(newline="") as file:
        return [kind(**{f.name: _READ[f.type](line[f.name]) for f in fields(kind)}) for line in csv.DictReader(file)]
