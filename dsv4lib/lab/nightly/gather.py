"""Read the shards of one night as one run. Nothing of them is changed: report and summary name their sources.

Records of shards that lie elsewhere are copied to the run, so that the history has them. Shards may lie where they were
run (a shared folder) or where they were brought to (artifacts of a CI job). They are of one night if plan, commit,
sources, number of shards and the name of the night agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4lib.errors import DSV4Error
from dsv4lib.lab import records
from dsv4lib.lab.nightly.shard import Shard
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import manifest, runner
from dsv4lib.lab.run.files import read_own, write_atomic
from dsv4lib.lab.run.manifest import Manifest
from dsv4lib.lab.run.plan import Job

SAME = ("set", "digest", "commit", "fingerprint", "night", "divided")
DEEPEST = 3  # folders between what is named and a run


class GatherError(DSV4Error):
    """Folders that do not hold the shards of one night."""


@dataclass(frozen=True)
class Gathered:
    """The night as one run: its result, where notebooks of its records lie, its stages and what is missing."""

    result: runner.Result
    sources: dict[str, Path]
    stages: list[str]
    missing_shards: list[str]


def gather(folders: Sequence[Path], night: str, out: Path) -> Gathered:
    """Read the shards under ``folders`` and write a manifest of the whole to ``out``.

    Args:
        folders: of runs, or folders that hold them.
        night: only shards of the night with this name; "" takes all.
        out: folder of runs, which gets a new one.

    Raises:
        GatherError: no shard, shards of several nights, a shard or a job twice, or one that still runs.
    """
    parts = [one for one in found(folders) if one.shard and night in ("", one.night)]
    if not parts:
        of = f" of the night {night!r}" if night else ""
        raise GatherError(f"there is no shard{of} in {', '.join(path.name or str(path) for path in folders)}")
    count = _of_one_night(parts)
    loaded = {part.run_id: list(records.latest(records.load(part.folder)).values()) for part in parts}
    _once(parts, loaded)
    planned = parts[0].planned
    by_name = {record.job: record for found_ in loaded.values() for record in found_}
    jobs = {job["name"]: Job(**job) for part in parts for job in part.jobs}
    ordered = [by_name[name] for name in planned if name in by_name]
    present = {Shard.parse(part.shard).number for part in parts}
    absent = [f"{number}/{count}" for number in range(1, count + 1) if number not in present]
    complete = not absent and len(ordered) == len(planned) and all(record.finished for record in ordered)
    labels = {part.label for part in parts}
    first = parts[0]
    have = [jobs[name] for name in planned if name in jobs]
    plan = manifest.new(
        out, first.set, first.fingerprint, first.divided and not absent, have,
        commit=first.commit, dirty=any(part.dirty for part in parts) if first.dirty is not None else None,
        label=labels.pop() if len(labels) == 1 else "", machine=first.machine, versions=first.versions,
        night=first.night, digest=first.digest, planned=planned, parts=sorted(part.run_id for part in parts),
    )  # fmt: skip
    plan = plan.save(state="complete" if complete else "interrupted", executed=manifest.executed(ordered))
    for part in parts:
        if part.folder.parent.resolve() != out.resolve():
            _copy_records(part.folder, plan.folder)
    sources = {part.run_id: part.folder for part in parts}
    stages = list(dict.fromkeys(job.stage for job in jobs.values()))
    return Gathered(runner.Result(plan, ordered, False), sources, stages, absent)


def found(folders: Iterable[Path]) -> list[Manifest]:
    """Return the manifests in and under ``folders``, each run once.

    Raises:
        GatherError: a folder that is not there.
    """
    by_folder: dict[Path, Manifest] = {}
    for folder in folders:
        if not folder.is_dir():
            raise GatherError(f"{folder} is no folder")
        here = folder.resolve()
        for parent in [here.parent, here, *(p for depth in range(1, DEEPEST) for p in sorted(here.glob("*/" * depth)))]:
            for one in manifest.stored(parent):
                if one.folder.resolve().is_relative_to(here):
                    by_folder.setdefault(one.folder.resolve(), one)
    return sorted(by_folder.values(), key=lambda one: one.run_id)


def _copy_records(source: Path, target: Path) -> None:
    (target / "records").mkdir(exist_ok=True)
    for file in sorted((source / "records").glob("*.parquet")):
        with contextlib.suppress(OSError):
            write_atomic(target / "records" / file.name, read_own(file, records.RECORD_BYTES, anybody=True))


def _of_one_night(parts: Sequence[Manifest]) -> int:
    """The number of shards that the parts agree on."""
    for name in SAME:
        values = {getattr(part, name) for part in parts}
        if len(values) > 1:
            shown = ", ".join(sorted(repr(value) for value in values))
            raise GatherError(f"these shards are not of one night: their {name} is {shown}; name the folders of one")
    counts = {Shard.parse(part.shard).count for part in parts}
    if len(counts) > 1:
        raise GatherError(f"these shards are not of one night: it has {' and '.join(map(str, sorted(counts)))} shards")
    for part in parts:
        twice = [other.run_id for other in parts if other.shard == part.shard]
        if len(twice) > 1:
            raise GatherError(f"shard {part.shard} is there twice, as {' and '.join(twice)}; name the folders of one")
        manifest.hold(part.folder).release()
    return counts.pop()


def _once(parts: Sequence[Manifest], loaded: dict[str, list[Record]]) -> None:
    """Refuse a job of two shards, and a record of a job that its shard did not have."""
    owner: dict[str, str] = {}
    for part in parts:
        for job in part.jobs:
            if owner.setdefault(job["name"], part.shard) != part.shard:
                raise GatherError(f"job {job['name']} belongs to shard {owner[job['name']]} and to {part.shard}")
        stray = [record.job for record in loaded[part.run_id] if owner.get(record.job) != part.shard]
        if stray:
            raise GatherError(f"shard {part.shard} has a record of {stray[0]}, which is not its job")
