"""Write the bench of ops as a table and a figure, from the committed measurements. No GPU is needed.

`python -m dsv4lib.pages.hopper.ops_table` rewrites the table in data/bench/ops.md and its extract in README.md.
`./dsv4 bench ops --record data/bench/ops` measures anew. data/bench/ops_notes.csv is written by hand: for each row that
misses its goal what bounds it (limit) and what was tried, with numbers (tried).
"""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from dsv4lib import env
from dsv4lib.bench.ops import counters, results
from dsv4lib.bench.ops.counters import Counted
from dsv4lib.bench.ops.results import ABSENT, OURS, TIMED, Result
from dsv4lib.errors import DSV4Error
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.viz.dumbbells import Case, dumbbells

MODULE = "hopper.ops_table"
COUNTERS = "hopper.ops_table (counters)"
PAGE = results.FOLDER.with_suffix(".md")
NOTES = results.FOLDER.with_name("ops_notes.csv")
README = env.root() / "README.md"
# What README shows of it, by op and shape.
EXTRACT = (
    ("rmsnorm", "Pro T 4096"),
    ("inv_rope_quant", "Pro T 4096"),
    ("qnorm_rope_kv", "Pro T 4096"),
    ("indexer_q", "fp8 T 4096"),
    ("compressor", "Flash and Pro, CSA prefill T 4096"),
    ("compressor", "Flash and Pro, HCA prefill T 4096"),
    ("topk", "Flash k 512 L 32768 T 32"),
    ("topk", "Pro k 1024 L 262144 T 128"),
    ("router", "Flash T 32"),
    ("linear", "Flash wq_a+wkv T 1"),
    ("linear", "Flash wo_b T 1"),
    ("linear", "Flash wo_b T 128"),
    ("fmha", "Flash CSA T 1"),
    ("fmha", "Flash CSA T 128"),
    ("fmha", "Pro CSA T 128"),
    ("mhc", "Flash T 1"),
    ("mhc", "Flash T 4096"),
)
HEADER = (
    "op",
    "shape",
    "ours us",
    "best peer",
    "its us",
    "ratio",
    "ours in a graph",
    "best peer there",
    "its us there",
    "ratio there",
    "ours host us",
    "peer's host us",
    "goal",
    "verdict",
    "in a graph",
    "floor us",
    "x floor",
    "limit",
    "tried",
)
# Not in the figure: a chain, ops that DSV4 lacks, ops that no peer was timed for, and linears (56 rows, a page of
# their own: data/bench/linear.md) and attention (20 rows, in the table): with them the picture takes over 1 MiB.
UNDRAWN = "layer_chain", "add_rmsnorm", "mhc_fp8", "moe_gemm", "linear", "fmha"
COUNTED = (
    "op",
    "shape",
    "provider",
    "least MB",
    "HBM MB read",
    "HBM MB written",
    "L2 MB",
    "1000 warp-instructions",
    "issue slots %",
    "warps %",
    "waits mostly for",
)


class Note(NamedTuple):
    """What is known of a row that misses its goal.

    Attributes:
        limit: what bounds the row now, one short phrase. tried: what was tried, with its numbers.
    """

    limit: str
    tried: str


UNKNOWN = Note("not looked into yet", "")


