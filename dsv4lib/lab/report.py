"""Static HTML report of a run (first cut: the index)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from dsv4lib.lab.files import write_atomic
from dsv4lib.lab.records import Record


def write_report(
    folder: Path, records: Sequence[Record], root: Path, *, missing: Sequence[str] = (), interrupted: bool = False
) -> Path:
    """Write the index page and return its path."""
    (folder / "report").mkdir(exist_ok=True)
    rows = "".join(f"<tr><td>{html.escape(r.job)}</td><td>{r.verdict}</td></tr>" for r in records)
    write_atomic(folder / "report" / "index.html", f"<table>{rows}</table>".encode())
    return folder / "report" / "index.html"
