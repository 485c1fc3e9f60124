"""Draw a waterfall: parts of a sum, each bar starting where the one above it ended, the sum last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, new_figure, set_alt

FULL, INNER, OTHER = (kinds.colour(kind) for kind in ("whole", "inner", "other"))
LACKING = "-"


@dataclass(frozen=True)
class Part:
    """One bar of a panel; what is None is not drawn and is in no sum.

    Attributes:
        name: of the part, the same ones in every panel.
        value: length of its bar. inner: of the darker bar in it. other: of the outlined bar under it. All start alike.
        note: a few words after its numbers.
    """

    name: str
    value: float | None
    inner: float | None = None
    other: float | None = None
    note: str = ""


class Words(NamedTuple):
    """What the three lengths are called; "" where a figure has none."""

    value: str
    inner: str = ""
    other: str = ""


@styled
def waterfall(
    panels: Mapping[str, Sequence[Part]],
    words: Words,
    title: str,
    notes: Mapping[str, str] | None = None,
    columns: int = 2,
    unit: str = "ms",
) -> Figure:
    """Draw a panel a waterfall, parts from top to bottom.

    Args:
        panels: parts by panel title. words: names of the lengths. title: of the figure, with all that it is about.
        notes: by panel, of the bar that is the sum. columns: panels side by side. unit: of all lengths.

    Raises:
        ArgumentError: no panel, a panel with other parts than the first, or none with a length.
    """
    names = [part.name for part in next(iter(panels.values()), ())]
    for panel, parts in panels.items():
        if [part.name for part in parts] != names or not any(part.value for part in parts):
            raise ArgumentError("panels", panel, "the same parts in every panel, one of them with a length")
    if not panels:
        raise ArgumentError("panels", panels, "at least one")
    across = min(columns, len(panels))
    down = -(-len(panels) // across)
    fig = new_figure(height=1.1 + down * (0.75 + 0.37 * (len(names) + 1)), width=11.0)
    axes = fig.subplots(down, across, squeeze=False, sharey=True)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (panel, parts) in zip(axes.flat, panels.items(), strict=False):
        _draw(ax, parts, words, (notes or {}).get(panel, ""))
        ax.set_title(panel)
        ax.set_xlabel(unit)
        ax.set_yticks(range(len(names) + 1), [*names, "sum"], fontsize=8)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(names) + 0.55, -0.6)
    for ax in axes[:, 0]:
        ax.get_yticklabels()[-1].set_fontweight("bold")
    _legend(fig, words)
    fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return set_alt(fig, _alt(panels, words, title, notes, unit))


def _draw(ax: Axes, parts: Sequence[Part], words: Words, note: str) -> None:
    """Draw the bars of a panel, their sum, and the numbers after each."""
    start, ends = 0.0, []
    for place, part in enumerate(parts):
        ends.append(_bar(ax, place, start, part, words))
        after = start + (part.value or 0.0)
        ax.plot([after, after], [place - 0.38, place + 1.38], color=MUTED, linewidth=0.7, zorder=1)
        start = after
    whole = total(parts, note)
    ends.append(_bar(ax, len(parts), 0.0, whole, words))
    ax.axhline(len(parts) - 0.5, color=GRID, linewidth=1)
    widest = max(ends)
    ax.set_xlim(0, 1.55 * widest)  # room for the numbers
    for place, (part, end) in enumerate(zip((*parts, whole), ends, strict=True)):
        ax.text(end + 0.015 * widest, place, said(part, words), va="center", fontsize=7, color=INK)


def _bar(ax: Axes, place: int, start: float, part: Part, words: Words) -> float:
    """Draw one part from ``start``; where its longest bar ends."""
    if part.value:
        ax.barh(place - 0.1, part.value, left=start, height=0.5, color=FULL, linewidth=0, zorder=2)
    if part.inner:
        ax.barh(place - 0.1, part.inner, left=start, height=0.5, color=INNER, linewidth=0, zorder=3)
    if part.other:
        style = {"facecolor": PAPER, "edgecolor": OTHER, "linewidth": 1.3}
        ax.barh(place + 0.29, part.other, left=start, height=0.18, zorder=3, **style)
    return start + max(part.value or 0.0, part.other or 0.0)


def total(parts: Sequence[Part], note: str = "") -> Part:
    """Add up parts; the outlined bar has no sum unless every part has one."""
    inner, other = [part.inner for part in parts], [part.other for part in parts]
    return Part(
        "sum",
        sum(part.value or 0.0 for part in parts),
        sum(value or 0.0 for value in inner),
        None if None in other else sum(other),
        note,
    )


def said(part: Part, words: Words) -> str:
    """Write the lengths of a part in the order of ``words``."""
    given = [value for value, word in zip((part.value, part.inner, part.other), words, strict=True) if word]
    numbers = " / ".join(LACKING if value is None else f"{value:.3g}" for value in given)
    return f"{numbers}  {part.note}".rstrip()


def _legend(fig: Figure, words: Words) -> None:
    from matplotlib.patches import Patch

    looks = {
        words.value: {"facecolor": FULL},
        words.inner: {"facecolor": INNER},
        words.other: {"facecolor": PAPER, "edgecolor": OTHER, "linewidth": 1.3},
    }
    handles = [Patch(label=word, **look) for word, look in looks.items() if word]
    fig.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=8)


def _alt(
    panels: Mapping[str, Sequence[Part]], words: Words, title: str, notes: Mapping[str, str] | None, unit: str
) -> str:
    """Every number, in words."""
    order = ", ".join(word for word in words if word)
    found = []
    for panel, parts in panels.items():
        own = (*parts, total(parts, (notes or {}).get(panel, "")))
        found.append(f"{panel}: " + "; ".join(f"{part.name} {said(part, words)}" for part in own))
    return " ".join(f"{title}. {unit} of {order}. {'. '.join(found)}.".split())
