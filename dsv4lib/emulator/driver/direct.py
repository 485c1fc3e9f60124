"""Launch a kernel of a PTX text on torch tensors in place. `launch_ptx(ptx, name, ...)` needs no host code.

What `host.launch` is for a compiled CuTeDSL function: for a kernel whose parameters the caller has packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4lib.emulator.driver import binary, config
from dsv4lib.emulator.driver.device import Device, active, make
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest
from dsv4lib.errors import ArgumentError


def launch_ptx(
    ptx: str,
    name: str,
    grid: Dim3,
    block: Dim3,
    params: bytes,
    tensors: Sequence[Any],
    *,
    dynamic_smem: int = 0,
    programmatic: bool = False,
    stream: int = 0,
    gpu: Device | None = None,
) -> Device:
    """Run one kernel in the emulator.

    Args:
        ptx: the text. name: of the kernel in it. A cluster's shape is what the kernel says.
        params: the parameter block. tensors: torch tensors on the CPU whose addresses are in there.
        dynamic_smem: bytes. programmatic: the launch may begin before its predecessor has ended.
        gpu: where to run; default the active device, else a new one of the text's architecture.

    Returns:
        the device, with the launch's result in ``launches``.

    Raises:
        ArgumentError: the parameter block is too short.
        LaunchError: no such kernel, or a launch that is not allowed.
        EmulatorError: what stopped the kernel.
    """
    module = binary.parsed(ptx)
    kernel = module.kernels.get(name)
    if kernel is None:
        raise LaunchError(f"no kernel {name} in the PTX; it has {', '.join(module.kernels)}")
    size = max((param.offset + param.size for param in kernel.params), default=0)
    if len(params) < size:
        raise ArgumentError("params", f"{len(params)} bytes", f"the {size} bytes of the parameters of {name}")
    inside = bool(RUNTIME.devices)
    if gpu is None:
        gpu = RUNTIME.device() if RUNTIME.devices else make(module.target)
    attributes = {"programmatic": True} if programmatic else {}
    with active(gpu):
        for tensor in tensors:
            if inside:  # of a group's device perhaps, whose memory it then is
                RUNTIME.track(tensor)
            gpu.memory.tensor(tensor)
        request = LaunchRequest(
            name, module, grid, block, kernel.cluster or (1, 1, 1), dynamic_smem, params, attributes, gpu.ctas
        )
        config.check(request, gpu.arch, gpu.settings.sm_count, dynamic_smem)
        if RUNTIME.captured is not None:
            RUNTIME.captured.append(request)
        else:
            gpu.launch(request, stream)
    return gpu
