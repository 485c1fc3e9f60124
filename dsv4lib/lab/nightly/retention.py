"""Keep the runs of the last days, or so many of them; of older ones keep records and summary, or nothing.

By default a run that is not kept loses its notebooks and pages, which are large, and keeps its records, which are small
and which histories read. Whatever the limits are, these stay whole: the newest green run of each set, the run that each
set is compared with, what one of these was gathered from, a run that goes on, and what is no run of this lab.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import records
from dsv4lib.lab.report import junit, summary
from dsv4lib.lab.run import manifest
from dsv4lib.lab.run.files import read_own
from dsv4lib.lab.run.manifest import Manifest
from dsv4lib.lab.verdicts import Verdict

NAME = re.compile(r"(\d{8}T\d{6})\.\d{6}Z-[0-9a-f]{4}")
KEPT = ("plan.json", "records", "records.parquet", ".lock")
KEPT_PAGES = (summary.FILE, junit.FILE)
LEAVING = ".leaving-"  # beginning of the name of a folder whose removal has begun


@dataclass(frozen=True)
class Limits:
    """What is kept: a run inside any limit that is given.

    Attributes:
        days: runs started in the last so many days.
        runs: the newest so many runs.
        forget: remove the others whole; else their records and summary stay.
    """

    days: float | None = None
    runs: int | None = None
    forget: bool = False

    def __post_init__(self) -> None:
        if self.days is not None and not (math.isfinite(self.days) and self.days > 0):
            raise ArgumentError("--keep-days", self.days, "a number of days above 0")
        if self.runs is not None and self.runs < 1:
            raise ArgumentError("--keep-runs", self.runs, "a number of runs, 1 at least")
        if self.forget and self.days is None and self.runs is None:
            raise ArgumentError("--forget", True, "together with --keep-days or --keep-runs")

    @property
    def given(self) -> bool:
        """Tell whether anything is limited."""
        return self.days is not None or self.runs is not None


def apply(runs: Path, limits: Limits, now: datetime | None = None, current: str = "") -> list[str]:
    """Remove what ``limits`` does not keep. Returns the names of the runs that lost something.

    Args:
        runs: folder of the runs.
        limits: what to keep.
        now: time, UTC.
        current: the run that is just over: it stays.
    """
    if not limits.given or not runs.is_dir():
        return []
    for left in _own_folders(runs):
        if left.name.startswith(LEAVING):
            shutil.rmtree(left, ignore_errors=True)  # another command may be doing the same
    stored = {one.run_id: one for one in manifest.stored(runs)}
    safe = protected(list(stored.values())) | {current}
    candidates = [folder for folder in _own_folders(runs) if NAME.fullmatch(folder.name) and folder.name in stored]
    changed = []
    for folder in expired(candidates, limits, now or datetime.now(UTC)):
        if folder.name in safe:
            continue
        with contextlib.suppress(DSV4Error, FileNotFoundError):  # it still goes on, or another command removes it
            lock = manifest.hold(folder)
            try:
                if _forget(folder) if limits.forget else _thin(folder):
                    changed.append(folder.name)
            finally:
                lock.release()
    return changed


def expired(folders: Sequence[Path], limits: Limits, now: datetime) -> list[Path]:
    """Return the folders that no limit keeps, oldest first."""
    by_age = sorted(folders, key=lambda folder: folder.name)
    newest = set(by_age[len(by_age) - limits.runs :] if limits.runs and limits.runs < len(by_age) else by_age)
    gone = []
    for folder in by_age:
        young = limits.days is not None and now - started(folder) <= timedelta(days=limits.days)
        if not young and not (limits.runs is not None and folder in newest):
            gone.append(folder)
    return gone


def started(folder: Path) -> datetime:
    """Return when the run of this folder was made; its name says so."""
    match = NAME.fullmatch(folder.name)
    if match is None:
        raise DSV4Error(f"{folder.name} is no name of a run")
    return datetime.strptime(match[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)


def protected(stored: Sequence[Manifest]) -> set[str]:
    """Return the runs that stay whatever the limits are: of each set the last baseline and the newest green run.

    A whole one, where there is any: a green shard or single stage says little.
    """
    by_set: dict[str, list[Manifest]] = {}
    for one in sorted(stored, key=lambda one: one.run_id, reverse=True):
        by_set.setdefault(one.set, []).append(one)
    safe: list[Manifest] = []
    for some in by_set.values():
        safe += [one for one in some if one.baseline][:1]
        greens = [one for one in some if is_green(one)]
        safe += ([one for one in greens if one.whole] or greens)[:1]
    return {one.run_id for one in safe} | {part for one in safe for part in one.parts}


def is_green(one: Manifest) -> bool:
    """Tell whether a run ended well: with exit code 0, or, where no summary says so, complete and with nothing red."""
    try:
        return json.loads(read_own(one.folder / "report" / summary.FILE, 1 << 28, anybody=True))["exit_code"] == 0
    except (OSError, ValueError, KeyError, TypeError):
        verdicts = [record.verdict for record in records.latest(records.load(one.folder)).values()]
        well = set(verdicts) <= {Verdict.PASSED, Verdict.SKIPPED} and Verdict.PASSED in verdicts
        return one.state == "complete" and well


def _own_folders(runs: Path) -> Iterator[Path]:
    """This user's folders in ``runs``; no links, nothing of others."""
    for entry in sorted(os.scandir(runs), key=lambda entry: entry.name):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            yield Path(entry.path)


def _thin(folder: Path) -> bool:
    """Remove notebooks and pages; True if there was something to remove."""
    pages = folder / "report"
    gone = [path for path in folder.iterdir() if path.name not in (*KEPT, pages.name)]
    if pages.is_dir() and not pages.is_symlink():
        gone += [path for path in pages.iterdir() if path.name not in KEPT_PAGES]
    for path in gone:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return bool(gone)


def _forget(folder: Path) -> bool:
    """Remove the folder: under another name first, so that no reader sees half a run."""
    leaving = folder.with_name(LEAVING + folder.name)
    folder.rename(leaving)
    shutil.rmtree(leaving)
    return True
