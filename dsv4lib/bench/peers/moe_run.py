"""Run kernels of `moe_calls` in the emulator. `python -m dsv4lib.bench.peers.moe_run [--short] NAME...`.

Prints a line of JSON for each. `--short`: with small K, see `SHORT`.
"""

from __future__ import annotations

import functools
import math
import sys
from importlib import metadata
from typing import Any

from dsv4lib.bench.peers import fmha_run as peer_run
from dsv4lib.bench.peers.moe_calls import BY_NAME, LENGTHS, SHAPES, problem

# K of a check of the table: steps and tiles of most kernels cost the same, in a quarter of the time.
SHORT = 512, 1024
TILE, STEP = 128, 256  # rows and columns of a tile of the table, K of a step


def about(name: str) -> dict[str, Any]:
    """Return what is known of a kernel without running it."""
    kernel = BY_NAME[name]
    counts, columns = SHAPES[kernel.case]
    return {
        "kernel": name,
        "package": kernel.package,
        "version": metadata.version(kernel.package) if kernel.package else "",
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "case": kernel.case,
        "operands": " x ".join(kernel.forms),
        "out": kernel.out,
        "rows": sum(counts),
        "columns": columns,
    }


def run(name: str, lengths: tuple[int, int] = LENGTHS) -> dict[str, Any]:
    """Everything the table says of a kernel, see `moe_peers.COLUMNS`. Of one that does not run, why, and what it said.

    Raises:
        ValueError: it does not do one launch of one shape for every length, or it runs although it is said not to.
    """
    kernel = BY_NAME[name]
    if not kernel.refused:
        return {**about(name), **_measured(name, lengths), "reason": ""}
    said = ""
    if kernel.call is not None:
        try:
            _measured(name, lengths)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            raise ValueError(f"{name} runs, although: {kernel.refused}")
    return {**about(name), "reason": kernel.refused, "said": said}


def _measured(name: str, lengths: tuple[int, int]) -> dict[str, Any]:
    from dsv4lib import emulator
    from dsv4lib.bench.peers.launch_counts import count, difference
    from dsv4lib.emulator.machine.request import SMEM_RESERVED

    kernel = BY_NAME[name]
    counts, grids = [], set()
    with (
        peer_run.watched() as seen,
        emulator.device("sm_100a", sm_count=2, checks="default,counters", trace=True) as gpu,
    ):
        for k in lengths:
            given = problem(kernel.case, kernel.forms, k)
            before = len(gpu.launches)
            out = kernel.call(given)
            if len(gpu.launches) != before + 1:
                raise ValueError(f"{name}: {len(gpu.launches) - before} launches, the table is of kernels with one")
            counts.append(count(gpu.trace))
            request = gpu.launches[-1].request
            grids.add((request.kernel_name, request.grid, request.cluster, request.block))
        smem = gpu.trace.smem_bytes - SMEM_RESERVED
        hazards = sorted({hazard.kind for hazard in gpu.hazards})
    if len(grids) != 1:
        raise ValueError(f"{name}: launches of different shape, {grids}")
    rows, columns = len(given.rows.codes), given.weights.codes.shape[-2]
    shorter, longer = counts
    grown, length = difference(longer, shorter), lengths[1] - lengths[0]
    tiles = sum(-(-count // TILE) for count in given.counts) * columns / TILE
    steps = tiles * length / STEP
    truth = given.truth()
    error, norm = out.double() - truth, truth.norm()
    info = seen["cubins"][request.kernel_name]
    return {
        "per_step": {key: n / steps for key, n in grown.items()},
        "per_tile": {key: (n - grown.get(key, 0) * lengths[0] / length) / tiles for key, n in shorter.items()},
        "waste": grown["flops"] / (2 * rows * columns * length),
        "rel_l2": float(error.norm() / norm),
        "rounding": float((truth.bfloat16().double() - truth).norm() / norm),
        "max_abs_err": float(error.abs().max()),
        "registers": info.registers,
        "local_bytes": info.local_bytes,
        "threads": request.block[0],
        "smem_bytes": smem,
        "ctas": math.prod(request.grid),
        "cluster": math.prod(request.cluster),
        "compile_s": seen["seconds"],
        "hazards": " ".join(hazards),
    }


if __name__ == "__main__":
    short = sys.argv[1:2] == ["--short"]
    names = sys.argv[2:] if short else sys.argv[1:]
    peer_run.main(names, BY_NAME, functools.partial(run, lengths=SHORT if short else LENGTHS))
