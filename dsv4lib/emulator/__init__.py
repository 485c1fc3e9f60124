"""Emulate NVIDIA GPUs for kernels compiled by CuTeDSL. Run PTX for SM80 to SM103 on any CPU, and check it.

with emulator.device("sm_100a", seed=0) as gpu:      # CuTeDSL, torch and code built on them see a GPU
    compiled = cute.compile(kernel, a, b)
    compiled(a, b)
gpu.launches[-1].result, gpu.hazards, gpu.trace      # the trace with device(..., trace=True), see trace/trace.py

with emulator.devices(2) as gpus: ...                # several, with memory that all share, see driver/devices.py
emulator.launch(compiled, a, b)                      # one call, nothing patched
emulator.launch_ptx(ptx, name, grid, block, ...)     # PTX and packed parameters, on torch tensors in place
emulator.emulate("script.py", ["--its", "args"])     # any script, in a fresh process
emulator.gpu.load("kernel.ptx")                      # PTX alone, launched on numpy arrays, see gpu/
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: the machine itself needs neither torch nor CuTeDSL.
_PUBLIC = {
    "Device": "driver.device",
    "Devices": "driver.devices",
    "device": "driver.device",
    "devices": "driver.devices",
    "emulate": "driver.script",
    "launch": "driver.host",
    "launch_ptx": "driver.direct",
}
__all__ = [*_PUBLIC, "gpu"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    if name == "gpu":
        return importlib.import_module(f"{__name__}.gpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
