"""Run twice, see the same. These are numbers and figures of two runs of a notebook with equal parameters.

A notebook whose figures or metrics change from run to run shows something else than its text says. Times are the
exception: the name of a metric of measured time ends in `_s` or `_seconds`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dsv4lib.lab.records import Record
from dsv4lib.lab.run.files import read_own

NOTEBOOK_BYTES = 1 << 28
TIMES = ("_s", "_seconds")
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")


def shown(record: Record, folder: Path) -> dict[str, str]:
    """List what a run showed, by name.

    Each metric's digits, a hash of each figure (``figure 7.0``: cell, output). Printed text counts as no output: a
    kernel sends one cell's text in one piece or in several.
    """
    found = {f"metric {name}": repr(value) for name, value in record.metrics.items()}
    if record.notebook:
        notebook = json.loads(read_own(folder / record.notebook, NOTEBOOK_BYTES, anybody=True))
        for number, cell in enumerate(notebook["cells"]):
            outputs = [one for one in cell.get("outputs", []) if one.get("output_type") != "stream"]
            for place, output in enumerate(outputs):
                found |= _figures(f"figure {number}.{place}", output.get("data", {}))
    return found


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """List the names of what the two runs showed differently, or only one of them. But for times."""
    names = [*first, *(name for name in second if name not in first)]
    return [name for name in names if not name.endswith(TIMES) and first.get(name) != second.get(name)]


def _figures(name: str, data: dict[str, Any]) -> dict[str, str]:
    return {
        f"{name} {mime}": hashlib.sha256("".join(data[mime]).encode()).hexdigest()[:16]
        for mime in PICTURES
        if mime in data
    }
