"""Keep the plan of each command on disk. A resume continues it, and the next nightly is compared with it.

`data/runs/<run id>/plan.json` holds the jobs and the state (running, interrupted, complete). A lock held while the
command lives distinguishes a running command from one that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.records import Record
from dsv4lib.lab.run.files import read_own, write_atomic
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.verdicts import Verdict

PLAN_BYTES = 1 << 26


@dataclass(frozen=True)
class Manifest:
    """One command's plan.

    Attributes:
        folder: data/runs/<run id>.
        set: the parameter set, or ``negatives``.
        fingerprint: of the library's sources.
        whole: True if every stage was chosen and no parameter was changed; only such a run is a baseline.
        state: running, interrupted or complete; interrupted as well where a job has no finished record.
        jobs: as planned, as dictionaries.
        executed: keys of the checks that reached a verdict of their own; filled when complete.
        baseline: True once a later run of the set may be compared with this one.
        commit, dirty, label, machine, versions: as in `records.Record`; empty in plans of an older lab.
        shard: `i/n` where this is one part of a divided plan, else empty.
        night: a name that its owner gave the night, by which its shards are gathered.
        divided: this is a shard of a plan that is whole.
        digest, planned: of the whole plan: a hash, and the names of its jobs; empty but for `./dsv4 nightly`.
        parts: names of the runs that a gathered one was read from.
    """

    folder: Path
    set: str
    fingerprint: str
    whole: bool
    state: str
    jobs: list[dict[str, Any]]
    executed: list[str]
    baseline: bool
    commit: str = ""
    dirty: bool | None = None
    label: str = ""
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    shard: str = ""
    night: str = ""
    divided: bool = False
    digest: str = ""
    planned: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        """Name of the command: UTC time (see `_next`) and four random digits."""
        return self.folder.name

    @property
    def folders(self) -> list[Path]:
        """Return where its records lie: in its own folder, of a gathered run in those of its parts beside it."""
        beside = [self.folder.with_name(part) for part in self.parts if Path(part).name == part != ".."]
        return [folder for folder in beside if folder.is_dir()] if self.parts else [self.folder]

    def save(self, **changes: Any) -> Manifest:
        """Write this manifest with ``changes`` and return the new one."""
        fields = {**self.__dict__, **changes}
        folder = fields.pop("folder")
        write_atomic(folder / "plan.json", json.dumps(fields, indent=1).encode())
        return Manifest(folder=folder, **fields)


def new(runs: Path, set_name: str, fingerprint: str, whole: bool, jobs: Sequence[Job], **facts: Any) -> Manifest:
    """Start a manifest in a new folder under ``runs``.

    Args:
        runs: folder of the manifests.
        set_name, fingerprint, whole: see `Manifest`.
        jobs: what will run.
        facts: commit, dirty, label, machine and versions, where they are known.

    Raises:
        DSV4Error: the folder cannot be written.
    """
    folder = runs / f"{_next(runs):%Y%m%dT%H%M%S.%f}Z-{uuid4().hex[:4]}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise DSV4Error(
            f"{runs.name}/ cannot keep a run ({error.strerror}): make it writable or name another folder with --out"
        ) from error
    planned = [job.as_dict() for job in jobs]
    return Manifest(folder, set_name, fingerprint, whole, "running", planned, [], False, **facts).save()


def _next(runs: Path) -> datetime:
    """Now, or just after the newest run: names sort by age even if the clock was set back."""
    now, form = datetime.now(UTC), "%Y%m%dT%H%M%S.%fZ"
    for path in runs.glob("*Z-????"):
        with contextlib.suppress(ValueError, OverflowError):
            earlier = datetime.strptime(path.name.rpartition("-")[0], form).replace(tzinfo=UTC)
            now = max(now, earlier + timedelta(microseconds=1))
    return now


def stored(runs: Path) -> list[Manifest]:
    """Return every readable manifest under ``runs``, oldest first."""
    found = []
    for path in sorted(runs.glob("*/plan.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            one = Manifest(folder=path.parent, **json.loads(read_own(path, PLAN_BYTES, anybody=True)))
            if isinstance(one.jobs, list) and isinstance(one.executed, list):
                found.append(one)
    return found


def hold(folder: Path) -> FileLock:
    """Take the lock that a living command holds on its folder. DSV4Error if another one does."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DSV4Error(f"run {folder.name} is still going on; wait for it or stop it first") from None
    return lock


def alike(runs: Path, set_name: str, fingerprint: str, jobs: Sequence[Job], night: str = "") -> list[Manifest]:
    """Return the commands with this set, these sources and jobs, and of this night, oldest first."""
    wanted = _comparable(job.as_dict() for job in jobs)
    same = [m for m in stored(runs) if (m.set, m.fingerprint, m.night) == (set_name, fingerprint, night)]
    return [m for m in same if _comparable(m.jobs) == wanted]


def to_resume(runs: Path, set_name: str, fingerprint: str, jobs: Sequence[Job], night: str = "") -> Manifest:
    """Return the last command, if it was interrupted. Set, sources, jobs and night are the same.

    Raises:
        DSV4Error: there is none, or the last one is complete: its verdicts belong to it and are not used again.
    """
    same = alike(runs, set_name, fingerprint, jobs, night)
    if not same:
        raise DSV4Error(
            f"nothing to resume: no earlier run of set {set_name} has these stages, parameters and sources; "
            "start it without --resume"
        )
    if same[-1].state == "complete":
        raise DSV4Error(
            f"nothing to resume: the last run of set {set_name} ({same[-1].run_id}) is complete; start a new one "
            "without --resume"
        )
    return same[-1]


def executed(records: Iterable[Record]) -> list[str]:
    """List the keys of what was really checked. They are of runs with a verdict, and of each of their gates."""
    keys: set[str] = set()
    for record in records:
        if record.verdict in (Verdict.SKIPPED, Verdict.INTERRUPTED):
            continue
        run = json.dumps([record.stage, record.kind, record.negative, record.overrides], sort_keys=True)
        keys.add(run)
        keys |= {f"{run} gate {gate.metric} {gate.op}" for gate in record.gates if gate.state in ("passed", "failed")}
    return sorted(keys)


def shrinkage(
    runs: Path, set_name: str, now: Sequence[str], stages: Iterable[str], exclude: str, whole: bool
) -> list[str]:
    """Return what the last baseline of a set executed and this run did not.

    A run that ended red before its gates were judged is red by its own class; its gates are not also reported here.

    Args:
        runs: folder of the manifests.
        set_name: the set, or ``negatives``.
        now: what this run executed.
        stages: its chosen stages; unless it is ``whole``, only these are compared.
        exclude: run id of this run.
        whole: it chose every stage, so a stage that is gone is missing too.
    """
    baselines = [m for m in stored(runs) if m.set == set_name and m.baseline and m.run_id != exclude]
    if not baselines:
        return []
    have, chosen = set(now), set(stages)
    judged = {key.split(" gate ")[0] for key in have if " gate " in key}
    missing = []
    for key in baselines[-1].executed:
        run, gate = key.split(" gate ")[0], " gate " in key
        if key in have or (gate and run not in judged):
            continue
        if whole or json.loads(run)[0] in chosen:
            missing.append(key)
    return missing


def _comparable(jobs: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(job, sort_keys=True) for job in jobs)
