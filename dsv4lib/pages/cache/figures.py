"""Draw figures and tables of the page on the KV cache's two stores. They are of runs of `run_case`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.formats import kv_entry
from dsv4lib.pages.cache import run_case
from dsv4lib.pages.cache.managed import Story
from dsv4lib.pages.cache.run_case import DIM, GROUP, GROUPS, NOPE, PAGE, WINDOW, Batch, Kernels, Pool
from dsv4lib.pages.common import faults as injected
from dsv4lib.viz import style
from dsv4lib.viz.diagram import pipeline
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.panels import styled
from dsv4lib.viz.table import show_table

SHOWN = 10  # tokens of a table of numbers
ALLOWED = {"nope_error": 1.0}  # of a check in `run_case.judged` that finds nothing; the others: 0
CLASSES = ("zero", "below bf16's normal numbers", "number", "infinity", "NaN")


def flow() -> Figure:
    """A key's two ways: the window's ring, and the paged pool."""
    key = ("kv row", "512 bf16, RoPE applied", colour("given"))
    entry = ("entry", "a row the compressor made", colour("given"))
    lanes = {
        "window, the last 128 tokens: kv_append": [
            key,
            ("request", "of the row, by a ballot", colour("choice")),
            ("slot", "position mod 128", colour("choice")),
            ("ring", "1,024 bytes as they are", colour("storage")),
            ("attention", "fmha reads rings", colour("result")),
        ],
        "pool, what stays: quantize_kv_entries, kv_gather": [
            entry,
            ("quantise", "7 groups of 64 to E4M3", colour("transform")),
            ("index", "page x page size + slot", colour("choice")),
            ("page", "584 bytes in two places", colour("storage")),
            ("gather", "by a list; -1: zeros", colour("choice")),
            ("dense rows", "512 bf16", colour("result")),
        ],
    }
    return pipeline(lanes, "how a key gets in and back")


def owners(batch: Batch, ring: torch.Tensor) -> Figure:
    """Which request's row lies in which slot of which ring, read from the contents."""
    found, codes = run_case.recognised(ring, batch.kv), torch.full(ring.shape[:2], -1)
    for number, (row, count, _, _) in enumerate(batch.table.tolist()):
        codes[(found >= row) & (found < row + count)] = number
    names = [name for name, *_ in batch.requests]
    labels = [f"ring {i}" for i in range(batch.rings)]
    title = f"one launch of {len(batch.kv)} rows: row of each slot"
    return viz.grids.category_map(codes, names, ("", "slot"), title, labels, "empty")


def stored_error(found: torch.Tensor, kv: torch.Tensor) -> Figure:
    """Show the largest error of every group of 64 dims, for the first tokens.

    In percent of the group's largest value.
    """
    apart = (found.double() - kv.double()).abs()[:SHOWN].unflatten(-1, (-1, GROUP)).amax(-1)
    size = kv.double().abs()[:SHOWN].unflatten(-1, (-1, GROUP)).amax(-1)
    columns = [f"{i * GROUP}.." for i in range(GROUPS)] + ["448.. rope"]
    norms = kv.double().norm(dim=-1).tolist()
    rows = [f"token {i}, |k| {norms[i]:,.{0 if norms[i] >= 10 else 1}f}" for i in range(len(size))]
    labels = "", "group of 64 dims", "largest error, % of the group's largest"
    return viz.grids.value_map(100 * apart / size, rows, columns, labels, "an entry's error, group by group", "{:.1f}")


def octave_error(kv: torch.Tensor, found: torch.Tensor) -> Figure:
    """Show the worst relative error of nope dims.

    By how far a value lies below its group's largest, in powers of two.
    """
    x, got = kv[:, :NOPE].double(), found[:, :NOPE].double()
    top = x.abs().unflatten(-1, (-1, GROUP)).amax(-1, keepdim=True).expand(-1, -1, GROUP).flatten(-2)
    below = torch.log2(top / x.abs()).floor().long()
    octaves = torch.arange(int(below.max()) + 1)
    worst = torch.stack([((got - x).abs() / x.abs())[below == i].max() for i in octaves])
    lines = {"worst value": 100 * worst, "4 significant bits": torch.full(worst.shape, 100 / 16)}
    titles = f"{kv.shape[0]} keys whose groups reach over {len(octaves)} powers of two"
    return viz.model.curves(octaves, {titles: lines}, "powers of two below the group's largest", "relative error, %")


def pool_map(pool: Pool) -> Figure:
    """Whose entries lie where in the pool."""
    codes = torch.full((pool.pages * PAGE,), -1)
    first = 0
    for number, count in enumerate(pool.counts):
        codes[pool.indices[first : first + count].long()] = number
        first += count
    names = [f"request {i}, pages {', '.join(map(str, table.tolist()))}" for i, table in enumerate(pool.tables)]
    labels = [f"page {i}" for i in range(pool.pages)]
    columns = "slot of the page"
    return viz.grids.category_map(
        codes.view(-1, PAGE), names, ("", columns), "a pool of pages, shared", labels, "unused"
    )


