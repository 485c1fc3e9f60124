"""Draw figures and tables of the page on the lightning indexer. They are of runs of `run_case`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.formats import hadamard
from dsv4lib.ops.indexer_q.op import IndexerQueries
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.indexer import run_case
from dsv4lib.pages.indexer.run_case import BLOCK, DIM, HEADS, RATE, Kernels, Step
from dsv4lib.viz.diagram import pipeline
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.table import show_table

# Of a check in `run_case.judged` that finds nothing; the others: 0.
ALLOWED = {"score_error": 0.2, "lost": 0.05, "folded_error": 6e-8, "logits_over_torch": 2}
FOUND = ("picked, as without rounding", "picked instead", "lost by rounding", "seen, not picked")


def flow() -> Figure:
    """Draw the flow from two projections to a list of entries."""
    lanes = {
        "a query: indexer_q": [
            ("64 heads", "128 bf16, projected", colour("given")),
            ("RoPE", "last 64 dims", colour("transform")),
            ("Hadamard", "spreads what is loud", colour("transform")),
            ("FP4 or FP8", "codes, scales", colour("storage")),
            ("weights", "one a head", colour("given")),
        ],
        "an entry: quantize_indexer_keys": [
            ("key", "128, one for 4 tokens", colour("given")),
            ("Hadamard", "the same matrix", colour("transform")),
            ("FP4", "68 bytes in a page", colour("storage")),
        ],
        "what they are worth: indexer_logits": [
            ("pages", "by the request's table", colour("storage")),
            ("q . k", "tensor core", colour("product")),
            ("ReLU", "head by head", colour("transform")),
            ("sum", "weights of heads", colour("result")),
        ],
        "which entries: topk": [
            ("count", "a histogram of scores", colour("transform")),
            ("bound", "the bin of the k-th best", colour("choice")),
            ("rank", "the few in that bin", colour("choice")),
            ("picks", "k indices, then -1", colour("result")),
        ],
    }
    return pipeline(lanes, "which entries a query of a CSA layer attends to")


def rotation(one: Step) -> Figure:
    """Draw FP4's error of queries and keys in each block of 32 dims. With and without the rotation."""
    rows, lines = [], []
    for name, x in (("queries", run_case.turned(one)), ("keys", one.keys.double())):
        for rotate in (False, True):
            rows.append(f"{name}, {'rotated' if rotate else 'as they are'}")
            lines.append(100 * run_case.block_error(x, rotate))
    columns = [f"{i * BLOCK}..{i * BLOCK + BLOCK - 1}" for i in range(DIM // BLOCK)]
    labels = "", "dims", "error, % of the block"
    return viz.grids.value_map(torch.stack(lines), rows, columns, labels, "what FP4 costs", "{:.1f}")


def sides(one: Step, k: int, backend: str) -> None:
    """Show what becomes of scores and picks where one side, or neither, is rotated."""
    exact, lines = run_case.exact_scores(one), []
    right = run_case.wanted_picks(exact, one.visible, k)
    for queries_too in (True, False):
        found, _ = run_case.queries(one, "fp4", backend, hadamard=queries_too)
        for keys_too in (True, False):
            keys = run_case.stored_keys(one, backend, keys_too).values
            coded = run_case.scores(run_case.values(found), keys, found.weights)
            kept = run_case.recall(run_case.wanted_picks(coded, one.visible, k), right)
            words = ("rotated" if on else "as they are" for on in (queries_too, keys_too))
            error = run_case.score_error(coded, exact)
            lines.append((*words, f"{100 * error:.1f}", f"{100 * kept.mean():.1f}", f"{100 * kept.min():.1f}"))
    head = "queries", "keys", "error of scores, % of their spread", "picks kept, %", "worst query, %"
    show_table(head, lines)


def code_error(one: Step, found: Mapping[str, IndexerQueries]) -> Figure:
    """Draw the error of the last query's heads, dim by dim. It is relative to the head's largest value."""
    want = hadamard.transform(run_case.turned(one))
    largest, maps = want.abs().amax(-1, keepdim=True), {}
    for variant, queries in found.items():
        x = run_case.values(queries)
        if queries.scales is None:
            x = x * torch.exp2(torch.ceil(torch.log2(largest / 448)))
        maps[variant] = ((x - want).abs() / largest)[-1]
    return viz.grids.block_maps(maps, ("head", "dim", "error / largest"), "the last query, head by head")


def score_lines(exact: torch.Tensor, coded: Mapping[str, torch.Tensor], k: int) -> Figure:
    """Draw the scores of the last query over its entries. They are in the order of the exact ones."""
    order = exact[-1].argsort(descending=True)
    # The last is drawn on top: the exact one, which is a line without noise.
    lines = {name: score[-1][order] for name, score in coded.items()} | {"nothing rounded": exact[-1][order]}
    title = f"{len(order):,} entries of the last query"
    return viz.model.curves(torch.arange(len(order)), {title: lines}, "rank", "score", marks={f"k = {k}": k})


def pick_map(one: Step, found: torch.Tensor, right: torch.Tensor) -> Figure:
    """Draw what every query picks among the entries."""
    codes = torch.full((len(found), len(one.keys)), -1)
    for row, (ours, theirs, seen) in enumerate(zip(found, right, one.visible.tolist(), strict=True)):
        codes[row, :seen] = 3
        codes[row, theirs[theirs >= 0].long()] = 2
        mine = ours[ours >= 0].long()
        codes[row, mine] = torch.where(codes[row, mine] == 2, 0, 1)
    rows = [f"token {at:,}" for at in one.positions.tolist()]
    title = f"{found.shape[1]} picks a query among what it sees"
    return viz.grids.category_map(codes, FOUND, ("", "entry"), title, rows, "not there yet")


def counted(score: torch.Tensor, k: int, bins: int = 1024) -> Figure:
    """Draw the histogram of a row of scores as the kernel counts it. It is around the bin of its k-th best."""
    place = run_case.bins_of(score, bins)
    counts = torch.bincount(place, minlength=bins)
    bound = int((counts.cumsum(0) < k).sum())
    first, last = int(place.min()), min(int(place.max()), bound + 40)
    shown = torch.arange(first, last + 1)
    above = int(counts[:bound].sum())
    title = f"{above} scores are in better bins, {int(counts[bound])} in the bin of number {k}: rank those"
    lines = {title: {"scores in the bin": counts[first : last + 1]}}
    marks = {f"bin {bound}": bound}
    return viz.model.curves(shown, lines, "bin, the best first", "scores", marks=marks)


def hard_table(wrong: Mapping[str, Mapping[str, int]]) -> None:
    """Show how many picks are wrong, by variant and kind of row."""
    names = list(next(iter(wrong.values())))
    show_table(("row", *wrong), [(name, *(line[name] for line in wrong.values())) for name in names])


def seen_table(one: Step, found: torch.Tensor) -> None:
    """Show what each query sees and what it got."""
    lines = []
    for at, seen, row in zip(one.positions.tolist(), one.visible.tolist(), found, strict=True):
        real = row[row >= 0].tolist()
        ends = f"{real[0]:,} .. {real[-1]:,}" if real else "none"
        lines.append((f"{at:,}", f"({at:,} + 1) // {RATE} = {seen:,}", len(real), int((row < 0).sum()), ends))
    show_table(("position", "entries it sees", "picks", "-1", "first and last"), lines)


def show_faults(faults: Mapping[str, Kernels], entries: int, k: int, seed: int, backend: str) -> int:
    """Show which checks see which fault; returns how many none of them sees."""

    def said(kernels: Kernels) -> str:
        right = "The right kernels." if kernels.rotate_keys else "Keys are stored without their rotation."
        return injected.said_of(kernels[:3], run_case.RIGHT[:3]) or right

    return injected.seen_by(faults, said, lambda one: run_case.judged(one, entries, k, seed, backend), ALLOWED)


def listed(every: bool, harmless: bool) -> dict[str, Kernels]:
    """Return the faults to show."""
    return injected.listed(run_case.FAULTS, run_case.RIGHT, "WeightsAsTheyCome", every, harmless)


def sizes(one: Step) -> None:
    """Show what a query and an entry cost in each format."""
    million = 1 << 20
    lines = [
        ("bf16", 2 * DIM, f"{HEADS * 2 * DIM / 1024:.1f}", f"{million // RATE * 2 * DIM / 2**20:.0f}"),
        ("FP8", DIM + 4, f"{HEADS * (DIM + 4) / 1024:.1f}", f"{million // RATE * (DIM + 4) / 2**20:.0f}"),
        ("FP4", DIM // 2 + 4, f"{HEADS * (DIM // 2 + 4) / 1024:.1f}", f"{million // RATE * 68 / 2**20:.0f}"),
    ]
    show_table(("format", "bytes a key", "KiB a query", "keys of 1M tokens, MiB a layer"), lines)
