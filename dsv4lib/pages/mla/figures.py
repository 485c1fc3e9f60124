"""Figures and tables of the page on paged MLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dsv4lib import viz
from dsv4lib.ops.mla_decode.config import Config
from dsv4lib.ops.mla_decode.op import LATENT, ROPE
from dsv4lib.ops.mla_decode.splits import (
    CLUSTER,
    Steps,
    num_kv_splits_by_clusters,
    num_kv_splits_by_sms,
    steps_of,
    workspace_bytes,
)
from dsv4lib.pages.mla.arithmetic import GPUS, token_bytes, work
from dsv4lib.pages.mla.run_case import Found
from dsv4lib.pages.mla.serving import Served
from dsv4lib.viz import kinds, style
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import GRID, INK, MUTED
from dsv4lib.viz.table import show_table

FOUND, OTHER, UNREAD = range(3)  # slots: read for their token, read for another, not read
SLOTS = "read for the token that is there", "read for another token, or for none", "holds a token, never read"
EXAMPLE = 4, 8192  # requests, tokens
SHAPES = (  # SMs, requests, tokens
    (132, 4, 8192),
    (132, 8, 8192),
    (148, 1, 131072),
    (148, 2, 8192),
    (148, 16, 8192),
    (148, 64, 1024),
    (148, 4, 131072),
)


def token_sizes() -> Figure:
    """Draw the bytes of a token in one layer's cache."""
    sizes = token_bytes()
    marked = ["latent" in name for name in sizes]
    panels = [Panel("bytes of a token of a layer", list(map(float, sizes.values())))]
    return side_by_side(list(sizes), panels, marked, "128 heads share one row", 1)


def row_of_a_token() -> Figure:
    """Draw the bytes of a token's row: latent, then the rotated key."""
    codes = torch.cat((torch.zeros(2 * LATENT), torch.ones(2 * ROPE))).int()
    names = "latent: key and value", "rotated key"
    return viz.grids.byte_map(codes.numpy(), names, "a token's row: 512 + 64 numbers of 2 bytes", 128)


