"""Draw what differs: verdicts by form, and where the words of the first probes differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from dsv4lib.lab.day_one import reading
from dsv4lib.lab.day_one.reading import Compared
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.style import new_figure

COLOURS = {verdict: colour(verdict) for verdict in reading.VERDICTS}
MAPS = 6


def overview(compared: Sequence[Compared], title: str) -> Figure:
    """Bars of verdicts by form, and maps of the first probes that differ, one a form.

    Args:
        title: which GPU.
    """
    by_form = reading.counts(compared)
    shown = first_of_forms(compared)
    differ = sum(one.verdict == reading.DIFFERS for one in compared)
    alt = f"{title}: {len(compared)} micro-kernels of {len(by_form)} forms; {differ} differ from the emulator."
    fig = new_figure(max(4.0, 0.24 * len(by_form) + 1.2), alt=alt)
    grid = fig.add_gridspec(max(1, -(-len(shown) // 2)), 4 if shown else 2)
    axes = fig.add_subplot(grid[:, :2])
    names, left = list(by_form), np.zeros(len(by_form))
    for verdict in reading.VERDICTS:
        width = np.array([by_form[name][verdict] for name in names], float)
        if width.any():
            axes.barh(names, width, left=left, color=COLOURS[verdict], label=f"{verdict}: {int(width.sum())}")
        left += width
    axes.invert_yaxis()
    axes.set_xlabel("micro-kernels")
    axes.set_title(title)
    fig.legend(loc="outside lower left", ncols=3)
    for i, one in enumerate(shown):
        _map(fig.add_subplot(grid[i // 2, 2 + i % 2]), one)
    return fig


def first_of_forms(compared: Sequence[Compared]) -> list[Compared]:
    """The first probe of each form that has a map, those that differ in meaning first, `MAPS` at most."""
    found: dict[str, Compared] = {}
    for verdict in (reading.DIFFERS, reading.ROUNDS):
        for one in compared:
            if one.map is not None and one.verdict == verdict:
                found.setdefault(one.form, one)
    return list(found.values())[:MAPS]


def _map(axes: object, one: Compared) -> None:
    """Rows (lanes of tensor memory, or threads) over words (columns); CTAs stand one below the other."""
    where = one.map.reshape(-1, one.map.shape[-1])
    axes.imshow(where, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    name = one.name if len(one.name) <= 30 else one.name[:28] + "..."
    axes.set_title(name, fontsize=7)
    axes.tick_params(labelsize=6)
    axes.set_xlabel(f"word ({one.words} differ)", fontsize=6)
    axes.set_ylabel("row", fontsize=6)
