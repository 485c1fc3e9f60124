"""Draw pieces that several figures share. The style inside a function, rasters of categories, numbers in cells.

Large layouts are rasters (one image), never thousands of patches: a 128 x 128 tile as patches takes most of a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from dsv4lib.errors import ArgumentError
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, RC

MAX_NUMBERED = 16  # cells carry numbers only up to 16 x 16

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function under the lab's style. Axes and titles read their defaults when they are made."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(RC):
            return draw(*args, **kwargs)

    return inside


def matrix(name: str, values: Any) -> np.ndarray:
    """Check ``values`` as a two-dimensional integer array. ArgumentError for anything else."""
    array = np.asarray(values)
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ArgumentError(name, f"{array.dtype}{list(array.shape)}", "a non-empty two-dimensional integer array")
    return array.astype(np.int64)


def _luminance(colour: Any) -> float:
    """Relative luminance as in WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


_BALANCE = ((_luminance(INK) + 0.05) * (_luminance(PAPER) + 0.05)) ** 0.5  # here both have the same contrast


def ink_on(colour: Any) -> str:
    """Choose dark or light text, whichever has more contrast on ``colour``."""
    return INK if _luminance(colour) + 0.05 > _BALANCE else PAPER


def categories(ax: Axes, codes: np.ndarray, colours: Sequence[str], empty: str = "#eef1f4") -> None:
    """A raster whose cell ``codes[i, j]`` picks a colour (modulo their number). Negative codes are left ``empty``."""
    cmap = ListedColormap([empty, *colours])
    ax.imshow(np.where(codes < 0, 0, codes % len(colours) + 1), cmap=cmap, vmin=0, vmax=len(colours), aspect="auto")
    frame(ax)


@lru_cache(maxsize=64)
def _glyph(text: str) -> tuple[Path, float, float]:
    """Outline of ``text`` at font size 1 with its width and height."""
    path = TextPath((0, 0), text, size=1.0)
    box = path.get_extents()
    return path, box.width, box.height


@lru_cache(maxsize=4096)
def _number_path(number: int) -> Path:
    """Outline of a number at font size 1, centred on the origin, put together from ten digits of one width."""
    digits = str(number)
    advance, height = _glyph("00")[1] - _glyph("0")[1], _glyph("0")[2]
    left = -len(digits) * advance / 2
    pieces = [
        _glyph(d)[0].transformed(Affine2D().translate(left + k * advance, -height / 2)) for k, d in enumerate(digits)
    ]
    return Path.make_compound_path(*pieces)


def numbers(ax: Axes, labels: np.ndarray, colours: np.ndarray | None = None, size: float = 7.5) -> None:
    """Write the integers ``labels[i, j]`` into a raster's cells, legibly. ``colours`` is the background of each.

    All labels are one collection of outlines: hundreds of text objects would take most of a second to lay out.
    """
    rows, columns = np.indices(labels.shape)
    paths = [_number_path(int(label)) for label in labels.ravel()]
    inks = [INK] * len(paths) if colours is None else [ink_on(c) for c in colours.reshape(len(paths), -1)]
    collection = PathCollection(
        paths,
        facecolors=inks,
        linewidths=0,
        offsets=np.column_stack((columns.ravel(), rows.ravel())),
        offset_transform=ax.transData,
    )
    collection.set_transform(Affine2D().scale(size / 72) + ax.figure.dpi_scale_trans)
    collection.set_in_layout(False)
    ax.add_collection(collection, autolim=False)


def cell_lines(ax: Axes, rows: int, columns: int, colour: str = PAPER, width: float = 1.0) -> None:
    """Draw thin lines between the cells of a ``rows`` x ``columns`` raster."""
    across = [[(-0.5, i - 0.5), (columns - 0.5, i - 0.5)] for i in range(1, rows)]
    down = [[(j - 0.5, -0.5), (j - 0.5, rows - 0.5)] for j in range(1, columns)]
    ax.add_collection(LineCollection(across + down, colors=colour, linewidths=width), autolim=False)


def frame(ax: Axes) -> None:
    """Draw all four spines, thin and quiet, and outward ticks."""
    ax.spines[:].set_visible(True)
    ax.spines[:].set_color(GRID)
    ax.tick_params(length=2, color=MUTED, labelsize=8)


def ticks(ax: Axes, rows: int, columns: int) -> None:
    """Set ticks at round coordinates, few enough to read."""
    ax.set_yticks(range(0, rows, _step(rows)))
    ax.set_xticks(range(0, columns, _step(columns)))


def _step(extent: int) -> int:
    if extent <= 16:
        return 1 if extent <= 8 else 2
    return max(1, 1 << (extent - 1).bit_length() - 3)


def zoom_frame(ax: Axes, row: int, column: int, rows: int, columns: int, colour: str = INK) -> None:
    """Outline a block of cells in a raster."""
    top, left = row - 0.5, column - 0.5
    ax.plot(
        [left, left + columns, left + columns, left, left],
        [top, top, top + rows, top + rows, top],
        color=colour,
        linewidth=1.2,
        clip_on=False,
    )
