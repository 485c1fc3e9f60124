"""Draw shared memory as banks. It shows the bank group of every 16-byte chunk of a tile, and what an access costs.

32 banks of 4 bytes serve 128 bytes a pass: eight groups of 16 bytes, one colour each. A read of one chunk from eight
rows is free exactly when the eight rows show eight colours in that column. That is all a swizzle is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import MAX_NUMBERED, categories, cell_lines, frame, matrix, numbers, styled, ticks, zoom_frame
from dsv4lib.viz.style import INK, MUTED, new_figure, set_alt

BANKS, BANK_BYTES, CHUNK_BYTES = 32, 4, 16
GROUPS = BANKS * BANK_BYTES // CHUNK_BYTES  # 8 groups of 4 banks
GROUP_COLOURS = [kinds.number(group) for group in range(GROUPS)]


def chunk_groups(offsets: Any, element_bytes: float) -> tuple[np.ndarray, bool]:
    """Return the bank group of every 16-byte chunk of a tile.

    Args:
        offsets: integer [rows, columns], element offsets; one of the two directions is contiguous in memory.
        element_bytes: bytes of one element; 0.5 for 4-bit data.

    Returns:
        (groups [lines, chunks of a line] in 0..7, True when lines are rows). A line is a run that is contiguous before
        the swizzle: a row of a K-major tile, a column of an MN-major one.
    """
    values = matrix("offsets", offsets)
    if element_bytes not in (0.5, 1, 2, 4, 8):
        raise ArgumentError("element_bytes", element_bytes, "0.5, 1, 2, 4 or 8")
    by_rows = values.shape[1] > 1 and abs(int(values[0, 1] - values[0, 0])) == 1
    if not by_rows and not (values.shape[0] > 1 and abs(int(values[1, 0] - values[0, 0])) == 1):
        raise ArgumentError("offsets", list(values.shape), "a tile whose rows or columns are contiguous in memory")
    lines = values if by_rows else values.T
    step = int(CHUNK_BYTES / element_bytes)
    chunks = (lines[:, ::step] * element_bytes).astype(np.int64) // CHUNK_BYTES
    return chunks % GROUPS, by_rows


def bank_words(addresses: Any, chunk_bytes: int = CHUNK_BYTES) -> np.ndarray:
    """Count the different 4-byte words of each bank one access touches. The largest is its number of passes.

    Args:
        addresses: integer [lanes], first byte of each thread's chunk.
        chunk_bytes: consecutive bytes each thread reads, a multiple of 4 at aligned addresses.

    Returns:
        int64 [32].
    """
    first = np.asarray(addresses)
    if first.ndim != 1 or first.size == 0 or first.dtype.kind not in "iu":
        raise ArgumentError(
            "addresses", f"{first.dtype}{list(first.shape)}", "a non-empty one-dimensional integer array"
        )
    words = np.unique(first[:, None].astype(np.int64) // BANK_BYTES + np.arange(chunk_bytes // BANK_BYTES))
    return np.bincount(words % BANKS, minlength=BANKS)


def _detail(ax: Axes, groups: np.ndarray, line: str) -> tuple[int, int]:
    part = groups[:MAX_NUMBERED, :MAX_NUMBERED]
    categories(ax, part, GROUP_COLOURS)
    cell_lines(ax, *part.shape)
    numbers(ax, part, np.array([*map(to_rgb, GROUP_COLOURS)])[part], size=8)
    ax.set_xlabel(f"16-byte chunk of a {line}")
    ax.set_ylabel(line)
    ticks(ax, *part.shape)
    return part.shape


def _overview(ax: Axes, groups: np.ndarray, shape: tuple[int, int]) -> None:
    categories(ax, groups, GROUP_COLOURS)
    zoom_frame(ax, 0, 0, *shape, colour=INK)
    ticks(ax, *groups.shape)
    ax.set_xticks([0, groups.shape[1] - 1])
    ax.set_title("whole tile", fontsize=8.5, fontweight="normal", color=MUTED)


@styled
def swizzle_map(offsets: Any, element_bytes: float, title: str, before: Any = None, before_title: str = "") -> Figure:
    """Draw a tile coloured by bank group, chunk by chunk. Beside it, if given, the same tile without its swizzle.

    Args:
        offsets: integer [rows, columns], element offsets of the layout.
        element_bytes: bytes of one element; 0.5 for 4-bit data.
        title: the layout's own string.
        before: offsets of the layout to compare with, the same shape.
        before_title: its string.
    """
    panels = [(title, *chunk_groups(offsets, element_bytes))]
    if before is not None:
        panels.insert(0, (before_title, *chunk_groups(before, element_bytes)))
    fits = all(max(groups.shape) <= MAX_NUMBERED for _, groups, _ in panels)
    each = 1 if fits else 2  # a tile that fits into the detail needs no overview
    fig = new_figure(height=4.4, width=9.0 if len(panels) == 2 else 5.2)
    ratios = ((1,) if fits else (3, 1)) * len(panels)
    axes = fig.subplots(1, each * len(panels), width_ratios=ratios, squeeze=False)[0]
    long = any(len(label) > 44 for label, *_ in panels)
    for i, (label, groups, by_rows) in enumerate(panels):
        detail = axes[each * i]
        shape = _detail(detail, groups, "row" if by_rows else "column")
        detail.set_title(label.replace(":", "\n: ", 1) if long else label, fontsize=8.5)
        if not fits:
            _overview(axes[each * i + 1], groups, shape)
    meaning = "number and colour: bank group of a chunk, one of eight that shared memory serves side by side"
    fig.supxlabel(meaning, fontsize=8, color=MUTED)
    ways = [_column_ways(groups) for _, groups, _ in panels]
    cost = " and ".join(f"{w}-way" for w in ways)
    alt = f"Bank group of every 16-byte chunk of {' and of '.join(p[0] for p in panels)}. "
    alt += f"Reading one chunk from eight neighbouring lines costs {cost} bank conflicts (1 means none)."
    return set_alt(fig, alt)


def _column_ways(groups: np.ndarray) -> int:
    """Turns for one 16-byte chunk from each of the first eight lines (chunks at different addresses)."""
    return int(np.bincount(groups[:8, 0], minlength=GROUPS).max())


@styled
def bank_conflicts(accesses: Mapping[str, Any], title: str, chunk_bytes: int = CHUNK_BYTES) -> Figure:
    """Draw the words each bank must deliver for one access, a bar a bank. The tallest bar is the number of passes.

    Args:
        accesses: name -> integer [lanes], first byte of each thread's chunk.
        title: what is read.
        chunk_bytes: bytes each thread reads.
    """
    if not accesses:
        raise ArgumentError("accesses", accesses, "at least one access")
    counts = {name: bank_words(a, chunk_bytes) for name, a in accesses.items()}
    top = max(int(c.max()) for c in counts.values())
    fig = new_figure(height=2.5)
    axes = fig.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for ax, (name, words) in zip(axes, counts.items(), strict=True):
        colours = [GROUP_COLOURS[bank * BANK_BYTES // CHUNK_BYTES] for bank in range(BANKS)]
        ax.bar(range(BANKS), words, color=colours, width=0.85)
        frame(ax)
        ax.set_ylim(0, top * 1.15 + 0.2)
        ax.set_xlim(-0.6, BANKS - 0.4)
        ax.set_xticks(range(0, BANKS, 8))
        ax.set_title(f"{name}: {int(words.max())}-way", fontsize=9)
        ax.set_xlabel("bank")
    axes[0].set_ylabel("words")
    fig.suptitle(title, fontsize=9, color=MUTED)
    cost = "; ".join(f"{name}: {int(w.max())}-way over {int((w > 0).sum())} banks" for name, w in counts.items())
    return set_alt(fig, f"Words per shared-memory bank. {title}. {cost}.")
