"""Figures and tables of the page on trends, from bands, findings and verdicts of a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dsv4lib.pages.trends import run_case
from dsv4lib.pages.trends.run_case import METRIC, OURS, WATCH, Alarms, Caught, Score, Slow
from dsv4lib.viz import over_runs
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.kinds import colour
from dsv4lib.viz.table import show_table

MOST = 18  # panels of a figure
STATES = {name: colour(name) for name in ("passed", "failed", "error", "skipped", "not judged")}
UNJUDGED = ("interrupted", "crash", "disk_full", "oom")


def track(band: Any, named: bool = True) -> over_runs.Track:
    """Return one number for a panel, ``band`` as `lab.history.bands` has it; ``named``: with its machine."""
    one = band.series
    place = {at.run_id: i for i, at in enumerate(band.runs)}
    changes = [
        over_runs.Change(
            place[f.last.run_id],
            place[f.first.run_id],
            None if f.kind == WATCH else f.worse,
            "machine" if f.kind == "machine" else commits(f),
        )
        for f in band.found
    ]
    unit = f", {one.unit}" if one.unit else ""
    name = short(one.name) + (f" ({one.label.partition(',')[0]})" if named and one.label else "")
    return over_runs.Track(f"{name}{unit}", band.places, one.values, band.low, band.high, one.bound, changes)


def short(name: str) -> str:
    """Shorten the name of a number to what a panel's title holds."""
    for word in (" (emulator)", " in nightly", " in quick", ": ours, cold"):
        name = name.replace(word, "")
    return name.removeprefix("ops ") if len(name) <= 44 else name.removeprefix("ops ")[:42] + ".."


def commits(finding: Any) -> str:
    """Write the two commits of a finding in seven digits each."""
    return f"{finding.last.shown[:7]}..{finding.first.shown[:7]}"


