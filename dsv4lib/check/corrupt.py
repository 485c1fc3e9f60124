"""Corrupt a result as broken kernels do. Holds what the comparator must reject, and the one thing it must not.

Each corruption takes an array (torch or numpy, at least two axes, last two at least 66 x 66 so that every pattern fits)
and a seeded `numpy.random.Generator`, and returns a damaged copy. The damage is the smallest honest version of its
kind: one element of typical size, one row, one 32 x 32 tile, one block of 32. `CORRUPTIONS` lists all of them;
`HARMLESS` lists changes that carry no information and must pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dsv4lib.check.arrays import Array
from dsv4lib.errors import ArgumentError

PAGE = 64  # rows of one page in `page_off_by_one`
MIN_EXTENT = 66


def _copy(x: Array) -> Array:
    return x.clone() if isinstance(x, torch.Tensor) else x.copy()


def _matrix(x: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """A copy of ``x`` and a view of one of its matrices (the last two axes at a random place of the others)."""
    if not isinstance(x, (torch.Tensor, np.ndarray)) or x.ndim < 2 or min(x.shape[-2:]) < MIN_EXTENT:
        shown = tuple(x.shape) if hasattr(x, "shape") else type(x).__name__
        raise ArgumentError("x", shown, f"a torch or numpy array whose last two axes are at least {MIN_EXTENT}")
    out = _copy(x)
    view = out
    for extent in x.shape[:-2]:
        view = view[int(rng.integers(extent))]
    return out, view


def _typical(view: Array, rng: np.random.Generator) -> tuple[int, int, float]:
    """(row, column, row RMS) of the element of a random row whose magnitude is nearest the row's RMS."""
    row = int(rng.integers(view.shape[0]))
    values = view[row].double().numpy() if isinstance(view, torch.Tensor) else view[row].astype(np.float64)
    rms = float(np.sqrt(np.mean(values**2)))
    return row, int(np.abs(np.abs(values) - rms).argmin()), rms


