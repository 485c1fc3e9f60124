"""One parquet file per run of a notebook: what ran, on what, with which result. Append-only, merged by reading.

Files lie at `data/runs/<run id>/records/<job>-<attempt>.parquet`; `read` gives all of them as one table. Nothing here
names a user, a host or a path outside the workspace: texts pass `scrub` first, environment values are never recorded.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4lib.lab.run.files import read_own, write_atomic
from dsv4lib.lab.verdicts import GateResult, Verdict

if TYPE_CHECKING:
    import pyarrow as pa


RECORD_BYTES = 1 << 26
# What a signal, a full disk or a dead process ended says nothing about the stage.
UNFINISHED = (Verdict.INTERRUPTED, Verdict.DISK_FULL, Verdict.CRASH)


@dataclass(frozen=True)
class Record:
    """One finished, skipped or stopped run of a notebook.

    Attributes:
        run_id: the command that it was part of.
        job: its name inside that command, such as ``layouts-00`` or ``layouts-negative-wrong_swizzle``.
        attempt: 0, or how often a resumed command had tried it before.
        stage, title, set: which stage and parameter set.
        kind: run or negative.
        negative, expect_fail: for a negative, its name and the metrics whose gates must fail, by commas.
        overrides, parameters: as in the set, and all parameters as passed.
        backend: resolved back end; empty where none could be resolved.
        arch: target of the stage's kernels; empty for a stage without one.
        archs: those that they might have run as; empty for a stage without one, and in older records.
        fingerprint, stage_fingerprint: of the library's sources, and of the contract with its notebook.
        commit, dirty: git commit of the sources and whether anything differed from it; "" and None where unknown.
        versions, machine: packages and kind of machine (cores, memory, GPU, driver).
        label: what its owner calls the machine (DSV4_MACHINE); never its host name.
        metrics, skipped, gates: what the notebook reported and how it was judged.
        verdict, reason: class and one sentence.
        started: UTC. seconds: wall time. cpu_s: CPU time of all its processes.
        counted_s, time_limit_s: CPU time with threads that run side by side once (`meter`), and its limit.
        peak_mb: largest resident memory seen (sampled).
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
    expect_fail: str
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
    cpu_s: float = 0.0
    counted_s: float = 0.0
    peak_mb: float = 0.0
    notebook: str = ""
    commit: str = ""
    dirty: bool | None = None
    label: str = ""
    archs: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    gates: list[GateResult] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Tell whether the run came to an end of its own. ``--resume`` runs the others again (`UNFINISHED`)."""
        return self.verdict not in UNFINISHED


def schema() -> pa.Schema:
    """Return the parquet schema of a record file."""
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
        (name, text) for name in ("stage", "title", "set", "kind", "negative", "expect_fail", "overrides", "parameters")
    ]
    fields += [(name, text) for name in ("backend", "arch", "fingerprint", "stage_fingerprint", "versions", "machine")]
    fields += [("verdict", text), ("reason", text), ("started", pa.timestamp("us", tz="UTC")), ("seconds", number)]
    fields += [(name, number) for name in ("time_limit_s", "cpu_s", "counted_s", "peak_mb")] + [("notebook", text)]
    fields += [("commit", text), ("dirty", pa.bool_()), ("label", text), ("archs", pa.list_(text))]
    fields += [("metrics", pa.map_(text, number)), ("skipped", pa.map_(text, text)), ("gates", pa.list_(gate))]
    return pa.schema(fields)


_AS_JSON = ("overrides", "parameters", "versions", "machine")


def write(record: Record, run_folder: Path) -> Path:
    """Add ``record`` to ``run_folder``. Raises FileExistsError rather than change an existing one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = asdict(record)
    for name in _AS_JSON:
        row[name] = json.dumps(row[name], sort_keys=True)
    row["verdict"] = str(record.verdict)
    row["metrics"], row["skipped"] = list(record.metrics.items()), list(record.skipped.items())
    target = path(run_folder, record.job, record.attempt)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise FileExistsError(f"record {target.name} exists already; records are never rewritten")
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([row], schema=schema()), buffer)
    write_atomic(target, buffer.getvalue())
    return target


