"""Draw the tile picture of a kernel. Which products a CTA forms, and where their operands live.

Everything is an argument: extents, memories, bytes and columns come from the kernel's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import frame, ink_on, styled
from dsv4lib.viz.style import INK, MUTED, new_figure, set_alt
from dsv4lib.viz.tmem import Region, draw_map, listing

MEMORIES = ("SMEM", "TMEM", "registers")
_GAP = 0.35


@dataclass(frozen=True)
class Part:
    """An operand or a result: its name, rows x columns. Also the memory it lives in (one of `MEMORIES`)."""

    name: str
    rows: int
    columns: int
    memory: str


@styled
def tile_picture(
    products: Sequence[tuple[Part, Part, Part]],
    smem: Sequence[tuple[str, int]],
    smem_limit: int,
    tmem: Sequence[Region],
    title: str,
) -> Figure:
    """Draw the products of a CTA, its shared memory and its tensor memory.

    Args:
        products: (A [M, K], B [K, N], D [M, N]) of each, in order.
        smem: (name, bytes) of the buffers, from the first byte on.
        smem_limit: bytes a CTA may have.
        tmem: regions of tensor memory.
        title: which kernel.

    Raises:
        ArgumentError: no product, extents that do not fit together, or a memory that is none of `MEMORIES`.
    """
    if not products:
        raise ArgumentError("products", "none", "one or more")
    for a, b, d in products:
        if (a.rows, a.columns, b.columns) != (d.rows, b.rows, d.columns) or {a.memory, b.memory, d.memory} - {
            *MEMORIES
        }:
            raise ArgumentError("products", (a, b, d), f"A [M, K], B [K, N], D [M, N] in {', '.join(MEMORIES)}")
    fig = new_figure(height=5.6)
    above, below = fig.subfigures(2, 1, height_ratios=(1.25, 1))
    for ax, product in zip(above.subplots(1, len(products), squeeze=False)[0], products, strict=True):
        _product(ax, product)
    left, right = below.subplots(1, 2, width_ratios=(1, 2.1))
    _stack(left, smem, smem_limit)
    used, clash = draw_map(right, tmem)
    right.set_title(f"tensor memory: {used} of 512 columns" + (f", {clash} cells claimed twice" if clash else ""))
    fig.suptitle(title, fontsize=10, fontweight="bold", color=INK, x=0.01, ha="left")
    said = "; ".join(f"{a.name} [{a.rows}, {a.columns}] x {b.name} = {d.name}" for a, b, d in products)
    bytes_of = ", ".join(f"{name} {size:,} bytes" for name, size in smem)
    return set_alt(fig, f"Tile picture, {title}. Products: {said}. Shared memory: {bytes_of}. TMEM: {listing(tmem)}.")


def _product(ax: Axes, product: tuple[Part, Part, Part]) -> None:
    """A at the left, B above, D in the corner; sides grow with the square root of the extents, so all stay visible."""
    a, b, d = product
    m, k, n = (extent**0.5 / 8 for extent in (a.rows, a.columns, b.columns))
    places = ((a, 0.0, 0.0, k, m), (b, k + _GAP, m + _GAP, n, k), (d, k + _GAP, 0.0, n, m))
    for part, x, y, width, height in places:
        colour = kinds.colours([part.name])[part.name]
        ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="none"))
        text = f"{part.name}\n{part.rows} x {part.columns}\n{part.memory}"
        where = {"ha": "center", "va": "center", "color": ink_on(colour), "fontsize": 8}
        ax.text(x + width / 2, y + height / 2, text, **where)
    ax.text(k / 2, m + _GAP / 2, f"{d.name} = {a.name} x {b.name}", ha="center", fontsize=8.5, color=MUTED)
    ax.set(xlim=(-0.1, k + n + _GAP + 0.1), ylim=(-0.1, m + k + _GAP + 0.1), aspect="equal")
    ax.set_axis_off()


def _stack(ax: Axes, buffers: Sequence[tuple[str, int]], limit: int) -> None:
    """Shared memory as a stack of buffers, first byte at the bottom."""
    at, small = 0, []  # small ones share a label beside the stack
    chosen = kinds.colours(name for name, _ in buffers)
    for name, size in buffers:
        colour = chosen[name]
        ax.bar(0, size / 1024, bottom=at / 1024, width=1.0, color=colour, edgecolor="white", linewidth=0.8)
        if size > 0.05 * limit:
            label = {"ha": "center", "va": "center", "fontsize": 8, "color": ink_on(colour)}
            ax.text(0, (at + size / 2) / 1024, f"{name}: {size / 1024:g} KiB", **label)
        elif size > 0.02 * limit:
            small.append((name, at + size / 2))
        at += size
    if small:
        middle = sum(place for _, place in small) / len(small)
        names = ", ".join(name for name, _ in small)
        ax.text(0.54, middle / 1024, names, va="center", fontsize=7, color=MUTED)
    ax.axhline(limit / 1024, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
    frame(ax)
    ax.set(xlim=(-0.55, 1.05), ylim=(0, limit / 1024 * 1.06), ylabel="KiB", title="shared memory, dashed: limit")
    ax.set_xticks([])
