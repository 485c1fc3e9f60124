"""How far a number moves from run to run when nothing changed, and where it moved further: change points.

Values are compared on a scale of their own: times by their logarithm, gated metrics as a part of their bound. The
noise of a series is a robust spread of its differences from run to run (1.4826 median absolute deviations, / sqrt 2).
It is that of all series of its kind on its machine until it has `OWN` differences itself, then its own, half of the
others' at least: few runs say little of one row, many rows say much. Rows of a bench add what their repetitions spread.

Change points are those of optimal partitioning (Jackson et al. 2005; what PELT of Killick et al. 2012 finds) with
squared error: exact, and at once for the few hundred runs of a history. The penalty of a change is the square of the
z-score that one of all places of all series would pass by chance in `ALARMS` of such histories, so that a history of
thousands of rows stays as quiet as one of ten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dsv4lib.lab.history.series import BENCH, METRIC, TIME, Series

ALARMS = 0.002  # of quiet histories that may show anything
ENOUGH = 6  # differences from run to run that tell noise; with fewer it is `ASSUMED`
OWN = 8  # differences of one series that tell its own noise
ASSUMED = {BENCH: 0.02, TIME: 0.15, METRIC: 0.0}
LEAST = {BENCH: 0.003, TIME: 0.03, METRIC: 1e-9}
TICK_US = 0.02  # resolution of a GPU's times
SURE = 2.0  # times the z-score: what one run at an end must be off by
MEDIAN_OF_RANGE = 0.072  # standard error of the median of 21 values / their range
Values = NDArray[np.float64]


def scaled(series: Series) -> Values:
    """Return the values on the scale of noise: logarithms, or parts of a gate's bound."""
    if series.kind != METRIC:
        return np.log(np.maximum(series.values, 1e-12))
    size = max(abs(series.bound or 0.0), float(np.abs(series.values).max(initial=0.0)))
    return series.values / (size or 1.0)


def robust(differences: Values, tails: bool = True) -> float:
    """Return the standard deviation of one value, from differences of two of which few may be changes.

    Args:
        differences: of neighbouring runs.
        tails: False for what a run repeats exactly: there the largest differences are changes, not long tails.
    """
    if not len(differences):
        return 0.0
    width = 1.4826 * float(np.median(np.abs(differences))) / np.sqrt(2)
    if tails and len(differences) >= 40:  # long tails: one in twenty differences is no larger than normal ones would be
        width = max(width, float(np.quantile(np.abs(differences), 0.95)) / 1.96 / np.sqrt(2))
    return width


def of(all_series: Sequence[Series]) -> list[tuple[float, int]]:
    """Return noise of each series on its scale, and how many differences tell it (0: it is assumed)."""
    pools: dict[tuple[str, str], list[Values]] = defaultdict(list)
    own = [np.diff(scaled(one)) for one in all_series]
    for one, differences in zip(all_series, own, strict=True):
        pools[one.kind, one.label].append(differences)
    pooled = {key: np.concatenate(parts) for key, parts in pools.items()}
    found = []
    for one, differences in zip(all_series, own, strict=True):
        pool = pooled[one.kind, one.label]
        known, tails = len(pool) >= ENOUGH, one.kind != METRIC or bool(one.label)
        width = robust(pool, tails) if known else ASSUMED[one.kind]
        if len(differences) >= OWN:
            # less their middle: a steady slope is no noise
            width = max(robust(differences - np.median(differences), tails), width / 2)
        width = max(width, LEAST[one.kind])
        if one.kind == BENCH:
            width = max(width, *_of_repetitions(one))
        found.append((width, len(pool) if known else 0))
    return found


def _of_repetitions(series: Series) -> tuple[float, float]:
    """What one run's repetitions and its clock leave open, as parts of the value."""
    middle = float(np.median(series.values))
    spread = series.spread[np.isfinite(series.spread)]
    within = MEDIAN_OF_RANGE * float(np.median(spread)) / middle if len(spread) else 0.0
    return within, TICK_US / middle if series.unit == "us" else 0.0


