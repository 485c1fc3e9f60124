"""Draw a roofline. Work per byte against rate, under the roofs of bandwidth and arithmetic.

A point's distance to the roof above it is what is lost; points of one shape on a vertical line differ only in that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import INK, MUTED, new_figure, set_alt

_MARKERS = "osD^vP*X"
_SIZE, _DOT = 6, 3.5  # of a label's letters and of a point's radius, in points
_SPOTS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))  # of a label beside its point


@styled
def roofline(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float, str]]]],
    peak: float,
    bandwidths: Mapping[str, float],
    title: str = "",
) -> Figure:
    """Draw roofs and points, one panel beside the other with the same axes.

    Args:
        panels: title of a panel -> series -> points (FLOP a byte, TFLOP/s, label or "").
        peak: TFLOP/s of the arithmetic; bandwidths: name -> TB/s of the memory that the bytes are counted at.
        title: of the figure.

    Raises:
        ArgumentError: no point, or a coordinate that is not positive.
    """
    points = [point for series in panels.values() for some in series.values() for point in some]
    if not points or min(min(x, y) for x, y, _ in points) <= 0:
        raise ArgumentError("panels", len(points), "at least one point, all coordinates positive")
    lowest, highest = min(x for x, _, _ in points) / 2, max(x for x, _, _ in points) * 2.5
    highest = max(highest, 4 * peak / max(bandwidths.values(), default=peak))  # so that both roofs are seen
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    chosen = kinds.colours(names)
    fig = new_figure(height=4.4)
    axes = np.atleast_1d(fig.subplots(1, len(panels), sharex=True, sharey=True))
    x = np.geomspace(lowest, highest, 200)
    for axis, (name, series) in zip(axes, panels.items(), strict=True):
        for i, (roof, rate) in enumerate(bandwidths.items()):
            axis.plot(x, np.minimum(rate * x, peak), color=INK, lw=1.4, ls=("-", "--", ":")[i % 3])
            middle = np.sqrt(lowest * min(highest, peak / rate))  # above the roof, where no point can be
            axis.annotate(roof, (middle, 1.15 * rate * middle), color=MUTED, fontsize=7, ha="right", va="bottom")
        axis.annotate(f"{peak:g} TFLOP/s", (highest, peak), color=MUTED, fontsize=7, ha="right", va="bottom")
        for line, some in series.items():
            i = names.index(line)
            style = {"color": chosen[line], "marker": _MARKERS[i % len(_MARKERS)]}
            axis.plot([p[0] for p in some], [p[1] for p in some], ls="", ms=5, label=line, **style)
        axis.set(xscale="log", yscale="log", title=name, xlabel="FLOP a byte of HBM")
        axis.grid(True, which="major", alpha=0.4)
    axes[0].set_ylabel("TFLOP/s")
    handles = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncol=4, fontsize=8)
    if title:
        fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    fig.draw_without_rendering()  # places of points on the page are final now
    for axis, series in zip(axes, panels.values(), strict=True):
        _label(axis, [point for some in series.values() for point in some])
    best = max(points, key=lambda point: point[1])
    return set_alt(
        fig,
        f"Roofline with {len(points)} points under {peak:g} TFLOP/s; the highest reaches {best[1]:.0f} TFLOP/s at "
        f"{best[0]:.0f} FLOP a byte.",
    )


def _label(axis: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each label beside its point, where the least of points, roofs and earlier labels is in the way."""
    places = axis.transData.transform([point[:2] for point in points]) * 72 / axis.figure.dpi
    roofs = [line.get_xydata() for line in axis.lines if line.get_linestyle() != "None"]
    roofs = axis.transData.transform(np.concatenate(roofs or [np.empty((0, 2))])) * 72 / axis.figure.dpi
    taken = [(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in places] + [
        (x - 1, y - 1, x + 1, y + 1) for x, y in roofs
    ]
    for (x, y), point in zip(places, points, strict=True):
        if not point[2]:
            continue
        width, height = 0.6 * _SIZE * len(point[2]), 1.2 * _SIZE
        boxes = []
        for right, up in _SPOTS:
            left = x + right * (_DOT + 1) - width * (1 - right) / 2
            low = y + up * (_DOT + 1) - height * (1 - up) / 2
            boxes.append((left, low, left + width, low + height))
        spot = min(range(len(boxes)), key=lambda i: sum(_overlap(boxes[i], other) for other in taken))
        taken.append(boxes[spot])
        offset = (boxes[spot][0] - x, boxes[spot][1] - y)
        axis.annotate(point[2], point[:2], offset, textcoords="offset points", fontsize=_SIZE, color=MUTED)


def _overlap(a: tuple, b: tuple) -> float:
    """Area that two boxes (left, low, right, high) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
