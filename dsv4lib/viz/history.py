"""Draw on-chip memories over time. The owner of each cell of tensor and shared memory at chosen moments.

Everything is arrays: codes of owners, ages from 0 (old) to 1 (just now). Old content is pale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import frame, styled
from dsv4lib.viz.style import INK, MUTED, PAPER, new_figure, set_alt
from dsv4lib.viz.timeline import CLOCK
from dsv4lib.viz.tmem import COLUMNS, LANES, QUARTER

_EMPTY = "#eef1f4"
_ROW = 64  # chunks a row where shared memory is drawn as an area
_PALEST = 0.35  # how much of its colour the oldest content keeps


def colour_codes(codes: np.ndarray, names: Sequence[str], fresh: np.ndarray | None = None) -> np.ndarray:
    """Colour owner codes, float [..., 3]. Code -1 is empty; ``fresh`` in [0, 1] fades old content.

    A name has the colour of its kind.

    Raises:
        ArgumentError: a code without a name.
    """
    if codes.size and (codes.max() >= len(names) or codes.min() < -1):
        raise ArgumentError("codes", f"{codes.min()}..{codes.max()}", f"-1..{len(names) - 1}, one per name")
    table = np.array([*map(to_rgb, kinds.colours(names).values())] + [to_rgb(_EMPTY)])
    colours = table[codes]
    if fresh is not None:
        keep = (_PALEST + (1 - _PALEST) * np.clip(fresh, 0, 1))[..., None]
        keep = np.where((codes < 0)[..., None], 1.0, keep)
        colours = colours * keep + np.array(to_rgb(PAPER)) * (1 - keep)
    return colours


@styled
def tmem_over_time(
    codes: Any,
    names: Sequence[str],
    moments: Sequence[str],
    title: str,
    fresh: Any = None,
    columns: int = 3,
    regions: Sequence[tuple[str, int, int]] = (),
) -> Figure:
    """Draw tensor memory at several moments.

    128 lanes x 512 columns each, coloured by the warp that accessed a cell last.

    Args:
        codes: integer [moments, 128, 512], index into ``names``, -1 = untouched.
        names: of the owners.
        moments: title of each panel.
        title: of which launch and CTA.
        fresh: [moments, 128, 512] from 0 (oldest, pale) to 1 (just touched); None = no fading.
        columns: panels side by side.
        regions: (name, first column, end) of what the columns are for, written into every panel.

    Raises:
        ArgumentError: shapes that do not fit, a code without a name.
    """
    values = np.asarray(codes)
    if values.shape != (len(moments), LANES, COLUMNS) or values.dtype.kind not in "iu" or not len(moments):
        wanted = f"integers [{len(moments)}, {LANES}, {COLUMNS}], at least one moment"
        raise ArgumentError("codes", f"{values.dtype}{list(values.shape)}", wanted)
    shades = None if fresh is None else np.asarray(fresh, float)
    across = min(columns, len(moments))
    rows = -(-len(moments) // across)
    fig = new_figure(height=0.9 + 1.75 * rows)
    axes = fig.subplots(rows, across, squeeze=False, sharex=True, sharey=True)
    for i, ax in enumerate(axes.ravel()):
        if i >= len(moments):
            ax.axis("off")
            continue
        ax.imshow(colour_codes(values[i], names, None if shades is None else shades[i]), aspect="auto")
        for quarter in range(1, 4):
            ax.axhline(QUARTER * quarter - 0.5, color=MUTED, linewidth=0.6, linestyle=(0, (4, 3)))
        frame(ax)
        _name_columns(ax, regions)
        ax.set_title(moments[i], fontsize=8.5, fontweight="normal")
        ax.set_yticks(range(0, LANES, QUARTER))
        ax.set_xticks(range(0, COLUMNS, 128))
    for ax in axes[:, 0]:
        ax.set_ylabel("lane")
    for ax in axes[-1]:
        ax.set_xlabel("column")
    _legend(fig, names, values, last="untouched" if shades is None else "untouched (paler: touched longer ago)")
    fig.suptitle(title, fontsize=10, fontweight="bold", color=INK, x=0.01, ha="left")
    used = "; ".join(f"{moment}: {_amounts(values[i], names)}" for i, moment in enumerate(moments))
    return set_alt(fig, f"Tensor memory over time, {title}. Cells by last owner: {used}.")


def _name_columns(ax: Axes, regions: Sequence[tuple[str, int, int]]) -> None:
    """Names of column ranges along the lower edge, with lines between them."""
    for name, first, end in regions:
        if first:
            ax.axvline(first - 0.5, color=PAPER, linewidth=0.9)
        box = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
        place = {"ha": "center", "va": "bottom", "fontsize": 7, "color": INK}
        ax.text((first + end - 1) / 2, LANES - 5, name, bbox=box, **place).set_in_layout(False)


def _legend(fig: Figure, names: Sequence[str], codes: np.ndarray, last: str = "untouched") -> None:
    chosen = kinds.colours(names)
    shown = [name for i, name in enumerate(names) if (codes == i).any()]
    handles = [Patch(facecolor=chosen[name], label=name) for name in shown]
    handles.append(Patch(facecolor=_EMPTY, label=last))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=8)


def _amounts(codes: np.ndarray, names: Sequence[str]) -> str:
    counts = [f"{names[i]} {int((codes == i).sum())}" for i in range(len(names)) if (codes == i).any()]
    return ", ".join(counts) or "none"


@dataclass(frozen=True)
class Barrier:
    """An mbarrier at one moment. It has a phase, arrivals it still misses of how many, and bytes it still expects."""

    name: str
    phase: int
    missing: int
    expected: int
    nbytes: int


@styled
def moment(
    tmem: tuple[Any, Sequence[str]], smem: tuple[Any, Sequence[str]], barriers: Sequence[Barrier], title: str
) -> Figure:
    """Draw tensor memory, shared memory and barriers at one moment.

    Args:
        tmem: (integer codes [128, 512], names), -1 = untouched.
        smem: (integer codes [chunks of 16 bytes], names), -1 = untouched; drawn 1 KiB a row.
        barriers: top to bottom.
        title: which moment.

    Raises:
        ArgumentError: shapes that do not fit, a code without a name.
    """
    cells, chunks = np.asarray(tmem[0]), np.asarray(smem[0])
    if cells.shape != (LANES, COLUMNS) or chunks.ndim != 1 or not chunks.size:
        raise ArgumentError("tmem, smem", [cells.shape, chunks.shape], f"[{LANES}, {COLUMNS}] and [chunks]")
    fig = new_figure(height=3.6)
    left, middle, right = fig.subplots(1, 3, width_ratios=(3.2, 1.3, 2.0))
    left.imshow(colour_codes(cells, tmem[1]), aspect="auto")
    left.set(xlabel="column", ylabel="lane")
    left.set_yticks(range(0, LANES, QUARTER))
    left.set_xticks(range(0, COLUMNS, 128))
    whole = np.append(chunks, np.full(-len(chunks) % _ROW, -1)).reshape(-1, _ROW)
    middle.imshow(colour_codes(whole, smem[1]), aspect="auto", origin="lower", extent=(0, _ROW, 0, len(whole)))
    middle.set(xlabel="16-byte chunk", ylabel="KiB")
    _states(right, barriers)
    for ax, name in ((left, "tensor memory"), (middle, "shared memory"), (right, "mbarriers")):
        frame(ax)
        ax.set_title(name, fontsize=8.5, fontweight="normal")
    names = [name for i, name in enumerate(tmem[1]) if (cells == i).any()]
    names += [name for i, name in enumerate(smem[1]) if (chunks == i).any()]
    handles = [Patch(facecolor=colour, label=name) for name, colour in kinds.colours(names).items()]
    handles.append(Patch(facecolor=_EMPTY, label="untouched"))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8)
    fig.suptitle(title, fontsize=10, fontweight="bold", color=INK, x=0.01, ha="left")
    phases = ", ".join(f"{b.name} phase {b.phase} missing {b.missing} and {b.nbytes} bytes" for b in barriers)
    return set_alt(
        fig,
        f"{title}. Tensor memory cells: {_amounts(cells, tmem[1])}. Shared memory chunks: {_amounts(chunks, smem[1])}. "
        f"Barriers: {phases or 'none'}.",
    )


def _states(ax: Axes, barriers: Sequence[Barrier]) -> None:
    """One line a barrier: its phase and what it waits for."""
    ax.set(xlim=(0, 1), ylim=(max(len(barriers), 1) - 0.4, -0.6))
    ax.set_xticks([])
    ax.set_yticks(range(len(barriers)), [b.name for b in barriers])
    for y, b in enumerate(barriers):
        parts = [f"{b.missing} of {b.expected} arrivals"] if b.missing else []
        parts += [f"{b.nbytes:,} bytes"] if b.nbytes else []
        waits = " and ".join(parts)
        ax.text(0.03, y, f"phase {b.phase}" + (f": waits for {waits}" if waits else ""), va="center", fontsize=7.5)


@styled
def smem_over_time(
    codes: Any,
    times: Any,
    names: Sequence[str],
    title: str,
    regions: Sequence[tuple[str, int, int]] = (),
    chunk_bytes: int = 16,
    now: float | None = None,
) -> Figure:
    """Draw shared memory (upwards) against time. Colours are the warp that accessed each chunk last.

    Args:
        codes: integer [chunks, times], index into ``names``, -1 = untouched.
        times: [times], ascending.
        names: of the accesses.
        title: of which launch and CTA.
        regions: (name, first byte, end) of buffers, named at the right and separated by lines.
        chunk_bytes: bytes of a chunk.
        now: a time to mark with a vertical line.

    Raises:
        ArgumentError: shapes that do not fit, a code without a name.
    """
    values, clock = np.asarray(codes), np.asarray(times, float)
    if values.ndim != 2 or values.dtype.kind not in "iu" or clock.shape != values.shape[1:] or len(clock) < 2:
        raise ArgumentError(
            "codes", f"{values.dtype}{list(values.shape)}", "integers [chunks, times], two times or more"
        )
    total = len(values) * chunk_bytes
    places = [(name, first / 1024, end / 1024) for name, first, end in regions]
    fig = _against_time(values, clock, names, title, total / 1024, places, now)
    fig.axes[0].set_ylabel("shared memory, KiB")
    last = _amounts(values[:, -1], names)
    return set_alt(
        fig, f"Shared memory over time, {title}: {total} bytes; 16-byte chunks by last access at the end: {last}."
    )


def _against_time(
    values: np.ndarray,
    clock: np.ndarray,
    names: Sequence[str],
    title: str,
    top: float,
    regions: Sequence[tuple[str, float, float]],
    now: float | None = None,
) -> Figure:
    """A memory (upwards, 0 to ``top``) against time; regions in the unit of ``top``."""
    fig = new_figure(height=4.2)
    ax = fig.subplots()
    ax.imshow(
        colour_codes(values, names),
        aspect="auto",
        origin="lower",
        extent=(clock[0], clock[-1], 0, top),
        interpolation="nearest",
    )
    frame(ax)
    for name, first, end in regions:
        ax.axhline(first, color=PAPER, linewidth=0.9)
        if end - first > 0.025 * top:
            place = ax.get_yaxis_transform()
            ax.text(1.006, (first + end) / 2, name, va="center", fontsize=8, color=MUTED, transform=place)
    if now is not None:
        ax.axvline(now, color=INK, linewidth=1.0)
    ax.set_xlabel(CLOCK)
    ax.set_title(title)
    _legend(fig, names, values)
    return fig


@styled
def tmem_against_time(
    codes: Any, times: Any, names: Sequence[str], title: str, regions: Sequence[tuple[str, int, int]] = ()
) -> Figure:
    """Draw columns of tensor memory (upwards) against time.

    Colours: the warp that last accessed a lane's cell of each column.

    Args:
        codes: integer [512, times], index into ``names``, -1 = untouched.
        times: [times], ascending.
        names: of the accesses.
        title: of which launch, CTA and lane.
        regions: (name, first column, end), named at the right and separated by lines.

    Raises:
        ArgumentError: shapes that do not fit, a code without a name.
    """
    values, clock = np.asarray(codes), np.asarray(times, float)
    if values.shape != (COLUMNS, len(clock)) or values.dtype.kind not in "iu" or len(clock) < 2:
        wanted = f"integers [{COLUMNS}, times], two times or more"
        raise ArgumentError("codes", f"{values.dtype}{list(values.shape)}", wanted)
    fig = _against_time(values, clock, names, title, COLUMNS, regions)
    fig.axes[0].set_ylabel("column of tensor memory")
    fig.axes[0].set_yticks(range(0, COLUMNS + 1, 64))
    last = _amounts(values[:, -1], names)
    return set_alt(fig, f"Columns of tensor memory over time, {title}: by last access at the end: {last}.")
