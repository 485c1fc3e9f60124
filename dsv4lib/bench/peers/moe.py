"""Run `dsv4 bench peers moe`. Block-scaled GEMMs of quack, FlashInfer and cuDNN, and ours, on the same operands.

Two lengths of K give the cost of a step (128 x 128 outputs, 256 of K) as their difference, and what is left is the cost
of a tile (128 x 128 outputs: set-up and epilogue). Tiles are as many as cover every expert's rows; a kernel whose own
tiles are larger than that pays for it in both. `waste` is what is multiplied over what the problem needs. The kernels
and the operands are in `moe_calls`. The committed table is data/bench/moe_peers.csv; `load` reads it without the
packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4lib.bench.peers.launch_counts import CLASSES
from dsv4lib.bench.peers.table import DATA, PeerTable, commit, run_alone

TABLE = DATA / "moe_peers.csv"

_FIRST = ("kernel", "package", "version", "case", "operands", "out")
_LAST = ("hazards", "dsl", "commit", "reason", "said")
_TEXT = (*_FIRST, "mma_shapes", *_LAST)
_SHAPE = ("rows", "columns", "ctas", "cluster", "threads", "registers", "local_bytes", "smem_bytes")
# Column -> name in `launch_counts.count`, of a step.
STEP = {
    "wi": "instructions",
    **{f"wi_{name}": f"class {name}" for name in CLASSES},
    "mma": "mma",
    "tma_loads": "tma loads",
    "bytes_tma": "tma",
    "bytes_cp_async": "cp.async",
    "bytes_bulk": "bulk",
    "bytes_plain": "plain",
    "smem_operands": "smem operands",
    "scale_copies": "smem to tmem",
}
# The same of a tile.
TILE = {
    "tile_wi": "instructions",
    "tile_stored": "stored",
    "tile_plain": "plain",
    "tile_smem_threads": "smem threads",
    "tile_tmem_ld": "tmem ld",
}
_ERRORS = ("rel_l2", "rounding", "max_abs_err")
COLUMNS = (
    *_FIRST,
    *_SHAPE,
    "waste",
    *STEP,
    "mma_shapes",
    *TILE,
    *_ERRORS,
    "compile_s",
    *_LAST,
)
# What another run on any machine must give again.
EXACT = (*_SHAPE, "waste", *STEP, "mma_shapes", *TILE, "hazards")
A_TILE, LOADED = "warp-instructions a tile", "KiB loaded a step"
# Where ours exceeds the bounds that the best of the others set, and why. With operands exchanged a tile follows a
# group's rows, but bf16 outputs have to be transposed in shared memory, in fp32. The CTAs of a pair both load the
# tokens' scales. An MMA has 16 tokens at least.
_TRANSPOSED = "outputs are transposed in fp32"
EXPLAINED = {
    ("ours", A_TILE): _TRANSPOSED,
    ("ours", LOADED): "both CTAs of a pair load the tokens' scales",
    ("ours, mxfp8 x mxfp4", A_TILE): _TRANSPOSED,
    ("ours, mxfp8", A_TILE): _TRANSPOSED,
    ("ours, 8 rows", LOADED): "16 rows of tokens at least",
    ("ours, groups", A_TILE): _TRANSPOSED,
    ("ours, groups, mxfp8 x mxfp4", A_TILE): _TRANSPOSED,
}
_FILE = PeerTable(TABLE, COLUMNS, _TEXT, {**dict.fromkeys(_ERRORS, ".4g"), "compile_s": ".3g"}, "moe")
load, record = _FILE.load, _FILE.record


def measure(names: list[str], packages: Path | None = None, short: bool = False) -> list[dict[str, Any]]:
    """Return the rows of kernels of `moe_calls.KERNELS`, run in one process. See `table.run_alone`.

    Args:
        short: with small K: the same counts, but of kernels that choose by K, and errors of other products.
    """
    seen = run_alone("dsv4lib.bench.peers.moe_run", [*(["--short"] if short else []), *names], packages)
    return [as_row(one) for one in seen]


def as_row(seen: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table from what `moe_run` prints."""
    row: dict[str, Any] = {key: seen.get(key, "" if key in _TEXT else None) for key in COLUMNS}
    row["commit"] = "" if seen["package"] else commit()
    if seen["reason"]:
        return row
    step, tile = seen["per_step"], seen["per_tile"]
    row |= {column: round(step.get(name, 0), 2) for column, name in STEP.items()}
    row |= {column: round(tile.get(name, 0), 2) for column, name in TILE.items()}
    shapes = sorted(key.removeprefix("mma ") for key in step if key.startswith("mma "))
    return {**row, "mma_shapes": "; ".join(shapes), "waste": round(seen["waste"], 4)}


def ran(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of kernels that ran."""
    return [row for row in rows if not row["reason"]]


def loaded(row: dict[str, Any]) -> float:
    """Return the KiB of operands and scales that a step brings into shared memory."""
    return (row["bytes_tma"] + row["bytes_cp_async"] + row["bytes_bulk"]) / 1024


def error_bound(row: dict[str, Any]) -> float:
    """Bound a row's error: fp32 sums leave the rounding of its output. It is to bf16, or to blocks of e4m3 or e2m1."""
    return {"bf16": 1.001 * row["rounding"], "mxfp8": 0.03, "nvfp4": 0.1}[row["out"]]


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """List the bounds that our rows exceed unexplained, and wrong explanations. Or that no row is ours."""
    if all(row["package"] for row in ran(rows)):
        return ["no kernel of ours is in the table"]
    found = over_bounds(rows)
    out = [text for key, text in found.items() if key not in EXPLAINED]
    named = {row["kernel"] for row in ran(rows)}
    stale = [key for key in EXPLAINED if key[0] in named and key not in found]
    return out + [f"{kernel}: within bounds in {what}, although EXPLAINED has it" for kernel, what in stale]


def over_bounds(rows: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Find where our rows exceed the bounds of the others: (kernel, what) -> a text.

    Of a case and its formats ours must execute no more warp-instructions a step and a tile than the best of the
    others, load no more, and have no larger error than the worst of them.
    """
    ours, others = ([row for row in ran(rows) if bool(row["package"]) is theirs] for theirs in (False, True))
    out: dict[tuple[str, str], str] = {}
    for row in ours:
        key = ("case", "operands", "out")
        same = [other for other in others if all(other[k] == row[k] for k in key)]
        if not same:
            continue
        for what, value, bounds in (
            ("warp-instructions a step", row["wi"], [other["wi"] for other in same]),
            (A_TILE, row["tile_wi"], [other["tile_wi"] for other in same]),
            (LOADED, loaded(row), [loaded(other) for other in same]),
        ):
            if value > min(bounds):
                best = same[bounds.index(min(bounds))]["kernel"]
                out[row["kernel"], what] = f"{row['kernel']}: {value:,.1f} {what}, {best} has {min(bounds):,.1f}"
        worst = max(other["rel_l2"] for other in same)
        if row["rel_l2"] > worst:
            text = f"{row['kernel']}: error {row['rel_l2']:.4g}, at most {worst:.4g} with the others"
            out[row["kernel"], "error"] = text
    return out
