"""Figures and tables of the page on a decode step: from the committed record, and from a model's sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from dsv4lib.bench.decode_step.lines import CLASSES
from dsv4lib.config import FLASH, LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.decode_step import run_case
from dsv4lib.pages.decode_step.floors import needs
from dsv4lib.pages.decode_step.run_case import BATCHES, CARD, CONTEXT, Judged, Live, Recorded, Whole
from dsv4lib.pages.decode_step.schedule import BESIDE, Schedule
from dsv4lib.pages.hopper.figures import TWO
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.table import show_table
from dsv4lib.viz.waterfall import Part, Words, waterfall

ALLOWED = {"b128": 1.6}  # the stage's bound of ours over the floor, of 128 requests


def _wrapped(name: str) -> str:
    return textwrap.fill(name, 24)


def _short(value: float | None) -> str:
    """Write three digits, never an exponent of a large number."""
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------- what a step is


def what_a_step_is(scheduled: Schedule) -> None:
    """Show every line of a step: calls in a layer of each kind, lines in a step, and what the calls are."""
    names = {one.name: one.group for one in needs(scheduled.config, 1, CONTEXT)}
    rows = []
    for line, group in sorted(names.items(), key=lambda item: CLASSES.index(item[1])):
        layers = [str(scheduled.a_layer(line, kind) or "") for kind in LayerKind]
        calls = ", ".join(map(str, scheduled.places_of(line)))
        rows.append((group, line, *layers, scheduled.counts.get(line, 0), calls))
    kinds = (f"calls in {'a' if kind == LayerKind.CSA else 'an'} {kind} layer" for kind in LayerKind)
    show_table(("class", "line", *kinds, "a step", "what is called"), rows)
    for place, reason in BESIDE.items():
        print(f"in no line: {place} ({reason})")


def calls_of(scheduled: Schedule) -> str:
    """Say how many calls of ops a step has, and of how many layers of each kind."""
    kinds = ", ".join(f"{scheduled.layers(kind)} {kind}" for kind in LayerKind)
    text = f"{scheduled.calls_a_step:,} calls of ops: {kinds} layers, embedding and head"
    return f"{text}; attention with splits launches twice"


# --------------------------------------------------------------------- floors


def floors_table(batch: int, context: int, bandwidth: float, config: ModelConfig = FLASH) -> None:
    """Show what each line of a step must move, MB of one call, and its floor; ``bandwidth`` in TB/s."""
    rate, rows = bandwidth * 1e12, []
    for one in sorted(needs(config, batch, context), key=lambda need: CLASSES.index(need.group)):
        floor = one.floor_us(rate)
        parts = (_short(size / 1e6) if size else "" for size in (one.weights, one.cache, one.tokens))
        bound = "bytes" if one.bytes / rate * 1e6 >= floor else "MMAs"
        rows.append((one.group, one.name, one.count, *parts, f"{floor:.3g}", f"{one.count * floor / 1e3:.3g}", bound))
    head = "class", "line", "a step", "weights MB", "caches MB", "activations MB", "floor us", "a step ms", "by"
    show_table(head, rows)


def floor_parts(config: ModelConfig, batch: int, context: int, bandwidth: float) -> list[Part]:
    """Return a step's floor by class in ms, and of that what is weights; ``bandwidth`` in TB/s."""
    found = needs(config, batch, context)
    parts = []
    for group in CLASSES:
        own = [one for one in found if one.group == group]
        full = sum(one.count * one.floor_us(bandwidth * 1e12) for one in own) / 1e3
        weights = sum(one.count * one.weights / bandwidth for one in own) / 1e9
        parts.append(Part(_wrapped(group), full, min(full, weights)))
    return parts


def floor_of(batch: int, context: int, bandwidth: float, config: ModelConfig = FLASH) -> tuple[Figure, str]:
    """Draw the floor of any step of a model as a waterfall: (figure, a line that states the result).

    Args:
        batch: requests. context: tokens of each. bandwidth: TB/s.

    Raises:
        ArgumentError: a context beyond the model's, or a size that is not positive.
    """
    for name, value, most in (("batch", batch, 4096), ("context", context, config.max_positions)):
        if not 1 <= value <= most:
            raise ArgumentError(name, value, f"1 to {most}")
    if not bandwidth > 0:
        raise ArgumentError("bandwidth", bandwidth, "TB/s, more than 0")
    parts = floor_parts(config, batch, context, bandwidth)
    ms, weights = sum(one.value for one in parts), sum(one.inner for one in parts)
    name = f"b {batch}, {context:,} tokens, {bandwidth:g} TB/s"
    title = "Floor of a decode step: bytes at this bandwidth, MMAs at the data sheet's peak where longer"
    figure = waterfall({name: parts}, Words("floor", "of it weights"), title, columns=1)
    text = f"floor {ms:.3g} ms, {100 * weights / ms:.0f} % weights: at most {1e3 * batch / ms:,.0f} tokens/s"
    return figure, text


# ------------------------------------------------------------------- measured


