"""Plan a night: stages x parameters x back ends, as the jobs of `run/plan.py`.

A plan's hash is of what is checked, not of where: machines with and without a GPU agree on it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import plan
from dsv4lib.lab.run.plan import Job
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict

LONGEST_S = 30 * 86400.0
NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Plan:
    """What a night checks.

    Attributes:
        jobs: all of them, of every shard.
        set: its name for comparisons: the parameter set and what was added to it.
        whole: every stage was chosen and no parameter changed by hand.
        stages: names of the chosen stages.
    """

    jobs: list[Job]
    set: str
    whole: bool
    stages: list[str]

    @property
    def digest(self) -> str:
        """Return 12 hex digits over names, checks and contracts of the jobs."""
        told = [[job.name, job.key(), job.stage_fingerprint, job.time_limit_s] for job in self.jobs]
        return hashlib.sha256(json.dumps([self.set, self.whole, told]).encode()).hexdigest()[:12]


def make(
    stages: Sequence[Stage],
    set_name: str,
    *,
    narrowed: bool = False,
    sweep: Mapping[str, Sequence[str]] | None = None,
    chosen: Sequence[str] = (),
    negatives: bool = False,
) -> Plan:
    """Make the plan of a night.

    Args:
        stages: what to run, in this order.
        set_name: their parameter set.
        narrowed: not every stage was chosen.
        sweep: values, as text, of parameters that every stage must have; all combinations of them are run.
        chosen: back ends, each of which runs everything; none: what the set says. A stage without a choice runs once.
        negatives: add the injected faults.

    Raises:
        DSV4Error: a back end or parameter that is not allowed, before anything starts.
    """
    for backend in chosen:
        if backend not in backends.NAMES:
            raise ArgumentError("--backends", backend, "names from " + ", ".join(backends.NAMES))
    sweep = dict(sweep or {})
    combinations = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    jobs: list[Job] = []
    for stage in stages:
        free = list(dict.fromkeys(chosen)) if "backend" in stage.parameters else []
        for backend, texts, faults in itertools.product(free or [None], combinations, [False, True][: 1 + negatives]):
            if faults and not stage.negatives:
                continue
            for job in plan.make([stage], set_name, texts=texts, backend=backend, negatives=faults):
                prefix = f"{stage.name}-{backend}" if len(free) > 1 else stage.name
                if all(job.key() != other.key() for other in jobs):
                    jobs.append(_named(job, prefix, jobs))
    added = (" with faults" if negatives else "") + (f" on {', '.join(dict.fromkeys(chosen))}" if chosen else "")
    return Plan(jobs, set_name + added, not narrowed and not sweep, [stage.name for stage in stages])


def _named(job: Job, prefix: str, others: Sequence[Job]) -> Job:
    """Give a job a name of its own: of a run with a number, of a fault only where the name is taken."""
    taken = {other.name for other in others}
    base = f"{prefix}-negative-{job.negative}" if job.negative else prefix
    names = itertools.chain([base] if job.negative else [], (f"{base}-{number:02d}" for number in itertools.count()))
    return replace(job, name=next(name for name in names if name not in taken))


def budget(text: str) -> float:
    """Read a time such as 90m, 2h, 1h30m or 5400 (seconds) as seconds. ArgumentError for anything else."""
    match = re.fullmatch(r"(?:([0-9]{1,3})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,7})s?)?", text.strip())
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if not 0 < total <= LONGEST_S:
        raise ArgumentError("--budget", text, "a time above 0 and up to 30 days, such as 90m, 2h or 1h30m")
    return total


def oldest_first(jobs: Sequence[Job], records: Sequence[Record]) -> list[Job]:
    """Order jobs so that what was not executed for longest comes first: no budget leaves out the same ones forever."""
    last: dict[tuple[str, str], datetime] = {}
    for record in records:
        if record.finished and record.verdict != Verdict.SKIPPED:
            key = record.set, record.job
            last[key] = max(record.started, last.get(key, NEVER))
    return sorted(jobs, key=lambda job: last.get((job.set, job.name), NEVER))