def over_commits(bands: Sequence[Any], kinds: Sequence[str], title: str, most: int = MOST) -> Figure:
    """Draw the numbers of some kinds over runs with their bands; what changed comes first, ``most`` panels in all.

    Returns a figure that says how many numbers it leaves out.
    """
    own = [band for band in bands if band.series.kind in kinds]
    order = sorted(own, key=lambda band: all(f.kind == "machine" for f in band.found))[:most]
    runs = own[0].runs if own else ()
    left = f"; {len(own) - len(order)} more, without a change of their own, not drawn" if len(own) > len(order) else ""
    marks = sorted({0, len(runs) // 2, max(len(runs) - 1, 0)})
    labels = {float(i): runs[i].shown[:7] for i in marks} if runs else {}
    return over_runs.tracks([track(band) for band in order], f"{title}{left}", labels)


def findings(found: Sequence[Any], kinds: Sequence[str] = ()) -> None:
    """Show findings: what, on which machine, by how much, between which commits."""
    shown = [one for one in found if not kinds or one.kind in kinds]
    rows = [(one.kind, _way(one), one.what, one.label or "all", one.size, one.since, one.runs) for one in shown]
    if rows:
        show_table(("finding", "", "what", "machine", "size", "commits", "runs since"), rows)
    else:
        print("nothing of this kind was found")


def _way(finding: Any) -> str:
    return "open" if finding.kind == WATCH else "worse" if finding.worse else "better"


def noise_table(bands: Sequence[Any]) -> None:
    """Show how wide bands are: the median half width by kind of number and machine."""
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for band in bands:
        half = (band.high - band.low) / 2 / np.maximum(np.abs(band.level), 1e-30)
        by[band.series.kind, band.series.label or "all"].append(float(np.median(half)))
    rows = [(kind, label, len(all_), f"{100 * np.median(all_):.2g} %") for (kind, label), all_ in sorted(by.items())]
    show_table(("kind", "machine", "numbers", "half width of the band"), rows)


def ways_to_bounds(history: Any, found: Sequence[Any]) -> Figure:
    """Draw how much of the way to its bound each gated metric has used; those that drift or moved are marked."""
    margins = run_case.margins(history)
    runs = sorted({at.run_id for at_all, _ in margins.values() for at in at_all})
    place = {run: i for i, run in enumerate(runs)}
    shown = {short(name): ([place[at.run_id] for at in ats], parts) for name, (ats, parts) in margins.items()}
    marked = [short(one.what) for one in found if one.kind in ("drift", "step") and one.what in margins and one.worse]
    return over_runs.ways(shown, list(dict.fromkeys(marked)), "Gated metrics on their way to their bounds")


def slowest(found: Sequence[Slow], count: int = 10) -> Figure:
    """Draw the slowest notebooks: CPU seconds of the newest five runs, and the change since the first five."""
    top = found[:count]
    names = [f"{short(one.name)} ({one.label})" if one.label else short(one.name) for one in top]
    grown = [100 * (one.seconds / one.before - 1) for one in top]
    panels = [
        Panel("CPU seconds, median of the newest five runs", [one.seconds for one in top], "{:,.1f}"),
        Panel("change since the first five, % (0 where it fell)", [max(g, 0.0) for g in grown], "{:+.0f}"),
    ]
    return side_by_side(names, panels, [g > 25 for g in grown], "Slowest notebooks; grown by more than 25 % in blue")


def verdicts(jobs: Sequence[Any], most: int = 24) -> Figure:
    """Draw the verdict of each notebook in each run; those with several verdicts first, ``most`` rows in all."""
    order = sorted(jobs, key=lambda job: len({v for _, v, _ in job.verdicts}) == 1)[:most]
    runs = sorted({at.run_id for job in jobs for at, _, _ in job.verdicts})
    place, names = {run: i for i, run in enumerate(runs)}, list(STATES)
    codes = np.full((len(order), len(runs)), -1)
    for row, job in enumerate(order):
        for at, verdict, _ in job.verdicts:
            codes[row, place[at.run_id]] = names.index(state(verdict))
    rows = [f"{job.name} {job.label}".strip() for job in order]
    return over_runs.states(codes, rows, names, "Verdicts by run", list(STATES.values()))


def state(verdict: str) -> str:
    """Return which colour a verdict has."""
    if verdict in ("passed", "skipped", "error"):
        return verdict
    return "not judged" if verdict in UNJUDGED else "failed"


def alarms_table(table: Sequence[Alarms], profiles: Mapping[str, str]) -> None:
    """Show in how many quiet histories each rule alarmed, a row a kind of noise."""
    rules = list(dict.fromkeys(one.rule for one in table))
    by = {(one.rule, one.profile): one for one in table}
    rows = []
    for profile, words in profiles.items():
        cells = [by[rule, profile] for rule in rules]
        rows.append((words, cells[0].histories, *(cell.alarmed for cell in cells)))
    show_table(("noise; nothing changed", "histories", *rules), rows)


def caught_over(table: Sequence[Caught], since: int) -> Figure:
    """Draw in which part of the histories each rule found a slowed row, over the size of the slowdown."""
    shown: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in table:
        if one.since == since:
            shown[one.rule].append((100 * one.slowdown, one.caught / one.histories))
    nights = "the newest run" if since == 1 else f"the newest {since} runs"
    title = f"One of twelve rows slower in {nights}: how often each rule names it"
    return over_runs.shares(shown, title, "slower by, %", "part of the histories", OURS)


def score_table(found: Score) -> None:
    """Show every injected change: found between its commits, elsewhere or missed; then what is false."""
    where = {id(pair[0]): "other commits" for pair in found.elsewhere}
    where |= {id(pair[0]): "found, wider" for pair in found.wider}
    rows = [
        (one.kind, one.what, one.label or "all", where.get(id(one), "found"), finding.since)
        for one, finding in found.found
    ]
    rows += [(one.kind, one.what, one.label or "all", "MISSED", "") for one in found.missed]
    rows += [(one.kind, one.what, one.label or "all", "FALSE", one.since) for one in found.false]
    show_table(("kind", "what", "machine", "", "commits"), rows)


def gated(history: Any) -> int:
    """Count the gated metrics of a history."""
    return sum(one.kind == METRIC for one in history.series)
