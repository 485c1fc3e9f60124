"""`compare`: every criterion in one record, with the place where it is worst.

Criteria, all of which must hold:

* NaN, +Inf and -Inf stand at the same positions;
* every finite element is within ``abs`` x RMS of its row **or** ``rel`` x the larger magnitude;
* the symmetric cosine difference ``1 - 2<x,y>/(<x,x>+<y,y>)`` is small over the whole array;
* no tile's relative L2 error is large.

The maximum distance in units in the last place is reported, not judged: it is unbounded at cancelled elements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dsv4lib.check import tolerances
from dsv4lib.check.arrays import Array, read_pair, row_scale
from dsv4lib.check.tolerances import Tolerance
from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class Comparison:
    """The record of one comparison.

    Attributes:
        passed: all criteria held.
        reasons: one sentence per criterion that failed; empty if passed.
        dtype: the format it was judged as.
        shape: shape of both arrays.
        count: number of elements; ``finite`` of them are finite on both sides.
        finite: elements compared by value.
        nonfinite_mismatches: positions where one side has NaN, +Inf or -Inf and the other something else.
        mismatches: finite elements outside abs-or-rel.
        max_abs: largest absolute error.
        max_ulp: largest error in steps of ``dtype`` at the larger value; None for block-scaled FP4.
        rel_l2: |error|_2 / |expected|_2 over the whole array.
        cosine: symmetric cosine difference.
        worst_index: coordinates of the worst element: the first non-finite mismatch if there is one, else the element
            that most exceeds (or comes closest to) what is allowed.
        worst_actual: its value.
        worst_expected: the value it should have.
        worst_ratio: its error over what is allowed; > 1 fails.
        worst_tile: tile coordinates (leading axes, tile row, tile column) of the tile with the largest relative error.
        worst_tile_origin: element coordinates of that tile's first element.
        worst_tile_relative: that tile's |error|_2 / |expected|_2.
        tile: extent of a tile on the last two axes.
        tol: the tolerance applied.
    """

    passed: bool
    reasons: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    count: int
    finite: int
    nonfinite_mismatches: int
    mismatches: int
    max_abs: float
    max_ulp: float | None
    rel_l2: float
    cosine: float
    worst_index: tuple[int, ...]
    worst_actual: float
    worst_expected: float
    worst_ratio: float
    worst_tile: tuple[int, ...]
    worst_tile_origin: tuple[int, ...]
    worst_tile_relative: float
    tile: tuple[int, int]
    tol: Tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON types. Non-finite numbers become the strings 'nan', 'inf' and '-inf'."""
        return _plain(asdict(self))

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED (" + "; ".join(self.reasons) + ")"
        ulp = "n/a" if self.max_ulp is None else f"{self.max_ulp:.3g}"
        return (
            f"{verdict} as {self.dtype} {list(self.shape)}: max abs {self.max_abs:.3g}, max ulp {ulp}, "
            f"rel L2 {self.rel_l2:.3g}, cosine diff {self.cosine:.3g}, worst element {list(self.worst_index)} = "
            f"{self.worst_actual:.6g} for {self.worst_expected:.6g}, worst tile {list(self.worst_tile)} "
            f"rel {self.worst_tile_relative:.3g}"
        )


