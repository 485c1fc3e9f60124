"""Draw number formats. Which values exist, where rounding errors sit, and what became of a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds, style
from dsv4lib.viz.arrays import as_array, cell_texts
from dsv4lib.viz.panels import MAX_NUMBERED, categories, cell_lines, frame, styled

NOTHING = "#eef1f4"  # no error at all
LINED = 128  # cells a side that are still kept apart by lines


@styled
def number_lines(formats: Mapping[str, Any], title: str = "") -> Figure:
    """Draw the positive values of each format as ticks. Relative to the largest, and over the powers of two.

    Args:
        formats: name -> values; what is not positive and finite is left out.
        title: first line of the figure.
    """
    if not formats:
        raise ArgumentError("formats", formats, "at least one")
    values = {}
    for name, raw in formats.items():
        found = np.unique(as_array(name, raw))
        values[name] = found[np.isfinite(found) & (found > 0)]
        if not len(values[name]):
            raise ArgumentError(name, raw, "at least one positive finite value")
    fig = style.new_figure(height=1.2 + 0.42 * len(values))
    linear, powers = fig.subplots(1, 2, sharey=True, width_ratios=(1.0, 1.4))
    chosen = kinds.colours(values)
    for row, (name, points) in enumerate(values.items()):
        colour = chosen[name]
        for ax, x in ((linear, points / points[-1]), (powers, np.log2(points))):
            ax.vlines(x, row - 0.36, row + 0.36, color=colour, linewidth=0.7 if len(points) > 16 else 1.6)
    linear.set_yticks(range(len(values)), [f"{name}  ({len(points)})" for name, points in values.items()])
    linear.set(xlabel="value / largest", title="positive values", xlim=(-0.02, 1.02))
    powers.set(xlabel="log2 of the value", title="over the powers of two")
    low, high = (f(np.log2(p[i]) for p in values.values()) for f, i in ((min, 0), (max, -1)))
    powers.set_xlim(max(low, -20) - 0.5, min(high, 20) + 0.5)
    linear.invert_yaxis()
    if title:
        fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    parts = [f"{name}: {len(p)} from {p[0]:.3g} to {p[-1]:.3g}" for name, p in values.items()]
    return style.set_alt(fig, "Positive values of number formats. " + "; ".join(parts) + ".")


@styled
def value_map(
    values: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str, str],
    title: str,
    form: str = "{:.3g}",
) -> Figure:
    """Draw a small matrix of magnitudes with its numbers; zeros are left pale.

    Args:
        values: [rows, columns], at most 16 x 16, each >= 0.
        rows, columns: names of both.
        labels: what the rows are, what the columns are, what the values are.
        title: of the figure. form: how a value is written.
    """
    matrix = as_array("values", values)
    if matrix.shape != (len(rows), len(columns)) or not matrix.size or max(matrix.shape) > MAX_NUMBERED:
        raise ArgumentError("values", matrix.shape, f"[{len(rows)}, {len(columns)}], at most {MAX_NUMBERED} square")
    fig = style.new_figure(height=1.1 + 0.34 * len(rows), width=7.6)
    ax = fig.subplots()
    cmap = matplotlib.colormaps["Oranges"].with_extremes(under=NOTHING)
    norm = Normalize(np.min(matrix[matrix > 0], initial=1.0) * 0.5 if (matrix > 0).any() else 0.5, matrix.max() or 1.0)
    image = ax.imshow(matrix, cmap=cmap, norm=norm, aspect="auto")
    frame(ax)
    texts = np.vectorize(lambda v: "0" if v == 0 else form.format(v), otypes=[object])(matrix)
    cell_texts(ax, texts, cmap(norm(matrix))[..., :3], 8)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(ylabel=labels[0], xlabel=labels[1], title=title)
    fig.colorbar(image, ax=ax, label=labels[2], extend="min")
    worst = np.unravel_index(matrix.argmax(), matrix.shape)
    facts = f"{int((matrix == 0).sum())} of {matrix.size} cells are 0; largest {form.format(matrix.max())}"
    return style.set_alt(fig, f"{title}. {facts}, at {rows[worst[0]]} and {columns[worst[1]]}.")


@styled
def block_maps(maps: Mapping[str, Any], labels: tuple[str, str, str], title: str) -> Figure:
    """Draw the rasters under one logarithmic colour scale, one above the other. Zeros are left pale.

    Args:
        maps: name -> [rows, blocks], each >= 0, all of one shape.
        labels: what the rows are, what the columns are, what the values are.
        title: of the figure.
    """
    arrays = {name: as_array(name, values) for name, values in maps.items()}
    shapes = {values.shape for values in arrays.values()}
    if len(shapes) != 1 or any(len(s) != 2 or 0 in s for s in shapes):
        raise ArgumentError("maps", shapes, "arrays of one shape [rows, blocks]")
    positive = np.concatenate([values[values > 0] for values in arrays.values()])
    top = positive.max(initial=1e-30)
    norm = LogNorm(max(positive.min(initial=top / 10), top * 1e-4), max(top, 1e-29))
    cmap = matplotlib.colormaps[style.SEQUENTIAL].with_extremes(under=NOTHING)
    fig = style.new_figure(height=0.9 + 1.45 * len(arrays))
    panels = fig.subplots(len(arrays), 1, squeeze=False, sharex=True)[:, 0]
    for ax, (name, values) in zip(panels, arrays.items(), strict=True):
        shown = np.where(values > 0, np.maximum(values, norm.vmin), norm.vmin / 10)
        image = ax.imshow(shown, cmap=cmap, norm=norm, aspect="auto", rasterized=True)
        frame(ax)
        ax.set(title=f"{name}: root mean square {np.sqrt(np.mean(values**2)):.2g}", ylabel=labels[0])
    panels[-1].set_xlabel(labels[1])
    fig.colorbar(image, ax=list(panels), label=labels[2], extend="min")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    facts = [f"{name}: median {np.median(v):.2g}, largest {v.max():.2g}" for name, v in arrays.items()]
    return style.set_alt(fig, f"{title}: {labels[2]} by {labels[0]} and {labels[1]}. " + "; ".join(facts) + ".")


@styled
def histograms(
    panels: Mapping[str, Mapping[str, Any]],
    xlabel: str,
    title: str,
    bins: int = 64,
    mark: tuple[float, str] | None = None,
) -> Figure:
    """Draw outlined histograms, one panel a group, all over one axis.

    Args:
        panels: panel title -> name -> values.
        xlabel: what the values are.
        title: of the figure. bins: of the common axis. mark: (place, words) of a line that the eye should compare with.
    """
    arrays = {name: {k: as_array(k, v).ravel() for k, v in lines.items()} for name, lines in panels.items()}
    everything = [v for lines in arrays.values() for v in lines.values()]
    if not everything or any(not len(v) or not np.isfinite(v).all() for v in everything):
        raise ArgumentError("panels", list(panels), "finite values in every line")
    low, high = min(v.min() for v in everything), max(v.max() for v in everything)
    edges = np.linspace(low, high if high > low else low + 1, bins + 1)
    fig = style.new_figure(height=2.9)
    axes = fig.subplots(1, len(arrays), squeeze=False, sharex=True)[0]
    facts, chosen = [], kinds.colours(label for lines in arrays.values() for label in lines)
    for ax, (name, lines) in zip(axes, arrays.items(), strict=True):
        for label, values in lines.items():
            colour = chosen[label]
            share = np.full(len(values), 100 / len(values))
            ax.hist(values, edges, weights=share, color=colour, histtype="stepfilled", alpha=0.25)
            ax.hist(values, edges, weights=share, color=colour, histtype="step", linewidth=1.5, label=label)
            facts.append(f"{name}, {label}: median {np.median(values):.3g}, {values.min():.3g} to {values.max():.3g}")
        if mark is not None:
            ax.axvline(mark[0], color=style.INK, linewidth=1.0, linestyle="--")
            ax.annotate(f" {mark[1]}", (mark[0], 1), xycoords=("data", "axes fraction"), fontsize=7.5, va="top")
        ax.set(title=name, xlabel=xlabel)
        if len(lines) > 1:
            ax.legend(fontsize=8)
    axes[0].set_ylabel("percent")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return style.set_alt(fig, f"{title}. " + "; ".join(facts) + ".")


@styled
def byte_map(codes: Any, names: Sequence[str], title: str, per_row: int = 64) -> Figure:
    """Draw the bytes of a buffer, coloured by what they hold, ``per_row`` in a line.

    Args:
        codes: integer [bytes], index into ``names``; -1: nothing.
        names: of what a byte may hold. title: of the figure. per_row: bytes of a line.

    Raises:
        ArgumentError: no bytes, or a code without a name.
    """
    flat = as_array("codes", codes, np.int64)
    if flat.ndim != 1 or not flat.size or flat.max() >= len(names):
        raise ArgumentError("codes", flat.shape, f"[bytes] of -1..{len(names) - 1}")
    lines = -(-flat.size // per_row)
    raster = np.full(lines * per_row, -1)
    raster[: flat.size] = flat
    fig = style.new_figure(height=1.0 + 0.12 * lines)
    ax = fig.subplots()
    chosen = kinds.colours(names)
    categories(ax, raster.reshape(lines, per_row), list(chosen.values()))
    cell_lines(ax, lines, per_row, width=0.4)
    step = max(1, lines // 9)
    ax.set_yticks(range(0, lines, step), [str(i * per_row) for i in range(0, lines, step)])
    ax.set(xlabel=f"byte in a line of {per_row}", ylabel="first byte of the line", title=title)
    handles = [Patch(color=colour, label=name) for name, colour in chosen.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=len(names), fontsize=8)
    counts = ", ".join(f"{int((flat == i).sum())} {name}" for i, name in enumerate(names))
    return style.set_alt(fig, f"{title}. {flat.size} bytes: {counts}, {int((flat < 0).sum())} nothing.")


@styled
def category_map(
    codes: Any, names: Sequence[str], labels: tuple[str, str], title: str, rows: Sequence[str] = (), nothing: str = ""
) -> Figure:
    """Draw a raster whose cells are of one kind each.

    Args:
        codes: integer [rows, columns], index into ``names``; -1: nothing.
        names: of the kinds. labels: what the rows are, what the columns are. title: of the figure.
        rows: names of the rows; none: their numbers. nothing: what -1 means, for the legend.

    Raises:
        ArgumentError: no cells, a code without a name, or another number of row names than rows.
    """
    values = as_array("codes", codes, np.int64)
    if values.ndim != 2 or not values.size or values.max() >= len(names) or len(names) > 8:
        raise ArgumentError("codes", values.shape, f"[rows, columns] of -1..{len(names) - 1}, at most 8 kinds")
    if rows and len(rows) != len(values):
        raise ArgumentError("rows", len(rows), f"{len(values)} names")
    fig = style.new_figure(height=min(1.6 + 0.26 * len(values), 5.2))
    ax = fig.subplots()
    chosen = kinds.colours(names)
    categories(ax, values, list(chosen.values()))
    if max(values.shape) <= LINED:
        cell_lines(ax, *values.shape, width=0.6)
    if rows:
        ax.set_yticks(range(len(rows)), rows)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(ylabel=labels[0], xlabel=labels[1], title=title)
    handles = [Patch(color=colour, label=name) for name, colour in chosen.items()]
    if nothing and (values < 0).any():
        handles.append(Patch(color=NOTHING, label=nothing))
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8)
    counts = ", ".join(f"{int((values == i).sum())} {name}" for i, name in enumerate(names))
    empty = f", {int((values < 0).sum())} {nothing or 'nothing'}"
    return style.set_alt(fig, f"{title}. {values.shape[0]} x {values.shape[1]} cells: {counts}{empty}.")
