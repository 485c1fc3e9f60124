"""Read the history of runs and benches. Parquet files become tables that duckdb answers SQL about; there is no server.

    runs      a row a run: set, start, commit, label, how many passed, failed, were skipped
    records   a row a notebook, as `dsv4lib.lab.records` writes it
    metrics   a row a metric of a notebook; gates: a row a gate, with its bound and state
    bench     a row a number of a bench, as `dsv4lib.bench.history` writes it

Records are many small files. Those of a complete run are read from one file beside them, which the first reader writes.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4lib.bench import history as bench
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import records
from dsv4lib.lab.commands.benches import BENCHES
from dsv4lib.lab.run import manifest
from dsv4lib.lab.run.files import read_own, write_atomic
from dsv4lib.lab.run.manifest import PLAN_BYTES

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

WHOLE = "records.parquet"
VIEWS = {
    "metrics": """
        SELECT run_id, started, commit, label, stage, set, job, kind, backend, arch, key AS metric, value
        FROM (SELECT *, unnest(map_entries(metrics), recursive := true) FROM records)""",
    "gates": """
        SELECT run_id, started, commit, label, stage, set, job, kind, backend, arch, verdict AS run_verdict,
               metric, op, bound, value, state, reason AS gate_reason
        FROM (SELECT * EXCLUDE (reason), unnest(gates, recursive := true) FROM records)""",
    "runs": """
        SELECT run_id, min(plan) AS set, min(started) AS started, min(commit) AS commit, bool_or(dirty) AS dirty,
               min(label) AS label, count(DISTINCT job) AS jobs,
               max(epoch(started) + seconds) - min(epoch(started)) AS seconds, sum(cpu_s) AS cpu_s,
               count(*) FILTER (verdict = 'passed') AS passed, count(*) FILTER (verdict = 'skipped') AS skipped,
               count(*) FILTER (verdict NOT IN ('passed', 'skipped')) AS failed
        FROM records WHERE last GROUP BY run_id""",
}


def records_table(runs: Path) -> pa.Table:
    """Return all records under ``runs``, one row each; ``last`` marks the last attempt of a job.

    Shards that were gathered are one run, ``part`` is the shard's own name. ``plan`` is the set of the command, such as
    negatives, where ``set`` is that of the parameters.

    Foreign and damaged files are left out, each with a line on stderr.
    """
    import pyarrow as pa

    tables = [records.schema().empty_table()]
    tables += (
        [_of_run(folder) for folder in sorted(runs.iterdir()) if (folder / "records").is_dir()] if runs.is_dir() else []
    )
    table = pa.concat_tables(tables)
    plans = manifest.stored(runs)
    nights = {part: plan.run_id for plan in plans for part in plan.parts}
    sets = {plan.run_id: plan.set for plan in plans}
    parts = table["run_id"].to_pylist()
    run_ids = [nights.get(part, part) for part in parts]
    named = [sets.get(run, name) for run, name in zip(run_ids, table["set"].to_pylist(), strict=True)]
    table = table.set_column(table.column_names.index("run_id"), "run_id", pa.array(run_ids, pa.string()))
    table = table.append_column("part", pa.array(parts, pa.string()))
    table = table.append_column("plan", pa.array(named, pa.string()))
    newest: dict[tuple[str, str], int] = {}
    keys = list(zip(table["run_id"].to_pylist(), table["job"].to_pylist(), strict=True))
    attempts = table["attempt"].to_pylist()
    for key, attempt in zip(keys, attempts, strict=True):
        newest[key] = max(attempt or 0, newest.get(key, 0))
    last = [(attempt or 0) == newest[key] for key, attempt in zip(keys, attempts, strict=True)]
    return table.append_column("last", pa.array(last, pa.bool_()))


def _of_run(folder: Path) -> pa.Table:
    """The records of one run; from their one file where that is not older than the last of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = folder / WHOLE
    with contextlib.suppress(OSError, ValueError, pa.ArrowException):
        if whole.stat().st_mtime_ns > (folder / "records").stat().st_mtime_ns:
            table = pq.read_table(io.BytesIO(read_own(whole, records.RECORD_BYTES, anybody=True)))
            if table.schema == records.schema():
                return table
    table = records.read(folder)
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, AttributeError):
        plan = json.loads(read_own(folder / "plan.json", PLAN_BYTES, anybody=True))
        if plan.get("state") == "complete":
            buffer = io.BytesIO()
            pq.write_table(table, buffer)
            write_atomic(whole, buffer.getvalue())
    return table


def bench_table(runs: Path) -> pa.Table:
    """Return all numbers of benches under ``runs``. Foreign and damaged files are left out, with a line on stderr."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, tables = bench.schema(), [bench.schema().empty_table()]
    for file in sorted((runs / BENCHES).glob("*.parquet")):
        try:
            table = pq.read_table(io.BytesIO(read_own(file, records.RECORD_BYTES, anybody=True)))
            if not {"run_id", "started", "row", "value"} <= set(table.column_names):
                raise ValueError("it has no row and value")
            columns = [
                table[f.name].cast(f.type) if f.name in table.column_names else pa.nulls(len(table), f.type)
                for f in schema
            ]
            tables.append(pa.table(columns, schema=schema))
        except (OSError, ValueError, pa.ArrowException) as error:
            why = str(error).partition("\n")[0][:200]
            print(f"dsv4: {BENCHES}/{file.name} is no bench and is left out: {why}", file=sys.stderr)
    return pa.concat_tables(tables)


def database(runs: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection, in memory, that knows the tables of the module's docstring.

    It reads no other file: SQL of a user sees the history alone.

    Raises:
        DSV4Error: the package duckdb is missing.
    """
    try:
        import duckdb
    except ImportError:
        raise DSV4Error("the history needs the package duckdb: pip install duckdb, which the extra lab has") from None
    known = duckdb.connect(":memory:")
    known.register("records", records_table(runs))
    known.register("bench", bench_table(runs))
    for name, query in VIEWS.items():
        known.execute(f"CREATE VIEW {name} AS {query}")
    known.execute("SET enable_external_access = false")
    known.execute("SET lock_configuration = true")
    return known


def query(runs: Path, text: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Answer a user's SQL with column names and rows.

    Raises:
        ArgumentError: duckdb cannot answer it; its first line says why.
    """
    known = database(runs)
    import duckdb

    try:
        answer = known.execute(text)
        return [column[0] for column in answer.description or []], answer.fetchall()
    except duckdb.Error as error:
        allowed = "a query over records, metrics, gates, runs and bench: " + str(error).partition("\n")[0]
        raise ArgumentError("sql", text, allowed) from None
