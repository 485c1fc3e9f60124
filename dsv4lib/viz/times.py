"""Draw the roofline in time. Launch time against bytes, with bandwidth and latency guides.

Small work lies on the levels, large work on the diagonals; what lies above both has something else to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import INK, MUTED, new_figure, set_alt

_MARKERS = "oDs^vP*X"


@styled
def over_bytes(
    series: Mapping[str, Sequence[tuple[float, float]]],
    bandwidths: Mapping[str, float],
    latencies: Mapping[str, float],
    title: str,
) -> Figure:
    """Draw a point a launch, both axes logarithmic.

    Args:
        series: name -> (bytes, us) of its launches. bandwidths: name -> TB/s. latencies: name -> us.
        title: of the figure.

    Raises:
        ArgumentError: no point, or one that a logarithm cannot show.
    """
    points = [point for some in series.values() for point in some]
    if not points or min(min(point) for point in points) <= 0:
        raise ArgumentError("series", len(points), "at least one point, bytes and us positive")
    fig = new_figure(height=4.6)
    axis = fig.subplots()
    lowest, highest = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    base = min(min(y for _, y in points), *latencies.values(), 1e9) / 1.6
    x = np.geomspace(lowest, highest, 200)
    for i, (name, rate) in enumerate(bandwidths.items()):
        us = x / rate / 1e6
        style = {"color": INK, "lw": 1.2, "ls": ("-", "--", ":")[i % 3]}
        axis.plot(x[us >= base], us[us >= base], label=f"{name}, {rate:g} TB/s", **style)
    for name, us in latencies.items():
        axis.axhline(us, color=MUTED, lw=0.9, ls=":")
        # At the right, where launches of so many bytes cannot be this short: no point lies there.
        place = {"xytext": (-3, 2), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axis.annotate(f"{name}, {us:g} us", (highest, us), color=MUTED, fontsize=7, **place)
    chosen = kinds.colours(series)
    for i, (name, some) in enumerate(series.items()):
        style = {"color": chosen[name], "marker": _MARKERS[i % len(_MARKERS)]}
        axis.plot([p[0] for p in some], [p[1] for p in some], ls="", ms=4.5, alpha=0.8, label=name, **style)
    axis.set(xscale="log", yscale="log", xlabel="bytes that must be moved", ylabel="us", title=title)
    axis.set_xlim(lowest, highest)
    axis.grid(True, which="major", alpha=0.4)
    fig.legend(loc="outside lower center", ncol=4, fontsize=8)
    counts = ", ".join(f"{len(some)} of {name}" for name, some in series.items())
    return set_alt(fig, f"{title}: us over bytes, {counts}; from {min(y for _, y in points):.3g} us up.")
