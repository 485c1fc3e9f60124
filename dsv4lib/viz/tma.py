"""Draw TMA boxes over a tensor. What a tile loop loads, loads twice, and fills with zeros past the edge.

A box that sticks out of the tensor is still written whole into shared memory: elements outside read as zero, and the
barrier still counts the full box's bytes (PTX ISA, "cp.async.bulk.tensor").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import cell_lines, frame, styled, ticks
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, new_figure, set_alt

_NEVER, _FILL, _AGAIN = "#eef1f4", "#c9ced4", "#b00020"
_LIGHT = ("#8fc1e3", "#f5cf85", "#8ed3bd", "#e8bdd4", "#bfe1f6", "#eeb089", "#f7ef9f")  # the palette, tinted


def _starts(coords: Any) -> np.ndarray:
    array = np.asarray(coords)
    if array.ndim < 2 or array.shape[-1] != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ArgumentError(
            "coords", f"{array.dtype}{list(array.shape)}", "integers [..., 2]: (row, column) of each box"
        )
    return array.reshape(-1, 2).astype(np.int64)


def coverage(shape: tuple[int, int], box: tuple[int, int], coords: Any) -> np.ndarray:
    """Count how often each element is loaded.

    Args:
        shape: (rows, columns) of the tensor.
        box: (rows, columns) of a box.
        coords: integer [..., 2], first (row, column) of every box; may lie outside, which loads nothing.

    Returns:
        int64 [rows, columns].
    """
    counts = np.zeros(shape, dtype=np.int64)
    for row, column in _starts(coords):
        counts[max(row, 0) : max(row + box[0], 0), max(column, 0) : max(column + box[1], 0)] += 1
    return counts


def filled(shape: tuple[int, int], box: tuple[int, int], coords: Any) -> int:
    """Return the elements of all boxes outside the tensor. They arrive as zeros."""
    return len(_starts(coords)) * box[0] * box[1] - int(coverage(shape, box, coords).sum())


@styled
def boxes(
    shape: tuple[int, int],
    box: tuple[int, int],
    coords: Any,
    title: str,
    element_bytes: float = 2,
    axes: tuple[str, str] = ("row", "k"),
) -> Figure:
    """Draw the boxes of a tile loop over a tensor, numbered in the order of loads.

    Args:
        shape: (rows, columns) of the tensor.
        box: (rows, columns) of a box.
        coords: integer [..., 2], first (row, column) of every box, in loading order.
        title: what is loaded.
        element_bytes: bytes of one element, for the traffic in the caption.
        axes: names of the two directions.
    """
    starts = _starts(coords)
    counts = coverage(shape, box, starts)
    extent = np.maximum(np.array(shape), (starts + np.array(box)).max(axis=0))
    picture = np.full(extent, 1, dtype=np.int64)  # 0 never loaded, 1 outside, 2 loaded again, 3.. the box that loads it
    picture[: shape[0], : shape[1]] = 0
    for number, (row, column) in enumerate(starts):
        part = np.s_[row : min(row + box[0], shape[0]), column : min(column + box[1], shape[1])]
        picture[part] = 3 + number % len(_LIGHT)
    picture[: shape[0], : shape[1]][counts > 1] = 2
    fig = new_figure(height=3.9)
    ax = fig.subplots()
    cmap = ListedColormap([_NEVER, _FILL, _AGAIN, *_LIGHT])
    ax.imshow(picture, cmap=cmap, vmin=0, vmax=2 + len(_LIGHT), aspect="auto")
    frame(ax)
    _outlines(ax, starts, box, shape)
    _labels(ax, starts, box, shape)
    ticks(ax, *picture.shape)
    ax.set_ylabel(axes[0])
    ax.set_xlabel(axes[1])
    never, again, outside = int((counts == 0).sum()), int((counts > 1).sum()), filled(shape, box, starts)
    ax.set_title(title)
    moved = int(len(starts) * box[0] * box[1] * element_bytes)
    facts = (
        f"{len(starts)} boxes of {box[0]} x {box[1]}, {moved:,} bytes; {outside:,} elements filled with zeros (grey), "
        f"{never:,} never loaded, {again:,} loaded more than once"
    )
    ax.text(0, -0.2, facts, transform=ax.transAxes, fontsize=8, color=_AGAIN if never or again else MUTED)
    return set_alt(fig, f"TMA boxes over a {shape[0]} by {shape[1]} tensor, {title}: {facts}.")


def _outlines(ax: Any, starts: np.ndarray, box: tuple[int, int], shape: tuple[int, int]) -> None:
    edges = []
    for row, column in np.unique(starts, axis=0) - 0.5:
        bottom, right = row + box[0], column + box[1]
        edges.append([(column, row), (right, row), (right, bottom), (column, bottom), (column, row)])
    ax.add_collection(LineCollection(edges, colors=PAPER, linewidths=1.6))
    bottom, right = shape[0] - 0.5, shape[1] - 0.5
    ax.plot([-0.5, right, right], [bottom, bottom, -0.5], color=INK, linewidth=1.6, linestyle=(0, (4, 2)))


def _labels(ax: Any, starts: np.ndarray, box: tuple[int, int], shape: tuple[int, int]) -> None:
    """Box numbers in loading order, inside the tensor; a place loaded several times shows all of its numbers."""
    places: dict[tuple[int, int], list[int]] = {}
    for number, (row, column) in enumerate(starts):
        places.setdefault((int(row), int(column)), []).append(number)
    if len(places) > 64:
        return
    for (row, column), loads in places.items():
        text = ", ".join(map(str, loads[:4])) + (", ..." if len(loads) > 4 else "")
        y, x = (
            (max(start, 0) + (min(start + size, end) if start < end else start + size) - 1) / 2
            for start, size, end in zip((row, column), box, shape, strict=True)
        )
        ax.text(x, y, text, ha="center", va="center", color=PAPER if len(loads) > 1 else INK)


@styled
def iterations(
    shape: tuple[int, int],
    box: tuple[int, int],
    coords: Any,
    title: str,
    axes: tuple[str, str] = ("row", "k"),
) -> Figure:
    """Find which box each iteration of a loop loads. A loop that walks its operand draws a diagonal, a stuck one a bar.

    Args:
        shape: (rows, columns) of the tensor, or of the part that the loop has to cover.
        box: (rows, columns) of a box.
        coords: integer [iterations, 2], first (row, column) of each box, multiples of the box.
        title: what is loaded.
        axes: names of the two directions.

    Raises:
        ArgumentError: a box off the grid of boxes.
    """
    starts = _starts(coords)
    grid = [-(-extent // size) for extent, size in zip(shape, box, strict=True)]
    place = starts // np.array(box)
    if (starts % np.array(box)).any() or (place < 0).any() or (place >= np.array(grid)).any():
        raise ArgumentError("coords", starts.tolist()[:4], f"multiples of {box} inside {shape}")
    number = place[:, 0] * grid[1] + place[:, 1]
    loaded = np.bincount(number, minlength=grid[0] * grid[1])
    picture = np.zeros((len(loaded), len(starts)), np.int64)  # 0 nothing, 1 loaded, 2 loaded again, 3 never loaded
    picture[loaded == 0] = 3
    seen: set[int] = set()
    for i, at in enumerate(number.tolist()):
        picture[at, i] = 2 if at in seen else 1
        seen.add(at)
    colours = [_NEVER, kinds.colour("loaded once"), _AGAIN, "#f3c6cd"]
    fig = new_figure(height=min(1.5 + 0.24 * len(loaded), 4.2))
    ax = fig.subplots()
    ax.imshow(picture, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto")
    frame(ax)
    if max(picture.shape) <= 40:
        cell_lines(ax, *picture.shape)
    names = [f"{axes[0]} {i // grid[1] * box[0]}, {axes[1]} {i % grid[1] * box[1]}" for i in range(len(loaded))]
    step = -(-len(names) // 16)
    ax.set_yticks(range(0, len(names), step), names[::step])
    ax.set_xticks(range(0, len(starts), -(-len(starts) // 16)))
    ax.set_xlabel("iteration")
    again, never = int((loaded - 1).clip(0).sum()), int((loaded == 0).sum())
    ax.set_title(title)
    states = zip(colours[1:], ("loaded", "loaded again", "never"), (1, 2, 3), strict=True)
    handles = [Patch(facecolor=c, label=n) for c, n, code in states if (picture == code).any()]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    facts = f"{len(starts)} boxes loaded, {again} of them again; {never} of {len(loaded)} boxes never loaded"
    return set_alt(fig, f"TMA boxes by iteration, {title}: {facts}.")


@styled
def gathers(rows: Any, groups: Sequence[tuple[str, int]], tile: int, title: str) -> Figure:
    """Draw which row of memory becomes which key of a loop. It gathers its tiles row by row.

    Args:
        rows: integer [keys], row of each key in loading order, -1 = none (TMA fills it with zeros).
        groups: (name, number of keys) of what is loaded, in order; each has rows of a tensor of its own.
        tile: keys of a tile.
        title: whose loop.

    Raises:
        ArgumentError: groups that do not add up to the keys.
    """
    values = np.asarray(rows)
    if values.ndim != 1 or values.dtype.kind not in "iu" or sum(n for _, n in groups) != len(values) or not len(values):
        raise ArgumentError("rows", f"{values.dtype}{list(values.shape)}", f"integers, one for each key of {groups}")
    fig = new_figure(height=3.0)
    ax = fig.subplots()
    keys, at, facts = np.arange(len(values)), 0, []
    chosen = kinds.colours(name for name, _ in groups)
    for name, count in groups:
        mine = (keys >= at) & (keys < at + count) & (values >= 0)
        colour = chosen[name]
        ax.scatter(keys[mine], values[mine], s=9, color=colour, label=f"{name}: row of its tensor", linewidths=0)
        facts.append(f"{int(mine.sum())} rows of {name}")
        at += count
    absent = keys[values < 0]
    if len(absent):
        low = -0.07 * max(int(values.max()), 1)
        style = {"s": 14, "marker": "|", "color": _AGAIN}
        ax.scatter(absent, np.full(len(absent), low), label="no key: filled with zeros, masked", **style)
    for edge in range(0, len(values) + 1, tile):
        ax.axvline(edge - 0.5, color=GRID, linewidth=1.0, zorder=0)
    frame(ax)
    ax.set(xlim=(-1, len(values)), xlabel=f"place of the key in the loop (lines: tiles of {tile})", ylabel="row")
    ax.xaxis.set_major_locator(MultipleLocator(tile))
    ax.set_title(title)
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    tiles = -(-len(values) // tile)
    return set_alt(
        fig, f"Gathered rows, {title}: {tiles} tiles of {tile}; {', '.join(facts)}; {len(absent)} places empty."
    )
