"""Draw a model's structure. Schedule, stream mixing, compression windows, visibility, curves, parity.

They draw what they are given, arrays measured on a model or lists from its configuration, and know no model: every
number in a figure is an argument. Colours follow the layer kind everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import style
from dsv4lib.viz.arrays import as_array, cell_texts
from dsv4lib.viz.kinds import colour as kind_colour
from dsv4lib.viz.kinds import colours as kind_colours
from dsv4lib.viz.panels import MAX_NUMBERED, cell_lines, frame, ink_on, styled

KIND_COLOURS = {kind: kind_colour(kind) for kind in ("SWA", "CSA", "HCA")}
EMPTY = "#eef1f4"
WINDOW, VISIBLE, SELECTED = 1, 2, 3  # codes of a visibility map; 0 is hidden
VISIBILITY = {
    WINDOW: ("token in the window", kind_colour("window")),
    VISIBLE: ("entry complete, not selected", kind_colour("entry not selected")),
    SELECTED: ("entry attended", kind_colour("entry")),
}
LINED = 128  # tokens of a window map that get lines between them
PREVIOUS, OWN = 1, 2  # codes of a window map: which window of an entry a token belongs to
POOLING = {
    PREVIOUS: ("previous window, Ca half", kind_colour("window before")),
    OWN: ("own window", kind_colour("own window")),
}


@styled
def schedule_map(schedules: Mapping[str, Sequence[str]], hash_layers: int = 0, mtp: str = "SWA") -> Figure:
    """Draw the layers of each model as a strip of cells coloured by kind.

    Args:
        schedules: model name -> kind of each backbone layer (``SWA``, ``CSA`` or ``HCA``).
        hash_layers: how many first layers route by token id; they get a mark.
        mtp: kind of the MTP block, drawn apart at the end.
    """
    if not schedules or not all(schedules.values()):
        raise ArgumentError("schedules", schedules, "at least one model with at least one layer")
    for kind in {mtp, *(kind for kinds in schedules.values() for kind in kinds)}:
        if kind not in KIND_COLOURS:
            raise ArgumentError("schedules", kind, f"kinds {', '.join(KIND_COLOURS)}")
    fig = style.new_figure(height=0.9 + 0.75 * len(schedules))
    ax = fig.subplots()
    longest = max(len(kinds) for kinds in schedules.values())
    for row, kinds in enumerate(schedules.values()):
        for at, kind in [*enumerate(kinds), (len(kinds) + 0.6, mtp)]:
            ax.add_patch(Rectangle((at, row - 0.36), 0.92, 0.72, facecolor=KIND_COLOURS[kind]))
        for layer in {0, *range(10, len(kinds), 10), len(kinds) - 1}:
            ink = ink_on(KIND_COLOURS[kinds[layer]])
            ax.text(layer + 0.46, row, str(layer), ha="center", va="center", fontsize=6.5, color=ink)
        ax.text(len(kinds) + 1.75, row, "MTP", va="center", fontsize=7, color=style.MUTED)
        if hash_layers:
            ax.plot([0, hash_layers - 0.08], [row - 0.45] * 2, color=style.INK, linewidth=2.2, solid_capstyle="butt")
    ax.set(xlim=(-0.3, longest + 4), ylim=(len(schedules) - 0.3, -0.65), title="one cell per layer, first to last")
    ax.set_yticks(range(len(schedules)), list(schedules), fontsize=10, fontweight="bold", color=style.INK)
    ax.set_xticks([])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    used = [kind for kind in KIND_COLOURS if any(kind in kinds for kinds in schedules.values()) or kind == mtp]
    handles = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in used]
    if hash_layers:
        handles.append(Patch(color=style.INK, label="experts by token id"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    counts = "; ".join(
        f"{name}: {len(kinds)} layers, " + ", ".join(f"{list(kinds).count(k)} {k}" for k in KIND_COLOURS if k in kinds)
        for name, kinds in schedules.items()
    )
    return style.set_alt(fig, f"Layer schedule as coloured strips. {counts}; the MTP block after them is {mtp}.")


@styled
def mixing_matrices(matrices: Any, labels: Sequence[str], title: str = "") -> Figure:
    """Draw the small square matrices side by side with their numbers and column sums.

    Args:
        matrices: [count, n, n] in [0, 1]; element (i, j) is how much of stream i goes to stream j.
        labels: one per matrix.
        title: first line of the figure.
    """
    values = as_array("matrices", matrices)
    if values.ndim != 3 or values.shape[1] != values.shape[2] or values.shape[1] > MAX_NUMBERED or not len(values):
        raise ArgumentError("matrices", values.shape, f"[count >= 1, n, n] with n <= {MAX_NUMBERED}")
    if len(labels) != len(values):
        raise ArgumentError("labels", len(labels), f"one label per matrix, {len(values)}")
    columns = min(6, len(values))
    lines = -(-len(values) // columns)
    fig = style.new_figure(height=0.7 + 1.75 * lines)
    panels = fig.subplots(lines, columns, squeeze=False).flat
    cmap = matplotlib.colormaps["Blues"]
    for ax, matrix, label in zip(panels, values, labels, strict=False):
        ax.imshow(matrix, cmap=cmap, vmin=0, vmax=1)
        frame(ax)
        cell_lines(ax, *matrix.shape)
        text = np.vectorize(lambda v: f"{v:.2f}"[1:] if v < 0.995 else "1", otypes=[object])(matrix)
        cell_texts(ax, text, cmap(matrix)[..., :3], size=7)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(label, fontsize=8.5)
    for ax in list(panels):
        ax.set_axis_off()
    fig.suptitle(title or "from stream (row) to stream (column)", x=0.01, ha="left", fontsize=11, fontweight="bold")
    fig.supxlabel("to stream", fontsize=8, color=style.MUTED)
    fig.supylabel("from stream", fontsize=8, color=style.MUTED)
    off = max(float(np.abs(values.sum(axis=axis) - 1).max()) for axis in (1, 2))
    diagonal = float(np.mean(np.trace(values, axis1=1, axis2=2)) / values.shape[1])
    alt = f"{len(values)} mixing matrices of {values.shape[1]} streams ({', '.join(labels)}). "
    return style.set_alt(fig, alt + f"Row and column sums are within {off:.1e} of 1; mean diagonal {diagonal:.2f}.")


@styled
def compressor_windows(maps: Mapping[str, Any]) -> Figure:
    """Draw which tokens are pooled into which entry.

    Args:
        maps: label -> integer [entries, tokens]: 0 not pooled, 1 (`PREVIOUS`) a token of the window before the entry's
            own, 2 (`OWN`) one of its own window.
    """
    arrays = {label: _codes("maps", value, len(POOLING)) for label, value in maps.items()}
    heights = [max(2, values.shape[0]) for values in arrays.values()]
    fig = style.new_figure(height=1.2 + 0.24 * sum(heights) + 0.35 * len(arrays))
    panels = fig.subplots(len(arrays), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (label, values) in zip(panels, arrays.items(), strict=True):
        _coded(ax, values, [colour for _, colour in POOLING.values()])
        if values.shape[1] <= LINED:
            cell_lines(ax, *values.shape, width=0.6)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(title=label, ylabel="entry")
        ax.set_yticks(range(values.shape[0]))
    panels[-1].set_xlabel("token")
    _legend(fig, POOLING, arrays.values())
    parts = []
    for label, values in arrays.items():
        fed = (values > 0).sum(axis=1)
        parts.append(f"{label}: {values.shape[0]} entries, each of {fed.min()} to {fed.max()} tokens")
    return style.set_alt(fig, "Which tokens feed which compressed entry. " + "; ".join(parts) + ".")


@styled
def visibility(maps: Mapping[str, Any], tokens: int) -> Figure:
    """Draw which keys each query sees: one panel per layer kind.

    Args:
        maps: label -> integer [queries, keys]: 0 hidden, 1 (`WINDOW`) token seen in the window, 2 (`VISIBLE`) entry
            complete but not selected, 3 (`SELECTED`) entry attended. Keys are ``tokens`` tokens, then entries.
        tokens: how many of the key columns are tokens; a line separates them from the entries.
    """
    arrays = {label: _codes("maps", value, len(VISIBILITY)) for label, value in maps.items()}
    for label, values in arrays.items():
        if values.shape[1] < tokens:
            raise ArgumentError(f"maps[{label!r}]", values.shape, f"at least tokens={tokens} key columns")
    widths = [values.shape[1] for values in arrays.values()]
    fig = style.new_figure(height=1.3 + min(4.0, 7.6 * max(v.shape[0] for v in arrays.values()) / sum(widths)))
    panels = fig.subplots(1, len(arrays), squeeze=False, width_ratios=widths, sharey=True)[0]
    for ax, (label, values) in zip(panels, arrays.items(), strict=True):
        _coded(ax, values, [colour for _, colour in VISIBILITY.values()])
        ax.axvline(tokens - 0.5, color=style.INK, linewidth=1.0)
        ax.set(title=label)
        middle = [tokens / 2 - 0.5] + ([(tokens + values.shape[1]) / 2 - 0.5] if values.shape[1] > tokens else [])
        ax.set_xticks(middle, ["tokens", "entries"][: len(middle)])
        ax.tick_params(axis="x", length=0)
    panels[0].set_ylabel("query position")
    _legend(fig, VISIBILITY, arrays.values())
    parts = [
        f"{label}: the last query sees {(values[-1] == WINDOW).sum()} tokens and attends "
        f"{(values[-1] == SELECTED).sum()} of {(values[-1] >= VISIBLE).sum()} complete entries"
        for label, values in arrays.items()
    ]
    return style.set_alt(fig, "Which keys each query sees. " + "; ".join(parts) + ".")


@styled
def ring(held: Any, title: str = "", steps_are: str = "position of the newest token") -> Figure:
    """Draw what the slots of a ring hold while a request grows.

    Args:
        held: integer [steps, slots], the position whose key is in a slot after each step; -1: nothing.
        title: first line of the figure. steps_are: what the steps are, at their axis.
    """
    values = as_array("held", held, np.int64)
    if values.ndim != 2 or values.size == 0 or values.max() < 0:
        raise ArgumentError("held", values.shape, "a table [steps, slots] with a key in it")
    fig = style.new_figure(height=3.6)
    ax = fig.subplots()
    cmap = matplotlib.colormaps[style.SEQUENTIAL].with_extremes(bad=EMPTY)
    image = ax.imshow(np.ma.masked_less(values, 0), cmap=cmap, aspect="auto", interpolation="nearest")
    newest = values.argmax(axis=1)
    there = values.max(axis=1) >= 0
    steps = np.arange(len(values))
    ax.scatter(newest[there], steps[there], s=2.5, color=kind_colour("newest key"), linewidths=0, label="newest key")
    frame(ax)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="slot of the ring", ylabel=steps_are, title=title)
    fig.colorbar(image, ax=ax, label="position held by the slot", pad=0.01)
    fig.legend(
        handles=[Patch(color=kind_colour("newest key"), label="newest key"), Patch(color=EMPTY, label="never written")],
        loc="outside lower center",
        ncols=2,
    )
    full = int((values >= 0).all(axis=1).argmax()) if (values >= 0).all(axis=1).any() else len(values)
    facts = f"{values.shape[1]} slots over {len(values)} steps; all are written from step {full} on"
    return style.set_alt(fig, f"Ring of keys{', ' + title if title else ''}: {facts}.")


@styled
def curves(
    x: Any,
    panels: Mapping[str, Mapping[str, Any]],
    xlabel: str,
    ylabel: str,
    log: str = "",
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw the lines over a common axis, one panel per group, each line labelled.

    Args:
        x: [n] values of the common axis.
        panels: panel title -> line label -> [n] values.
        xlabel: what ``x`` is, with its unit.
        ylabel: what the values are, with their unit.
        log: axes on a logarithmic scale: any of ``x``, ``y``, ``xy`` or nothing.
        marks: label -> x position of a thin vertical line.
    """
    places = as_array("x", x)
    if log not in ("", "x", "y", "xy"):
        raise ArgumentError("log", log, "'', 'x', 'y' or 'xy'")
    if not panels:
        raise ArgumentError("panels", panels, "at least one panel")
    fig = style.new_figure(height=3.4)
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    summary = []
    chosen = kind_colours(label for lines in panels.values() for label in lines)
    dashes = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for index, (label, line) in enumerate(lines.items()):
            values = as_array(label, line)
            if values.shape != places.shape:
                raise ArgumentError(f"panels[{title!r}][{label!r}]", values.shape, f"the shape of x, {places.shape}")
            look = {"color": chosen[label], "linestyle": dashes[index % 5]}
            ax.plot(places, values, linewidth=1.8, label=label, **look)
            summary.append(f"{label} goes from {values[0]:.3g} to {values[-1]:.3g}")
        if np.all(places == np.round(places)):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if "x" in log:
            ax.set_xscale("log", base=2)
        if "y" in log:
            ax.set_yscale("log")
        for label, place in (marks or {}).items():
            ax.axvline(place, color=style.MUTED, linewidth=0.8, linestyle=":")
            ax.annotate(label, (place, 1), xycoords=("data", "axes fraction"), fontsize=7, color=style.MUTED, va="top")
        ax.grid(color=style.GRID, linewidth=0.5)
        ax.set(title=title, xlabel=xlabel)
        if len(lines) > 1:
            ax.legend(fontsize=8)
    axes[0].set_ylabel(ylabel)
    return style.set_alt(fig, f"{ylabel} over {xlabel}: " + "; ".join(summary) + ".")


