"""Run a training of the nano model from the command line. Progress while it runs, a checkpoint at the end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.nano import corpus, settings, training


def command(
    model: str,
    folder: Path,
    console: Console,
    *,
    smoke: bool = False,
    device: str | None = None,
    seconds: float | None = None,
    seed: int = 0,
    text: Path | None = None,
    registry: str | None = None,
) -> None:
    """Train and write ``folder``; an interrupted run writes nothing.

    Raises:
        ArgumentError: another model than nano, a folder that is taken, a device that is not there.
        FetchError: text that cannot be had.
    """
    if model != "nano":
        raise ArgumentError("model", model, "nano")
    if os.path.lexists(folder) or not folder.absolute().parent.is_dir():
        raise ArgumentError("folder", str(folder), "a name that is not taken, in a folder that exists")
    config, run = (settings.SMALL, settings.SMOKE) if smoke else (settings.NANO, settings.Run())
    run = replace(run, seed=seed, seconds=run.seconds if seconds is None else seconds)
    say = lambda line: console.print(line, markup=False)  # noqa: E731
    try:
        found = corpus.load(text, registry, say)
        outcome = training.train(found, config, run, device or ("cpu" if smoke else "cuda"), say)
        training.write(outcome, folder.absolute())
    except KeyboardInterrupt:
        say("interrupted: nothing was written")
        raise
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {outcome.steps} steps in {outcome.seconds:.0f} s, model.safetensors {size:,} bytes")
