"""Show tables in a notebook: rows as HTML with a text twin, everything escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.style import GRID, INK, MUTED

LINE, WRAPPED = 36, 14  # characters that stay on one line; width of what is wrapped, so that no page squeezes it
_CELL = f"padding:3px 14px 3px 0;border-bottom:1px solid {GRID};vertical-align:top;color:{INK}"


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the rows as an HTML table. Numbers are aligned to the right, text to the left.

    Raises:
        ArgumentError: a row has another number of cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ArgumentError("rows", tuple(row), f"{len(header)} cells a row, as in the header")
    head = "".join(f'<th style="{_CELL};text-align:left;color:{MUTED}">{html.escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>'


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write the rows as text, columns padded."""
    lines = [list(header), *([_shown(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def show_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Display a table in a notebook."""
    from IPython.display import display

    display({"text/html": html_table(header, rows), "text/plain": text_table(header, rows)}, raw=True)


def _cell(value: Any) -> str:
    text = _shown(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    width = "white-space:nowrap" if len(text) <= LINE else f"min-width:{WRAPPED}em"
    style = f"{_CELL};text-align:{'right' if number else 'left'};{width}"
    return f'<td style="{style}">{html.escape(text)}</td>'


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
