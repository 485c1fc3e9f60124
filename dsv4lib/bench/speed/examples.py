"""Time NVIDIA's CuTeDSL examples in the emulator. A CUTLASS checkout is given by its path.

The scripts run as they are, each in a process of its own that ends with the script's own comparison; the kernel is
measured in between (example_run.py). Without a checkout the rows are there and say why they are empty.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dsv4lib.bench.speed.rows import Row

_FOLDER = Path("examples/python/CuTeDSL/cute/blackwell/kernel")
_ROOT = Path(__file__).resolve().parents[3]
_LIMIT = 600  # seconds of one script
RACE_FLOOR = 2.0  # times as long with the race detector
CALLS_FLOOR = 1.4  # times as many calls; as reached in all examples, with room for other versions of Python


@dataclass(frozen=True)
class Example:
    """A script below `_FOLDER` with its arguments. Also the seconds that its kernel may take."""

    what: str
    script: str
    arguments: str
    floor: float


EXAMPLES = (
    Example(
        "FMHA d128, 256 queries x 1024 keys",
        "attention/fmha/fmha.py",
        "--q_shape 1,256,1,128 --k_shape 1,1024,1,128",
        0.12,
    ),
    Example(
        "mixed-input FMHA d512 of a CTA pair, 128 queries x 1024 keys",
        "attention/mixed_input_fmha/mixed_input_fmha_prefill_d512.py",
        "--q_shape 1,1,128,512 --k_shape 1,1,1024,512",
        1.0,
    ),
    Example(
        "nvfp4 tile 128x128x4096",
        "blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
        "--mnkl 128,128,4096,1",
        0.1,
    ),
)


def measure(cutlass: Path | None, folder: str) -> list[Row]:
    """Three rows an example: seconds with the default checks, how many times that with the race detector, and the same
    of calls of functions, which a busy machine does not change.

    Args:
        cutlass: a CUTLASS checkout, None = there is none.
        folder: scratch; the scripts run in it.
    """
    return [row for example in EXAMPLES for row in _rows(example, cutlass, folder)]


def _rows(example: Example, cutlass: Path | None, folder: str) -> list[Row]:
    ratio, calls = f"{example.what}: race detector", f"{example.what}: calls with the race detector"
    empty = [
        Row(example.what, None, "s", example.floor),
        Row(ratio, None, "times", RACE_FLOOR),
        Row(calls, None, "times", CALLS_FLOOR),
    ]
    if cutlass is None:
        return [row.skipped("needs a CUTLASS checkout: --cutlass PATH") for row in empty]
    script = cutlass.resolve() / _FOLDER / example.script
    if not script.is_file():
        return [row.skipped(f"{_FOLDER / example.script} is not in the checkout") for row in empty]
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": "sm_100a",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).strip(":"),
    }
    command = [sys.executable, "-m", "dsv4lib.bench.speed.example_run", str(script), *example.arguments.split()]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return [row.failed(f"more than {_LIMIT} s") for row in empty]
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        said = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        return [row.failed(said) for row in empty]
    seen = json.loads(lines[-1])
    detail = f"{seen['instructions']} warp-instructions, {seen['mma']} MMAs; CPU time, best of 5"
    slower, more = seen["race"] / seen["default"], seen["race_calls"] / seen["default_calls"]
    return [
        Row(example.what, seen["default"], "s", example.floor, detail=detail),
        Row(ratio, slower, "times", RACE_FLOOR, detail=f"{seen['race']:.3g} s; CPU time, best of 5, alternating"),
        Row(calls, more, "times", CALLS_FLOOR, detail=f"{seen['race_calls']} calls of functions in a launch"),
    ]
