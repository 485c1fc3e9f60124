"""`error_map`: where a result is wrong, as a picture.

A kernel's faults have places: one element, one tile, one TMEM lane, everything from some KV iteration on. Each way of
looking folds the same errors along another axis, and folds by the maximum, so that a single wrong element of a large
array stays visible. Errors are in units of the RMS of the expected row, because rows differ in scale.

The functions take arrays. A record of `dsv4lib.check.compare` may be passed along for the title; `viz` itself judges
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds, style
from dsv4lib.viz.arrays import as_array, cell_texts, compact
from dsv4lib.viz.panels import MAX_NUMBERED, frame, styled, zoom_frame

WAYS = ("element", "tile", "lane", "kv_iteration")
MAX_PIXELS = 512  # longest side of a raster; larger arrays are folded by the maximum of each block
DECADES = 6.0  # colour range below the largest error
BAD_COLOUR = kinds.colour("wrong")  # NaN/Inf differs: a colour that the sequential map does not contain
ZERO_COLOUR = "#eef0f3"


class Judged(Protocol):
    """What `error_map` reads of a comparison record."""

    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ErrorGrid:
    """The errors, folded one way.

    Attributes:
        by: one of `WAYS`.
        values: what is drawn, [rows, columns]: the largest error of each cell in units of its row's RMS, for
            ``tile`` the tile's relative L2 error; NaN where NaN or Inf differ between the two arrays.
        worst: coordinates of the worst element: the first NaN/Inf difference, else the largest error.
        worst_error: its error in units of its row's RMS (NaN for a NaN/Inf difference).
        worst_cell: (row, column) of the worst cell of ``values``.
        matrix: leading coordinates of the matrix that is drawn (of the worst element), empty for 2-D input.
        signed: the signed errors of that matrix in units of the row's RMS, [M, N].
    """

    by: str
    values: np.ndarray
    worst: tuple[int, ...]
    worst_error: float
    worst_cell: tuple[int, int]
    matrix: tuple[int, ...]
    signed: np.ndarray


def error_grid(actual: Any, expected: Any, by: str = "element", tile: tuple[int, int] = (128, 128)) -> ErrorGrid:
    """Fold the errors of ``actual`` against ``expected`` one way.

    Args:
        actual: torch or numpy array, any rank; the last two axes are the matrix (a vector is one row).
        expected: same shape.
        by: ``element``: every element of the matrix that holds the worst one. ``tile``: its tiles. ``lane``: all
            matrices and tiles laid over each other, TMEM lane (row in the tile) x column in the tile.
            ``kv_iteration``: the first axis counts the iterations (one recording of the accumulator after each KV
            tile, or one slab of scores per tile): row x iteration.
        tile: rows and columns of a tile.
    """
    a, e = as_array("actual", actual), as_array("expected", expected)
    if by not in WAYS:
        raise ArgumentError("by", by, f"one of {', '.join(WAYS)}")
    if a.shape != e.shape or a.size == 0:
        raise ArgumentError("actual.shape", a.shape, f"expected.shape, {e.shape}, with at least one element")
    if not (len(tile) == 2 and all(isinstance(n, int) and n >= 1 for n in tile)):
        raise ArgumentError("tile", tile, "two integers >= 1: rows, columns")
    if by == "kv_iteration" and a.ndim < 2:
        raise ArgumentError("actual.shape", a.shape, "[iterations, ..., columns] for by='kv_iteration'")
    signed = _signed_errors(a, e)
    flat = int(np.isnan(signed).argmax() if np.isnan(signed).any() else np.abs(signed).argmax())
    worst = tuple(int(i) for i in np.unravel_index(flat, a.shape))
    matrices = signed.reshape(-1, *((1, 1) + a.shape)[-2:])
    here = matrices[flat // (matrices.shape[1] * matrices.shape[2])]
    if by == "element":
        values = np.abs(here)
    elif by == "tile":
        values = _tiles(here, _expected_units(e, matrices.shape, flat), tile)
    elif by == "lane":
        values = _fold_lanes(np.abs(matrices), tile)
    else:
        values = np.abs(signed).reshape(a.shape[0], -1, a.shape[-1]).max(axis=2).T
    ranked = np.where(np.isnan(values), np.inf, values)
    cell = tuple(int(i) for i in np.unravel_index(int(ranked.argmax()), values.shape))
    return ErrorGrid(by, values, worst, float(signed.reshape(-1)[flat]), cell, worst[:-2], here)


@styled
def error_map(
    actual: Any,
    expected: Any,
    by: str = "element",
    tile: tuple[int, int] = (128, 128),
    zoom: str | tuple[int, int] | None = "worst",
    record: Judged | None = None,
    name: str = "",
    axes: tuple[str, str] = ("row", "column"),
) -> Figure:
    """Draw a map of the errors, with a 16 x 16 corner in numbers.

    Args:
        actual: see `error_grid`.
        expected: see `error_grid`.
        by: see `error_grid`.
        tile: see `error_grid`.
        zoom: the 16 x 16 corner beside the map: ``worst`` around the worst element, ``corner`` at (0, 0), a (row,
            column) of your choice, or None for no zoom.
        record: a comparison record; its verdict goes into the title.
        name: what is compared, first words of the title.
        axes: what the rows and columns of the matrix are.

    Returns:
        A figure; its alt text names the worst element and its place.
    """
    grid = error_grid(actual, expected, by, tile)
    left, top = _zoom_origin(grid, zoom)
    fig = style.new_figure(height=4.6)
    if zoom is None:
        main, side = fig.subplots(), None
    else:
        main, side = fig.subplots(1, 2, width_ratios=(0.85, 1.15))
    _draw_map(fig, main, grid, tile, axes)
    if side is not None:
        _draw_zoom(side, grid, top, left, axes)
        if by == "element":
            height, width = _extent(grid.signed, top, left)
            if (height, width) != grid.values.shape:
                zoom_frame(main, top, left, height, width)
    place = "[" + ", ".join(map(str, grid.worst)) + "]"
    size = "NaN/Inf differs" if np.isnan(grid.worst_error) else f"{abs(grid.worst_error):.2g} x row RMS"
    title = f"{name + ': ' if name else ''}worst element {place}, {size}"
    if record is not None:
        title += " | " + (
            "passed" if record.passed else "FAILED: " + ", ".join(r.split(":")[0] for r in record.reasons)
        )
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return style.set_alt(fig, _alt(grid, title, tile))


def _alt(grid: ErrorGrid, title: str, tile: tuple[int, int]) -> str:
    row, col = grid.worst_cell
    cell = {
        "element": f"row {row}, column {col} of matrix {list(grid.matrix)}",
        "tile": f"tile ({row}, {col}) of {tile[0]} x {tile[1]} elements",
        "lane": f"lane {row}, column {col} of the tile",
        "kv_iteration": f"iteration {col}, row {row}",
    }[grid.by]
    return f"Error map by {grid.by.replace('_', ' ')}. {title}. The worst cell of the map is {cell}."


def _signed_errors(a: np.ndarray, e: np.ndarray) -> np.ndarray:
    """(a - e) / RMS of the expected row; NaN where NaN or Inf differ, 0 where both hold the same NaN or Inf."""
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    finite = np.isfinite(a) & np.isfinite(e)
    error = np.where(same, 0.0, np.where(finite, np.where(finite, a, 0) - np.where(finite, e, 0), np.nan))
    rows = np.where(np.isfinite(e), e, 0.0).reshape(-1, e.shape[-1] if e.ndim else 1)
    rms = np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    rms = np.where(rms > 0, rms, 1.0)  # an all-zero row has no scale: its errors are shown as they are
    return (error.reshape(rows.shape) / rms).reshape(e.shape)


def _expected_units(e: np.ndarray, matrices: tuple[int, ...], flat: int) -> np.ndarray:
    """The expected matrix that holds element ``flat``, its rows divided by their RMS."""
    here = e.reshape(matrices)[flat // (matrices[1] * matrices[2])]
    here = np.where(np.isfinite(here), here, 0.0)
    rms = np.sqrt(np.mean(here**2, axis=1, keepdims=True))
    return here / np.where(rms > 0, rms, 1.0)


def _tiles(signed: np.ndarray, expected: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Relative L2 error of each tile, rows weighted alike; NaN where a tile holds a NaN/Inf difference."""
    rows, cols = (np.arange(0, n, t) for n, t in zip(signed.shape, tile, strict=True))

    def sums(x: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(x, rows, axis=0), cols, axis=1)

    num, den = np.sqrt(sums(signed**2)), np.sqrt(sums(expected**2))
    return np.divide(num, den, out=num.copy(), where=den > 0)