def _corner(view: Array, size: tuple[int, int], rng: np.random.Generator, aligned: bool = True) -> tuple[slice, slice]:
    """A random ``size`` block, on its own grid if ``aligned``."""
    picked = []
    for extent, n in zip(view.shape[-2:], size, strict=True):
        start = int(rng.integers(extent // n)) * n if aligned else int(rng.integers(extent - n + 1))
        picked.append(slice(start, start + n))
    return picked[0], picked[1]


def element_zeroed(x: Array, rng: np.random.Generator) -> Array:
    """One element of typical size was never written."""
    out, view = _matrix(x, rng)
    row, col, _ = _typical(view, rng)
    view[row, col] = 0
    return out


def element_negated(x: Array, rng: np.random.Generator) -> Array:
    """One element of typical size has the wrong sign."""
    out, view = _matrix(x, rng)
    row, col, _ = _typical(view, rng)
    view[row, col] = -view[row, col]
    return out


def element_doubled(x: Array, rng: np.random.Generator) -> Array:
    """One element of typical size was accumulated twice."""
    out, view = _matrix(x, rng)
    row, col, _ = _typical(view, rng)
    view[row, col] = view[row, col] * 2
    return out


def row_zeroed(x: Array, rng: np.random.Generator) -> Array:
    """One row (one lane's output) is missing."""
    out, view = _matrix(x, rng)
    view[int(rng.integers(view.shape[0]))] = 0
    return out


def last_row_unwritten(x: Array, rng: np.random.Generator) -> Array:
    """The ragged last row was predicated off."""
    out, view = _matrix(x, rng)
    view[-1] = 0
    return out


def last_column_unwritten(x: Array, rng: np.random.Generator) -> Array:
    """The ragged last column was predicated off."""
    out, view = _matrix(x, rng)
    view[:, -1] = 0
    return out


def tile_zeroed(x: Array, rng: np.random.Generator) -> Array:
    """One 32 x 32 tile is missing."""
    out, view = _matrix(x, rng)
    view[_corner(view, (32, 32), rng)] = 0
    return out


def tile_negated(x: Array, rng: np.random.Generator) -> Array:
    """One 32 x 32 tile has the wrong sign."""
    out, view = _matrix(x, rng)
    block = _corner(view, (32, 32), rng)
    view[block] = -view[block]
    return out


def tile_stale(x: Array, rng: np.random.Generator) -> Array:
    """Leave the previous iteration in one 32 x 32 tile. It has its left neighbour's values."""
    out, view = _matrix(x, rng)
    rows, cols = _corner(view[:, 32:], (32, 32), rng)
    view[rows, cols.start + 32 : cols.stop + 32] = _copy(view[rows, cols])
    return out


def row_halves_swapped(x: Array, rng: np.random.Generator) -> Array:
    """The upper and the lower half changed places (a CTA pair's halves)."""
    out, view = _matrix(x, rng)
    half = view.shape[0] // 2
    upper, lower = _copy(view[:half]), _copy(view[-half:])
    view[:half], view[-half:] = lower, upper
    return out


def column_halves_swapped(x: Array, rng: np.random.Generator) -> Array:
    """The left and the right half changed places."""
    out, view = _matrix(x, rng)
    half = view.shape[1] // 2
    left, right = _copy(view[:, :half]), _copy(view[:, -half:])
    view[:, :half], view[:, -half:] = right, left
    return out


def rows_swapped(x: Array, rng: np.random.Generator) -> Array:
    """Two neighbouring rows changed places (wrong lane map)."""
    out, view = _matrix(x, rng)
    row = int(rng.integers(view.shape[0] - 1))
    view[row : row + 2] = _copy(view[[row + 1, row]])
    return out


def columns_rotated(x: Array, rng: np.random.Generator) -> Array:
    """Shift one 32-column stretch of one row by a column (address off by one)."""
    out, view = _matrix(x, rng)
    row = int(rng.integers(view.shape[0]))
    _, cols = _corner(view, (1, 32), rng)
    old = _copy(view[row, cols])
    view[row, cols.start + 1 : cols.stop] = old[:-1]
    view[row, cols.start] = old[-1]
    return out


def page_off_by_one(x: Array, rng: np.random.Generator) -> Array:
    """One page of rows was read one row too far."""
    out, view = _matrix(x, rng)
    start = int(rng.integers(max(1, (view.shape[0] - 1) // PAGE))) * PAGE
    stop = min(start + PAGE, view.shape[0] - 1)
    view[start:stop] = _copy(view[start + 1 : stop + 1])
    return out


def block_doubled(x: Array, rng: np.random.Generator) -> Array:
    """The scale of one block of 32 is one power of two too large."""
    out, view = _matrix(x, rng)
    block = _corner(view, (1, 32), rng)
    view[block] = view[block] * 2
    return out


def block_halved(x: Array, rng: np.random.Generator) -> Array:
    """The scale of one block of 32 is one power of two too small."""
    out, view = _matrix(x, rng)
    block = _corner(view, (1, 32), rng)
    view[block] = view[block] / 2
    return out


def block_transposed(x: Array, rng: np.random.Generator) -> Array:
    """One 8 x 8 core matrix is transposed."""
    out, view = _matrix(x, rng)
    block = _corner(view, (8, 8), rng)
    view[block] = _copy(view[block]).T
    return out


def nan_injected(x: Array, rng: np.random.Generator) -> Array:
    """One element is NaN."""
    out, view = _matrix(x, rng)
    view[int(rng.integers(view.shape[0])), int(rng.integers(view.shape[1]))] = float("nan")
    return out


def inf_injected(x: Array, rng: np.random.Generator) -> Array:
    """One element overflowed."""
    out, view = _matrix(x, rng)
    view[int(rng.integers(view.shape[0])), int(rng.integers(view.shape[1]))] = float("inf")
    return out


def nan_masked(x: Array, rng: np.random.Generator) -> Array:
    """A NaN that belongs there (needs one in ``x``) was turned into 0."""
    del rng
    out = _copy(x)
    where = out != out
    if not where.any():
        raise ArgumentError("x", tuple(x.shape), "an array that holds at least one NaN")
    out[where] = 0
    return out


def inf_clamped(x: Array, rng: np.random.Generator) -> Array:
    """Turn an infinity that belongs there into a large finite number.

    Needs an infinity in ``x``.
    """
    del rng
    out = _copy(x)
    where = abs(out) == float("inf")
    if not where.any():
        raise ArgumentError("x", tuple(x.shape), "an array that holds at least one infinity")
    out[where] = 3e4
    return out


def inf_sign(x: Array, rng: np.random.Generator) -> Array:
    """An infinity that belongs there (needs one in ``x``) has the wrong sign."""
    del rng
    out = _copy(x)
    where = abs(out) == float("inf")
    if not where.any():
        raise ArgumentError("x", tuple(x.shape), "an array that holds at least one infinity")
    out[where] = -out[where]
    return out


def zero_signs_flipped(x: Array, rng: np.random.Generator) -> Array:
    """Every zero of ``x`` gets the other sign. Harmless.

    The sign of a zero is an accident of the order of operations ((-1) + 1 is +0, a product of mixed signs that
    underflows is -0), and no later operation of the model distinguishes the two: rejecting it would be a false alarm.
    """
    del rng
    out = _copy(x)
    where = out == 0
    out[where] = -out[where]
    return out


Corruption = Callable[[Array, np.random.Generator], Array]

CORRUPTIONS: dict[str, Corruption] = {
    f.__name__: f
    for f in (
        element_zeroed,
        element_negated,
        element_doubled,
        row_zeroed,
        last_row_unwritten,
        last_column_unwritten,
        tile_zeroed,
        tile_negated,
        tile_stale,
        row_halves_swapped,
        column_halves_swapped,
        rows_swapped,
        columns_rotated,
        page_off_by_one,
        block_doubled,
        block_halved,
        block_transposed,
        nan_injected,
        inf_injected,
        nan_masked,
        inf_clamped,
        inf_sign,
    )
}
NEEDS_NAN = frozenset({"nan_masked"})
NEEDS_INF = frozenset({"inf_clamped", "inf_sign"})
HARMLESS: dict[str, Corruption] = {"zero_signs_flipped": zero_signs_flipped}
