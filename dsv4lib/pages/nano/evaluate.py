"""Show what each precision costs a checkpoint. One line a variant, gates at the end."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.nano import corpus, evaluate, on_kernels, variants
from dsv4lib.nano.evaluate import Row

LENGTH = 2048  # bytes of a held-out window


def shipped() -> Path:
    """Return the folder of the checkpoint that the lab ships."""
    return env.root() / "data" / "nano"


def held_windows(count: int, length: int) -> corpus.Windows:
    """Return the first ``length`` bytes of ``count`` windows. They are of the held-out text that is shipped."""
    text = (shipped() / "heldout.txt").read_bytes()
    parts = [text[at : at + length] for at in range(0, len(text), LENGTH)]
    if not 1 <= count <= len(parts):
        raise ArgumentError("windows", count, f"1 to {len(parts)}")
    return corpus.windows({str(i): part for i, part in enumerate(parts)}, length).some(count)


def command(
    model: Path | None,
    console: Console,
    *,
    windows: int = 1,
    length: int = 512,
    names: Sequence[str] = (),
    table: Path | None = None,
    device: str = "cpu",
    backend: str | None = None,
) -> bool:
    """Print the table; False if a gate fails.

    Args:
        backend: of the ops that judge the modes of `on_kernels`; None: the variants of the reference model.

    Raises:
        ArgumentError: an unknown variant or device, too many windows, a table that exists, dimensions that the codecs
            are not made for.
        BackendUnavailable: the back end cannot run here.
        CheckpointError: a checkpoint that is not complete.
    """
    kind = variants if backend is None else on_kernels
    wanted = [kind.named(name) for name in names] or list(variants.VARIANTS if backend is None else on_kernels.MODES)
    found = held_windows(windows, length)
    if table is not None and table.exists():
        raise ArgumentError("table", str(table), "a file that does not exist: nothing is overwritten")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ArgumentError("device", device, "cpu, or cuda where torch finds a GPU")
    console.print(f"{len(wanted)} variants on {int(found.judged.sum())} bytes, paired with the checkpoint as it is")
    if backend is None:
        config, values = evaluate.load(model or shipped(), device)
        rows = evaluate.table(config, values, found, wanted, lambda row: print(line(row), flush=True))
    else:
        rows = on_kernels.table(model or shipped(), found, wanted, backend, lambda row: print(line(row), flush=True))
    if table is not None:
        with open(table, "x", newline="") as stream:
            writer = csv.DictWriter(stream, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    faults = (evaluate if backend is None else on_kernels).gates(rows)
    for fault in faults:
        console.print(fault, style="red", markup=False)
    return not faults


def line(row: Row) -> str:
    """Return one row as text."""
    return (
        f"{row.name:30s} {row.bpb:.4f} bits per byte  {row.difference:+.5f} [{row.low:+.5f}, {row.high:+.5f}]"
        f"  KL {row.kl:.6f}  same {row.same:.4f}"
    )
