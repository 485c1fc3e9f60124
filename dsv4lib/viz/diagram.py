"""Draw boxes and arrows: a pipeline of named steps, one line a lane."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import style
from dsv4lib.viz.panels import ink_on, styled

MAX_STEPS = 9  # boxes a lane that stay readable at the page's width
BOX, GAP, HEIGHT, PITCH = 1.0, 0.22, 0.62, 1.12


@styled
def pipeline(lanes: Mapping[str, Sequence[tuple[str, str, str]]], title: str = "") -> Figure:
    """Draw the lanes of boxes, each box an arrow from the one before.

    Args:
        lanes: name of the lane -> steps in order, each (name, what it does, colour).
        title: first line of the figure.
    """
    if not lanes or not all(1 <= len(steps) <= MAX_STEPS for steps in lanes.values()):
        raise ArgumentError("lanes", {k: len(v) for k, v in lanes.items()}, f"1..{MAX_STEPS} steps in every lane")
    longest = max(map(len, lanes.values()))
    fig = style.new_figure(height=0.35 + 1.15 * len(lanes))
    ax = fig.subplots()
    for row, (lane, steps) in enumerate(lanes.items()):
        y = -row * PITCH
        ax.text(0, y + HEIGHT + 0.1, lane, fontsize=8.5, color=style.MUTED)
        for column, (name, what, colour) in enumerate(steps):
            x = column * (BOX + GAP)
            ax.add_patch(
                FancyBboxPatch((x, y), BOX, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08", fc=colour, ec="none")
            )
            ink, size = ink_on(colour), 7.8 * min(1, 11 / len(name))
            label = {"ha": "center", "va": "center", "color": ink}
            ax.text(x + BOX / 2, y + HEIGHT * (0.76 if what else 0.5), name, size=size, weight="bold", **label)
            text = "\n".join(textwrap.wrap(what, 16))
            ax.text(x + BOX / 2, y + HEIGHT * 0.32, text, size=6.8, linespacing=1.1, **label)
            if column:
                ends = {"xy": (x - 0.01, y + HEIGHT / 2), "xytext": (x - GAP + 0.01, y + HEIGHT / 2)}
                ax.annotate(
                    "", **ends, arrowprops={"arrowstyle": "-|>", "color": style.MUTED, "shrinkA": 0, "shrinkB": 0}
                )
    ax.set(xlim=(-0.05, longest * (BOX + GAP) - GAP + 0.05), ylim=(-(len(lanes) - 1) * PITCH - 0.08, HEIGHT + 0.32))
    ax.set_title(title)
    ax.set_axis_off()
    said = "; ".join(f"{lane}: " + ", then ".join(f"{n} ({w})" for n, w, _ in steps) for lane, steps in lanes.items())
    return style.set_alt(fig, f"{title or 'Pipeline'}. {said}.")