@styled
def kv_bytes(
    per_token: Mapping[str, Mapping[str, float]], contexts: Sequence[int], fixed: Mapping[str, float]
) -> Figure:
    """Draw what the KV cache of a request costs.

    Growing bytes per token by part, and the total over the context length.

    Args:
        per_token: model -> part -> bytes that each further token adds.
        contexts: context lengths for the totals, in tokens.
        fixed: model -> bytes of a request that do not grow.
    """
    if set(per_token) != set(fixed) or not per_token:
        raise ArgumentError("fixed", sorted(fixed), f"the models of per_token, {sorted(per_token)}")
    parts = list(dict.fromkeys(part for costs in per_token.values() for part in costs))
    fig = style.new_figure(height=3.4)
    bars, lines = fig.subplots(1, 2, width_ratios=(1.0, 1.1))
    start = np.zeros(len(per_token))
    colours, chosen = kind_colours(parts), kind_colours(per_token)
    for part in parts:
        sizes = np.array([costs.get(part, 0.0) for costs in per_token.values()])
        bars.barh(list(per_token), sizes, left=start, color=colours[part], label=part, height=0.55)
        start += sizes
    for row, total in enumerate(start):
        bars.text(total, row, f" {total:,.0f}", va="center", fontsize=8.5)
    bars.invert_yaxis()
    bars.set(title="bytes per further token", xlim=(0, float(start.max()) * 1.18))
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8)
    summary = []
    for index, (name, total) in enumerate(zip(per_token, start, strict=True)):
        gib = (fixed[name] + total * np.asarray(contexts, dtype=float)) / 2**30
        look = {"color": chosen[name], "linestyle": ("-", "--", "-.", ":")[index % 4]}
        lines.plot(contexts, gib, linewidth=1.8, label=name, **look)
        summary.append(f"{name}: {total:,.0f} bytes per token, {gib[-1]:.2f} GiB at {contexts[-1]:,} tokens")
    lines.set_xscale("log", base=2)
    lines.set_yscale("log")
    lines.grid(color=style.GRID, linewidth=0.5)
    lines.set(title="one request, GiB", xlabel="context, tokens")
    lines.legend(fontsize=8)
    return style.set_alt(fig, "KV cache size. " + "; ".join(summary) + ".")


