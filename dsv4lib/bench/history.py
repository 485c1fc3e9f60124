"""Append what a bench measured to a history. One parquet file a run of a bench, which is never changed.

`dsv4lib.lab.history` reads them beside the records of notebooks. A time is compared within one machine label and GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from dsv4lib import env

if TYPE_CHECKING:
    import pyarrow as pa

    from dsv4lib.bench.ops.results import Result
    from dsv4lib.bench.speed.rows import Row

COLUMNS = ("suite", "row", "provider", "what", "value", "low", "high", "unit", "more_is_better")
SHOWN = {"us": "cold", "warm_us": "graph", "host_us": "host"}


@dataclass(frozen=True)
class Measured:
    """One number of a bench.

    Attributes:
        suite: ops, decode_step or emulator.
        row: which line of it, such as ``topk Pro k 1024``. provider: whose kernel.
        what: which of its times, such as ``cold``.
        value: median, in ``unit``. low, high: least and largest of the repetitions, None where not known.
        more_is_better: False for a time.
    """

    suite: str
    row: str
    provider: str
    what: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = "us"
    more_is_better: bool = False


def of_results(suite: str, results: Iterable[Result]) -> list[Measured]:
    """Return the times of a bench of ops: cold, in a graph and on the host, of every provider that was timed."""
    found = []
    for result in results:
        for one in result.found:
            for field, what in SHOWN.items():
                value = getattr(one, field)
                if value is not None:
                    ends = (one.low_us, one.high_us) if field == "us" else (None, None)
                    found.append(Measured(suite, f"{result.op} {result.shape}", one.provider, what, value, *ends))
    return found


def of_rows(suite: str, rows: Iterable[Row]) -> list[Measured]:
    """Return the numbers of the emulator's bench that were measured."""
    return [
        Measured(suite, row.what, "ours", "speed", row.value, None, None, row.unit, row.more_is_better)
        for row in rows
        if row.value is not None
    ]


def schema() -> pa.Schema:
    """Return the parquet schema of a file: the columns of `Measured` and what they depend on."""
    import pyarrow as pa

    kinds = {"value": pa.float64(), "low": pa.float64(), "high": pa.float64(), "more_is_better": pa.bool_()}
    fields = [("run_id", pa.string()), ("started", pa.timestamp("us", tz="UTC"))]
    fields += [(name, pa.string()) for name in ("commit", "label", "gpu", "driver", "fingerprint")]
    fields += [("dirty", pa.bool_()), *((name, kinds.get(name, pa.string())) for name in COLUMNS)]
    return pa.schema(fields)


def append(measured: Iterable[Measured], folder: Path, facts: Mapping[str, str] | None = None) -> Path | None:
    """Write one file into ``folder`` and return its path. None, said on stderr, where that is not possible.

    Args:
        measured: what one run measured; nothing is written for none.
        folder: made if it is missing.
        facts: ``gpu`` and ``driver`` of the machine, where it has one.
    """
    rows = [asdict(one) for one in measured]
    if not rows:
        return None
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        print("dsv4: the history of benches is not kept here: it needs the package pyarrow", file=sys.stderr)
        return None
    now, facts = datetime.now(UTC), facts or {}
    commit, dirty = env.revision()
    run = f"{now:%Y%m%dT%H%M%S.%f}Z-{uuid4().hex[:4]}"
    shared = {
        "run_id": run, "started": now, "commit": commit, "dirty": dirty, "label": env.machine_label(),
        "gpu": facts.get("gpu", ""), "driver": facts.get("driver", ""), "fingerprint": env.source_fingerprint(),
    }  # fmt: skip
    target = folder / f"{run}.parquet"
    part = folder / f".{run}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{**shared, **row} for row in rows], schema=schema()), part)
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        print(f"dsv4: this run is not in the history of benches: {error.strerror}", file=sys.stderr)
        return None
    return target