def slots_read(slots: Tensor, length: int, page: int, name: str) -> Figure:
    """Draw the slots of a request, a page a line: which are read for the token that is there.

    Args:
        slots: int32 [W], of the request's tokens. length: tokens. page: tokens of a page. name: of the example.
    """
    own = slots[:length].long()
    tokens = torch.arange(length)
    read = (own[tokens // page * page] // page) * page + tokens % page
    pages = sorted(set((own // page).tolist()) | set((read // page).tolist()))
    grid = torch.full((len(pages), page), -1)
    for at, kind in ((own, UNREAD), (read, OTHER), (own[own == read], FOUND)):
        for slot in at.tolist():
            grid[pages.index(slot // page), slot % page] = kind
    rows = [f"page {number}" for number in pages]
    title = f"{name}: {length} tokens in pages of {page}"
    labels = "", "slot within its page"
    return viz.grids.category_map(grid.numpy(), SLOTS, labels, title, rows, nothing="neither")


class Choice(NamedTuple):
    """Splits of a heuristic. steps: of the launch. partial: bytes of the outputs that are combined."""

    splits: int
    steps: Steps
    partial: int


def choice(sms: int, batch: int, tokens: int, by_clusters: bool) -> Choice:
    """Choose splits by counting clusters, or SMs as CUTLASS does."""
    choose = num_kv_splits_by_clusters if by_clusters else num_kv_splits_by_sms
    splits = choose(tokens, batch, sms)
    return Choice(splits, steps_of(tokens, batch, sms, splits), workspace_bytes(batch, splits))


@styled
def waves(sms: Sequence[int] = (132, 148), batch: int = EXAMPLE[0], tokens: int = EXAMPLE[1]) -> Figure:
    """Draw when clusters of two CTAs work, by both heuristics: a line a cluster, a box an item of work."""
    fig = style.new_figure(height=6.2, width=11.0)
    axes = fig.subplots(len(sms), 2, squeeze=False, sharex=True)
    said = []
    for row, count in zip(axes, sms, strict=True):
        for ax, right in zip(row, (False, True), strict=True):
            found = choice(count, batch, tokens, right)
            _gantt(ax, count // CLUSTER, batch * found.splits, found.steps)
            how = "an item is a cluster" if right else "an item is an SM"
            ax.set_title(f"{count} SMs, {how}: {found.splits} splits, {found.partial / 1e6:.1f} MB to combine")
            said.append(
                f"{count} SMs, {how}: {found.splits} splits, {found.steps.waves} waves, {found.steps.steps} steps"
            )
    for ax in axes[-1]:
        ax.set_xlabel("time in tiles of 128 tokens")
    for ax in axes[:, 0]:
        ax.set_ylabel("cluster of two CTAs")
    title = f"{batch} requests of {tokens:,} tokens"
    fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return style.set_alt(fig, f"{title}: " + "; ".join(said) + ".")


def _gantt(ax: Axes, clusters: int, items: int, steps: Steps) -> None:
    """Draw items in the order in which clusters take them."""
    long = steps.steps // steps.waves
    for item in range(items):
        wave, place = divmod(item, clusters)
        colour = kinds.colour("first wave" if wave == 0 else "later waves")
        ax.add_patch(Rectangle((wave * long, place), long, 1, fc=colour, ec=style.PAPER, lw=0.3))
    ax.axhline(clusters, color=INK, linewidth=1)
    idle = clusters * steps.waves - items
    text = f"{steps.waves} wave{'s' if steps.waves > 1 else ''}, {idle} of {clusters * steps.waves} slots idle"
    ax.text(steps.steps + 0.08, clusters / 2, text, va="center", fontsize=8, color=MUTED)
    ax.set(xlim=(0, 8), ylim=(clusters + 1, 0))
    ax.grid(axis="x", color=GRID, linewidth=0.5)


def heuristics() -> None:
    """Show splits, steps, waves and bytes to combine by both heuristics."""
    rows = []
    for sms, batch, tokens in SHAPES:
        both = [choice(sms, batch, tokens, right) for right in (False, True)]
        cells = [f"{one.splits} ({one.steps.steps}, {one.steps.waves})" for one in both]
        bytes_ = [f"{one.partial / 1e6:.1f}" for one in both]
        rows.append((sms, batch, tokens, *cells, *bytes_))
    header = "SMs", "requests", "tokens", "by SMs: splits (steps, waves)", "by clusters", "MB by SMs", "MB by clusters"
    show_table(header, rows)


def table_of(slots: Tensor, table: Tensor, page: int, rows: Sequence[int], starts: Sequence[int]) -> None:
    """Show a page table beside the slots that it was made of: the first of each page.

    Args:
        slots: int32 [R, W], the map. table: int32 [B, N]. page: tokens of a page. rows: requests. starts: first tokens.
    """
    shown = []
    for row, (request, start) in enumerate(zip(rows, starts, strict=True)):
        count = int((table[row] >= 0).sum())
        firsts = slots[request, start : start + count * page : page].tolist() if request >= 0 else []
        shown.append((row, request, start, " ".join(map(str, firsts)), " ".join(map(str, table[row].tolist()))))
    show_table(("row", "request", "from token", "slots of the pages' first tokens", "page table"), shown)


def served(run: Served) -> None:
    """Show the steps of a run: captured beside eager."""
    lines = [
        (str(step.requests), str(step.lengths), step.size, step.differences, f"{step.error:.4f}") for step in run.steps
    ]
    show_table(("requests", "tokens", "rows of the graph", "bits that differ from eager", "error over RMS"), lines)


def memory(run: Served) -> None:
    """Show the memory of graphs."""
    held = "-" if run.stand_in else "bytes held"
    lines = [(one.size, one.captured, held if run.stand_in else one.held_bytes, one.out_bytes) for one in run.memory]
    show_table(("rows", "captured", "bytes that the capture took", "bytes of its result"), lines)


def budget() -> None:
    """Show shared and tensor memory of a CTA of the SM100 kernel, alone and in a pair."""
    alone, pair = (Config(cluster=cluster).budget() for cluster in (1, 2))
    rows = [(a.resource, a.used, p.used, p.limit, p.unit, p.derivation) for a, p in zip(alone, pair, strict=True)]
    show_table(("a CTA's", "up to 64 heads", "of a pair", "limit", "unit", "the pair's"), rows)


def floors() -> None:
    """Show what a launch must take at least, on the GPUs that have kernels."""
    rows = []
    for tokens in (1024, 4096, 16384, 65536):
        one = work(32, tokens)
        rows.append(
            (
                tokens,
                f"{one.bytes / 1e6:.0f}",
                f"{one.flops / 1e9:.0f}",
                *(f"{one.floor_us(g):.3g}" for g in GPUS.values()),
            )
        )
    show_table(("tokens", "MB", "GFLOP", *(f"{name}, us" for name in GPUS)), rows)


def faults_table(found: Sequence[Found]) -> int:
    """Show the injected faults and what shows each; returns how many nothing shows."""
    show_table(("place", "fault", "what shows it", "found"), [(*one[:3], "yes" if one.seen else "NO") for one in found])
    return sum(not one.seen for one in found)
