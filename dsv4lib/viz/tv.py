"""Draw thread-value maps. Which element of a tile sits in which register of which thread.

Made for copies between tensor memory and registers (T2R, R2T); any map (thread, value) -> (row, column) can be drawn.
A load and a store that are meant to undo each other must have the same map: `round_trip` shows where every element
lands when they have not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import frame, matrix, styled, ticks
from dsv4lib.viz.style import INK, PAPER, SEQUENTIAL, new_figure, set_alt


def _coordinates(rows: Any, columns: Any, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    r, c = matrix("rows", rows), matrix("columns", columns)
    if r.shape != c.shape:
        raise ArgumentError("columns", list(c.shape), f"the shape of rows, {list(r.shape)}")
    if r.min() < 0 or c.min() < 0 or r.max() >= tile[0] or c.max() >= tile[1]:
        raise ArgumentError("tile", tile, "a tile that contains every (row, column) of the map")
    return r, c


def owners(rows: Any, columns: Any, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Invert the map.

    Returns (thread, value) of every element, int64 [rows, columns] each, -1 where no thread has it.
    """
    r, c = _coordinates(rows, columns, tile)
    thread = np.full(tile, -1, dtype=np.int64)
    value = thread.copy()
    t, v = np.indices(r.shape)
    thread[r, c], value[r, c] = t, v
    return thread, value


def _panel(fig: Figure, ax: Axes, values: np.ndarray, label: str) -> None:
    image = ax.imshow(np.ma.masked_less(values, 0), cmap=SEQUENTIAL, aspect="auto", vmin=0)
    frame(ax)
    ticks(ax, *values.shape)
    ax.set_xlabel("column")
    ax.set_ylabel("row")
    fig.colorbar(image, ax=ax, location="bottom", aspect=40, shrink=0.9, label=label)


@styled
def thread_value_map(rows: Any, columns: Any, tile: tuple[int, int], title: str, thread: int = 37) -> Figure:
    """Draw the owner thread and register of every element. One thread's elements are marked.

    Args:
        rows, columns: integer [threads, values], element coordinates.
        tile: (rows, columns) of the tile.
        title: the copy.
        thread: whose elements are marked.
    """
    r, c = _coordinates(rows, columns, tile)
    if not 0 <= thread < r.shape[0]:
        raise ArgumentError("thread", thread, f"0 to {r.shape[0] - 1}")
    owner, register = owners(r, c, tile)
    fig = new_figure(height=4.1)
    for ax, values, label in zip(fig.subplots(1, 2), (owner, register), ("thread", "register"), strict=True):
        _panel(fig, ax, values, f"{label} that holds the element")
        size = float(np.clip(900 / max(tile), 3, 60))
        ax.scatter(
            c[thread],
            r[thread],
            s=size,
            marker="s",
            color=kinds.colour("marked thread"),
            edgecolors=PAPER,
            linewidths=0.6,
        )
    fig.suptitle(f"{title}; thread {thread} in orange", fontsize=10, fontweight="bold", color=INK)
    first = ", ".join(f"({a}, {b})" for a, b in zip(r[thread, :4], c[thread, :4], strict=False))
    return set_alt(
        fig,
        f"Thread-value map of {title}: {r.shape[0]} threads with {r.shape[1]} registers each, tile {tile[0]} by "
        f"{tile[1]}. Registers 0 to {min(3, r.shape[1] - 1)} of thread {thread} hold elements {first}.",
    )


def displaced(rows_in: Any, columns_in: Any, rows_out: Any, columns_out: Any, tile: tuple[int, int]) -> int:
    """Return elements that end in another cell.

    The tile is read with the first map and written back with the second.
    """
    r_in, c_in = _coordinates(rows_in, columns_in, tile)
    r_out, c_out = _coordinates(rows_out, columns_out, tile)
    if r_in.shape != r_out.shape:
        raise ArgumentError("rows_out", list(r_out.shape), f"the shape of rows_in, {list(r_in.shape)}")
    return int(((r_in != r_out) | (c_in != c_out)).sum())


@styled
def round_trip(
    rows_in: Any, columns_in: Any, rows_out: Any, columns_out: Any, tile: tuple[int, int], title: str
) -> Figure:
    """Draw a tile after a load with one map and a store with another. It shows the row and column each cell came from.

    Args:
        rows_in, columns_in: integer [threads, values], the load's map.
        rows_out, columns_out: the store's map, the same shape.
        tile: (rows, columns) of the tile.
        title: the two copies.
    """
    moved = displaced(rows_in, columns_in, rows_out, columns_out, tile)
    source_row = np.full(tile, -1, dtype=np.int64)
    source_column = source_row.copy()
    where = matrix("rows_out", rows_out), matrix("columns_out", columns_out)
    source_row[where], source_column[where] = matrix("rows_in", rows_in), matrix("columns_in", columns_in)
    fig = new_figure(height=4.1)
    for ax, values, name in zip(fig.subplots(1, 2), (source_row, source_column), ("row", "column"), strict=True):
        _panel(fig, ax, values, f"{name} the cell's value came from")
    total = tile[0] * tile[1]
    fig.suptitle(f"{title}: {moved} of {total} elements moved", fontsize=10, fontweight="bold", color=INK)
    return set_alt(fig, f"Round trip {title}: {moved} of {total} elements end in another cell of the tile.")
