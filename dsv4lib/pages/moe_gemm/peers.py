"""Show block-scaled GEMMs of others, and ours, as a table and a figure. From the committed measurements.

`python -m dsv4lib.pages.moe_gemm.peers` rewrites the tables in data/bench/moe_peers.md.
`./dsv4 bench peers moe` measures anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from dsv4lib.bench.peers import moe as moe_peers
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.viz.bars import Panel, side_by_side

MODULE = "moe_gemm.peers"
NOTES = moe_peers.TABLE.with_suffix(".md")
HEADER = (
    "kernel",
    "case",
    "operands",
    "output",
    "instructions a step",
    "without moves",
    "MMAs",
    "loaded KiB",
    "operand KiB",
    "multiplied",
    "instructions a tile",
    "stored KiB",
    "error",
    "registers",
    "SMEM KiB",
    "compile s",
)


def cells(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return what the table shows of each row that ran, see `HEADER`."""
    return [
        (
            row["kernel"],
            row["case"],
            row["operands"],
            row["out"],
            round(row["wi"]),
            round(row["wi"] - row["wi_move"]),
            f"{row['mma']:.2g}",
            f"{moe_peers.loaded(row):.1f}",
            f"{row['smem_operands'] / 1024:.1f}",
            f"{row['waste']:.2f}",
            round(row["tile_wi"]),
            f"{row['tile_stored'] / 1024:.0f}",
            f"{row['rel_l2']:.2e}",
            round(row["registers"]),
            round(row["smem_bytes"] / 1024),
            f"{row['compile_s']:.0f}",
        )
        for row in moe_peers.ran(rows)
    ]


def markdown(rows: list[dict[str, Any]] | None = None) -> str:
    """Return the committed table (or ``rows``) and its source. Also what did not run and why."""
    rows = moe_peers.load() if rows is None else rows
    refused = [row for row in rows if row["reason"]]
    lines = ["Not in the table:", ""]
    for row in refused:
        said = f" (`{row['said']}`)" if row["said"] else ""
        lines.append(f"* {row['kernel']}, {row['operands']}: {row['reason']}{said}.")
    source = peer_pages.source(rows, moe_peers.TABLE, "./dsv4 bench peers moe")
    return peer_pages.markdown(HEADER, cells(rows), "\n".join([*lines, "", source]))


def figure(rows: list[dict[str, Any]] | None = None) -> Figure:
    """Draw the committed table (or ``rows``) as bars, one panel a quantity. Ours in bold."""
    rows = moe_peers.ran(moe_peers.load() if rows is None else rows)
    operands = [row["smem_operands"] / 1024 for row in rows]
    panels = [
        Panel("PTX warp-instructions a step", [row["wi"] for row in rows], parts=peer_pages.grouped(rows)),
        Panel("PTX warp-instructions a tile, besides", [row["tile_wi"] for row in rows]),
        Panel("Operands and scales loaded a step, KiB", [moe_peers.loaded(row) for row in rows], "{:.1f}"),
        Panel("Operands that tensor cores read, KiB", operands, "{:.1f}"),
        Panel("Multiplied over useful products", [row["waste"] for row in rows], "{:.2f}"),
        Panel("Error against fp64, relative L2 x 1000", [1e3 * row["rel_l2"] for row in rows], "{:.2f}"),
    ]
    names = [f"{row['kernel']} ({row['case']})" for row in rows]
    title = "Block-scaled GEMM: a step is 128 x 128 x 256 of the product, a tile 128 x 128 outputs"
    return side_by_side(names, panels, [not row["package"] for row in rows], title)


def command(record: Path | None, only: list[str]) -> int:
    """Run `dsv4 bench peers moe` and return its exit code. 1: ours is missing, or slower for no known reason.

    Args:
        record: the table to update. only: names of kernels, empty: all.

    Raises:
        ArgumentError: a name that is no kernel's. DSV4Error: a kernel stopped.
    """
    from dsv4lib.bench.peers import moe_calls

    def measure(name: str, packages: Path | None) -> dict[str, Any]:
        return moe_peers.measure([name], packages)[0]

    rows = peer_pages.measure_all(moe_calls.KERNELS, measure, moe_peers.record, record, only)
    console = Console(width=190)
    peer_pages.show(HEADER, cells(rows), console)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['kernel']}: {row['reason']}. {row['said']}", markup=False)
    for key, text in moe_peers.over_bounds(rows).items():
        if key in moe_peers.EXPLAINED:
            console.print(f"known: {text}: {moe_peers.EXPLAINED[key]}", markup=False)
    return 0 if only else peer_pages.verdict(moe_peers.missed(rows), console)


def main() -> None:
    """Rewrite the tables in the notes."""
    peer_pages.replace(NOTES, MODULE, markdown())


if __name__ == "__main__":
    main()