def compare(
    actual: Array,
    expected: Array,
    tol: Tolerance | str | None = None,
    tile: tuple[int, int] = (128, 128),
    dtype: torch.dtype | str | None = None,
) -> Comparison:
    """Judge ``actual`` against ``expected``.

    Args:
        actual: the result, torch or numpy, any rank, any real dtype the table knows.
        expected: the oracle, same shape; integers on both sides or on neither. Usually a finer format than ``actual``.
        tol: a `Tolerance`, a name in the table, or None for the row of ``dtype``.
        tile: rows and columns of a tile on the last two axes that are not 1 (a short last tile joins its neighbour).
        dtype: the format to judge in; None takes the coarser of the two arrays'. Name it for values that were rounded
            to a coarser format than the array they are stored in (dequantised FP8 or FP4, for instance).

    Returns:
        A `Comparison`. It never raises for wrong numbers.

    Raises:
        ArgumentError: not arrays, shapes or kinds differ, empty arrays, unknown dtype or tolerance, bad tile.
    """
    a, e, found = read_pair(actual, expected)
    name = found if dtype is None else tolerances.format_name(dtype)
    if (name == "int") != (found == "int"):
        raise ArgumentError("dtype", name, f"the kind of the arrays, which is {found}")
    if tol is None or isinstance(tol, str):
        tol = tolerances.tolerance(name if tol is None else tol)
    elif not isinstance(tol, Tolerance):
        raise ArgumentError("tol", tol, "a Tolerance, a name in the table, or None")
    _check_tile(tile)

    bad_kind = _kind(a) != _kind(e)
    finite = torch.isfinite(a) & torch.isfinite(e)
    a0, e0 = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
    error = (a0 - e0).abs()
    larger = torch.maximum(a0.abs(), e0.abs())
    allowed = torch.maximum(tol.abs * row_scale(a0, e0), tol.rel * larger).clamp(min=tol.floor)
    ratio = torch.where(error > 0, error / allowed, 0.0)  # allowed 0 gives inf: exactness was required
    cosine = _cosine_difference(a0, e0)
    step = tolerances.spacing(larger, name)
    max_ulp = None if step is None else float((error / step).max())
    index, tile_origin, tile_relative = _worst_tile(error, e0, tile, tol.floor)

    nonfinite, mismatches = int(bad_kind.sum()), int((ratio > 1).sum())
    flat = int(bad_kind.flatten().to(torch.int8).argmax()) if nonfinite else int(ratio.flatten().argmax())
    place = _unravel(flat, a.shape)
    reasons = _reasons(nonfinite, mismatches, int(finite.sum()), cosine, tile_relative, index, place, tol)
    return Comparison(
        passed=not reasons,
        reasons=reasons,
        dtype=name,
        shape=tuple(a.shape),
        count=a.numel(),
        finite=int(finite.sum()),
        nonfinite_mismatches=nonfinite,
        mismatches=mismatches,
        max_abs=float(error.max()),
        max_ulp=max_ulp,
        rel_l2=_relative(error, e0, tol.floor),
        cosine=cosine,
        worst_index=place,
        worst_actual=float(a.flatten()[flat]),
        worst_expected=float(e.flatten()[flat]),
        worst_ratio=math.inf if nonfinite else float(ratio.max()),
        worst_tile=index,
        worst_tile_origin=tile_origin,
        worst_tile_relative=tile_relative,
        tile=(int(tile[0]), int(tile[1])),
        tol=tol,
    )


