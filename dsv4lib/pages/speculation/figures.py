"""Figures and tables of the page on drafts and their verification."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from dsv4lib import viz
from dsv4lib.config import FLASH
from dsv4lib.loader.whole import Listed
from dsv4lib.model.tokenizer import ByteTokenizer
from dsv4lib.model.verify import residual
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.speculation import run_case
from dsv4lib.pages.speculation.run_case import Accepted, Chains, Change, Served
from dsv4lib.viz import style
from dsv4lib.viz.diagram import pipeline
from dsv4lib.viz.kinds import colour as kind_colour
from dsv4lib.viz.panels import ink_on, styled
from dsv4lib.viz.table import show_table

OLD, KNOWN, TAKEN, LOST, UNUSED = (
    "earlier token",
    "the step's known token",
    "accepted draft",
    "rejected draft",
    "unused",
)
COLOURS = {
    OLD: kind_colour("old"),
    KNOWN: kind_colour("known"),
    TAKEN: kind_colour("accepted"),
    LOST: kind_colour("rejected"),
}
COLOURS[UNUSED] = "#eef1f4"
SHOWN = 9  # tokens of a distribution
CELL, HIGH = 1.0, 0.8


def flow() -> Figure:
    """Draw a step with drafts: what drafts, what verifies, what goes back."""
    lanes = {
        "drafting, K times": [
            ("streams", "of the last token", kind_colour("given")),
            ("MTP block", "and the token after it", kind_colour("product")),
            ("argmax", "a draft", kind_colour("choice")),
            ("again", "with its own streams", kind_colour("product")),
        ],
        "one step of the model": [
            ("K + 1 tokens", "the last one, K drafts", kind_colour("given")),
            ("backbone", "K + 1 rows of logits", kind_colour("product")),
            ("verify", "a prefix, and one more", kind_colour("choice")),
            ("commit", "length + accepted + 1", kind_colour("result")),
            ("go back", "by position: no copy", kind_colour("storage")),
        ],
    }
    return pipeline(lanes, "draft, verify, go back")


def shown(token: int) -> str:
    """A byte as it is read, in quotes."""
    return repr(ByteTokenizer().bytes_of(token).decode("latin1"))


def text(tokens: tuple[int, ...] | list[int]) -> str:
    """Bytes as they are read, in quotes."""
    return repr("".join(ByteTokenizer().bytes_of(token).decode("latin1") for token in tokens))


def steps_table(one: Served) -> None:
    """Show what each step drafted and kept."""
    rows = [
        (number, change.start, text(change.drafted) if change.drafts else "", change.accepted, text(change.kept))
        for number, change in enumerate(one.changes)
    ]
    show_table(("step", "first position", "drafts", "accepted", "tokens that it gave"), rows)


def runs_table(runs: dict[int, Served]) -> None:
    """Show tokens, steps and rows of runs with different numbers of drafts."""
    rows = [
        (k, text(one.tokens), len(one.changes), f"{one.a_step:.2f}", one.rows, one.rows - runs[0].rows)
        for k, one in runs.items()
    ]
    show_table(("K", "text", "steps", "tokens a step after the prompt", "tokens run", "more than without"), rows)


@styled
def acceptance(found: Accepted, places: int) -> Figure:
    """Draw acceptance by place of the draft: after those before it, with counts, and of the whole prefix."""
    fig = style.new_figure(height=3.5)
    left, right = fig.subplots(1, 2, sharey=True)
    x = torch.arange(1, len(found.reached) + 1)
    each = found.accepted.double() / found.reached.clamp_min(1)
    left.bar(x.tolist(), (100 * each).tolist(), color=kind_colour("accepted"), width=0.62)
    for i, share in enumerate(each.tolist()):
        words = f"{found.accepted[i]}\nof {found.reached[i]}" if found.reached[i] else "never\nreached"
        left.text(i + 1, 100 * share + 1.5, words, ha="center", va="bottom", fontsize=7.5, linespacing=1.1)
    left.set(title="if those before it were accepted", xlabel="place of the draft", ylabel="accepted, %", ylim=(0, 105))
    for values, label, colour, mark in (
        (found.greedy, "greedy: the target's argmax", kind_colour("accepted"), "o"),
        (found.drawn, "drawn at temperature 1", kind_colour("target"), "s"),
    ):
        right.plot(
            x.tolist(), (100 * values).tolist(), color=colour, marker=mark, markersize=4.5, linewidth=1.6, label=label
        )
    right.set(title="it and all before it", xlabel="place of the draft")
    right.legend(fontsize=8)
    for ax in (left, right):
        ax.set_xticks(x.tolist())
        ax.grid(axis="y", color=style.GRID, linewidth=0.5)
        ax.set_axisbelow(True)
    said = ", ".join(f"{n} of {m}" for n, m in zip(found.accepted.tolist(), found.reached.tolist(), strict=True))
    alt = f"Accepted drafts by place, over {places} places of held-out text: {said}. Drawn at temperature 1: "
    return style.set_alt(fig, alt + ", ".join(f"{100 * s:.1f} %" for s in found.drawn.tolist()) + ".")


@styled
def distributions(chains: Chains, position: int, counts: torch.Tensor) -> Figure:
    """Draw target and draft distribution of one token, what a rejection draws from, and what came out."""
    p, q, drawn = chains.p[position], chains.q[position], counts.double() / counts.sum()
    rest = residual(p, q)
    order = torch.maximum(p, q).argsort(descending=True)[:SHOWN]
    fig = style.new_figure(height=3.6)
    left, right = fig.subplots(1, 2, sharey=True)
    y, names = torch.arange(SHOWN).double(), [shown(int(token)) for token in order]
    left.barh(
        (y - 0.2).tolist(),
        (100 * q[order]).tolist(),
        height=0.38,
        color=kind_colour("draft"),
        label="q, the draft block",
    )
    left.barh(
        (y + 0.2).tolist(), (100 * p[order]).tolist(), height=0.38, color=kind_colour("target"), label="p, the target"
    )
    left.set(title="two distributions of the next byte", xlabel="probability, %")
    right.barh(
        y.tolist(),
        (100 * rest[order]).tolist(),
        height=0.6,
        color="#d5dae0",
        label="residual, max(p - q, 0) normalised",
    )
    right.scatter(100 * p[order], y, color=kind_colour("target"), marker="|", s=130, linewidths=2, label="p", zorder=3)
    right.scatter(
        100 * drawn[order], y, color=kind_colour("accepted"), s=18, label="share among tokens that came out", zorder=4
    )
    right.set(title=f"{int(counts.sum()):,} draws, verified", xlabel="%")
    left.set_yticks(y.tolist(), names, family="DejaVu Sans Mono")
    left.invert_yaxis()
    for ax in (left, right):
        ax.legend(fontsize=7.5, loc="lower right")
        ax.grid(axis="x", color=style.GRID, linewidth=0.5)
        ax.set_axisbelow(True)
    overlap = float(torch.minimum(p, q).sum())
    worst = 100 * float((drawn - p).abs().max())
    alt = f"Target and draft distribution of one byte overlap by {100 * overlap:.0f} %. After verification no token's "
    return style.set_alt(fig, alt + f"share is more than {worst:.1f} points from the target's probability.")


def position_table(chains: Chains, position: int) -> None:
    """Show the numbers of verification for the likeliest bytes of one position."""
    p, q = chains.p[position], chains.q[position]
    rest, order = residual(p, q), torch.maximum(p, q).argsort(descending=True)[:6]
    rows = []
    for token in order.tolist():
        chance = min(1.0, float(p[token] / q[token])) if q[token] > 0 else 1.0
        through = min(float(p[token]), float(q[token]))
        lost = (1 - float(torch.minimum(p, q).sum())) * float(rest[token])
        numbers = (float(q[token]), chance, through, float(rest[token]), lost, through + lost, float(p[token]))
        rows.append((shown(token), *(f"{x:.3f}" for x in numbers)))
    head = "byte", "q", "accepted: min(1, p/q)", "by the draft", "residual", "by a replacement", "sum", "p"
    show_table(head, rows)


@styled
def rollback(change: Change, rings: dict[str, int], rate: int) -> Figure:
    """Show what one step wrote into window, state ring and entries, and what the next token reads of them."""
    end, rows = change.start + 1 + change.drafts, rings["csa_state"]
    first = change.length // rate * rate - rate
    kind = {p: _kind(change, p) for p in range(end)}
    shown_from = max(0, end - rows)
    window = [(str(p), kind[p], p < change.length) for p in range(shown_from, end)]
    ring = []
    for row in range(rows):
        p = max((p for p in range(row, end, rows)), default=-1)
        ring.append((str(p), kind[p], first <= p < change.length) if p >= 0 else ("", UNUSED, False))
    entries = []
    for s in range(end // rate):
        closed = s * rate + rate - 1
        entries.append((str(s), kind[closed], s < (change.length + 1) // rate and closed < change.length))
    lines = [("window: a row a position", window), ("CSA state: a ring", ring), ("CSA entries, 4 tokens each", entries)]
    fig = style.new_figure(height=3.7)
    ax = fig.subplots()
    for line, (label, cells) in enumerate(lines):
        y = -1.75 * line
        ax.text(-0.35, y + HIGH / 2, label, ha="right", va="center", fontsize=8.5)
        for column, (words, what, read) in enumerate(cells):
            colour = COLOURS[what]
            ax.add_patch(Rectangle((column * CELL, y), 0.94, HIGH, facecolor=colour, edgecolor="none"))
            if read:
                ax.add_patch(Rectangle((column * CELL, y - 0.2), 0.94, 0.11, facecolor=style.INK, edgecolor="none"))
            ax.text(column + 0.47, y + HIGH / 2, words, ha="center", va="center", fontsize=8, color=ink_on(colour))
    ax.set(xlim=(-5.4, max(rows, len(window)) + 0.1), ylim=(-1.75 * 2 - 0.5, HIGH + 0.2))
    ax.set_title(f"after a step at position {change.start}: {change.accepted} of {change.drafts} drafts accepted")
    ax.set_axis_off()
    used = {what for _, cells in lines for _, what, _ in cells}
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    handles.append(Patch(color=style.INK, label=f"bar: read by the token at {change.length}"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    lost = [p for p in range(end) if kind[p] == LOST]
    wrote = f"Rejected drafts wrote positions {lost[0]} to {lost[-1]}" if lost else "No draft was rejected"
    alt = f"Cells of a window, a ring of {rows} rows and entries after a step. {wrote}; the token at "
    return style.set_alt(fig, alt + f"{change.length} reads only cells of committed positions.")


@styled
def hca_rollback(change: Change, rings: dict[str, int], rate: int) -> Figure:
    """Draw HCA's ring after a step, a cell a row, beside the running softmax that it has without drafts."""
    end, rows, across = change.start + 1 + change.drafts, rings["hca_state"], 64
    first = change.length // rate * rate
    fig = style.new_figure(height=3.4)
    ax = fig.subplots()
    used = set()
    for row in range(rows):
        p = max(range(row, end, rows), default=-1)
        what = _kind(change, p) if p >= 0 else UNUSED
        x, y = row % across, -(row // across) * 1.3
        used.add(what)
        ax.add_patch(Rectangle((x, y), 0.86, 0.8, facecolor=COLOURS[what], edgecolor="none"))
        if first <= p < change.length:
            ax.add_patch(Rectangle((x, y - 0.2), 0.86, 0.11, facecolor=style.INK, edgecolor="none"))
        if row % across == 0:
            ax.text(-0.8, y + 0.4, f"rows {row} to {min(row + across, rows) - 1}", ha="right", va="center", fontsize=8)
    below = -1.3 * math.ceil(rows / across) - 1.1
    mixed = LOST if change.length < end else TAKEN
    state = f"maximum, sum and weighted sum over positions {first} to {end - 1}: {mixed}s are in all three"
    if first == end:
        mixed, state = UNUSED, f"maximum, sum and weighted sum of no position: the window closed at {end - 1}"
    used.add(mixed)
    ax.add_patch(Rectangle((0, below), across - 0.14, 1.1, facecolor=COLOURS[mixed], edgecolor="none"))
    ax.text(across / 2, below + 0.55, state, ha="center", va="center", fontsize=8, color=ink_on(COLOURS[mixed]))
    ax.text(-0.8, below + 0.55, "running: one row", ha="right", va="center", fontsize=8)
    ax.set(xlim=(-12, across), ylim=(below - 0.3, 1.0))
    ax.set_title(f"HCA: rows go back by position, a running softmax does not; step at {change.start}")
    ax.set_axis_off()
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    handles.append(Patch(color=style.INK, label=f"bar: read when the window of {rate} closes"))
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    lost, kept = [p % rows for p in range(change.length, end)], f"the {change.length - first} rows of its open window"
    if lost:
        where = f"Rejected drafts lie in rows {lost[0]} to {lost[-1]}, past {kept}"
        where += "; a running softmax would hold them in its sums."
    else:
        where = f"No draft was rejected; the next token reads {kept}."
    return style.set_alt(fig, f"HCA's ring of {rows} rows after a step. {where}")


def _kind(change: Change, position: int) -> str:
    if position < change.start:
        return OLD
    if position == change.start:
        return KNOWN
    return TAKEN if position < change.length else LOST


def overwritten(change: Change, rings: dict[str, int], rate: int) -> None:
    """Show what each rejected draft overwrote, and why it is not missed."""
    rows, least = [], change.length // rate * rate - rate
    for p in range(change.length, change.start + 1 + change.drafts):
        old = p - rings["csa_state"]
        what = f"position {old}" if old >= 0 else "nothing"
        why = f"rows from {least} on are read" if old >= 0 else "the row was unused"
        entry = f"entry {p // rate}" if (p + 1) % rate == 0 else ""
        rows.append((p, p % rings["csa_state"], what, why, entry))
    head = "rejected position", "row of the ring", "overwrote", "not missed, because", "entry written too early"
    show_table(head, rows)


def tokens_a_step(found: Accepted) -> Figure:
    """Draw the tokens that a step gives against drafts, from acceptance over held-out text."""
    lines = {"greedy": run_case.a_step(found.greedy), "drawn at temperature 1": run_case.a_step(found.drawn)}
    x = torch.arange(len(lines["greedy"]))
    return viz.model.curves(x, {"from acceptance over held-out text": lines}, "drafts K", "tokens a step")


def cost(found: Accepted) -> Figure:
    """Draw weight bytes of Flash a token against drafts, for three batches, with nano's acceptance."""
    gains = run_case.a_step(found.greedy)
    lines = {f"{n} requests" if n > 1 else "1 request": run_case.relative_cost(FLASH, n, gains) for n in (1, 8, 64)}
    title = "computed: bytes of weights a token, over K = 0"
    return viz.model.curves(torch.arange(len(gains)), {title: lines}, "drafts K", "ratio")


def faults_table(names: Sequence[str], found: Listed, right: Served, p: torch.Tensor, q: torch.Tensor) -> int:
    """Show what sees each fault of ``names``, on the reference back end. Returns how many nothing sees.

    Args:
        names: of `run_case.FAULTS`. found: the model. right: its text without drafts.
        p, q: distributions [V] of target and draft, for faults of a draw.
    """
    prompt, count = "The state of", len(right.tokens)

    def said(name: str) -> str:
        return run_case.FAULTS[name].__doc__.split("\n")[0]

    def judged(name: str) -> dict[str, float]:
        if name in run_case.OF_A_DRAW:
            return {"chi_square": run_case.chi_square(run_case.emitted(p, q, 8000, name)[0], p)}
        one = run_case.serve(found, prompt, count, run_case.MOST, "reference", name)
        seen = {"tokens": run_case.differing(right, one), "logits_missing": run_case.missing(right, one)}
        return seen | {"strayed": run_case.strayed(one)}

    return injected.seen_by({name: name for name in names}, said, judged, {"chi_square": 1.0})
