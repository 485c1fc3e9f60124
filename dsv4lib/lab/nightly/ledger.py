"""Find checks that had several verdicts on one commit. Computed from records; nothing is retried or excused by it.

Two runs are of the same check if stage, injected fault, wished parameters, back end and all sources agree: commit,
hash of the library, hash of contract and notebook. Verdicts that say nothing about the check do not count (skipped,
interrupted, a full disk). A check whose verdict depends on the machine alone is listed as such: it is no race.

`tests/flaky.toml`, written by hand, is what excuses a flaky stage, with an issue and an end.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4lib.lab import records
from dsv4lib.lab.records import Record
from dsv4lib.lab.run import manifest
from dsv4lib.lab.verdicts import Verdict

SILENT = (Verdict.SKIPPED, Verdict.INTERRUPTED, Verdict.DISK_FULL, Verdict.BAD_ARGUMENTS)
FLAKY, BY_MACHINE = "flaky", "by machine"
KIND = ("system", "cores", "memory", "gpu", "driver")  # of a machine without a name; clocks change from run to run


@dataclass(frozen=True)
class Unsteady:
    """A check with several verdicts on one commit.

    Attributes:
        check: stage, and its fault if one is injected.
        parameters: what its set or the command line wished.
        backend: that it ran on.
        commit: git commit, or the hash of the sources where it is unknown.
        verdicts: how often it had which.
        machines: labels of the machines, "" for one without.
        kind: `flaky`, or `by machine` if each machine always gave the same verdict.
        runs: names of the runs, oldest first.
    """

    check: str
    parameters: dict[str, Any]
    backend: str
    commit: str
    verdicts: dict[str, int]
    machines: list[str]
    kind: str
    runs: list[str]

    def as_dict(self) -> dict[str, object]:
        """Convert for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        told = ", ".join(f"{verdict} {count}x" for verdict, count in self.verdicts.items())
        wished = " ".join(f"{name}={value}" for name, value in self.parameters.items())
        where = f" on {self.backend}" if self.backend else ""
        machines = f", machines {', '.join(name or 'without a name' for name in self.machines)}"
        of = machines if self.kind == BY_MACHINE else ""
        return f"{self.kind}: {' '.join(filter(None, (self.check, wished)))}{where}: {told} at {self.commit[:10]}{of}"


def find(found: Sequence[Record]) -> list[Unsteady]:
    """Find the checks of ``found`` with several verdicts on one commit, those with the most runs first."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in sorted(found, key=lambda record: record.started):
        if record.verdict not in SILENT and (record.commit or record.fingerprint):
            check = json.dumps([record.stage, record.kind, record.negative, record.overrides], sort_keys=True)
            sources = (record.commit, record.fingerprint, record.stage_fingerprint)
            groups[(check, record.backend, *sources)].append(record)
    unsteady = [_unsteady(group) for group in groups.values() if len({record.verdict for record in group}) > 1]
    return sorted(unsteady, key=lambda one: (-sum(one.verdicts.values()), one.check))


def of_commit(runs: Path, commit: str, fingerprint: str, further: Sequence[Record] = ()) -> list[Unsteady]:
    """Find them among the runs under ``runs`` that have these sources, and ``further`` records."""
    same = [m.folder for m in manifest.stored(runs) if (m.commit, m.fingerprint) == (commit, fingerprint)]
    loaded = [record for folder in same for record in records.load(folder)]
    once = {(record.run_id, record.job, record.attempt): record for record in [*loaded, *further]}
    return find(list(once.values()))


def _unsteady(group: Sequence[Record]) -> Unsteady:
    first, per_machine = group[0], defaultdict(set)
    for record in group:
        per_machine[record.label or json.dumps([record.machine.get(name) for name in KIND])].add(record.verdict)
    steady = all(len(verdicts) == 1 for verdicts in per_machine.values())
    return Unsteady(
        check=f"{first.stage} fault {first.negative}" if first.negative else first.stage,
        parameters=first.overrides,
        backend=first.backend,
        commit=first.commit or first.fingerprint,
        verdicts={str(verdict): count for verdict, count in Counter(r.verdict for r in group).most_common()},
        machines=sorted({record.label for record in group}),
        kind=BY_MACHINE if steady else FLAKY,
        runs=list(dict.fromkeys(record.run_id for record in group)),
    )
