"""Show the conversion of a checkpoint. Progress while it runs, what was lossless and what was not at the end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4lib.loader import convert


def command(source: Path, folder: Path, to: str, console: Console) -> None:
    """Convert and report; see `loader.convert.convert` for the errors."""
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        done = convert.convert(
            source, folder, to, lambda at, size, name: bar.update(task, completed=at, total=size, description=name)
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.weights.items()))
    print(f"{folder}: {done.tensors} tensors, {done.nbytes:,} bytes, {done.source} -> {done.target}; weights: {kinds}")
    if done.target == "nvfp4" and done.source != "nvfp4":
        print("input_scale is that of a proven bound, not calibrated: no activation saturates, resolution may be lost")
