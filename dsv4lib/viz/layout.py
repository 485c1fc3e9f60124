"""Draw a layout: every coordinate of a tile with the offset it goes to.

Up to 16 x 16 the offsets are written in the cells; above that the tile is a raster and one corner is shown in detail.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from dsv4lib.viz.panels import MAX_NUMBERED, cell_lines, frame, matrix, numbers, styled, ticks, zoom_frame
from dsv4lib.viz.style import MUTED, SEQUENTIAL, new_figure, set_alt


def _raster(ax: Axes, values: np.ndarray, norm: Normalize, write: bool) -> Any:
    image = ax.imshow(values, cmap=SEQUENTIAL, norm=norm, aspect="auto")
    if write:
        cell_lines(ax, *values.shape)
        shades = matplotlib.colormaps[SEQUENTIAL](norm(values))[..., :3]
        numbers(ax, values, shades, size=7.5 if values.max() < 1000 else 6.2)
    frame(ax)
    return image


def _axis_names(ax: Axes, names: tuple[str, str]) -> None:
    ax.set_ylabel(names[0])
    ax.set_xlabel(names[1])


@styled
def grid(
    offsets: Any,
    title: str,
    axes: tuple[str, str] = ("row", "column"),
    corner: tuple[int, int] = (0, 0),
    what: str = "offset",
) -> Figure:
    """Draw every offset of a layout.

    Args:
        offsets: integer [rows, columns].
        title: the layout's own string.
        axes: names of the two directions.
        corner: first (row, column) of the 16 x 16 detail of a larger tile.
        what: what a cell's number is, for the colour bar and the alt text.
    """
    values = matrix("offsets", offsets)
    rows, columns = values.shape
    norm = Normalize(values.min(), max(values.max(), values.min() + 1))
    small = rows <= MAX_NUMBERED and columns <= MAX_NUMBERED
    if small:
        fig = new_figure(height=0.75 + 0.33 * rows, width=1.3 + 0.52 * columns)
        ax = fig.subplots()
        _raster(ax, values, norm, write=True)
    else:
        fig = new_figure(height=4.8)
        fig.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
        ax, detail = fig.subplots(1, 2, width_ratios=(1, 1.25))
        image = _raster(ax, values, norm, write=False)
        top, left = (max(0, min(c, n - MAX_NUMBERED)) for c, n in zip(corner, values.shape, strict=True))
        part = values[top : top + MAX_NUMBERED, left : left + MAX_NUMBERED]
        zoom_frame(ax, top, left, *part.shape, colour="#ffffff")
        _raster(detail, part, Normalize(part.min(), max(part.max(), part.min() + 1)), write=True)
        label = f"the outlined {part.shape[0]} x {part.shape[1]}, with colours of its own"
        detail.set_title(label, fontweight="normal", color=MUTED)
        _axis_names(detail, axes)
        detail.set_xticks(range(0, part.shape[1], 2), [str(left + c) for c in range(0, part.shape[1], 2)])
        detail.set_yticks(range(0, part.shape[0], 2), [str(top + r) for r in range(0, part.shape[0], 2)])
        fig.colorbar(image, ax=ax, location="bottom", shrink=0.8, label=what, aspect=30)
    if small:
        ax.set_title(title)
    _axis_names(ax, axes)
    ticks(ax, rows, columns)
    return set_alt(fig, _alt(values, title, axes, what))


def _alt(values: np.ndarray, title: str, axes: tuple[str, str], what: str) -> str:
    first = ", ".join(map(str, values[0, : min(4, values.shape[1])]))
    down = ", ".join(map(str, values[: min(4, values.shape[0]), 0]))
    return (
        f"Layout {title}: a {values.shape[0]} by {values.shape[1]} table of {what}s. "
        f"The first {axes[0]} begins {first}; the first {axes[1]} begins {down}."
    )


@styled
def difference(drawn: Any, expected: Any, title: str, names: tuple[str, str] = ("drawn", "independent")) -> Figure:
    """Draw where two evaluations of one layout disagree. It is a raster of the elements that differ.

    Args:
        drawn, expected: integer arrays [rows, columns] of one shape.
        title: the layout's own string.
        names: what the two are called.
    """
    a, b = matrix("drawn", drawn), matrix("expected", expected)
    if a.shape != b.shape:
        # A wrong shape is the loudest difference there is: every element of the larger rectangle counts.
        wrong = np.ones(np.maximum(a.shape, b.shape), dtype=bool)
    else:
        wrong = a != b
    fig = new_figure(height=2.6, width=4.6)
    ax = fig.subplots()
    ax.imshow(wrong, cmap=ListedColormap(["#eef1f4", "#b00020"]), vmin=0, vmax=1, aspect="auto")
    frame(ax)
    ticks(ax, *wrong.shape)
    _axis_names(ax, ("row", "column"))
    ax.set_title(f"{int(wrong.sum())} of {wrong.size} elements differ")
    ax.text(0, -0.3, title, transform=ax.transAxes, fontsize=7.5, color=MUTED)
    return set_alt(
        fig, f"{names[0]} against {names[1]} for {title}: {int(wrong.sum())} of {wrong.size} elements differ."
    )
