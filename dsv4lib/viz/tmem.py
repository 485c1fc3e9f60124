"""Draw tensor memory. 128 lanes x 512 columns of 32 bits, address ``lane << 16 | column``.

Warp w of a warpgroup reads and writes lanes 32 (w mod 4) to 32 (w mod 4) + 31 only (PTX ISA, "Tensor Memory Access
Restrictions"); every map here shows these quarters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import categories, frame, ink_on, matrix, styled, ticks
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, SEQUENTIAL, new_figure, set_alt

LANES, COLUMNS, QUARTER = 128, 512, 32
_CLASH = "#b00020"


@dataclass(frozen=True)
class Region:
    """A named rectangle of tensor memory.

    Attributes:
        name: shown inside it.
        lane0, lanes: first lane and number of lanes.
        col0, cols: first column and number of columns.
        colour: any matplotlib colour; None takes the next of the palette.
    """

    name: str
    lane0: int
    lanes: int
    col0: int
    cols: int
    colour: str | None = None


def _check(region: Region) -> None:
    inside = 0 <= region.lane0 and 0 <= region.col0 and region.lanes > 0 and region.cols > 0
    if not (inside and region.lane0 + region.lanes <= LANES and region.col0 + region.cols <= COLUMNS):
        raise ArgumentError("regions", region, f"a region inside {LANES} lanes x {COLUMNS} columns")


def _quarters(ax: Axes, columns: int) -> None:
    """Lines between the lane quarters and the warp that owns each."""
    for warp in range(4):
        if warp:
            ax.axhline(QUARTER * warp - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        ax.text(columns + columns * 0.01, QUARTER * warp + 15.5, f"warp {warp}", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(0, LANES, QUARTER))
    ax.set_ylabel("lane")
    ax.set_xlabel("column")


def draw_map(ax: Axes, regions: Sequence[Region]) -> tuple[int, int]:
    """Draw the owner of each part of tensor memory; cells claimed twice are marked.

    Returns:
        (columns used, cells claimed twice).

    Raises:
        ArgumentError: a region that is not inside.
    """
    owner = np.full((LANES, COLUMNS), -1, dtype=np.int64)
    claims = np.zeros((LANES, COLUMNS), dtype=np.int64)
    chosen = kinds.colours(region.name for region in regions)
    colours = [region.colour or chosen[region.name] for region in regions]
    for i, region in enumerate(regions):
        _check(region)
        block = np.s_[region.lane0 : region.lane0 + region.lanes, region.col0 : region.col0 + region.cols]
        owner[block], claims[block] = i, claims[block] + 1
    categories(ax, owner, colours or [GRID])
    twice = claims > 1
    if twice.any():
        ax.imshow(np.where(twice, 1.0, np.nan), cmap=ListedColormap([_CLASH]), aspect="auto", alpha=0.85)
    for region, colour in zip(regions, colours, strict=True):
        corner = (region.col0 - 0.5, region.lane0 - 0.5)
        ax.add_patch(Rectangle(corner, region.cols, region.lanes, facecolor="none", edgecolor=PAPER, linewidth=1.2))
        narrow = region.cols < 40
        ax.text(
            region.col0 + region.cols / 2 - 0.5,
            region.lane0 + region.lanes / 2 - 0.5,
            region.name,
            ha="center",
            va="center",
            rotation=90 if narrow else 0,
            fontsize=9,
            color=ink_on(colour),
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 2},
        )
    _quarters(ax, COLUMNS)
    ax.set_xticks([*range(0, COLUMNS, 64), COLUMNS - 1])
    return int((claims > 0).any(axis=0).sum()), int(twice.sum())


@styled
def tmem_map(regions: Sequence[Region], title: str) -> Figure:
    """Draw the owners of tensor memory; cells claimed twice are marked.

    Args:
        regions: named rectangles.
        title: what the plan belongs to.
    """
    fig = new_figure(height=3.4)
    ax = fig.subplots()
    used, clash = draw_map(ax, regions)
    ax.set_title(f"{title}: {used} of {COLUMNS} columns used" + (f", {clash} cells claimed twice" if clash else ""))
    listed = listing(regions) or "Nothing is allocated"
    return set_alt(fig, f"Tensor memory map, {title}. {listed}. {clash} cells are claimed twice.")


def listing(regions: Sequence[Region]) -> str:
    """Return the regions in words, for alt texts."""
    names = [" ".join(r.name.split()) for r in regions]
    places = [f"lanes {r.lane0}-{r.lane0 + r.lanes - 1} columns {r.col0}-{r.col0 + r.cols - 1}" for r in regions]
    return ", ".join(f"{name} {place}" for name, place in zip(names, places, strict=True))


def cells(addresses: Any) -> tuple[np.ndarray, np.ndarray]:
    """Find the which element sits in every tensor-memory cell.

    Args:
        addresses: integer [rows, columns], ``lane << 16 | column`` of each 32-bit element.

    Returns:
        (row, column) of the element in each cell, int64 [128, 512] each, -1 where there is none.
    """
    values = matrix("addresses", addresses)
    lanes, columns = values >> 16, values & 0xFFFF
    if values.min() < 0 or lanes.max() >= LANES or columns.max() >= COLUMNS:
        raise ArgumentError("addresses", list(values.shape), f"lane < {LANES} and column < {COLUMNS} in every address")
    if np.unique(values).size != values.size:
        raise ArgumentError("addresses", list(values.shape), "a cell of its own for every element")
    row = np.full((LANES, COLUMNS), -1, dtype=np.int64)
    column = row.copy()
    i, j = np.indices(values.shape)
    row[lanes, columns], column[lanes, columns] = i, j
    return row, column


@styled
def accumulator(addresses: Any, title: str) -> Figure:
    """Draw where the elements of an accumulator sit. Every cell holds a row (left) and a column (right).

    Args:
        addresses: integer [rows, columns], ``lane << 16 | column``.
        title: the layout's own string.
    """
    holds = cells(addresses)
    width = int((np.asarray(addresses) & 0xFFFF).max()) + 1
    fig = new_figure(height=3.6)
    for ax, held, name in zip(fig.subplots(1, 2), holds, ("row", "column"), strict=True):
        shown = np.ma.masked_less(held[:, :width], 0)
        ax.set_facecolor("#e3e7eb")
        image = ax.imshow(shown, cmap=SEQUENTIAL, aspect="auto", vmin=0)
        frame(ax)
        ticks(ax, LANES, width)
        _quarters(ax, width)
        fig.colorbar(image, ax=ax, location="bottom", aspect=40, shrink=0.9, label=f"{name} of the accumulator tile")
        ax.set_title(f"which {name} a cell holds", fontweight="normal")
    fig.suptitle(title, fontsize=10, fontweight="bold", color=INK)
    values = np.asarray(addresses)
    used = np.unique(values >> 16)
    corner = f"lane {values[-1, -1] >> 16}, column {values[-1, -1] & 0xFFFF}"
    return set_alt(
        fig,
        f"Accumulator {title}: {values.shape[0]} by {values.shape[1]} elements in {used.size} lanes "
        f"({used.min()} to {used.max()}) and {width} columns; the last element is in {corner}. Grey cells are empty.",
    )
