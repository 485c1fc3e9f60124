"""Run one example script under an emulated device and measure its main kernel: `python -m dsv4lib.bench.example_run`.

Arguments: the script and its own. The launch with tensor-core work is repeated on the same memory before the script
goes on to compare its results, with the default checks and with the race detector. The last line of output is JSON:
``default`` and ``race`` (seconds of CPU time, best run), ``instructions``, ``mma``, ``hazards``.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dsv4lib import emulator
from dsv4lib.emulator import machine
from dsv4lib.emulator.driver.device import CHECKS, Device
from dsv4lib.emulator.request import LaunchRequest, LaunchResult

REPEATS = {"default": 5, "race": 3}


def cpu_seconds(request: LaunchRequest, device: Device, checks: str) -> float:
    """CPU time of a launch, best of several."""
    settings, best = device.settings, float("inf")
    device.settings = dataclasses.replace(settings, native_checks=CHECKS[checks])
    try:
        for _ in range(REPEATS[checks]):
            began = time.process_time()
            machine.run(request, device)
            best = min(best, time.process_time() - began)
    finally:
        device.settings = settings
    return best


def watch(device: Device, seen: list[dict[str, Any]]) -> None:
    """Measure every launch of the device that uses tensor cores."""
    original = device.launch

    def launch(request: LaunchRequest, stream: int = 0) -> LaunchResult | None:
        result = original(request, stream)
        if result is not None and result.stats["mma"]:
            row: dict[str, Any] = {checks: cpu_seconds(request, device, checks) for checks in REPEATS}
            row |= {"instructions": result.instructions, "mma": result.stats["mma"]}
            seen.append(row | {"hazards": sorted({hazard.kind for hazard in result.hazards})})
        return result

    device.launch = launch


def main() -> None:
    """Command line."""
    script, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    path = Path(script).resolve()
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    sys.path += [str(folder) for folder in path.parents if (folder / "helpers").is_dir() or folder.name == "cute"]
    seen: list[dict[str, Any]] = []
    with emulator.device("sm_100a", default_device="cpu") as gpu:
        watch(gpu, seen)
        runpy.run_path(str(path), run_name="__main__")
    print()
    print(json.dumps(max(seen, key=lambda row: row["instructions"])))


if __name__ == "__main__":
    main()
