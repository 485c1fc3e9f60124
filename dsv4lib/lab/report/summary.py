"""Write `summary.json` beside a report. One JSON object says what a command came to, for scripts and dashboards.

Fields of version 1 (further ones may be added; a changed meaning gets another version):

| field | meaning |
| --- | --- |
| `version` | 1 |
| `run`, `set`, `night`, `shard` | name of the run, its set, the name its owner gave the night, `i/n` or "" |
| `parts` | runs that a gathered one was read from |
| `state`, `whole` | complete or interrupted; whether every stage was chosen and nothing changed by hand |
| `exit_code`, `exit_class` | as the command's, with its word from the table of exit codes |
| `started`, `ended` | UTC, ISO 8601, of the first and last job; null without a record |
| `wall_s`, `work_s`, `cpu_s` | from first start to last end; sum of the jobs' wall times; sum of their CPU times |
| `commit`, `dirty`, `fingerprint` | of the sources: git commit ("" if unknown), changes to it (null), hash |
| `label`, `machine`, `versions` | of the machine that wrote this: given name, kind with GPU and clocks, packages |
| `machines` | labels of all machines that ran a job, "" for one without |
| `planned`, `counts` | number of jobs; how many ended in each class |
| `missing` | checks that the set's last baseline executed and this run did not |
| `not_started` | jobs without a record: interrupted, out of budget, or of a shard that is missing |
| `required`, `not_native` | `native` or `none`; jobs whose kernel had to run on a GPU and did not |
| `known_flaky` | red jobs that `tests/flaky.toml` excuses: job, issue, expires |
| `flaky` | checks with several verdicts on one commit, as `nightly/ledger.py` lists them |
| `jobs` | one object a job: job, stage, kind, fault, set, parameters, backend, arch, verdict, reason, |
| | attempt, started, seconds, cpu_s, time_limit_s, peak_mb, label, stage_fingerprint, metrics, skipped, gates |
| `jobs[].gates` | metric, op, bound, value (null: none reported), last_seen, state (passed, failed, skipped, missing) |

Numbers that JSON lacks (NaN, infinities) are texts: "nan", "inf", "-inf".
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dsv4lib.lab.ledger import Entry
from dsv4lib.lab.records import Record
from dsv4lib.lab.report.scrub import scrub, scrub_all
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.run.manifest import Manifest
from dsv4lib.lab.verdicts import exit_code_table

FILE = "summary.json"
VERSION = 1


@dataclass(frozen=True)
class Told:
    """What a summary and a JUnit file are made of; see `outcome.Outcome` for the fields."""

    manifest: Manifest
    records: Sequence[Record]
    interrupted: bool
    exit_code: int
    missing: Sequence[str] = ()
    not_started: Sequence[str] = ()
    required: str = "none"
    not_native: Sequence[str] = ()
    known: Mapping[str, Entry] = field(default_factory=dict)
    flaky: Sequence[dict[str, object]] = ()


def write(told: Told, folder: Path, root: Path) -> Path:
    """Write the summary to ``folder`` and return its path. Private paths and names are taken out of every text."""
    clean = functools.partial(scrub, root=root)
    text = json.dumps(_jsonable(scrub_all(build(told), clean)), indent=1, allow_nan=False)
    write_atomic(folder / FILE, text.encode(errors="replace"))
    return folder / FILE


def build(told: Told) -> dict[str, Any]:
    """Return the summary as a dict. Its fields are those of the module's table."""
    plan, records = told.manifest, told.records
    words = {code: name for code, name, _ in exit_code_table()}
    started = min((record.started for record in records), default=None)
    ended = max((record.started + timedelta(seconds=record.seconds) for record in records), default=None)
    return {
        "version": VERSION,
        "run": plan.run_id,
        "set": plan.set,
        "night": plan.night,
        "shard": plan.shard,
        "parts": list(plan.parts),
        "state": "interrupted" if told.interrupted or told.not_started else plan.state,
        "whole": plan.whole,
        "exit_code": told.exit_code,
        "exit_class": words[told.exit_code],
        "started": _time(started),
        "ended": _time(ended),
        "wall_s": (ended - started).total_seconds() if started and ended else 0.0,
        "work_s": sum(record.seconds for record in records),
        "cpu_s": sum(record.cpu_s for record in records),
        "commit": plan.commit,
        "dirty": plan.dirty,
        "fingerprint": plan.fingerprint,
        "label": plan.label,
        "machine": plan.machine,
        "versions": plan.versions,
        "machines": sorted({record.label for record in records}),
        "planned": len(records) + len(told.not_started),
        "counts": {str(verdict): count for verdict, count in sorted(Counter(r.verdict for r in records).items())},
        "missing": list(told.missing),
        "not_started": list(told.not_started),
        "required": told.required,
        "not_native": list(told.not_native),
        "known_flaky": [
            {"job": job, "issue": entry.issue, "expires": str(entry.expires)} for job, entry in told.known.items()
        ],
        "flaky": list(told.flaky),
        "jobs": [_job(record) for record in records],
    }


def _job(record: Record) -> dict[str, Any]:
    names = (
        "job", "stage", "kind", "set", "parameters", "backend", "arch", "reason", "attempt", "seconds", "cpu_s",
        "time_limit_s", "peak_mb", "label", "stage_fingerprint", "metrics", "skipped",
    )  # fmt: skip
    gates = [
        {name: getattr(gate, name) for name in ("metric", "op", "bound", "value", "last_seen", "state")}
        for gate in record.gates
    ]
    return {
        **{name: getattr(record, name) for name in names},
        "fault": record.negative,
        "verdict": str(record.verdict),
        "started": _time(record.started),
        "gates": gates,
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def _jsonable(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as texts, which strict JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(one) for key, one in value.items()}
    return [_jsonable(one) for one in value] if isinstance(value, list) else value
