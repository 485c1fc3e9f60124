"""Draw what happened when. Warps and asynchronous units on one clock, and the phases of barriers.

The clock is whatever the caller counts in (the emulator: executed warp-instructions). It orders events; it is no time
of a GPU, and the figures say so on their axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import frame, ink_on, styled
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, new_figure, set_alt

CLOCK = "executed warp-instructions (an order, not GPU time)"
_EVEN, _ODD, _WAITED = (kinds.colour(kind) for kind in ("even phase", "odd phase", "a warp waits for it"))


@dataclass(frozen=True)
class Track:
    """One row of a timeline.

    Attributes:
        name: at the left.
        start, end: [n] times, start <= end.
        kind: [n] what each stretch is; equal kinds have one colour in the whole figure.
    """

    name: str
    start: Any
    end: Any
    kind: Sequence[str]


def _check(track: Track) -> tuple[np.ndarray, np.ndarray]:
    start, end = np.asarray(track.start, float), np.asarray(track.end, float)
    if start.shape != end.shape or start.ndim != 1 or len(track.kind) != len(start) or (end < start).any():
        found = f"{track.name}: {start.shape}, {end.shape}, {len(track.kind)} kinds"
        raise ArgumentError("tracks", found, "as many kinds as stretches, none of which ends before it starts")
    return start, end


@styled
def timeline(
    tracks: Sequence[Track], title: str, colours: Mapping[str, str] | None = None, now: float | None = None
) -> Figure:
    """Draw the stretches of several actors on one clock.

    Args:
        tracks: rows, top to bottom.
        title: of which launch.
        colours: of kinds; others are those of `viz.kinds`.
        now: a time to mark with a vertical line.

    Raises:
        ArgumentError: no track, or one whose arrays do not fit together.
    """
    if not tracks:
        raise ArgumentError("tracks", "none", "at least one track")
    spans = [_check(track) for track in tracks]
    chosen = kinds.colours(k for track in tracks for k in track.kind) | dict(colours or {})
    fig = new_figure(height=1.2 + 0.3 * len(tracks))
    ax = fig.subplots()
    for y, (track, (start, end)) in enumerate(zip(tracks, spans, strict=True)):
        of_each = np.asarray(track.kind, dtype=object)
        for kind in dict.fromkeys(track.kind):
            mine = of_each == kind
            bars = list(zip(start[mine], end[mine] - start[mine], strict=True))
            ax.broken_barh(bars, (y - 0.36, 0.72), facecolors=chosen[kind], edgecolor=PAPER, linewidth=0.4)
    _rows(ax, [track.name for track in tracks], title)
    if now is not None:
        ax.axvline(now, color=INK, linewidth=1.0)
    lasting = {
        k for t, (s, e) in zip(tracks, spans, strict=True) for k, more in zip(t.kind, e > s, strict=True) if more
    }
    used = [kind for kind in chosen if kind in lasting]
    handles = [Patch(facecolor=chosen[kind], label=kind) for kind in used]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(used), 6), fontsize=8)
    shares = [_share(track, *span) for track, span in zip(tracks, spans, strict=True)]
    return set_alt(fig, f"Timeline, {title}: {len(tracks)} tracks. " + " ".join(shares))


def _rows(ax: Axes, names: Sequence[str], title: str) -> None:
    """Row names, top row first."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(CLOCK)
    ax.set_title(title)
    frame(ax)
    ax.margins(x=0.005)


def _share(track: Track, start: np.ndarray, end: np.ndarray) -> str:
    """One sentence: how long a track spent in each kind."""
    of_each = np.asarray(track.kind, dtype=object)
    parts = [f"{kind} {int((end - start)[of_each == kind].sum())}" for kind in dict.fromkeys(track.kind)]
    return f"{track.name}: {', '.join(parts) or 'nothing'}."


@dataclass(frozen=True)
class Phases:
    """One barrier.

    Attributes:
        name: at the left.
        completed: [n] times at which its phases completed, ascending.
        waits: [m, 2] start and end of every wait on it.
    """

    name: str
    completed: Any
    waits: Any = ()


@styled
def barrier_phases(barriers: Sequence[Phases], end: float, title: str, now: float | None = None) -> Figure:
    """Draw the phases of barriers over time. Bars alternate with the parity, numbers are phases, lines below are waits.

    Args:
        barriers: rows, top to bottom.
        end: where the last, incomplete phase is cut off.
        title: of which launch.
        now: a time to mark with a vertical line.

    Raises:
        ArgumentError: no barrier, or times that do not ascend to ``end``.
    """
    if not barriers:
        raise ArgumentError("barriers", "none", "at least one barrier")
    fig = new_figure(height=1.1 + 0.34 * len(barriers))
    ax = fig.subplots()
    sentences = []
    for y, barrier in enumerate(barriers):
        times = np.concatenate([[0.0], np.asarray(barrier.completed, float), [float(end)]])
        if (np.diff(times) < 0).any():
            raise ArgumentError("barriers", f"{barrier.name}: {times.tolist()}", "ascending times up to `end`")
        _phase_row(ax, y, times, float(end))
        waits = np.asarray(barrier.waits, float).reshape(-1, 2)
        ax.hlines(np.full(len(waits), y + 0.36), waits[:, 0], waits[:, 1], color=_WAITED, linewidth=2.2)
        waited = int((waits[:, 1] - waits[:, 0]).sum())
        sentences.append(f"{barrier.name}: {len(times) - 2} phases, waited on for {waited}.")
    _rows(ax, [barrier.name for barrier in barriers], title)
    ax.set_xlim(0, end)
    if now is not None:
        ax.axvline(now, color=INK, linewidth=1.0)
    handles = [
        Patch(facecolor=_EVEN, label="even phase"),
        Patch(facecolor=_ODD, label="odd phase"),
        Patch(facecolor=_WAITED, label="a warp waits for it"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    return set_alt(fig, f"Barrier phases, {title}. " + " ".join(sentences))


def _phase_row(ax: Axes, y: int, times: np.ndarray, end: float) -> None:
    """Bars of one barrier; phases wide enough carry their number, the unfinished one is pale."""
    for parity, colour in ((0, _EVEN), (1, _ODD)):
        bars = [(times[i], times[i + 1] - times[i]) for i in range(parity, len(times) - 1, 2)]
        ax.broken_barh(bars, (y - 0.3, 0.5), facecolors=colour, edgecolor=PAPER, linewidth=0.5)
    ax.broken_barh([(times[-2], times[-1] - times[-2])], (y - 0.3, 0.5), facecolors=GRID, edgecolor=PAPER)
    for i in range(len(times) - 1):
        if times[i + 1] - times[i] > 0.03 * end:
            colour = GRID if i == len(times) - 2 else (_EVEN, _ODD)[i % 2]
            middle = (times[i] + times[i + 1]) / 2
            label = ax.text(middle, y - 0.05, str(i), ha="center", va="center", fontsize=7.5, color=ink_on(colour))
            label.set_in_layout(False)
    if len(times) == 2:
        ax.text(end * 0.005, y - 0.05, "no phase completed", va="center", fontsize=7.5, color=MUTED)
