"""Draw the time of attention against the number of splits, by the formula of `ops.common.splits`, and its optimum."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.figure import Figure

from dsv4lib.ops.common import splits
from dsv4lib.viz import kinds
from dsv4lib.viz.panels import styled
from dsv4lib.viz.style import GRID, INK, MUTED, PAPER, new_figure, set_alt

TILE, WINDOW_TILES = 64, 2
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # whose optima are drawn
KEYS, START, COMBINE = "tiles of keys", "starts", "combine"  # addends of a time


class Launch(NamedTuple):
    """One launch of attention.

    Attributes:
        tokens: in the batch. heads: 64 or 128, in a CTA or a pair. entries: of the longest list.
        combine: microseconds of the second launch.
    """

    tokens: int
    heads: int
    entries: int
    combine: float = splits.COMBINE

    @property
    def blocks(self) -> int:
        """Blocks of 64 heads of a token."""
        return self.heads // 64

    @property
    def tiles(self) -> int:
        """Tiles of 64 keys of the longest list, the window's two among them."""
        return -(-self.entries // TILE) + WINDOW_TILES

    @property
    def most(self) -> int:
        """The most splits that are allowed: each has a tile, and all CTAs run at once."""
        return max(1, min(self.tiles, splits.SM_COUNT // self.blocks // self.tokens))

    def times(self, s: int, dims: int) -> dict[str, float]:
        """Microseconds of each addend of the formula."""
        tile = splits.mean_tile("index", self.blocks, self.tiles, WINDOW_TILES)
        units = self.tokens * self.blocks
        starts = splits.START * units * s * dims
        keys = (tile.whole if dims == 1 else tile.half) * -(-self.tiles // s) - tile.saved * (dims - 1)
        whole = splits.cost(s, units, self.tiles, tile, dims)
        combine = whole - keys - starts + (self.combine - splits.COMBINE if s > 1 else 0.0)
        return {KEYS: keys, START: starts, COMBINE: combine}

    def allowed(self, s: int, dims: int) -> bool:
        """Tell whether all CTAs of so many splits run at once."""
        return dims == 1 or self.tokens * self.blocks * s * dims <= splits.SM_COUNT

    def better(self, s: int) -> int:
        """Return the dims that make so many splits faster."""
        allowed = [dims for dims in (1, 2) if self.allowed(s, dims)]
        return min(allowed, key=lambda dims: sum(self.times(s, dims).values()))

    def best(self) -> tuple[int, int, float]:
        """Find (splits, dims, microseconds) of the shortest time; of equal ones that of the fewest splits."""
        choices = [(s, dims) for s in range(1, self.most + 1) for dims in (1, 2) if self.allowed(s, dims)]
        return min(((*choice, sum(self.times(*choice).values())) for choice in choices), key=lambda found: found[2])


@styled
def split_times(tokens: int, heads: int, entries: int, combine: float = splits.COMBINE) -> tuple[Figure, str]:
    """Draw the addends of the formula for each number of splits, the optimum, and where it is for other batches.

    Returns:
        the figure, and a line that states the optimum.
    """
    launch = Launch(tokens, heads, entries, combine)
    s_best, dims_best, us_best = launch.best()
    others = [Launch(n, heads, entries, combine) for n in BATCHES if n * launch.blocks <= splits.SM_COUNT]
    optima = [other.best() for other in others]
    fig = new_figure(height=4.0)
    ax = fig.subplots()
    numbers = range(1, launch.most + 1)
    dims_of = [launch.better(s) for s in numbers]
    times = [launch.times(s, dims) for s, dims in zip(numbers, dims_of, strict=True)]
    edges = [0.5, *(s + 0.5 for s in numbers)]
    floor = [0.0] * len(times)
    for name in (KEYS, START, COMBINE):
        top = [low + t[name] for low, t in zip(floor, times, strict=True)]
        ax.stairs(top, edges, baseline=floor, fill=True, color=kinds.colour(name), label=_LABELS[name])
        floor = top
    path = [(s, us) for s, _, us in optima]
    ax.plot(*zip(*path, strict=True), color=MUTED, linewidth=1.0, linestyle=":", marker="o", markersize=5,
            markerfacecolor=PAPER, label="optimum of other batches, tokens beside it")  # fmt: skip
    for other, (s, us) in zip(others, path, strict=True):
        ax.annotate(str(other.tokens), (s, us), (4, 5), textcoords="offset points", fontsize=7.5, color=MUTED)
    ax.plot([s_best], [us_best], marker="v", markersize=10, color=INK, linestyle="none", label="optimum")
    widest = max(launch.most, *(s for s, _ in path))
    ax.axvspan(launch.most + 0.5, widest * 1.15 + 1, color=GRID, alpha=0.6, label="more than tiles or SMs allow")
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.5, widest * 1.15 + 1)
    ax.set_ylim(0, 1.12 * max(*floor, *(us for _, us in path)))
    ticks = [2**i for i in range(8) if 2**i <= widest]
    ax.set_xticks(ticks, list(map(str, ticks)))
    ax.set(xlabel="splits of the keys", ylabel="us, by the formula")
    ax.set_title(f"{tokens} token{'s' * (tokens > 1)} x {heads} heads, {entries:,} entries: {launch.tiles} tiles")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    whole = sum(launch.times(1, 1).values())
    halves = " of half of O's dimensions each" if dims_best == 2 else ""
    line = f"{s_best} split{'s' * (s_best > 1)}{halves}: {us_best:.2f} us, unsplit {whole:.2f} us"
    moved = ", ".join(f"{other.tokens}: {s}" for other, (s, _) in zip(others, path, strict=True))
    return set_alt(fig, f"Time against splits. Best: {line}. Splits at the optimum by tokens: {moved}."), line


_LABELS = {
    KEYS: "keys: tile * ceil(tiles / s) - SAVED",
    START: "starts: START * blocks * s * dims",
    COMBINE: "combine: COMBINE + EACH * s + PARTIAL ...",
}
