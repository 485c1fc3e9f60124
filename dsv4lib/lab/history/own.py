"""Read the reader's own history, as far as a page may show it: complete before the command that runs the page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from dsv4lib.lab.history.series import History, Series, read

ENOUGH = 5  # runs that make a history


def runs_of(history: History) -> list[str]:
    """Return the names of all runs of a history, oldest first."""
    return sorted(
        {at.run_id for one in history.series for at in one.at} | {v[0].run_id for j in history.jobs for v in j.verdicts}
    )


def history(runs: Path) -> History | None:
    """Return the history under ``runs`` before the command that is going on; None with fewer than `ENOUGH` runs.

    A second run of the same command (``--twice``) must show the same, so what this command wrote is left out.
    """
    found = read(runs) if runs.is_dir() else History()
    now = _current(runs)
    if now:
        series = [_before(one, now) for one in found.series]
        jobs = [replace(job, verdicts=tuple(v for v in job.verdicts if v[0].run_id < now)) for job in found.jobs]
        whole = {name: [entry for entry in known if entry[0].run_id < now] for name, known in found.whole.items()}
        found = History([one for one in series if len(one.at)], [job for job in jobs if job.verdicts], whole)
    return found if len(runs_of(found)) >= ENOUGH else None


def _current(runs: Path) -> str:
    """The run under ``runs`` that this process is part of, "" for none."""
    folder = os.environ.get("DSV4_RUN_DIR")
    return next((part for part in Path(folder).parts if (runs / part / "plan.json").is_file()), "") if folder else ""


def _before(one: Series, now: str) -> Series:
    kept = [i for i, at in enumerate(one.at) if at.run_id < now]
    return replace(one, at=tuple(one.at[i] for i in kept), values=one.values[kept], spread=one.spread[kept])