@styled
def parity(rows: Sequence[tuple[str, float, float]], title: str = "") -> Figure:
    """Draw measured differences against their bounds, on a logarithmic axis.

    Args:
        rows: (label, largest absolute difference, bound allowed); a difference of 0 is drawn at the left edge.
        title: first line of the figure.
    """
    if not rows:
        raise ArgumentError("rows", rows, "at least one row")
    labels = [label for label, _, _ in rows]
    values = np.array([value for _, value, _ in rows], dtype=float)
    bounds = np.array([bound for _, _, bound in rows], dtype=float)
    positive = np.concatenate([values[values > 0], bounds[bounds > 0]])
    low = float(positive.min()) / 10 if positive.size else 1e-9
    fig = style.new_figure(height=0.9 + 0.24 * len(rows))
    ax = fig.subplots()
    place = np.arange(len(rows))
    ok = values <= bounds
    shown, limit = np.maximum(np.nan_to_num(values, nan=np.inf), low), np.maximum(bounds, low)
    top = 10 * float(np.max([*shown[np.isfinite(shown)], *limit]))
    shown = np.minimum(shown, top)
    ax.hlines(place, low, shown, color=style.GRID, linewidth=1.0)
    ax.scatter(shown[ok], place[ok], color=kind_colour("right"), s=26, label="difference, within its bound", zorder=3)
    if not ok.all():
        look = {"color": kind_colour("wrong"), "marker": "X", "s": 44, "zorder": 3}
        ax.scatter(shown[~ok], place[~ok], label="difference, too large", **look)
    ax.scatter(limit, place, color=style.INK, marker="|", s=90, label="bound")
    ax.set_xscale("log")
    ax.set_yticks(place, labels, fontsize=8)
    ax.set(xlim=(low * 0.7, top), ylim=(len(rows) - 0.4, -0.6), xlabel="max |difference|", title=title)
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    worst = int(np.argmax(np.divide(shown, limit)))
    alt = f"{int(ok.sum())} of {len(rows)} compared tensors are within their bound. Closest to it or worst beyond it: "
    return style.set_alt(fig, alt + f"{labels[worst]}, {values[worst]:.2g} of {bounds[worst]:.2g}.")


def _codes(name: str, value: Any, highest: int) -> np.ndarray:
    codes = as_array(name, value, np.int64)
    if codes.ndim != 2 or codes.size == 0 or codes.min() < 0 or codes.max() > highest:
        raise ArgumentError(name, f"{codes.shape}", f"a non-empty 2-D integer array of codes 0..{highest}")
    return codes


def _coded(ax: Axes, codes: np.ndarray, colours: Sequence[str]) -> None:
    ax.imshow(codes, cmap=ListedColormap([EMPTY, *colours]), vmin=0, vmax=len(colours), aspect="auto")
    frame(ax)


def _legend(fig: Figure, looks: Mapping[int, tuple[str, str]], arrays: Any) -> None:
    used = set().union(*(np.unique(values).tolist() for values in arrays))
    handles = [Patch(color=colour, label=label) for code, (label, colour) in looks.items() if code in used]
    fig.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))
