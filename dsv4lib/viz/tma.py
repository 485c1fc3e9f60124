"""TMA boxes over a tensor: what a tile loop loads, what it loads twice, and what it fills with zeros beyond the edge.

A box that sticks out of the tensor is still written whole into shared memory: elements outside read as zero, and the
barrier still counts the full box's bytes (PTX ISA, "cp.async.bulk.tensor").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.panels import frame, styled, ticks
from dsv4lib.viz.style import INK, MUTED, PAPER, new_figure, set_alt

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
    """How often each element is loaded.

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
    """Elements of all boxes that lie outside the tensor and arrive as zeros."""
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
    """The boxes of a tile loop over a tensor, numbered in the order they are loaded.

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
