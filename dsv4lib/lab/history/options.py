"""Options of `dsv4 history`, `dsv4 compare` and `dsv4 trends`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsv4lib.lab.stage import runs_folder


def add(app: typer.Typer) -> None:
    """Give the command line the commands of the history."""
    for command in (history, compare, trends):
        app.command()(command)


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def history(
    last: Annotated[int, typer.Option(min=1, help="so many runs")] = 20,
    set_name: Annotated[str | None, typer.Option("--set", help="only of this set")] = None,
    stage: Annotated[str | None, typer.Option("--stage", "-s", help="only with this stage")] = None,
    label: Annotated[str | None, typer.Option(help="only of machines of this label")] = None,
    sql: Annotated[str | None, typer.Option(help="answer SQL over records, metrics, gates, runs and bench")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs [default: data/runs]")] = None,
) -> None:
    """The last runs: when, which commit and machine, what passed. Or any question about them, in SQL."""
    from dsv4lib.lab.history import command

    filters = {"set": set_name, "stage": stage, "label": label}
    raise typer.Exit(command.history(out or runs_folder(), last, filters, sql, _console()))


def compare(
    a: Annotated[str, typer.Argument(help="a run or the start of its name, a commit, last or previous")] = "previous",
    b: Annotated[str, typer.Argument(help="the run that is compared with it")] = "last",
    page: Annotated[Path | None, typer.Option(help="also write an HTML page with the figures that differ")] = None,
    everything: Annotated[bool, typer.Option("--all", help="also what does not differ, and times")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the runs [default: data/runs]")] = None,
) -> None:
    """Two runs side by side: verdicts, metrics and their distance to the bound, times, figures."""
    from dsv4lib.lab.history import command

    runs = out or runs_folder()
    raise typer.Exit(command.compared(runs, a, b, page, everything, _console()))


def trends(
    label: Annotated[str | None, typer.Option(help="only of machines of this label")] = None,
    window: Annotated[int, typer.Option(min=2, help="so many runs of each number")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="all findings as JSON")] = False,
    notify: Annotated[
        str | None, typer.Option(help="a command that gets the findings as JSON on its input, good or bad")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the runs [default: data/runs]")] = None,
) -> None:
    """What got worse over runs and benches, since which commit, on which machine. Exit code 26 if anything did."""
    from dsv4lib.lab.history import command

    runs = out or runs_folder()
    raise typer.Exit(command.trend(runs, label, window, as_json, notify, _console()))
