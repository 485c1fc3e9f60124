"""List the PTX and the source lines that a page shows: those that its events name, and lines around them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.microscope.columns import encode, encode_words
from dsv4lib.emulator.sanitize.findings import clean, source_lines
from dsv4lib.emulator.trace.trace import Trace

MAX_PTX = 1_000_000  # characters of PTX that a page holds whole, of all its launches
AROUND = 12  # lines before and after each that an event names
_WIDTH = 240  # characters of a line


def shown(file: str) -> str:
    """Shorten a path: relative to the folder of the call, else its last two parts. It tells of no home folder."""
    if not file:
        return ""
    path = Path(file)
    if path.parent.name.startswith("ipykernel_"):
        return f"notebook cell {path.stem[:4]}"
    if not path.is_absolute():
        return clean(file)
    near = os.path.relpath(path)
    return clean(near if not near.startswith("..") else "/".join(path.parts[-2:]))


def listing(
    trace: Trace, lines: Iterable[int], places: Iterable[tuple[str, int]] = (), most: int | None = None
) -> dict[str, Any]:
    """Return ``ptx`` and ``files`` of a stream.

    Args:
        lines: PTX lines that events name.
        places: further files and lines of the source.
        most: characters of PTX up to which it is listed whole, by default `MAX_PTX`.
    """
    named = f"{trace.kernel}_param_"  # mangled names of parameters hide the instruction
    texts = [clean(text.replace(named, "param_"))[:_WIDTH] for text in trace.texts] or [
        str(name) for name in trace.opcodes
    ]
    rows = np.arange(len(texts))
    if sum(map(len, texts)) > (MAX_PTX if most is None else most):
        rows = rows[_near(len(rows), np.nonzero(np.isin(trace.lines, list(lines)))[0])]
    split = [_split(trace.sources[row]) for row in rows]
    wanted: dict[str, set[int]] = {}
    for file, line in [*split, *places]:
        if file:
            wanted.setdefault(file, set()).add(line)
    ptx = {
        "line": encode(trace.lines[rows]),
        "file": encode_words([shown(file) for file, _ in split]),
        "number": encode([line for _, line in split]),
        "executed": encode(trace.executed[rows]),
        "text": [texts[row] for row in rows],
        "total": len(texts),
    }
    return {"ptx": ptx, "files": [_file(file, numbers) for file, numbers in sorted(wanted.items())]}


def _split(source: str) -> tuple[str, int]:
    file, _, number = source.rpartition(":")
    return (file, int(number)) if file and number.isdigit() else ("", 0)


def _file(file: str, numbers: set[int]) -> dict[str, Any]:
    """Lines of a file, none where it cannot be read here."""
    text = source_lines(file)
    near = _near(len(text), np.array(sorted(n - 1 for n in numbers if 1 <= n <= len(text)), np.int64))
    kept = np.nonzero(near)[0]
    return {"name": shown(file), "line": encode(kept + 1), "text": [clean(text[i])[:_WIDTH] for i in kept]}


def _near(count: int, rows: np.ndarray) -> np.ndarray:
    """Mark the rows within `AROUND` of one of ``rows``, bool[count]."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.maximum(rows - AROUND, 0), 1)
    np.add.at(change, np.minimum(rows + AROUND + 1, count), -1)
    return np.cumsum(change)[:count] > 0
