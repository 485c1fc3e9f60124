"""`dsv4 bench peers`: our attention beside FA4's, FlashInfer's and cuDNN's, in the emulator, on the same numbers.

What a 128-key tile costs in the steady state (the difference of two lengths): warp-instructions by class, MMAs by
shape, bytes; and the error against fp64, registers, shared memory, compile time. The kernels and the inputs are in
`peer_calls`, what is counted is in `launch_counts`. The committed table is data/bench/fmha_peers.csv; `load` reads it
without the packages.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsv4lib.bench.launch_counts import CLASSES
from dsv4lib.errors import DSV4Error

_ROOT = Path(__file__).resolve().parents[2]
TABLE = _ROOT / "data" / "bench" / "fmha_peers.csv"
_LIMIT = 900  # seconds of one kernel, all runs

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
    """The row of one kernel of `peer_calls.KERNELS`, run in a process of its own.

    Args:
        packages: folder of other people's packages (`lab.corpus`); None for ours.

    Raises:
        DSV4Error: it stopped; the message ends with the last line it printed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).strip(":"),
        **({} if packages is None else {"DSV4_CORPUS_SITE": str(packages)}),
    }
    command = [sys.executable, "-m", "dsv4lib.bench.peer_run", name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise DSV4Error(f"{name}: more than {_LIMIT} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        raise DSV4Error(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1][:300]}")
    return as_row(json.loads(lines[-1]))


def as_row(seen: dict[str, Any]) -> dict[str, Any]:
    """A row of the table from what `peer_run` prints."""
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


def commit() -> str:
    """The last one of this repository that changed a kernel, with "+" if they have changed since."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", "dsv4lib/kernels"]
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("log", "-1", "--format=%h", "--abbrev=9") + ("+" if changed else "")


def load(path: Path = TABLE) -> list[dict[str, Any]]:
    """The rows of the committed table, numbers as numbers; needs none of the packages.

    Raises:
        DSV4Error: the file is missing or has other columns.
    """
    if not path.is_file():
        raise DSV4Error(f"{path} is missing: ./dsv4 bench peers --record {path} writes it")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
        return [{key: value if key in _TEXT else float(value) for key, value in row.items()} for row in reader]


def record(rows: Iterable[dict[str, Any]], path: Path, order: Iterable[str]) -> None:
    """Write rows into a table; rows of other kernels that it has stay. ``order``: names of the kernels."""
    known = {row["kernel"]: row for row in load(path)} if path.is_file() else {}
    known |= {row["kernel"]: row for row in rows}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_shown(known[name]) for name in order if name in known)


def _shown(row: dict[str, Any]) -> dict[str, str]:
    digits = {**dict.fromkeys(_ERRORS, ".4g"), "compile_s": ".3g"}
    return {key: value if key in _TEXT else f"{value:{digits.get(key, '.12g')}}" for key, value in row.items()}


def loaded(row: dict[str, Any]) -> float:
    """KiB of keys loaded a tile; through registers, for 584-byte entries, counted in sectors with the index."""
    plain = row["bytes_plain"] if row["gather"] == "loads" else 0
    return (row["bytes_tma"] + row["bytes_cp_async"] + plain) / 1024


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What our rows do not keep: a text for each bound that is broken, and for each larger error.

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
