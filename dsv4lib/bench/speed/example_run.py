"""Run one example script under an emulated device and measure its main kernel. `python -m` this module.

Arguments: the script and its own. The launch with tensor-core work is repeated on the same memory before the script
goes on to compare its results, with the default checks and with the race detector, alternating. The last line of output
is JSON: ``default`` and ``race`` (seconds of CPU time, best run), ``default_calls`` and ``race_calls`` (calls of Python
and built-in functions in a run), ``instructions``, ``mma``, ``hazards``.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsv4lib import emulator
from dsv4lib.emulator.driver.device import CHECKS, Device
from dsv4lib.emulator.machine import machine
from dsv4lib.emulator.machine.request import LaunchRequest, LaunchResult

REPEATS = 5
MODES = ("default", "race")


def measure(request: LaunchRequest, device: Device) -> dict[str, float]:
    """Measure seconds and calls of a launch. With the default checks and with the race detector."""
    settings = device.settings
    seconds = dict.fromkeys(MODES, float("inf"))
    try:
        for _ in range(REPEATS):
            for mode in MODES:  # alternating: other processes disturb both alike
                device.settings = dataclasses.replace(settings, native_checks=CHECKS[mode], cores=1)
                began = time.process_time()
                machine.run(request, device)
                seconds[mode] = min(seconds[mode], time.process_time() - began)
        counts = {}
        for mode in MODES:
            device.settings = dataclasses.replace(settings, native_checks=CHECKS[mode], cores=1)
            counts[f"{mode}_calls"] = count_calls(lambda: machine.run(request, device))
    finally:
        device.settings = settings
    return {**seconds, **counts}


def count_calls(run: Callable[[], Any]) -> int:
    """Count calls of Python and built-in functions in ``run()``. They are the same on every machine, however busy."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def watch(device: Device, seen: list[dict[str, Any]]) -> None:
    """Measure every launch of the device that uses tensor cores."""
    original = device.launch

    def launch(request: LaunchRequest, stream: int = 0) -> LaunchResult | None:
        result = original(request, stream)
        if result is not None and result.stats["mma"]:
            row: dict[str, Any] = measure(request, device)
            row |= {"instructions": result.instructions, "mma": result.stats["mma"]}
            seen.append(row | {"hazards": sorted({hazard.kind for hazard in result.hazards})})
        return result

    device.launch = launch


def main() -> None:
    """Run the command line."""
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
