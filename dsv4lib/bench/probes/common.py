"""Compile, print and record for the probes. `issue_probe`, `combine_probe`, `launch_probe`."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda

from dsv4lib.ops.common import compile_cache
from dsv4lib.predict import table

WIDTH = 8  # characters of a column on the screen


def get_all(wanted: Sequence[tuple], processes: int = 1) -> list[Any]:
    """Return the code of each (class, settings, fake_args, architecture). So many processes compile at once."""
    if processes > 1:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(_get, wanted))
    return [compile_cache.default().get(*one)[1] for one in wanted]


def _get(one: tuple) -> None:
    """In a process of its own: into the cache."""
    compile_cache.default().get(*one)


def stream() -> cuda.CUstream:
    """Return torch's current stream."""
    import torch

    return cuda.CUstream(torch.cuda.current_stream().cuda_stream)


def heads(kind: type) -> str:
    """Return the heads of the columns that `line` fills. It takes instances of ``kind``, a dataclass."""
    return " ".join(f"{f.name.removesuffix('_us')[:WIDTH]:>{WIDTH}}" for f in fields(kind))


def line(row: Any) -> str:
    """Return a row, an instance of a dataclass, for the screen."""
    texts = (f"{v:.2f}" if isinstance(v, float) else str(v)[:WIDTH] for v in astuple(row))
    return " ".join(f"{text:>{WIDTH}}" for text in texts)


def main(about: str, kind: type, run: Callable[[int], Sequence[Any]]) -> None:
    """Run a probe: measure, write the table.

    Args:
        about: the probe's docstring; kind: of its rows; run: gives them, printing each, from how many processes
            compile at once.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--record", type=Path, required=True, help="where the table goes")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    given = parser.parse_args()
    print(heads(kind))
    table.record(run(given.processes), given.record)
