"""Draw numbers over runs: values in their bands of noise, ways to a bound, verdicts by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import categories, cell_lines, styled
from dsv4lib.viz.style import GRID, INK, MUTED, new_figure, set_alt

VALUE, BAND, WORSE, BETTER, OPEN = map(kinds.colour, ("a run", "noise", "worse", "better", "open"))
COLOURS, SAID = {True: WORSE, False: BETTER, None: OPEN}, {True: "worse", False: "better", None: "open"}


class Change(NamedTuple):
    """A change between two runs: their places, whether it is for the worse, and its commits in a few characters.

    ``worse`` is None where this is open.
    """

    last: float
    first: float
    worse: bool | None
    text: str = ""


@dataclass(frozen=True)
class Track:
    """One number over runs.

    Attributes:
        title: with its unit. places: of its runs, ascending. values: one a run.
        low, high: band of noise, one a run. bound: of a gate, drawn if it is near; None without one.
        changes: where its level moved.
    """

    title: str
    places: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    bound: float | None = None
    changes: Sequence[Change] = ()


@styled
def tracks(shown: Sequence[Track], title: str, labels: Mapping[float, str], columns: int = 3) -> Figure:
    """Draw a panel a number: values over runs, the band of its noise, changes between their two runs.

    Args:
        shown: the numbers. title: of the figure. labels: texts under the places of some runs. columns: side by side.

    Raises:
        ArgumentError: nothing to draw, or lengths that differ within a number.
    """
    if not shown:
        raise ArgumentError("shown", 0, "at least one number")
    for one in shown:
        if not len(one.places) == len(one.values) == len(one.low) == len(one.high) > 0:
            raise ArgumentError(one.title, len(one.values), f"{len(one.places)} values, each with low and high")
    across = min(columns, len(shown))
    down = -(-len(shown) // across)
    fig = new_figure(height=1.0 + 1.55 * down, width=11.0)
    axes = fig.subplots(down, across, squeeze=False, sharex=True)
    for ax in axes.flat[len(shown) :]:
        ax.axis("off")
    for ax, one in zip(axes.flat, shown, strict=False):
        _track(ax, one)
    for ax in axes[-1]:
        ax.set_xticks(list(labels), list(labels.values()), fontsize=6.5)
    handles = [
        Line2D([], [], color=VALUE, marker="o", ms=3, lw=0, label="a run"),
        Patch(color=BAND, alpha=0.35, label="noise"),
        Line2D([], [], color=INK, ls=(0, (4, 3)), lw=1, label="bound of its gate"),
        Patch(color=WORSE, alpha=0.5, label="worse since"),
        Patch(color=BETTER, alpha=0.5, label="better since"),
        Patch(color=OPEN, alpha=0.5, label="the next run decides"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8)
    fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    said = [
        f"{one.title}: " + ", ".join(f"{SAID[c.worse]} {c.text}" for c in one.changes) for one in shown if one.changes
    ]
    return set_alt(fig, f"{title}. {len(shown)} numbers over runs. Changes: {'; '.join(said) or 'none'}.")


def _track(ax: Axes, one: Track) -> None:
    places, values = np.asarray(one.places, float), np.asarray(one.values, float)
    ax.fill_between(places, one.low, one.high, step="mid", color=BAND, alpha=0.35, lw=0)
    ax.plot(places, values, color=VALUE, marker="o", ms=2.2, lw=0.6)
    low, high = float(min(values.min(), np.min(one.low))), float(max(values.max(), np.max(one.high)))
    if one.bound is not None and min(abs(one.bound - low), abs(one.bound - high)) <= 2 * max(high - low, 1e-30):
        low, high = min(low, one.bound), max(high, one.bound)
        ax.axhline(one.bound, color=INK, lw=0.9, ls=(0, (4, 3)))
    least = 0.01 * max(abs(low), abs(high)) or 1.0  # what is constant to a part in a hundred looks so
    room = max(high - low, least)
    low, high = (low + high - room) / 2, (low + high + room) / 2
    ax.set_ylim(low - 0.12 * room, high + 0.32 * room)
    for change in one.changes:
        ax.axvspan(change.last, change.first, color=COLOURS[change.worse], alpha=0.5, lw=0)
        middle = (places[0] + places[-1]) / 2
        side = "left" if change.first < middle else "right"
        x = change.first if side == "left" else change.last
        ax.text(x, high + 0.3 * room, f" {change.text} ", fontsize=6.2, ha=side, va="top", color=INK)
    ax.set_title(one.title, fontsize=8, fontweight="normal")
    ax.tick_params(labelsize=6.5, length=2)
    ax.ticklabel_format(axis="y", useOffset=False) if room > 1e-4 else None
    ax.grid(True, axis="y", color=GRID, lw=0.5)


@styled
def ways(shown: Mapping[str, tuple[Sequence[float], Sequence[float]]], marked: Sequence[str], title: str) -> Figure:
    """Draw how much of the way to its bound each number has used up: 0 where it began, 1 at the bound.

    Args:
        shown: name -> (places of runs, parts of the way). marked: names to tell apart by colour. title: of the figure.

    Raises:
        ArgumentError: nothing to draw.
    """
    if not shown:
        raise ArgumentError("shown", 0, "at least one number")
    fig = new_figure(height=3.2)
    ax = fig.subplots()
    ax.axhspan(1, 10, color=WORSE, alpha=0.12, lw=0)
    ax.axhline(1, color=INK, lw=1, ls=(0, (4, 3)))
    drawn, others = kinds.colours(marked), kinds.colour("others")
    for name, (places, parts) in shown.items():
        ink, width = (drawn[name], 2.0) if name in marked else (others, 1.0)
        label = name if name in marked else None
        ax.step(places, np.clip(parts, -0.6, 1.25), where="post", color=ink, lw=width, label=label)
        if name in marked and max(parts) > 1.25:
            ax.annotate(f"{max(parts):.1f}", (places[-1], 1.25), fontsize=7, ha="right", va="bottom", color=ink)
    ax.plot([], [], color=others, lw=1, label=f"{len(shown) - len(marked)} others")
    ax.set(ylim=(-0.7, 1.4), xlabel="run", ylabel="part of the way", title=title)
    ax.text(0, 1.03, "past the bound", fontsize=7, color=MUTED, ha="left", va="bottom")
    fig.legend(loc="outside lower center", ncols=2, fontsize=7.5)
    ends = ", ".join(f"{name} {shown[name][1][-1]:.2f}" for name in marked)
    return set_alt(fig, f"{title}: {len(shown)} numbers; those marked end at {ends or 'none'}; 1 is the bound.")


@styled
def states(codes: Any, rows: Sequence[str], names: Sequence[str], title: str, colours: Sequence[str]) -> Figure:
    """Draw a state for each row and run as a raster.

    Args:
        codes: integers [rows, runs], index into ``names``, -1 where there is none. rows: their names.
        names: of the states. title: of the figure. colours: one a state.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    raster = np.asarray(codes)
    if raster.ndim != 2 or len(raster) != len(rows) or not raster.size or len(colours) != len(names):
        raise ArgumentError("codes", f"{list(raster.shape)}", f"[{len(rows)}, runs], and a colour for each of {names}")
    fig = new_figure(height=0.9 + 0.26 * len(rows))
    ax = fig.subplots()
    categories(ax, raster, colours)
    cell_lines(ax, *raster.shape)
    ax.set_yticks(range(len(rows)), rows, fontsize=7.5)
    ax.set(xlabel="run", title=title)
    there = [i for i in range(len(names)) if (raster == i).any()]
    handles = [Patch(facecolor=colours[i], label=names[i]) for i in there]
    handles.append(Patch(facecolor="#eef1f4", label="not run"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    counts = ", ".join(f"{int((raster == i).sum())} {names[i]}" for i in there)
    return set_alt(fig, f"{title}: {len(rows)} rows over {raster.shape[1]} runs: {counts}.")


@styled
def shares(
    shown: Mapping[str, Sequence[tuple[float, float]]], title: str, xlabel: str, ylabel: str, marked: str = ""
) -> Figure:
    """Draw parts of a whole over a size, a line a rule.

    Args:
        shown: name -> (size, part) points, parts from 0 to 1. title, xlabel, ylabel: words. marked: the thick line.

    Raises:
        ArgumentError: nothing to draw.
    """
    if not shown or not all(shown.values()):
        raise ArgumentError("shown", len(shown), "at least one rule with points")
    fig = new_figure(height=3.2)
    ax = fig.subplots()
    drawn = kinds.colours(shown)
    for i, (name, points) in enumerate(shown.items()):
        x, y = zip(*points, strict=True)
        thick = name == marked
        ax.plot(x, y, color=drawn[name], marker="osD^v"[i % 5], ms=4, lw=2.2 if thick else 1, label=name)
    ax.set(ylim=(-0.04, 1.06), xlabel=xlabel, ylabel=ylabel, title=title)
    ax.grid(True, axis="y", color=GRID, lw=0.5)
    fig.legend(loc="outside lower center", ncols=5, fontsize=8)
    ends = "; ".join(f"{name}: " + ", ".join(f"{y:.0%} at {x:g}" for x, y in points) for name, points in shown.items())
    return set_alt(fig, f"{title}. {ends}.")