def notes(path: Path = NOTES) -> dict[tuple[str, str], Note]:
    """Read the notes of rows that miss their goal, by op and shape.

    Raises:
        DSV4Error: the file is missing, has other columns, or a line without limit.
    """
    columns = ["op", "shape", *Note._fields]
    if not path.is_file():
        raise DSV4Error(f"{path} is missing: it has the columns {', '.join(columns)}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != columns:
            raise DSV4Error(f"{path} has other columns than {', '.join(columns)}")
        found = {(line["op"], line["shape"]): Note(line["limit"], line["tried"]) for line in reader}
    for (op, shape), note in found.items():
        if not note.limit:
            raise DSV4Error(f"{path}: {op} {shape} has no limit; say what bounds the row")
    return found


def cells(rows: list[Result], known: dict[tuple[str, str], Note]) -> list[tuple[Any, ...]]:
    """Return the cells of each row, by the columns of `HEADER`."""
    return [_cells(row, known.get((row.op, row.shape), UNKNOWN)) for row in rows]


def _cells(row: Result, note: Note) -> tuple[str, ...]:
    ours, peer, graph_peer = row.named(OURS), row.peer, row.graph_peer
    cold = "" if ours is None else ours.detail if ours.state == TIMED else f"{ours.state}: {ours.detail}"
    over = f"{row.ours_us / row.floor_us:.1f}" if row.ours_us and row.floor_us else ""
    return (
        row.op,
        row.shape,
        _us(row.ours_us) or cold,
        peer.provider if peer else "none",
        _us(peer.us if peer else None),
        _ratios(row.ratio, row.copy_ratio),
        _us(ours.warm_us if ours else None),
        "" if graph_peer is None else "the same" if graph_peer is peer else graph_peer.provider,
        _us(graph_peer.warm_us if graph_peer else None),
        _ratios(row.graph_ratio, row.graph_copy_ratio),
        _us(ours.host_us if ours else None),
        _us((peer or graph_peer).host_us if peer or graph_peer else None),
        row.promise,
        _marked(row.verdict),
        _marked(row.graph_verdict),
        _us(row.floor_us),
        over,
        *(note if row.verdict == "missed" else ("", "")),
    )


def _ratios(ratio: float | None, copy_ratio: float | None) -> str:
    """Ours over the best peer's, and a copy's over ours, where there are such."""
    parts = [] if ratio is None else [f"{ratio:.2f}"]
    return ", ".join(parts + ([] if copy_ratio is None else [f"copy {copy_ratio:.2f}"]))


def _marked(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "missed" else verdict


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def source(rows: list[Result], runs: dict[str, dict[str, str]]) -> str:
    """Say where the numbers are from: a line a run, below the method of its runs, and which peers were absent."""
    used = {row.run for row in rows}
    lines = []
    for method, some in groupby(
        ((key, one) for key, one in runs.items() if key in used), key=lambda it: it[1]["method"]
    ):
        lines += [f"Measured on ({method}):", ""]
        lines += [
            f"* {key}: driver {one['driver']}, torch {one['torch']} (CUDA {one['cuda']}), {one['packages']}; "
            f"kernels {one['kernels']}. `{one['command']}`"
            for key, one in some
        ]
        lines.append("")
    return "\n".join([*lines, *_absent(rows), "Every provider and its spread: `ops/rows.csv`."])


def _absent(rows: list[Result]) -> list[str]:
    """Name the peers of rows without any peer, by op: a package that was missing must not look like no peer."""
    gone: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.peer is None and row.graph_peer is None:
            gone.setdefault(row.op, {}).update(dict.fromkeys(one.provider for one in row.found if one.state == ABSENT))
    lines = [f"* {op}: {'; '.join(names)}" for op, names in gone.items() if names]
    return ["In rows without a peer, these were absent:", "", *lines, ""] if lines else []


def markdown(folder: Path = results.FOLDER, noted: Path = NOTES) -> str:
    """Return the table of a folder of recorded rows, with its source below."""
    rows = results.load(folder)
    return peer_pages.markdown(HEADER, cells(rows, notes(noted)), source(rows, results.runs(folder)))


def counted(folder: Path = results.FOLDER) -> str:
    """Return what the GPU's counters say of recorded rows that promised something. With the runs they are from."""
    rows, found = results.load(folder), counters.load(folder)
    promised = {(row.op, row.shape): row for row in rows if row.promise}
    shown = [one for key, one in found.items() if key[:2] in promised]
    shown.sort(key=lambda one: list(promised).index((one.op, one.shape)))  # ours, then peers, as they were recorded
    runs = ", ".join(sorted({one.run for one in shown}))
    return peer_pages.markdown(
        COUNTED,
        [_counted(one, promised[one.op, one.shape]) for one in shown],
        f"Counted on: {runs or 'no machine yet'}.",
    )


def _counted(one: Counted, row: Result) -> tuple[str, ...]:
    megabytes = (f"{size / 1e6:.3g}" for size in (row.bytes, one.hbm_read, one.hbm_write, one.l2))
    slots = f"{one.instructions / 1e3:.4g}", f"{one.issue:.0f}", f"{one.warps:.0f}"
    return (one.op, one.shape, one.provider, *megabytes, *slots, f"{one.stall} ({one.stalled:.0f} %)")


def extract(folder: Path = results.FOLDER) -> str:
    """Return the rows of `EXTRACT`.

    Also how many of all that promised something reached it, by cold and by graph times.
    """
    rows = {(row.op, row.shape): row for row in results.load(folder)}
    lines = [
        "| op | shape | ours us | best other | its us | ratio | ratio in a graph | goal |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for key in EXTRACT:
        row = rows[key]
        other = (row.peer.provider, _us(row.peer.us), f"{row.ratio:.2f}") if row.peer else ("none", "", "")
        graph = "" if row.graph_ratio is None else f"{row.graph_ratio:.2f}"
        said = f"{row.promise}: {row.verdict}" if row.promise else ""
        lines.append(f"| {' | '.join((*key, _us(row.ours_us), *other, graph, said))} |")
    counts = []
    for verdicts in ([row.verdict for row in rows.values()], [row.graph_verdict for row in rows.values()]):
        judged = [verdict for verdict in verdicts if verdict in ("reached", "missed")]
        counts.append(f"{judged.count('reached')} of {len(judged)} goals are reached")
    text = f"With a cold L2 {counts[0]}; as nodes of a CUDA graph, which has no gaps between launches, {counts[1]}. "
    return "\n".join([*lines, "", text + f"{len(rows)} rows in all."])


def figure(folder: Path = results.FOLDER) -> Figure:
    """Draw floor, ours and the best peer of the recorded rows, a panel an op. Those of `UNDRAWN` are left out."""
    rows = [row for row in results.load(folder) if not row.op.startswith(UNDRAWN)]
    panels = {op: [_case(row) for row in group] for op, group in groupby(rows, key=lambda row: row.op)}
    return dumbbells(panels, "Cold L2, one GPU, one process")


def _case(row: Result) -> Case:
    peer, good = row.peer, {"reached": True, "missed": False}.get(row.verdict)
    return Case(row.shape, row.floor_us, row.ours_us, peer.us if peer else None, peer.provider if peer else "", good)


def main() -> None:
    """Rewrite the table in the notes and its extract."""
    peer_pages.replace(PAGE, MODULE, markdown())
    peer_pages.replace(PAGE, COUNTERS, counted())
    peer_pages.replace(README, MODULE, extract())


if __name__ == "__main__":
    main()