def measured(rows: Sequence[Recorded]) -> Figure:
    """Draw the waterfall of a step: ours, its floor in it, public kernels under it, by class; a panel a batch."""
    panels, notes = {}, {}
    for batch in BATCHES:
        own = [one for one in rows if one.batch == batch]
        panel = f"b {batch}"
        panels[panel] = [_part(group, one) for group, one in run_case.by_class(rows, batch).items()]
        whole = run_case.total(own)
        notes[panel] = (
            f"\n{whole.timed} of {whole.lines} lines; on {whole.compared} of them\n"
            f"public {whole.public:.3g}, ours {whole.public_ours:.3g}"
        )
    title = (
        f"A decode step op by op on an {run_case.card(rows)}: "
        f"each alone, cold L2, no gaps between launches; {CONTEXT:,} tokens\n"
        "numbers: ours / floor of the same lines / best public kernel"
    )
    return waterfall(panels, Words("ours", "floor", "best public kernel"), title, notes)


def _part(group: str, one: run_case.Sum) -> Part:
    """A class: its sums, and a note where lines lack a time."""
    notes = [f"{one.timed} of {one.lines} lines timed"] if one.timed < one.lines else []
    if not one.compared:
        notes.append("no public time")
    elif one.compared < one.timed:
        notes.append(f"public: {one.compared} of {one.lines} lines, ours there {one.public_ours:.2g}")
    public = one.public if one.compared else None
    ours, floor = (one.ours, one.floor) if one.timed else (None, None)
    return Part(_wrapped(group), ours, floor, public, ("\n" + "\n".join(notes)) if notes else "")


def lacking(rows: Sequence[Recorded]) -> None:
    """Show the lines that lack a time of ours or of a public kernel, and why."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in rows:
        if one.ours_us is None:
            found.setdefault((one.name, f"ours: {one.state} when it was recorded"), []).append(one.batch)
        if one.public is None:
            why = run_case.UNEQUAL.get(one.name, "no package's kernel was timed")
            found.setdefault((one.name, f"public: {why}"), []).append(one.batch)
    show_table(("line", "what is missing", "b"), [(*key, ", ".join(map(str, of))) for key, of in found.items()])


def _order(rows: Sequence[Recorded], count: int) -> list[str]:
    """Return the lines that lose most in any batch, as a share of that batch's loss."""
    losses: dict[str, float] = {}
    for batch in BATCHES:
        own = [one for one in rows if one.batch == batch]
        whole = sum(one.lost_ms for one in own)
        for one in own:
            losses[one.name] = max(losses.get(one.name, 0.0), one.lost_ms / whole)
    return sorted(losses, key=losses.__getitem__, reverse=True)[:count]


def losses(rows: Sequence[Recorded], count: int = 12) -> Figure:
    """Draw the ms that a step loses to the floor in its worst lines, a panel a batch."""
    names, panels = _order(rows, count), []
    for batch in BATCHES:
        by_name = {one.name: one for one in rows if one.batch == batch}
        lost = [by_name[name].lost_ms for name in names]
        whole = sum(one.lost_ms for one in by_name.values())
        panels.append(Panel(f"b {batch}: {sum(lost):.3g} of {whole:.3g} ms lost", lost, "{:.2g}"))
    title = f"ms a step over the floor, ours, the {count} worst lines; op by op on an {run_case.card(rows)}"
    return side_by_side(names, panels, [True] * len(names), title)


def _nature(one: Recorded) -> str:
    """Say what a time is like: a launch, bytes, or neither."""
    share = one.floor_us / one.ours_us
    if one.ours_us <= TWO:
        return f"a launch (up to {TWO:g} us)"
    return f"{100 * share:.0f} % of it is the floor" if share >= 0.01 else "under 1 % of it is the floor"


def furthest(rows: Sequence[Recorded], batch: int, count: int = 10) -> None:
    """Show the lines of a batch that lose most, how far they are from their floor, and what limits them."""
    timed = [one for one in rows if one.batch == batch and one.ours_us is not None]
    table = []
    for one in sorted(timed, key=lambda line: line.lost_ms, reverse=True)[:count]:
        limit = run_case.limit(one)
        where = f"{limit.limit} ({limit.source})" if limit.source else limit.limit
        times = _short(one.ours_us), _short(one.floor_us), f"{one.lost_ms:.2g}"
        public = f"{one.public.us:.3g} {one.public.provider}" if one.public else "-"
        table.append((one.name, *times, public, f"{_nature(one)}; {where}"))
    head = "line", "ours us", "floor us", "lost ms a step", "public us", "what limits it"
    show_table(head, table)


# ----------------------------------------------------------- the step as a whole


def _gpus(steps: Sequence[Whole]) -> str:
    return ", ".join(sorted({one.gpu for one in steps}))


def _both(rows: Sequence[Recorded], one: Whole) -> tuple[run_case.Sum, float, float]:
    """Return in ms, of a batch: ops alone, ops as nodes of a graph, the floor on the card of the whole step."""
    own = [row for row in rows if row.batch == one.batch]
    nodes = sum(row.graph_us * row.ours_count for row in own if row.graph_us is not None) / 1e3
    floor = sum(row.bytes * row.count for row in own) / run_case.bandwidth(one.gpu) * 1e3
    return run_case.total(own), nodes, floor