def index_table(picked: torch.Tensor, found: torch.Tensor, count: int = 7) -> None:
    """Show what the first indices of a list mean. They are page, slot, bytes, and the row that came."""
    lines, data = [], kv_entry.LAYOUT.data_bytes
    for index, row in zip(picked[:count].tolist(), found[:count], strict=True):
        page, slot = divmod(index, PAGE)
        if index < 0:
            parts = "none", "", "nothing is read", "", "zeros"
        else:
            start, scales = slot * data, kv_entry.LAYOUT.scale_offset(PAGE, slot, 0)
            dims = ", ".join(f"{float(v):.3g}" for v in (*row[:2], *row[-2:]))
            parts = page, slot, f"{start:,}..{start + data - 1:,}", f"{scales:,}..{scales + 6:,}", dims
        lines.append((index, *parts))
    show_table(("index", "page", "slot", "data bytes of the page", "scale bytes", "dims 0, 1, 510, 511"), lines)


def pair_map(found: torch.Tensor, ends: int = 12) -> Figure:
    """Show what every pair of code and scale has become. Under the ``ends`` smallest and largest scales."""
    x = found[:, :256].float()
    codes = torch.full(x.shape, 2)
    codes[x.abs() < 2.0**-126] = 1
    codes[x == 0], codes[x.isinf()], codes[x.isnan()] = 0, 3, 4
    rows = [*range(ends), *range(256 - ends, 256)]
    title = f"codes under the {ends} smallest and the {ends} largest scales, as the kernel reads them"
    labels = "scale byte", "E4M3 code"
    return viz.grids.category_map(codes[rows], CLASSES, labels, title, [str(row) for row in rows])


def odd_table(kv: torch.Tensor, found: torch.Tensor) -> None:
    """Show what became of entries that hold what is no number."""
    lines = []
    for row, back in zip(kv, found, strict=True):
        place = (~row.isfinite()).nonzero().flatten().tolist()
        put = f"{float(row[place[0]])} in dim {place[0]}" if place else "numbers"
        gone = (~back.isfinite()).nonzero().flatten()
        came = f"{int(back.isnan().sum())} NaN, {int(back.isinf().sum())} Inf"
        where = f"dims {int(gone.min())}..{int(gone.max())}" if len(gone) else "nowhere"
        lines.append((put, came, where))
    show_table(("went in", "came back", "where"), lines)


def kept_bytes() -> None:
    """Show the bytes of a key, a window and a pool of 1M tokens in each format."""
    entry, row, million = kv_entry.LAYOUT.entry_bytes, 2 * DIM, 1 << 20
    lines = [
        (name, size, f"{WINDOW * size / 1024:.0f}", f"{million // 4 * size / 2**20:.0f}")
        for name, size in (("bf16 row", row), ("584-byte entry", entry))
    ]
    lines.append(("entry / row", f"{entry / row:.3f}", "", ""))
    head = "format", "bytes a key", "window, KiB a request and layer", "CSA entries of 1M tokens, MiB a layer"
    show_table(head, lines)


def show_faults(faults: Mapping[str, Kernels], prefill: int, seed: int, backend: str) -> int:
    """Show which checks see which faulty kernel. Returns how many kernels none of them sees."""

    def said(kernels: Kernels) -> str:
        return injected.said_of(kernels, run_case.RIGHT) or "The right kernels."

    return injected.seen_by(faults, said, lambda one: run_case.judged(one, prefill, seed, backend), ALLOWED)


def listed(every: bool, harmless: bool) -> dict[str, Kernels]:
    """The faulty kernels to show."""
    return injected.listed(run_case.FAULTS, run_case.RIGHT, "PagesTransposed", every, harmless)


GROUP_COLOURS = {
    name: colour(name) for name in ("window", "csa", "keys", "hca", "csa_state", "keys_state", "hca_state")
}


@styled
def pool_over_time(told: Story) -> Figure:
    """Pages of the pool after each event: of requests by group, cached, unused."""
    fig = style.new_figure(height=5.0)
    ax = fig.subplots()
    places, start = range(len(told.moments)), [0] * len(told.moments)
    cached, unused = [one.cached for one in told.moments], [one.unused for one in told.moments]
    parts = {name: ([one.live[name] for one in told.moments], colour) for name, colour in GROUP_COLOURS.items()}
    parts |= {"cached, of no request": (cached, colour("cached")), "unused": (unused, "#eef1f4")}
    for name, (pages, shade) in parts.items():
        ax.barh(places, pages, left=start, height=0.8, color=shade, label=name, linewidth=0)
        start = [a + b for a, b in zip(start, pages, strict=True)]
    ax.set_yticks(list(places), [one.event for one in told.moments])
    ax.set(xlabel="pages", xlim=(0, start[0]), title=f"a pool of {start[0]} pages, from top to bottom in time")
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    fig.legend(loc="outside lower center", ncols=5, fontsize=8)
    fullest = min(told.moments, key=lambda one: one.unused)
    words = "; ".join(f"{one.event}: {sum(one.live.values())} live, {one.cached} cached" for one in told.moments)
    alt = f"Pages of the pool after each event. Fewest unused, {fullest.unused}, after '{fullest.event}'. {words}."
    return style.set_alt(fig, alt)


def group_bytes(told: Story) -> None:
    """Show the bytes of a block by group. All blocks and unused pages are the pool."""
    head = "group", "kind", "layers", "tokens a block", "bytes of values", "padding", "most blocks at once"
    show_table(head, told.rows)
