"""Draw times of one thing by several providers, and the least that physics allows. A line a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, new_figure, set_alt


@dataclass(frozen=True)
class Case:
    """One line; what is None is not drawn.

    Attributes:
        name: of the case. floor, ours, other: times in us. label: whose the other time is.
        good: whether ours is what was promised; None: nothing was.
    """

    name: str
    floor: float | None
    ours: float | None
    other: float | None
    label: str = ""
    good: bool | None = None


@styled
def dumbbells(panels: Mapping[str, Sequence[Case]], title: str, columns: int = 2) -> Figure:
    """Draw lines from the floor over ours to the other's time, on a logarithmic axis.

    Args:
        panels: cases by panel title, top to bottom. title: of the figure. columns: panels side by side.

    Raises:
        ArgumentError: a panel without a time.
    """
    for name, cases in panels.items():
        if not any(value for case in cases for value in (case.floor, case.ours, case.other)):
            raise ArgumentError("panels", name, "panels with at least one time")
    if not panels:
        raise ArgumentError("panels", panels, "at least one")
    stacks = _stacks(panels, min(columns, len(panels)))
    height = max(sum(map(_lines, stack)) for stack in stacks)
    fig = new_figure(height=0.9 + 0.24 * height, width=11.0)
    axes = [ax for part, stack in zip(_parts(fig, stacks), stacks, strict=True) for ax in _column(part, stack, height)]
    for ax, (name, cases) in zip(axes, (item for stack in stacks for item in stack), strict=True):
        for place, case in enumerate(cases):
            times = [value for value in (case.floor, case.ours, case.other) if value]
            if not times:
                continue
            ax.plot([min(times), max(times)], [place, place], color=GRID, linewidth=2, zorder=1)
            if case.floor:
                ax.plot(case.floor, place, "|", color=MUTED, markersize=9, markeredgewidth=2, zorder=2)
            if case.other:
                style = {"markerfacecolor": PAPER, "markeredgecolor": kinds.colour("others"), "markeredgewidth": 1.5}
                ax.plot(case.other, place, "o", markersize=7, zorder=3, **style)
            if case.ours:
                colour = kinds.colour("wrong" if case.good is False else "ours")
                ax.plot(case.ours, place, "D" if case.good is False else "o", color=colour, markersize=6, zorder=4)
            where = {"xytext": (8, 0), "textcoords": "offset points"}
            ax.annotate(_said(case), (max(times), place), va="center", fontsize=7, color=INK, **where)
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        ax.set_xlim(low, high * (high / low) ** 0.6)  # room for the words
        ax.set_yticks(range(len(cases)), [case.name for case in cases], fontsize=8)
        ax.set_ylim(len(cases) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.set_title(name)
        ax.set_xlabel("us")
    fig.suptitle(f"{title}\n| floor   \u25cf ours (\u25c6 short of its goal)   \u25cb the best other", fontsize=10)
    return set_alt(fig, _alt(panels, title))


Stack = list[tuple[str, Sequence[Case]]]


def _lines(panel: tuple[str, Sequence[Case]]) -> float:
    """Height of a panel in lines, title and axis included."""
    return len(panel[1]) + 4.0


def _stacks(panels: Mapping[str, Sequence[Case]], across: int) -> list[Stack]:
    """Divide panels between columns: each goes below what is shortest so far, so that columns end at one height."""
    stacks: list[Stack] = [[] for _ in range(across)]
    for panel in panels.items():
        min(stacks, key=lambda stack: sum(map(_lines, stack))).append(panel)
    return stacks


def _parts(fig: Figure, stacks: Sequence[Stack]) -> list[SubFigure]:
    return list(fig.subfigures(1, len(stacks), squeeze=False).flat)


def _column(part: SubFigure, stack: Stack, height: float) -> list[Axes]:
    """Make the axes of a column, all lines of one height; below a short column is nothing."""
    lines = [_lines(one) for one in stack]
    rest = height - sum(lines)
    axes = list(
        part.subplots(len(stack) + (rest > 0), 1, squeeze=False, height_ratios=lines + [rest] * (rest > 0)).flat
    )
    for ax in axes[len(stack) :]:
        ax.axis("off")
    return axes[: len(stack)]


def _said(case: Case) -> str:
    if not (case.ours and case.other):
        return case.label
    return f"{case.ours / case.other:.2f}x {case.label}"


def _alt(panels: Mapping[str, Sequence[Case]], title: str) -> str:
    """Every time, in words."""

    def us(value: float | None) -> str:
        return "none" if value is None else f"{value:.3g}"

    lines = [
        f"{name}: "
        + "; ".join(
            f"{c.name} floor {us(c.floor)}, ours {us(c.ours)}, {c.label or 'other'} {us(c.other)}" for c in cases
        )
        for name, cases in panels.items()
    ]
    return f"{title}, us. " + ". ".join(lines)
