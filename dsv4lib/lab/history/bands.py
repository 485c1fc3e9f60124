"""Give each number over runs its level and its band of noise: what figures draw around the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsv4lib.lab.history import noise
from dsv4lib.lab.history.series import BENCH, METRIC, At, Series
from dsv4lib.lab.history.trends import WINDOW, Finding


@dataclass(frozen=True)
class Band:
    """One number over runs with its noise.

    Attributes:
        series: the number, cut to the runs that were judged.
        places: where its runs stand among `runs`. runs: all runs of the history, oldest first.
        level: of each run's stretch. low, high: a value outside of them is more than noise.
        found: what was found in it or, of a row of a bench, in its whole machine.
    """

    series: Series
    places: tuple[int, ...]
    runs: tuple[At, ...]
    level: noise.Values
    low: noise.Values
    high: noise.Values
    found: tuple[Finding, ...]


def of(all_series: Sequence[Series], found: Sequence[Finding], window: int = WINDOW) -> list[Band]:
    """Return the bands of all series, in their order.

    Args:
        all_series: of a history. found: what `trends.judge` found in it. window: as given to `trends.judge`.
    """
    cut = [one.newest(window) for one in all_series]
    runs = tuple(sorted({at.run_id: at for one in cut for at in one.at}.values(), key=lambda at: at.run_id))
    place = {at.run_id: i for i, at in enumerate(runs)}
    several = [one for one in cut if len(one.at) > 1]
    alone = [_without_machines(one, found) for one in several]
    judged = dict(zip(map(id, several), noise.of(alone), strict=True))
    candidates = sum(len(one.values) - 1 for one in several)
    bands = []
    for one in cut:
        width, told_by = judged.get(id(one), (0.0, 0))
        reach = width * noise.z_score(candidates, told_by)
        own = tuple(
            f for f in found
            if f.label == one.label and (f.what == one.name or (f.kind == "machine" and one.kind == BENCH))
        )  # fmt: skip
        level = _levels(one, [f for f in own if f.kind in ("step", "machine")])
        if one.kind == METRIC:
            size = max(abs(one.bound or 0.0), float(np.abs(one.values).max(initial=0.0))) * reach
            low, high = level - size, level + size
        else:
            low, high = level * np.exp(-reach), level * np.exp(reach)
        bands.append(Band(one, tuple(place[at.run_id] for at in one.at), runs, level, low, high, own))
    return bands


def _without_machines(one: Series, found: Sequence[Finding]) -> Series:
    """The number with shifts of its whole machine taken back, which are no noise of its own."""
    values = one.values.copy()
    for shift in found:
        later = np.array([at.run_id >= shift.first.run_id for at in one.at])
        if shift.kind == "machine" and one.kind == BENCH and shift.label == one.label and 0 < later.sum() < len(later):
            values[later] *= np.median(values[~later]) / np.median(values[later])
    return replace(one, values=values)


def _levels(one: Series, steps: Sequence[Finding]) -> noise.Values:
    """The median of each stretch between two steps, a value a run."""
    starts = sorted({i for i, at in enumerate(one.at) for step in steps if at.run_id == step.first.run_id})
    level = np.empty(len(one.values))
    for first, end in zip([0, *starts], [*starts, len(level)], strict=True):
        level[first:end] = np.median(one.values[first:end]) if end > first else 0.0
    return level