def tile_errors(
    error: torch.Tensor, expected: torch.Tensor, tile: tuple[int, int], floor: float = 0.0
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the relative L2 error of every tile.

    Args:
        error: absolute errors, [..., M, N], fp64, finite.
        expected: same shape.
        tile: rows and columns of a tile. A last tile shorter than half joins its neighbour: a sliver of a few elements
            that all happen to cancel would otherwise look terrible.
        floor: smallest meaningful value, kept out of the denominator's zero.

    Returns:
        (relative [..., tile rows, tile columns], first row of each tile row, first column of each tile column).
    """
    peak = torch.maximum(error.abs().max(), expected.abs().max())
    unit = peak if float(peak) > 0 else torch.ones_like(peak)  # squares of fp64 extremes would over- or underflow
    rows, cols = _starts(error.shape[-2], tile[0]), _starts(error.shape[-1], tile[1])
    num = _block_sums((error / unit) ** 2, rows, cols)
    den = _block_sums((expected / unit) ** 2, rows, cols)
    den = torch.maximum(den.sqrt() * unit, torch.full_like(den, floor))
    num = num.sqrt() * unit
    return torch.where(num > 0, num / den, 0.0), rows, cols


def _check_tile(tile: Any) -> None:
    if not (isinstance(tile, (tuple, list)) and len(tile) == 2 and all(isinstance(n, int) and n >= 1 for n in tile)):
        raise ArgumentError("tile", tile, "two integers >= 1: rows, columns")


def _kind(x: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf."""
    kind = torch.zeros_like(x, dtype=torch.int8)
    kind[torch.isnan(x)] = 1
    kind[torch.isposinf(x)] = 2
    kind[torch.isneginf(x)] = 3
    return kind


def _cosine_difference(a: torch.Tensor, e: torch.Tensor) -> float:
    """1 - 2<x,y>/(<x,x>+<y,y>), computed as |x-y|^2/(|x|^2+|y|^2) so that equal arrays give exactly 0."""
    peak = torch.maximum(a.abs().max(), e.abs().max())
    if float(peak) == 0:
        return 0.0
    a, e = a / peak, e / peak
    return float(((a - e) ** 2).sum() / ((a * a).sum() + (e * e).sum()))


def _relative(error: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    whole, _, _ = tile_errors(error.reshape(1, -1), expected.reshape(1, -1), (1, error.numel()), floor)
    return float(whole.max())


def _starts(extent: int, tile: int) -> list[int]:
    starts = list(range(0, extent, tile))
    if len(starts) > 1 and extent - starts[-1] < tile / 2:
        starts.pop()
    return starts


def _block_sums(x: torch.Tensor, rows: list[int], cols: list[int]) -> torch.Tensor:
    """Sums of ``x`` [..., M, N] over the blocks that begin at ``rows`` x ``cols``."""
    x = torch.stack([part.sum(dim=-2) for part in x.tensor_split(rows[1:], dim=-2)], dim=-2)
    return torch.stack([part.sum(dim=-1) for part in x.tensor_split(cols[1:], dim=-1)], dim=-1)


def _worst_tile(
    error: torch.Tensor, expected: torch.Tensor, tile: tuple[int, int], floor: float
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """(tile coordinates, element coordinates of its origin in the original shape, relative error)."""
    shape = tuple(error.shape)
    dense = [n for n in shape if n > 1]
    matrix = ([1, 1] + dense)[-2:]
    batch = dense[:-2]
    relative, rows, cols = tile_errors(error.reshape(*batch, *matrix), expected.reshape(*batch, *matrix), tile, floor)
    *lead, i, j = _unravel(int(relative.flatten().argmax()), relative.shape)
    flat = 0
    for extent, position in zip([*batch, *matrix], [*lead, rows[i], cols[j]], strict=True):
        flat = flat * extent + position
    return (*lead, i, j), _unravel(flat, shape), float(relative.max())


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for extent in reversed(shape):
        flat, here = divmod(flat, extent)
        place.append(here)
    return tuple(reversed(place))


def _reasons(
    nonfinite: int,
    mismatches: int,
    finite: int,
    cosine: float,
    tile_relative: float,
    tile_index: tuple[int, ...],
    place: tuple[int, ...],
    tol: Tolerance,
) -> tuple[str, ...]:
    reasons = []
    if nonfinite:
        reasons.append(f"nonfinite: NaN/Inf differ at {nonfinite} positions, first {list(place)}")
    if mismatches:
        where = "" if nonfinite else f", worst {list(place)}"
        reasons.append(
            f"elements: {mismatches} of {finite} outside abs {tol.abs:g} x row RMS or rel {tol.rel:g}{where}"
        )
    if cosine > tol.cosine:
        reasons.append(f"cosine: difference {cosine:.3g} > {tol.cosine:g}")
    if tile_relative > tol.tile:
        reasons.append(f"tile: {list(tile_index)} has relative error {tile_relative:.3g} > {tol.tile:g}")
    return tuple(reasons)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
