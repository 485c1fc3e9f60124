"""Write the recorded decode step into README.md. ms by class and batch, ours beside the floor, and whole.

No GPU is needed.

`python -m dsv4lib.pages.hopper.step_table` rewrites the table; `./dsv4 bench decode_step --record
data/bench/decode_step` measures anew, with every line by itself.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from dsv4lib import env
from dsv4lib.bench.decode_step import whole
from dsv4lib.bench.decode_step.lines import BATCHES, CLASSES
from dsv4lib.bench.decode_step.table import COLUMNS, FILE, NO_KERNEL, markdown
from dsv4lib.bench.ops.results import TIMED
from dsv4lib.errors import DSV4Error
from dsv4lib.pages.common import peers as peer_pages

MODULE = "hopper.step_table"
FOLDER = env.root() / "data" / "bench" / "decode_step"
README = env.root() / "README.md"
CONTEXT = 32768


def load(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Read the recorded lines of `CONTEXT`.

    Raises:
        DSV4Error: the file has other columns.
    """
    path = folder / FILE
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
        return [row for row in reader if int(row["context"]) == CONTEXT]


def milliseconds(rows: Sequence[dict[str, str]]) -> str:
    """Sum up lines to ms a step, "ours / floor". What was not timed is in neither and is counted."""
    timed = [row for row in rows if row["ours"] == TIMED]
    ours = sum(float(row["ours_us"]) * int(row["ours_count"]) for row in timed) / 1e3
    floor = sum(float(row["floor_us"]) * int(row["count"]) for row in timed) / 1e3
    lacking = f" ({len(timed)} of {len(rows)})" if len(timed) < len(rows) else ""
    return f"{ours:.3g} / {floor:.3g}{lacking}" if timed else NO_KERNEL


def load_whole(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Read what `bench.decode_step.whole` recorded of `CONTEXT`."""
    with (folder / whole.FILE).open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["context"]) == CONTEXT]


def in_one_graph(rows: Sequence[dict[str, str]]) -> list[str]:
    """Make the row of steps that were captured whole: ms, and on which GPU."""
    gpus = {row["run"].split(maxsplit=2)[2] for row in rows}
    by_batch = {int(row["batch"]): f"{float(row['step_us']) / 1e3:.3g}" for row in rows}
    return [f"whole layers, one CUDA graph, on {', '.join(sorted(gpus))}", *(by_batch.get(b, "-") for b in BATCHES)]


def table(rows: Sequence[dict[str, str]], steps: Sequence[dict[str, str]]) -> str:
    """Make the table: a row a class, a column a batch. Last the steps that were captured whole."""
    cells = []
    for name in (*CLASSES, "sum"):
        own = [row for row in rows if name in (row["class"], "sum")]
        cells.append([name, *(milliseconds([row for row in own if int(row["batch"]) == batch]) for batch in BATCHES)])
    cells.append(in_one_graph(steps))
    return markdown(["ms a step, ours / floor of the same lines", *(f"b {batch}" for batch in BATCHES)], cells)


def main() -> None:
    """Rewrite the table."""
    peer_pages.replace(README, MODULE, table(load(), load_whole()))


if __name__ == "__main__":
    main()
