"""One parquet file per run of a notebook: what ran, on what, with which result. Append-only, merged by reading.

Files lie at `data/runs/<run id>/records/<job>-<attempt>.parquet`; `read` gives all of them as one table. Nothing here
names a user, a host or a path outside the workspace: texts pass `scrub` first, environment values are never recorded.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4lib.lab.files import write_atomic
from dsv4lib.lab.verdicts import GateResult, Verdict

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Record:
    """One finished, skipped or stopped run of a notebook.

    Attributes:
        run_id: the command that it was part of.
        job: its name inside that command, such as ``layouts-00`` or ``layouts-negative-wrong_swizzle``.
        attempt: 0, or how often a resumed command had tried it before.
        stage, title, set: which stage and parameter set.
        kind: run or negative.
        negative, reds: for a negative, its name and the metric whose gate must fail.
        overrides, parameters: as in the set, and all parameters as passed.
        backend: resolved back end; empty where none could be resolved.
        arch: target of the stage's kernels; empty for a stage without one.
        fingerprint, stage_fingerprint: of the library's sources, and of the contract with its notebook.
        versions, machine: packages and kind of machine.
        metrics, skipped, gates: what the notebook reported and how it was judged.
        verdict, reason: class and one sentence.
        started: UTC. seconds: wall time. time_limit_s: its limit. peak_mb: largest resident memory seen (sampled).
        notebook: the executed notebook, relative to the command's folder; empty if there is none.
    """

    run_id: str
    job: str
    attempt: int
    stage: str
    title: str
    set: str
    kind: str
    negative: str
    reds: str
    overrides: dict[str, Any]
    parameters: dict[str, Any]
    backend: str
    arch: str
    fingerprint: str
    stage_fingerprint: str
    versions: dict[str, str]
    machine: dict[str, str]
    verdict: Verdict
    reason: str
    started: datetime
    seconds: float
    time_limit_s: float
    peak_mb: float = 0.0
    notebook: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    gates: list[GateResult] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True if the run came to an end of its own; an interrupted one is run again by ``--resume``."""
        return self.verdict is not Verdict.INTERRUPTED


def schema() -> pa.Schema:
    """The parquet schema of a record file."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    gate = pa.struct(
        [
            ("metric", text),
            ("op", text),
            ("bound", number),
            ("last_seen", number),
            ("reason", text),
            ("value", number),
            ("state", text),
        ]
    )
    fields = [(name, text) for name in ("run_id", "job")] + [("attempt", pa.int32())]
    fields += [
        (name, text) for name in ("stage", "title", "set", "kind", "negative", "reds", "overrides", "parameters")
    ]
    fields += [(name, text) for name in ("backend", "arch", "fingerprint", "stage_fingerprint", "versions", "machine")]
    fields += [("verdict", text), ("reason", text), ("started", pa.timestamp("us", tz="UTC")), ("seconds", number)]
    fields += [("time_limit_s", number), ("peak_mb", number), ("notebook", text)]
    fields += [("metrics", pa.map_(text, number)), ("skipped", pa.map_(text, text)), ("gates", pa.list_(gate))]
    return pa.schema(fields)


_AS_JSON = ("overrides", "parameters", "versions", "machine")


def write(record: Record, run_folder: Path) -> Path:
    """Add ``record`` to ``run_folder``; raises FileExistsError rather than change an existing one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = asdict(record)
    for name in _AS_JSON:
        row[name] = json.dumps(row[name], sort_keys=True)
    row["verdict"] = str(record.verdict)
    row["metrics"], row["skipped"] = list(record.metrics.items()), list(record.skipped.items())
    folder = run_folder / "records"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.job}-{record.attempt}.parquet"
    if path.exists():
        raise FileExistsError(f"record {path.name} exists already; records are never rewritten")
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row], schema=schema()), buffer)
    write_atomic(path, buffer.getvalue())
    return path


def read(runs_folder: Path) -> pa.Table:
    """All records under ``runs_folder`` (data/runs, or one run's folder), one row each."""
    import pyarrow.dataset as ds

    files = sorted(str(path) for path in runs_folder.rglob("records/*.parquet"))
    if not files:
        return schema().empty_table()
    table: pa.Table = ds.dataset(files, schema=schema(), format="parquet").to_table()
    return table


def load(runs_folder: Path) -> list[Record]:
    """All records under ``runs_folder`` as objects, oldest first."""
    rows = sorted(read(runs_folder).to_pylist(), key=lambda row: (row["run_id"], row["started"], row["attempt"]))
    return [_from_row(row) for row in rows]


def latest(records: list[Record]) -> dict[str, Record]:
    """The last attempt of each job, by job name."""
    newest: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r.attempt):
        newest[record.job] = record
    return newest


def _from_row(row: dict[str, Any]) -> Record:
    for name in _AS_JSON:
        row[name] = json.loads(row[name])
    row["verdict"] = Verdict(row["verdict"])
    row["started"] = row["started"].astimezone(UTC)
    row["metrics"], row["skipped"] = dict(row["metrics"]), dict(row["skipped"])
    row["gates"] = [GateResult(**gate) for gate in row["gates"]]
    return Record(**row)