def _fold_lanes(errors: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """Largest error at each (row % tile rows, column % tile columns) over all matrices and tiles; NaN wins."""
    _, m, n = errors.shape
    lanes, columns = min(tile[0], m), min(tile[1], n)
    out = np.zeros((lanes, columns))
    for top in range(0, m, tile[0]):
        for left in range(0, n, tile[1]):
            block = errors[:, top : top + lanes, left : left + columns].max(axis=0)
            view = out[: block.shape[0], : block.shape[1]]
            np.maximum(view, block, out=view)
    return out


def _shrink(values: np.ndarray, limit: int = MAX_PIXELS) -> np.ndarray:
    """At most ``limit`` rows and columns, each the maximum of its block; NaN wins."""
    for axis in (0, 1):
        n = values.shape[axis]
        if n > limit:
            starts = np.arange(limit) * n // limit
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def _colours(values: np.ndarray) -> tuple[Colormap, LogNorm]:
    top = float(np.nanmax(values)) if not np.isnan(values).all() else 1.0
    top = top if top > 0 else 1.0
    positive = values[values > 0]
    low = max(float(positive.min()) if positive.size else top / 10, top * 10**-DECADES)
    cmap = matplotlib.colormaps[style.SEQUENTIAL].with_extremes(under=ZERO_COLOUR, bad=BAD_COLOUR)
    return cmap, LogNorm(vmin=min(low, top / 10), vmax=top)


def _draw_map(fig: Figure, ax: Axes, grid: ErrorGrid, tile: tuple[int, int], axes: tuple[str, str]) -> None:
    values = _shrink(grid.values)
    cmap, norm = _colours(values)
    rows, cols = grid.values.shape
    small = max(values.shape) <= MAX_NUMBERED
    shown = np.ma.masked_invalid(np.where(values == 0, norm.vmin / 10, np.maximum(values, norm.vmin)))
    extent = None if small else (-0.5, cols - 0.5, rows - 0.5, -0.5)
    aspect = "equal" if 0.5 < rows / cols < 2 else "auto"
    image = ax.imshow(shown, cmap=cmap, norm=norm, aspect=aspect, extent=extent, rasterized=True)
    unit = "relative L2 error" if grid.by == "tile" else "max |error| / row RMS"
    fig.colorbar(image, ax=ax, label=unit, shrink=0.8, extend="min")
    frame(ax)
    if small:
        _numbered(ax, values, cmap, norm, "NaN", 6.5)
    row, col = grid.worst_cell
    ax.plot(
        col, row, marker="o", markersize=13, markerfacecolor="none", markeredgecolor=BAD_COLOUR, markeredgewidth=1.8
    )
    labels = {
        "element": (axes[1], axes[0], "every element" + (f", matrix {list(grid.matrix)}" if grid.matrix else "")),
        "tile": ("tile column", "tile row", f"tiles of {tile[0]} x {tile[1]}"),
        "lane": ("column in the tile", "lane (row in the tile)", "all tiles laid over each other"),
        "kv_iteration": ("KV iteration", axes[0], "iteration by iteration"),
    }[grid.by]
    ax.set(xlabel=labels[0], ylabel=labels[1], title=labels[2])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    if grid.by == "lane" and rows == 128:
        ax.set_yticks([0, 32, 64, 96, 127])
        for warp in (32, 64, 96):
            ax.axhline(warp - 0.5, color=style.PAPER, linewidth=0.8)
    if np.isnan(values).any():
        ax.plot([], [], "s", color=BAD_COLOUR, label="NaN/Inf differs")
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12))


