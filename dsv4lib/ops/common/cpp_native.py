"""Launch a kernel of CUDA C++ on a GPU by the CUDA driver, on a stream of torch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4lib.dsl.compile import Compiled
from dsv4lib.dsl.cpp import CppKernel, places
from dsv4lib.ops.common.native import LaunchFailed

_SMEM_WITHOUT_OPT_IN = 48 << 10


def launch(
    code: Compiled, kernel: CppKernel, grid: Sequence[int], block: bytes, stream: int, device: torch.device
) -> None:
    """Queue a kernel.

    Args:
        block: its parameters, as `pack` lays them out. stream: handle. device: of its tensors.

    Raises:
        LaunchFailed: the driver refuses the cubin or the launch.
    """
    from cuda.bindings import driver

    memory = ctypes.create_string_buffer(block, len(block))
    start = ctypes.addressof(memory)
    addresses = [start + offset for offset in places(kernel)]
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes, config.hStream = kernel.smem_bytes, driver.CUstream(stream)
    config.attrs, config.numAttrs = [overlap], 1
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        function = _loaded(code.cubin, code.name, kernel.smem_bytes, device.index or 0)
        _done(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


@functools.cache
def _loaded(cubin: bytes, name: str, smem_bytes: int, device: int) -> Any:
    """Load a kernel once; it stays as long as the process."""
    from cuda.bindings import driver

    (library,) = _done(driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
    (kernel,) = _done(driver.cuLibraryGetKernel(library, name.encode()))
    if smem_bytes > _SMEM_WITHOUT_OPT_IN:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _done(driver.cuKernelSetAttribute(limit, smem_bytes, kernel, driver.CUdevice(device)))
    (function,) = _done(driver.cuKernelGetFunction(kernel))
    return function


def _done(result: Sequence[Any]) -> Sequence[Any]:
    if int(result[0]):
        raise LaunchFailed(f"CUDA error {int(result[0])}: {result[0].name}")
    return result[1:]
