"""Find device memory by its address alone: addresses are unified, no two devices of a group have the same one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dsv4lib.emulator.driver import cuda_api
from dsv4lib.emulator.driver.interfaces import DeviceView
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.memory.gmem import Allocation
from dsv4lib.errors import ArgumentError


class Found(NamedTuple):
    """An allocation, the device that knows it, and the number of the device that it belongs to."""

    allocation: Allocation
    device: DeviceView
    ordinal: int


def find(address: int) -> Found | None:
    """Find the allocation that holds an address, on the current device or another one of its group."""
    for gpu in _devices():
        gpu.memory.sweep()  # what was freed may be host memory by now
        known = gpu.gmem.find(address)
        if known is not None:
            return Found(known, gpu, gpu.index if known.device is None else known.device)
    return None


def allocation(address: int) -> Found:
    """Find the allocation that holds an address.

    Raises:
        ArgumentError: it is no device memory.
    """
    found = find(address)
    if found is None:
        raise ArgumentError("dptr", hex(address), "an address of device memory")
    return found


def view(address: int, nbytes: int) -> np.ndarray:
    """View device memory, constants too: only kernels may not write them.

    Raises:
        MemoryFault: any byte lies outside of the allocation that holds the first one.
    """
    found = find(address)
    return (RUNTIME.device() if found is None else found.device).gmem.view(address, nbytes)


def copy(target: int | None, source: int | None, nbytes: int, *, to: bool = False, of: bool = False) -> None:
    """Copy bytes; a side that is device memory stays inside one allocation.

    Args:
        to, of: the target, the source must be device memory.

    Raises:
        ArgumentError: a null pointer. MemoryFault: no device memory, or bytes outside of it.
    """
    if not nbytes:
        return
    RUNTIME.synchronize()
    for name, address, must in (("dst", target, to), ("src", source, of)):
        if not address:
            raise ArgumentError(name, address, f"an address of {nbytes} bytes")
        if must or find(address) is not None or RUNTIME.device().gmem.multicast(address):
            view(address, nbytes)
    cuda_api.copy(target, source, nbytes)


def _devices() -> Iterator[DeviceView]:
    """The current device, then the others of its group."""
    current = RUNTIME.device()
    yield current
    yield from (gpu for gpu in current.group or () if gpu is not current)
