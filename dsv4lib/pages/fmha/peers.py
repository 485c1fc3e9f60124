"""Show our attention beside other people's, as a table and a figure. From committed measurements, without the packages.

`python -m dsv4lib.pages.fmha.peers` rewrites the table in data/bench/fmha_peers.md.
`./dsv4 bench peers` measures anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from dsv4lib.bench.peers import fmha as peers
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.viz.bars import Panel, side_by_side

MODULE = "fmha.peers"
NOTES = peers.TABLE.with_suffix(".md")
HEADER = (
    "kernel",
    "instructions",
    "without moves",
    "MMAs",
    "K/V KiB",
    "operand KiB",
    "error",
    "registers",
    "SMEM KiB",
    "compile s",
)


def cells(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what the table shows of each row, see `HEADER`. Counts are of a 128-key tile."""
    return [
        (
            row["kernel"],
            round(row["wi"]),
            round(row["wi"] - row["wi_move"]),
            round(row["mma"]),
            round(peers.loaded(row)),
            round(row["smem_operands"] / 1024),
            f"{row['rel_l2']:.2e}",
            round(row["registers"]),
            round(row["smem_bytes"] / 1024),
            f"{row['compile_s']:.0f}",
        )
        for row in rows
    ]


def markdown(rows: list[dict[str, Any]] | None = None) -> str:
    """Return the committed table (or ``rows``) for a README or a notebook. Its source is below."""
    rows = peers.load() if rows is None else rows
    return peer_pages.markdown(HEADER, cells(rows), peer_pages.source(rows, peers.TABLE, "./dsv4 bench peers"))


def figure(rows: list[dict[str, Any]] | None = None) -> Figure:
    """Draw the committed table (or ``rows``) as bars, one panel a quantity. Ours in bold, its bounds as ticks."""
    rows = peers.load() if rows is None else rows
    names = [row["kernel"] for row in rows]
    ours = [not row["package"] for row in rows]
    bounds = [peers.BOUNDS[int(row["heads"])] if row["kernel"] in peers.OURS.values() else None for row in rows]
    loaded, operands = [peers.loaded(row) for row in rows], [row["smem_operands"] / 1024 for row in rows]
    tensor = [(row["tmem_ld"] + row["tmem_st"]) / 1024 for row in rows]
    most_wi, most_kib = ([bound and bound[i] for bound in bounds] for i in (0, 1))
    panels = [
        Panel("PTX warp-instructions", [row["wi"] for row in rows], parts=peer_pages.grouped(rows), bounds=most_wi),
        Panel("K and V loaded, KiB", loaded, bounds=most_kib),
        Panel("Operands that the tensor cores read there, KiB", operands),
        Panel("Tensor memory, loads and stores of threads, KiB", tensor),
        Panel("Error against fp64, relative L2 x 1000", [1e3 * row["rel_l2"] for row in rows], "{:.2f}"),
        Panel("Registers a thread", [row["registers"] for row in rows]),
    ]
    return side_by_side(names, panels, ours, "One 128-key tile in the steady state, 64 or 128 heads of 512")


def command(record: Path | None, only: list[str]) -> int:
    """Run `dsv4 bench peers`: measure, print, perhaps record. The exit code (1: a bound of ours is not kept).

    Args:
        record: the table to update. only: names of kernels, empty: all.

    Raises:
        ArgumentError: a name that is no kernel's. DSV4Error: a kernel stopped.
    """
    from dsv4lib.bench.peers import fmha_calls

    names = [kernel.name for kernel in fmha_calls.KERNELS]
    rows = peer_pages.measure_all(fmha_calls.KERNELS, peers.measure, peers.record, record, only)
    console = Console()
    peer_pages.show(HEADER, cells(rows), console)
    return 0 if len(rows) < len(names) else peer_pages.verdict(peers.missed(rows), console)


def main() -> None:
    """Rewrite the table in the notes."""
    peer_pages.replace(NOTES, MODULE, markdown())


if __name__ == "__main__":
    main()
