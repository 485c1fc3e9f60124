"""Run `dsv4 bench peers`. Our attention beside FA4's, FlashInfer's and cuDNN's, in the emulator, on the same numbers.

What a 128-key tile costs in the steady state (the difference of two lengths): warp-instructions by class, MMAs by
shape, bytes; and the error against fp64, registers, shared memory, compile time. The kernels and the inputs are in
`fmha_calls`, what is counted is in `launch_counts`. The committed table is data/bench/fmha_peers.csv; `load` reads it
without the packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4lib.bench.peers.launch_counts import CLASSES
from dsv4lib.bench.peers.table import DATA, PeerTable, commit, run_alone

TABLE = DATA / "fmha_peers.csv"

_TEXT = ("kernel", "package", "version", "keys", "gather", "mma_shapes", "dsl", "commit")
_SHAPE = ("heads", "dims", "ctas", "cluster", "threads", "registers", "local_bytes", "smem_bytes")
# Column -> name in `launch_counts.count`, all of one 128-key tile.
COUNTS = {
    "wi": "instructions",
    **{f"wi_{name}": f"class {name}" for name in CLASSES},
    "mma": "mma",
    "flops": "flops",
    "tma_loads": "tma loads",
    "bytes_tma": "tma",
    "bytes_cp_async": "cp.async",
    "bytes_plain": "plain",
    "smem_operands": "smem operands",
    "smem_copies": "smem copies in",
    "smem_threads": "smem threads",
    "tmem_ld": "tmem ld",
    "tmem_st": "tmem st",
}
_ERRORS = ("rel_l2", "rel_l2_worst", "max_abs_err")
COLUMNS = (*_TEXT[:3], *_SHAPE, *_TEXT[3:5], *COUNTS, "mma_shapes", *_ERRORS, "compile_s", *_TEXT[6:])
EXACT = (*_SHAPE, *COUNTS, "mma_shapes")  # what another run on any machine must give again

# What our kernel must keep a 128-key tile, by heads: warp-instructions and KiB of keys loaded.
BOUNDS = {64: (6_000, 128), 128: (8_000, 208)}
# Kernels whose error ours must not exceed: they too rescale O only when a maximum has grown by more than a threshold,
# or round P to fp8. FlashInfer's bf16 MLA rescales on every growth; data/bench/fmha_peers.md says what that is worth.
ERROR_PEERS = (
    "FA4 MLA .ws",
    "FA4 MLA .ws, 576",
    "cuDNN DSA, 64 heads",
    "FA4 MLA pair",
    "FA4 MLA pair, 576",
    "cuDNN DSA, 128 heads",
    "FlashInfer MLA fp8",
    "FlashInfer HCA fp8",
)
OURS = {64: "ours, 64 heads", 128: "ours, 128 heads"}


def measure(name: str, packages: Path | None = None) -> dict[str, Any]:
    """Return the row of one kernel of `fmha_calls.KERNELS`. It runs in a process of its own; see `table.run_alone`."""
    return as_row(run_alone("dsv4lib.bench.peers.fmha_run", [name], packages)[0])


def as_row(seen: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table from what `fmha_run` prints."""
    tile = seen["per_tile"]
    shapes = {key.removeprefix("mma "): n for key, n in tile.items() if key.startswith("mma ")}
    errors = seen["rel_l2"]
    return {
        **{key: seen[key] for key in COLUMNS if key in seen},
        **{column: round(tile.get(name, 0), 2) for column, name in COUNTS.items()},
        "mma_shapes": "; ".join(f"{n:g} x {shape}" for shape, n in sorted(shapes.items())),
        "rel_l2": (sum(e * e for e in errors) / len(errors)) ** 0.5,
        "rel_l2_worst": max(errors),
        "commit": commit() if not seen["package"] else "",
    }


_FILE = PeerTable(TABLE, COLUMNS, _TEXT, {**dict.fromkeys(_ERRORS, ".4g"), "compile_s": ".3g"}, "fmha")
load, record = _FILE.load, _FILE.record


def loaded(row: dict[str, Any]) -> float:
    """Count the KiB of keys loaded a tile. Through registers, for 584-byte entries: sectors, with the index."""
    plain = row["bytes_plain"] if row["gather"] == "loads" else 0
    return (row["bytes_tma"] + row["bytes_cp_async"] + plain) / 1024


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return what our rows do not keep. It is a text for each bound that is broken, and for each larger error.

    An error counts as larger if it exceeds the other kernel's largest over its seeds: below that, another choice of
    random numbers changes more than the choice of the kernel.
    """
    by_name, out = {row["kernel"]: row for row in rows}, []
    for heads, (instructions, kib) in BOUNDS.items():
        ours = by_name[OURS[heads]]
        for value, bound, what in (
            (ours["wi"], instructions, "warp-instructions"),
            (loaded(ours), kib, "KiB of keys loaded"),
        ):
            if value > bound:
                out.append(f"{OURS[heads]}: {value:,.0f} {what} a tile, at most {bound:,}")
        for name in ERROR_PEERS:
            peer = by_name[name]
            if peer["heads"] == heads and ours["rel_l2"] > peer["rel_l2_worst"]:
                out.append(f"{OURS[heads]}: error {ours['rel_l2']:.4g}, {name} has {peer['rel_l2_worst']:.4g} at most")
    return out
