"""Run kernels of `fmha_calls` in the emulator, a line of JSON each. `python -m dsv4lib.bench.peers.fmha_run NAME...`.

A process of its own: packages read variables when they are imported, and compile seconds need a fresh compiler.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

LENGTHS = 512, 1024  # keys; per-tile counts are their difference
SEEDS = 3  # numbers the errors are taken over
TILE = 128  # keys of a tile in the table
# Packages read these when they are imported: their caches of object files must not meet the emulator's.
SWITCHES = {
    "CUTE_DSL_ARCH": "sm_100a",
    "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    "QUACK_CACHE_ENABLED": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """``seconds``: CPU time inside of cute.compile. ``cubins``: by kernel name, of all that is compiled meanwhile."""
    import cutlass.cute as cute

    from dsv4lib.dsl.cubin import read_cubin
    from dsv4lib.emulator.driver import binary

    seen: dict[str, Any] = {"seconds": 0.0, "cubins": {}}
    kind, remember = type(cute.compile), binary.remember
    compile_it = kind._compile

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        try:
            return compile_it(*args, **kwargs)
        finally:
            seen["seconds"] += time.process_time() - began

    def noted(cubin: bytes, ptx: str) -> str:
        info = read_cubin(cubin)
        seen["cubins"][info.name] = info
        return remember(cubin, ptx)

    kind._compile, binary.remember = timed, noted
    try:
        yield seen
    finally:
        kind._compile, binary.remember = compile_it, remember


def run(name: str) -> dict[str, Any]:
    """Return all the table says of a kernel, see `peers.COLUMNS`, and ``lines``.

    Those are instructions a tile by source line.

    Raises:
        EmulatorError: what stopped the kernel.
        ValueError: it does not do one launch of one shape for every length.
    """
    from dsv4lib import emulator
    from dsv4lib.bench.peers.fmha_calls import BY_NAME, problem
    from dsv4lib.bench.peers.launch_counts import by_line, count, difference
    from dsv4lib.emulator.machine.request import SMEM_RESERVED

    kernel = BY_NAME[name]
    counts, lines, grids, errors, largest = [], [], set(), [], 0.0
    with watched() as seen, emulator.device("sm_100a", sm_count=2, checks="default,counters", trace=True) as gpu:
        for keys, seed in [*((n, 0) for n in LENGTHS), *((LENGTHS[-1], seed) for seed in range(1, SEEDS))]:
            given = problem(kernel.heads, keys, seed)
            gpu.tracing = seed == 0
            before = len(gpu.launches)
            out = kernel.call(given)
            if len(gpu.launches) != before + 1:
                raise ValueError(f"{name}: {len(gpu.launches) - before} launches, the table is of kernels with one")
            if gpu.tracing:
                counts.append(count(gpu.trace))
                lines.append(by_line(gpu.trace))
            if keys == LENGTHS[-1]:
                truth = given.truth()
                error = out.double() - truth
                errors.append(float(error.norm() / truth.norm()))
                largest = max(largest, float(error.abs().max()))
            request = gpu.launches[-1].request
            grids.add((request.kernel_name, request.grid, request.cluster, request.block))
        smem = gpu.trace.smem_bytes - SMEM_RESERVED
    if len(grids) != 1:
        raise ValueError(f"{name}: launches of different shape, {grids}")
    tiles = (LENGTHS[1] - LENGTHS[0]) // TILE
    info = seen["cubins"][request.kernel_name]
    x, y, z = request.grid
    return {
        "kernel": name,
        "package": kernel.package,
        "version": metadata.version(kernel.package) if kernel.package else "",
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "heads": kernel.heads,
        "keys": kernel.keys,
        "dims": kernel.dims,
        "gather": kernel.gather,
        "per_tile": {key: n / tiles for key, n in difference(counts[1], counts[0]).items()},
        "lines": {key: n / tiles for key, n in difference(lines[1], lines[0]).items()},
        "rel_l2": errors,
        "max_abs_err": largest,
        "registers": info.registers,
        "local_bytes": info.local_bytes,
        "threads": request.block[0],
        "smem_bytes": smem,
        "ctas": x * y * z,
        "cluster": math.prod(request.cluster),
        "compile_s": seen["seconds"],
    }


def main(names: list[str], kernels: dict[str, Any], run: Callable[[str], dict[str, Any]]) -> None:
    """Run the named kernels, one after the other, and print a line of JSON for each."""
    os.environ.update(SWITCHES)
    for name in names:
        os.environ.update(getattr(kernels[name], "environment", {}))
    if packages := os.environ.get("DSV4_CORPUS_SITE"):
        sys.path.append(packages)  # last: the lab's own pins win
    import torch

    torch.set_num_threads(1)
    for name in names:
        print(json.dumps(run(name)), flush=True)


if __name__ == "__main__":
    from dsv4lib.bench.peers import fmha_calls

    main(sys.argv[1:], fmha_calls.BY_NAME, run)