def _zoom_origin(grid: ErrorGrid, zoom: str | tuple[int, int] | None) -> tuple[int, int]:
    """(first column, first row) of the zoomed corner."""
    rows, cols = grid.signed.shape
    if zoom is None or zoom == "corner":
        return 0, 0
    if zoom == "worst":
        row, col = ((0, 0) + grid.worst)[-2:]
        centre = [(col - MAX_NUMBERED // 2, cols), (row - MAX_NUMBERED // 2, rows)]
        left, top = (int(np.clip(at, 0, max(0, n - MAX_NUMBERED))) for at, n in centre)
        return left, top
    if isinstance(zoom, tuple) and len(zoom) == 2 and all(isinstance(n, int) for n in zoom):
        if 0 <= zoom[0] < rows and 0 <= zoom[1] < cols:
            return zoom[1], zoom[0]
    raise ArgumentError("zoom", zoom, f"'worst', 'corner', None, or (row, column) within {rows} x {cols}")


def _extent(signed: np.ndarray, top: int, left: int) -> tuple[int, int]:
    return min(MAX_NUMBERED, signed.shape[0] - top), min(MAX_NUMBERED, signed.shape[1] - left)


def _numbered(ax: Axes, values: np.ndarray, cmap: Colormap, norm: Normalize, bad: str, size: float) -> None:
    """Write every cell of a small raster, in ink that is readable on its colour."""
    shades = cmap(norm(np.ma.masked_invalid(values)))[..., :3]
    labels = np.vectorize(lambda v: bad if np.isnan(v) else compact(v), otypes=[object])(values)
    cell_texts(ax, labels, shades, size)


def _draw_zoom(ax: Axes, grid: ErrorGrid, top: int, left: int, axes: tuple[str, str]) -> None:
    height, width = _extent(grid.signed, top, left)
    part = grid.signed[top : top + height, left : left + width]
    limit = float(np.nanmax(np.abs(part))) if not np.isnan(part).all() else 1.0
    limit = limit if limit > 0 else 1.0
    cmap = matplotlib.colormaps[style.DIVERGING].with_extremes(bad=BAD_COLOUR)
    norm = TwoSlopeNorm(vcenter=0.0, vmin=-limit, vmax=limit)
    ax.imshow(np.ma.masked_invalid(part), cmap=cmap, norm=norm)
    frame(ax)
    unit = 10.0 ** np.floor(np.log10(limit)) if not 1e-6 < limit < 1e6 else 1.0  # long exponents would not fit a cell
    _numbered(ax, part / unit, cmap, Normalize(norm.vmin / unit, norm.vmax / unit), "NaN", 5.2)
    ax.set_xticks(range(0, width, 4), [str(left + i) for i in range(0, width, 4)])
    ax.set_yticks(range(0, height, 4), [str(top + i) for i in range(0, height, 4)])
    where = f" of matrix {list(grid.matrix)}" if grid.matrix else ""
    ax.set(
        xlabel=axes[1],
        ylabel=axes[0],
        title=f"signed error / row RMS{where}" + (f", in units of {unit:.0e}" if unit != 1 else ""),
    )