def path(run_folder: Path, job: str, attempt: int) -> Path:
    """Return where the record of this attempt lies."""
    return run_folder / "records" / f"{job}-{attempt}.parquet"


def read(runs_folder: Path) -> pa.Table:
    """Read all records under ``runs_folder``, one row each. It is data/runs, or one run's folder.

    A file that is no record (cut off, or another program's) is left out, which one line on stderr says.
    """
    import pyarrow as pa

    tables = [_table(file) for file in _files(runs_folder)]
    return pa.concat_tables([schema().empty_table(), *(table for table in tables if table is not None)])


def load(runs_folder: Path) -> list[Record]:
    """Load all records under ``runs_folder`` as objects, oldest first. See `read` for files that are none."""
    found = []
    for file in _files(runs_folder):
        table = _table(file)
        for row in table.to_pylist() if table is not None else []:
            try:
                found.append(_from_row(row))
            except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
                _left_out(file, error)
    return sorted(found, key=lambda record: (record.run_id, record.started, record.attempt))


def from_bytes(data: bytes) -> Record:
    """Return the one record of a file's bytes, as another machine wrote them.

    Raises:
        ValueError: they are no record.
    """
    import pyarrow as pa

    try:
        (row,) = _rows(data).to_pylist()
        return _from_row(row)
    except (pa.ArrowException, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no record: {error}") from error


def _files(runs_folder: Path) -> list[Path]:
    return sorted(runs_folder.rglob("records/*.parquet"))


def _table(file: Path) -> pa.Table | None:
    """The rows of one file in today's schema, or None. Columns that older records lack are null."""
    import pyarrow as pa

    try:
        return _rows(read_own(file, RECORD_BYTES, anybody=True))
    except (OSError, ValueError, pa.ArrowException) as error:
        _left_out(file, error)
        return None


def _rows(data: bytes) -> pa.Table:
    """The rows of a record file's bytes in today's schema; ValueError or ArrowException if it is none.

    Older records call ``expect_fail`` ``reds``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(data))
    if "run_id" not in table.column_names or "verdict" not in table.column_names:
        raise ValueError("it has no run and no verdict")
    table = table.rename_columns(["expect_fail" if name == "reds" else name for name in table.column_names])
    columns = [
        table[f.name].cast(f.type) if f.name in table.column_names else pa.nulls(len(table), f.type) for f in schema()
    ]
    return pa.table(columns, schema=schema())


def _left_out(file: Path, error: Exception) -> None:
    why = str(error).partition("\n")[0][:200]
    print(f"dsv4: {file.parent.parent.name}/records/{file.name} is no record and is left out: {why}", file=sys.stderr)


def latest(records: list[Record]) -> dict[str, Record]:
    """Return the last attempt of each job, by job name."""
    newest: dict[str, Record] = {}
    for record in sorted(records, key=lambda r: r.attempt):
        newest[record.job] = record
    return newest


def _from_row(row: dict[str, Any]) -> Record:
    for name in _AS_JSON:
        row[name] = json.loads(row[name])
    row |= {name: row[name] or 0.0 for name in ("cpu_s", "counted_s")}  # older records have none of these,
    row |= {name: row[name] or "" for name in ("commit", "label")}  # nor of these, and ``dirty`` is null
    row["archs"] = list(row["archs"] or ())
    row["verdict"] = Verdict(row["verdict"])
    row["started"] = row["started"].astimezone(UTC)
    row["metrics"], row["skipped"] = dict(row["metrics"]), dict(row["skipped"])
    row["gates"] = [GateResult(**gate) for gate in row["gates"]]
    return Record(**row)