def one_graph(rows: Sequence[Recorded], steps: Sequence[Whole]) -> Figure:
    """Draw the sum of ops beside whole layers as one CUDA graph, a panel a batch, each with the floor of its card."""
    card = run_case.card(rows)
    whole = run_case.total(one for one in rows if one.batch == steps[0].batch)
    some = f"{whole.timed} of {whole.lines} lines"
    names = [f"{some} alone, cold L2\n{card}", f"{some} as nodes, warm L2\n{card}"]
    names.append(f"whole layers, one graph\n{_gpus(steps)}")
    promised = {goal.batch: goal.us / 1e3 for goal in run_case.goals() if goal.what == run_case.WHOLE}
    panels = []
    for one in steps:
        cold, nodes, floor = _both(rows, one)
        goal = promised.get(one.batch)
        said = "no goal" if goal is None else f"goal on an {CARD.split()[-1]}: {goal:g}"
        title = f"b {one.batch}: ms a step ({said})"
        bounds = [cold.floor, cold.floor, floor]
        panels.append(Panel(title, [cold.ours, nodes, one.ms], "{:.3g}", bounds=bounds))
    cards = "" if card == _gpus(steps) else "two kinds of cards; "
    title = f"Sum of ops on an {card}, whole step on an {_gpus(steps)}: {cards}red: the floor on its card"
    return side_by_side(names, panels, [False, False, True], title)


def graph_table(rows: Sequence[Recorded], steps: Sequence[Whole]) -> None:
    """Show for every batch the sum of ops and the whole step, each beside the floor of its own card, and tokens/s."""
    table = []
    for one in steps:
        cold, _, floor = _both(rows, one)
        alone = (
            f"{_short(cold.ours)} ({cold.timed} of {cold.lines} lines)",
            f"{cold.ours / cold.floor:.2f}",
            _short(cold.ours - cold.floor),
        )
        whole = f"{_short(one.ms)} on {one.gpu}", f"{one.ms / floor:.2f}", _short(one.ms - floor)
        rates = f"{1e3 * one.batch / one.ms:,.0f}", f"{1e3 / one.ms:,.0f}"
        table.append((one.batch, *alone, *whole, *rates))
    over = "x floor", "ms over it"
    head = "b", f"sum of ops ms, {run_case.card(rows)}", *over, "whole step ms", *over, "tokens/s", "a request"
    show_table(head, table)


def goals(found: Sequence[Judged]) -> None:
    """Show every promise beside what was measured, us, a column a batch."""
    table = []
    for what in dict.fromkeys(one.goal.what for one in found):
        own = {one.goal.batch: one for one in found if one.goal.what == what}
        cells = [_promise(own[batch]) if batch in own else "" for batch in BATCHES]
        table.append((what, *cells, ", ".join(sorted({one.gpu for one in own.values()}))))
    show_table(("us", *(f"b {batch}" for batch in BATCHES), "measured on"), table)


def _promise(one: Judged) -> str:
    return f"{_short(one.us)}, goal {one.goal.us:,g}: {one.verdict}"


def here(found: Live) -> None:
    """Show lines that were timed on this machine beside the record; where none was, say so as loudly."""
    if found.skipped:
        show_table(("live", "why"), [("SKIPPED", f"{found.skipped}. Nothing was timed, nothing passed.")])
        return
    table = [
        (
            one.name,
            "not timed" if one.us is None else f"{one.us:.3g}",
            one.calls,
            one.gpu,
            "-" if one.recorded.ours_us is None else f"{one.recorded.ours_us:.3g}",
            run_case.gpu_of(one.recorded.run),
        )
        for one in found.lines
    ]
    show_table(("line", "us here", "calls", "on", "us recorded", "on"), table)


def checks(found: Mapping[str, Sequence[object]]) -> None:
    """Show what each check found."""
    show_table(("check", "found"), [(name, "; ".join(map(str, what)) or "nothing") for name, what in found.items()])


def faults_table(names: Sequence[str], scheduled: Schedule, steps: Sequence[Whole]) -> int:
    """Show what sees each fault of ``names`` in the record. Returns how many nothing sees.

    Args:
        names: of `run_case.FAULTS`. scheduled: what a step calls. steps: those measured whole.
    """

    def judged(name: str) -> dict[str, float]:
        rows = run_case.recorded(name)
        goals_of = run_case.judged(rows, steps, name)
        found = {"unaccounted": run_case.unaccounted(rows, scheduled), "impossible": run_case.impossible(rows)}
        found |= {"counts_off": run_case.counts_off(rows, scheduled), "floors_off": run_case.floors_off(rows, name)}
        found |= {"readme_off": run_case.readme_off(rows), "not_packages": run_case.not_packages(rows)}
        counts = {check: len(what) for check, what in found.items()}
        return counts | {"elsewhere": len(run_case.judged_elsewhere(goals_of)), "b128": run_case.over_floor(rows, 128)}

    return injected.seen_by({name: name for name in names}, run_case.FAULTS.__getitem__, judged, ALLOWED)
