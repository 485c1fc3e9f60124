"""Draw things side by side. One panel a quantity, one bar a thing, the same order in every panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import INK, MUTED, new_figure, set_alt


@dataclass(frozen=True)
class Panel:
    """One quantity.

    Attributes:
        title: with its unit; values: one a thing; form: how a value is written beside its bar.
        parts: name -> values that make up each bar, stacked in this order; None: a plain bar.
        bounds: one a thing, drawn as a tick that the bar should not pass; None where there is none.
    """

    title: str
    values: Sequence[float]
    form: str = "{:,.0f}"
    parts: dict[str, Sequence[float]] | None = None
    bounds: Sequence[float | None] | None = None


@styled
def side_by_side(
    names: Sequence[str], panels: Sequence[Panel], marked: Sequence[bool], title: str, columns: int = 2
) -> Figure:
    """Draw the horizontal bars in panels that share their names.

    Args:
        names: of the things, top to bottom. panels: the quantities. marked: the things that the figure is about.
        title: of the figure. columns: panels side by side.

    Raises:
        ArgumentError: nothing to draw, or a panel with another number of values than names.
    """
    if not names or not panels:
        raise ArgumentError("names, panels", (len(names), len(panels)), "at least one of each")
    for panel in panels:
        if len(panel.values) != len(names) or any(len(v) != len(names) for v in (panel.parts or {}).values()):
            raise ArgumentError(panel.title, len(panel.values), f"{len(names)} values, one per name")
    across = min(columns, len(panels))
    rows = -(-len(panels) // across)
    fig = new_figure(height=0.7 + rows * (0.6 + 0.2 * len(names)), width=11.0)
    axes = fig.subplots(rows, across, squeeze=False, sharey=True)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    places = range(len(names))
    for ax, panel in zip(axes.flat, panels, strict=False):
        if panel.parts:
            start = [0.0] * len(names)
            chosen = kinds.colours(panel.parts)
            for name, values in panel.parts.items():
                ax.barh(places, values, left=start, height=0.72, color=chosen[name], label=name, linewidth=0)
                start = [a + b for a, b in zip(start, values, strict=True)]
            below = -0.3 / (0.3 + 0.2 * len(names))  # of the axes: about 0.3 inches, past the numbers of the axis
            box = {"loc": "upper left", "bbox_to_anchor": (0.0, below), "borderaxespad": 0.0}
            ax.legend(fontsize=7, ncols=-(-len(panel.parts) // 2), handlelength=1.0, columnspacing=1.0, **box)
        else:
            colours = [kinds.colour("ours" if mine else "others") for mine in marked]
            ax.barh(places, panel.values, height=0.72, color=colours, linewidth=0)
        widest = max(*panel.values, *(b or 0 for b in panel.bounds or (0,)), 1e-30)
        for place, value in zip(places, panel.values, strict=True):
            text = panel.form.format(value)
            ax.text(value + 0.01 * widest, place, text, va="center", fontsize=7.5, color=INK)
        for place, bound in zip(places, panel.bounds or [None] * len(names), strict=True):
            if bound is not None:
                ax.plot([bound, bound], [place - 0.46, place + 0.46], color=kinds.colour("bound"), linewidth=2)
        ax.set_title(panel.title)
        ax.set_xlim(0, widest * 1.14)
        ax.set_yticks(places, names, fontsize=8)
        for label, mine in zip(ax.get_yticklabels(), marked, strict=False):  # only the first column has them
            label.set_fontweight("bold" if mine else "normal")
        ax.tick_params(axis="y", length=0)
        ax.tick_params(axis="x", labelsize=7, colors=MUTED)
    axes[0, 0].invert_yaxis()
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    smallest = "; ".join(
        f"{panel.title}: {names[min(places, key=lambda i: panel.values[i])]} has least, "
        + panel.form.format(min(panel.values)).strip()
        for panel in panels
    )
    return set_alt(fig, f"Bars for {', '.join(names)}. {smallest}.")
