"""Share what pages of comparisons with other people's kernels need. Measuring, the table in the notes, the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4lib.errors import ArgumentError, DSV4Error

BEGIN, END = "<!-- peers: written by python -m dsv4lib.pages.{} -->", "<!-- /peers -->"
NUMBER = re.compile(r"\**[-+]?\d[\d,.e+-]*(?![\w ]*[a-z])")  # a number, not "2 x 64 heads"
# Classes of instructions, grouped for display.
GROUPS = {
    "exp2, max, convert": ("exp2", "maximum", "convert"),
    "float arithmetic": ("float",),
    "TMEM, MMA issue": ("tmem", "mma"),
    "shared memory": ("shared",),
    "global, copies": ("copy",),
    "barriers": ("barrier",),
    "integer, select, branch": ("integer", "select", "branch"),
    "moves (mostly free)": ("move",),
}


def grouped(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the warp-instructions of every row by `GROUPS`."""
    return {name: [sum(row[f"wi_{kind}"] for kind in kinds) for row in rows] for name, kinds in GROUPS.items()}


def source(rows: list[dict[str, Any]], table: Path, command: str) -> str:
    """Say where the numbers of a table are from, with versions. ``command`` measures anew."""
    versions = sorted({f"{row['package']} {row['version']}" for row in rows if row["package"]})
    commits = sorted({row["commit"] for row in rows if not row["package"]})
    ours = f"ours at {', '.join(commits)}" if commits else "none of ours yet"
    return (
        f"Measured in the emulator ({', '.join(versions)}, CuTeDSL {rows[0]['dsl']}; {ours}) and read from "
        f"data/bench/{table.name}: the packages need not be installed. {command} measures anew."
    )


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _numeric(column: list[str]) -> bool:
    """Tell whether most cells of a column begin with a number; an empty column is one of numbers."""
    filled = [text for text in column if text]
    return 2 * sum(NUMBER.match(text) is not None for text in filled) >= len(filled)


def markdown(header: Sequence[str], cells: list[tuple[Any, ...]], source: str) -> str:
    """Make a table whose first column names kernels, ours in bold. Columns of numbers end at the right."""
    texts = [[_text(value) for value in row] for row in cells]
    marks = ["---", *("---:" if _numeric([row[k] for row in texts]) else "---" for k in range(1, len(header)))]
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join(marks)} |"]
    for row, shown in zip(cells, texts, strict=True):
        if row[0].startswith("ours"):
            shown = [f"**{value}**" for value in shown]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join([*lines, "", source])


def show(header: Sequence[str], cells: list[tuple[Any, ...]], console: Console) -> None:
    """Print a table."""
    table = Table(*header)
    for row in cells:
        table.add_row(*map(_text, row))
    console.print(table)


def measure_all(
    kernels: Sequence[Any],
    measure: Callable[[str, Path | None], dict[str, Any]],
    write: Callable[[list[dict[str, Any]], Path, list[str]], None],
    record: Path | None,
    only: list[str],
) -> list[dict[str, Any]]:
    """Measure the rows of the kernels. Each is written into ``record`` as soon as it is there.

    Args:
        kernels: what has ``name`` and ``package``. measure: the row of one, by name and folder of packages.
        write: rows into a table, in the order of these names. only: names, empty: all.

    Raises:
        ArgumentError: a name that is no kernel's. DSV4Error: a kernel stopped.
    """
    from dsv4lib.bench.peers import corpus

    names = [kernel.name for kernel in kernels]
    for name in only:
        if name not in names:
            raise ArgumentError("only", name, "one of " + "; ".join(names))
    console, rows, packages = Console(), [], None
    for kernel in kernels:
        if only and kernel.name not in only:
            continue
        if kernel.package and packages is None:
            packages = corpus.packages()
        with console.status(kernel.name):
            rows.append(measure(kernel.name, packages if kernel.package else None))
        if record is not None:
            write(rows[-1:], record, names)
    return rows


def verdict(missed: list[str], console: Console) -> int:
    """Print the bounds that ours does not keep; the exit code."""
    for text in missed:
        console.print(f"[red]{text}[/]")
    return 1 if missed else 0


def marks(module: str) -> tuple[str, str]:
    """Return the lines of the notes between which ``module`` writes its table. It is a module of `pages`."""
    return BEGIN.format(module), END


def written(notes: Path, module: str) -> str:
    """Read the table in the notes.

    Raises:
        DSV4Error: its marks are missing.
    """
    text, (begin, end) = notes.read_text(), marks(module)
    if begin not in text or end not in text:
        raise DSV4Error(f"{notes} needs the lines {begin} and {end}")
    return text.partition(begin)[2].partition(end)[0].strip()


def replace(notes: Path, module: str, table: str) -> None:
    """Write the table into the notes."""
    written(notes, module)  # the marks are there
    text, (begin, end) = notes.read_text(), marks(module)
    before, after = text.partition(begin)[0], text.partition(begin)[2].partition(end)[2]
    notes.write_text(f"{before}{begin}\n{table}\n{end}{after}")