def z_score(places: int, told_by: int) -> float:
    """Return how many standard errors a change must have among so many places where one could be.

    Args:
        places: of all series together.
        told_by: differences that tell the noise; few of them tell it badly, so that more is required.
    """
    once = NormalDist().inv_cdf(1 - ALARMS / (2 * max(places, 1)))
    return once * (1 + 1.5 / np.sqrt(max(told_by, ENOUGH)))


@dataclass(frozen=True)
class Stretch:
    """Runs at one level: indices of theirs (those of outliers left out) and the median of their values."""

    runs: tuple[int, ...]
    level: float


def stretches(values: Values, noise: float, z: float) -> tuple[list[Stretch], int | None]:
    """Return the levels that values have one after the other, and the newest run where it alone is off, by too little.

    One run is no level: between two others it is an outlier and left out. At an end it must be off by `SURE` times
    as much, for times have long tails; two runs must both be off. A level that a later one takes back is none either.

    Args:
        values: on the scale of `scaled`. noise: of one value. z: standard errors that a change must have.
    """
    kept, watched = list(range(len(values))), None
    while True:
        parts = _segments(values[kept], noise, z)
        found = [tuple(kept[first:end]) for first, end in parts]
        outlier = _outlier(values, found, noise * z)
        if outlier is None:
            break
        if outlier == len(values) - 1:
            watched = outlier
        kept.remove(outlier)
    levels = [Stretch(runs, float(np.median(values[list(runs)]))) for runs in found]
    return _lasting(levels, noise * z), watched


def _outlier(values: Values, found: Sequence[tuple[int, ...]], least: float) -> int | None:
    """A run to leave out: the only one of its stretch, or of two that do not both leave their neighbours."""
    for i, runs in enumerate(found):
        others = [found[j] for j in (i - 1, i + 1) if 0 <= j < len(found)]
        if len(runs) > 2 or not others:
            continue
        ways = [values[list(runs)] - np.median(values[list(other)]) for other in others]
        if len(runs) == 2:
            if any((np.abs(way) < least / 2).any() or np.ptp(np.sign(way)) for way in ways):
                return runs[int(np.argmax(np.abs(ways[0])))]
        elif len(others) == 2:
            return runs[0]
        elif abs(ways[0][0]) < SURE * least:
            return max(runs[0], others[0][0]) if len(values) == 2 else runs[0]
    return None


def _lasting(levels: list[Stretch], least: float) -> list[Stretch]:
    """Join what lies between two stretches of the same level."""
    kept: list[Stretch] = []
    for one in levels:
        back = [i for i, earlier in enumerate(kept) if abs(earlier.level - one.level) < least]
        if back:
            runs = tuple(run for stretch in kept[back[0] :] for run in stretch.runs) + one.runs
            kept = [*kept[: back[0]], Stretch(runs, one.level)]
        else:
            kept.append(one)
    return kept


def _segments(values: Values, noise: float, z: float) -> list[tuple[int, int]]:
    """(first, past the last) of the stretches in which values stay at one level."""
    count = len(values)
    if count < 2 or float(np.ptp(values)) <= z * noise:
        return [(0, count)]
    units = (values - values.mean()) / noise
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (units, units**2))
    best, begins = np.zeros(count + 1), np.zeros(count + 1, int)
    best[0] = -z * z
    for end in range(1, count + 1):
        first = np.arange(end)
        cost = squares[end] - squares[first] - (sums[end] - sums[first]) ** 2 / (end - first)
        total = best[first] + cost + z * z
        begins[end] = int(np.argmin(total))
        best[end] = total[begins[end]]
    parts, end = [], count
    while end:
        parts.append((int(begins[end]), end))
        end = int(begins[end])
    return parts[::-1]
