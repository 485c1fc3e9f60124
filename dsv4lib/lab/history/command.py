"""Print the history: `dsv4 history`, `dsv4 compare`, `dsv4 trends`, and hand a summary to a command of the user's."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.history import compare, series, store, trends
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.stage import workspace
from dsv4lib.lab.verdicts import GOT_WORSE

SLOWEST = 5
NOTIFY_S = 60
LINES = 20  # of the one-screen message


def history(runs: Path, last: int, filters: dict[str, str | None], sql: str | None, console: Console) -> int:
    """Print the newest ``last`` runs, or what ``sql`` asks. Filters: set, stage, label. The exit code is 0."""
    if sql is not None:
        columns, rows = store.query(runs, sql)
        print("\t".join(columns))
        for row in rows:
            print("\t".join("" if value is None else str(value) for value in row))
        return 0
    known = store.database(runs)
    where = " AND ".join(f"{name} = ?" for name, value in filters.items() if value is not None) or "true"
    values = [value for value in filters.values() if value is not None]
    rows = known.execute(
        f"""SELECT runs.* FROM runs WHERE run_id IN (SELECT run_id FROM records WHERE {where})
            ORDER BY run_id DESC LIMIT ?""",
        [*values, last],
    ).fetchall()
    if not rows:
        console.print("no run matches" if values else f"no run yet: {env.front_door()} run makes the first")
        return 0
    columns = ("run", "set", "started", "commit", "machine", "passed", "skipped", "failed", "wall s", "CPU s")
    table = Table(*columns, box=None)
    for run_id, set_name, started, commit, dirty, label, _, seconds, cpu, passed, skipped, failed in reversed(rows):
        at = series.At(run_id, started, commit or "", dirty)
        table.add_row(
            run_id[:15], set_name, f"{started:%Y-%m-%d %H:%M}", at.shown if commit else "-", Text(label or "-"),
            str(passed), str(skipped), Text(str(failed), style="red" if failed else ""),
            f"{seconds or 0:.0f}", f"{cpu or 0:.0f}",
        )  # fmt: skip
    console.print(table)
    return 0


def compared(runs: Path, a: str, b: str, page: Path | None, everything: bool, console: Console) -> int:
    """Print what differs between two runs; ``page``: also write it with the figures as HTML. The exit code is 0."""
    a, b = compare.find(runs, a), compare.find(runs, b)
    found = compare.lines(runs, a, b)
    table = Table(
        "", f"A {a[:15]}", f"B {b[:15]}", "change", "room to the bound", title="What differs" * (not everything)
    )
    shown = [one for one in found if everything or one.differs]
    for one in shown:
        left = "" if one.left is None else Text(f"{one.left:.0%}", style="red" if one.left < 0 else "")
        table.add_row(Text(one.name), one.a, one.b, "" if one.change is None else f"{one.change:+.1%}", left)
    console.print(table if shown else f"nothing differs in {len(found)} verdicts, metrics and times")
    if page is not None:
        try:
            write_atomic(page, scrub(compare.page(runs, a, b), workspace()).encode())
        except OSError as error:
            raise ArgumentError("--page", str(page), f"a file that can be written ({error.strerror})") from None
        console.print(f"figures: {page}", soft_wrap=True)
    return 0


def trend(runs: Path, label: str | None, window: int, as_json: bool, notify: str | None, console: Console) -> int:
    """Print what got worse and better; hand it to ``notify``. The exit code is 0, or `GOT_WORSE`."""
    known = series.read(runs, label)
    found = trends.judge(known, window)
    worse = [one for one in found if one.counts]
    names = {at.run_id for one in known.series for at in one.at}
    names |= {at.run_id for job in known.jobs for at, _, _ in job.verdicts}
    summary = {
        "runs": len(names),
        "series": len(known.series), "worse": len(worse), "findings": [one.as_dict() for one in found],
        "message": message(found, known),
    }  # fmt: skip
    if as_json:
        print(json.dumps(summary, indent=1, default=str))
    else:
        console.print(Text(summary["message"]), soft_wrap=True)
        slow = _slowest(known)
        if slow:
            console.print(Text("slowest notebooks: " + "; ".join(slow), style="dim"), soft_wrap=True)
    if notify is not None:
        _notify(notify, json.dumps(summary, default=str))
    return GOT_WORSE if worse else 0


def message(found: Sequence[trends.Finding], known: series.History) -> str:
    """Return at most one screen for people: what got worse with its commits, what got better, what is to be seen."""
    worse = [one for one in found if one.counts]
    same = [one for one in found if one.worse and not one.counts]
    better = [one for one in found if not one.worse and one.kind != "watch"]
    watched = [one for one in found if one.kind == "watch"]
    among = f"{len(known.series)} series of numbers and {len(known.jobs)} notebooks"
    lines = [f"{len(worse)} worse, {len(better)} better in {among}"]
    for title, group in (("worse", worse), ("worse at one commit", same), ("better", better)):
        lines += [f"  {title}: {_line(one)}" for one in group]
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"  and {len(lines) - LINES} more: {env.front_door()} trends --json has all"]
    if watched:
        names = ", ".join(one.what for one in watched[:3]) + (", ..." if len(watched) > 3 else "")
        lines.append(f"  the next run decides about {len(watched)}: {names}")
    return "\n".join(lines)


def _line(one: trends.Finding) -> str:
    machine = f" on {one.label}" if one.label else ""
    runs = f"{one.runs} run{'s' * (one.runs > 1)}"
    return f"{one.kind}: {one.what}{machine}: {one.size}; {one.since} ({runs})"


def _slowest(known: series.History) -> list[str]:
    newest = max((at.run_id for one in known.series if one.kind == series.TIME for at in one.at), default="")
    times = [one for one in known.series if one.kind == series.TIME and one.at[-1].run_id == newest]
    times = sorted(times, key=lambda one: -one.values[-1])[:SLOWEST]
    return [f"{one.name.removesuffix(': CPU time')} {one.values[-1]:.0f} CPU-s" for one in times]


def _notify(command: str, text: str) -> None:
    """Run a command of the user's with the summary on its input. What it does wrong is said and ends nothing."""
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("it is empty")
        done = subprocess.run(words, input=text, text=True, timeout=NOTIFY_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"dsv4: --notify could not run: {str(error)[:200]}", file=sys.stderr)
        return
    if done.returncode:
        print(f"dsv4: --notify ended with {done.returncode}", file=sys.stderr)
