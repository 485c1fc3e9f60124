"""Serve the CUDA runtime to packages that contain it: CuPy's compiled modules are linked with ``libcudart_static.a``.

That library asks the driver for tables of functions without names (`libcuda_calls.export_table`). Its own functions
have documented names, and a module that was not stripped still has them: each begins with a jump to ours here
(`static_runtime`). Those that have a twin in the driver lead to it; their parameters and statuses are the same.

A function that is not here answers cudaErrorNotSupported, and its name is in the error. So does what launches a kernel
of the package's own binary, of which there is no PTX. Source: CUDA runtime API reference.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from dsv4lib.emulator.driver import libcuda, libcuda_contexts, unified
from dsv4lib.emulator.driver import libcuda_calls as calls  # with contexts it fills `libcuda.ENTRIES`
from dsv4lib.emulator.driver.cuda_api import DRIVER_VERSION
from dsv4lib.emulator.driver.libcuda import NOT_SUPPORTED, SIZE, U32, U64, I, P, put
from dsv4lib.emulator.driver.on_import import installed
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import EmulatorError, LaunchError
from dsv4lib.errors import ArgumentError

ENTRIES: dict[str, Any] = {}  # callbacks by the runtime's names
HOST_TO_DEVICE, DEVICE_TO_HOST, ON_DEVICE, BY_ADDRESS = 1, 2, 3, 4  # cudaMemcpyKind
HOST_MEMORY, DEVICE_MEMORY = 1, 2  # cudaMemoryType
_RUN = ("cudaLaunchKernel", "cudaLaunchCooperative", "cudaFunc", "cudaOccupancy", "cudaGetSymbol", "cudaMemcpyToSymbol")
_NO_PTX = (
    "a kernel of the package's own binary, of which no PTX is known: what it does (sorting, scanning, FFTs, random "
    "numbers) must be done on the CPU"
)
_LAST = [0]  # status that cudaGetLastError answers and forgets
_BUS = re.compile(r"(?:[\da-fA-F]{1,8}:)?([\da-fA-F]{1,2}):[\da-fA-F]{1,2}(?:\.[0-7])?", re.ASCII)  # domain:bus:device
_TWINS = """
    cudaDeviceCanAccessPeer cudaDeviceGetAttribute cudaDeviceGetDefaultMemPool cudaDeviceGetMemPool
    cudaDeviceGetPCIBusId cudaDeviceSetMemPool cudaDriverGetVersion cudaEventDestroy cudaEventElapsedTime
    cudaEventQuery cudaEventRecord cudaEventRecordWithFlags cudaEventSynchronize cudaLaunchHostFunc cudaMemGetInfo
    cudaMemPoolCreate cudaMemPoolDestroy cudaMemPoolGetAttribute cudaMemPoolSetAttribute cudaMemPoolTrimTo
    cudaProfilerStart cudaProfilerStop cudaStreamAddCallback cudaStreamDestroy cudaStreamGetFlags cudaStreamGetId
    cudaStreamGetPriority cudaStreamIsCapturing cudaStreamQuery cudaStreamSynchronize cudaStreamWaitEvent
"""
_OTHER_NAMES = {
    "cudaMallocManaged": "cuMemAllocManaged",
    "cudaMallocFromPoolAsync": "cuMemAllocFromPoolAsync",
    "cudaMallocAsync": "cuMemAllocAsync",
    "cudaHostGetDevicePointer": "cuMemHostGetDevicePointer",
    "cudaHostAlloc": "cuMemHostAlloc",
    "cudaFreeHost": "cuMemFreeHost",
    "cudaFreeAsync": "cuMemFreeAsync",
    "cudaDeviceGetStreamPriorityRange": "cuCtxGetStreamPriorityRange",
    "cudaDeviceSynchronize": "cuCtxSynchronize",
    "cudaFree": "cuMemFree",
    "cudaGetDevice": "cuCtxGetDevice",
    "cudaGetDeviceCount": "cuDeviceGetCount",
    "cudaEventCreateWithFlags": "cuEventCreate",
    "cudaMalloc": "cuMemAlloc",
    "cudaMallocHost": "cuMemAllocHost",
    "cudaStreamCreateWithFlags": "cuStreamCreate",
    "cudaStreamCreateWithPriority": "cuStreamCreateWithPriority",
}


def forget() -> None:
    """Begin without a failure: what a device before this one refused is none of its errors."""
    _LAST[0] = 0


def _remembered(status: int) -> int:
    """Keep a failure for cudaGetLastError."""
    if status:
        _LAST[0] = status
    return status


def _twin(runtime: str, driver: str) -> None:
    """Serve a function by the driver's callback of the same parameters."""
    callback = libcuda.ENTRIES[driver]
    types = callback.argtypes
    ENTRIES[runtime] = ctypes.CFUNCTYPE(I, *types)(lambda *args: _remembered(callback(*args)))


def _entry(name: str, *types: Any, release: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the server of the runtime's function ``name``; see `libcuda.guarded`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        serve = libcuda.guarded(function, types, release)
        ENTRIES[name] = ctypes.CFUNCTYPE(I, *types)(lambda *args: _remembered(serve(*args)))
        return function

    return add


for _name in _TWINS.split():
    _twin(_name, "cu" + _name.removeprefix("cuda"))
for _name, _driver in _OTHER_NAMES.items():
    _twin(_name, _driver)


@_entry("cudaRuntimeGetVersion", P)
def runtime_version(out: int) -> None:
    """Get the version of the API."""
    put(out, I, DRIVER_VERSION)


@_entry("cudaSetDevice", I)
def set_device(device: int) -> None:
    """Make a device the active one, and its context."""
    libcuda_contexts.set_current(libcuda_contexts.handle(device))


@_entry("cudaDeviceGetByPCIBusId", P, ctypes.c_char_p)
def by_bus(out: int, name: bytes) -> None:
    """Find a device by its address on the bus."""
    found = _BUS.fullmatch((name or b"").decode(errors="replace"))
    if found is None:
        raise ArgumentError("pciBusId", name, "an address as cudaDeviceGetPCIBusId writes it")
    put(out, I, RUNTIME.sibling(int(found[1], 16) - 1).index)


@_entry("cudaStreamCreate", P)
def stream_create(out: int) -> None:
    """Make a stream."""
    calls.stream_create(out, 0)


@_entry("cudaEventCreate", P)
def event_create(out: int) -> None:
    """Make an event."""
    calls.event_create(out, 0)


def _copy(target: int, source: int, nbytes: int, kind: int, *_stream: Any) -> None:
    """Copy; what the kind says is device memory must be."""
    if kind not in range(BY_ADDRESS + 1):
        raise ArgumentError("kind", kind, "of cudaMemcpyKind")
    unified.copy(target, source, nbytes, to=kind in (HOST_TO_DEVICE, ON_DEVICE), of=kind in (DEVICE_TO_HOST, ON_DEVICE))


def _copy_rows(
    target: int, to_pitch: int, source: int, of_pitch: int, width: int, rows: int, kind: int, *_stream: Any
) -> None:
    for name, pitch in (("dpitch", to_pitch), ("spitch", of_pitch)):
        if pitch < width:
            raise ArgumentError(name, pitch, f"at least the width, {width}")
    for row in range(rows):
        _copy(target + row * to_pitch, source + row * of_pitch, width, kind)


def _fill(target: int, value: int, nbytes: int, *_stream: Any) -> None:
    calls.fill_bytes(target, value & 0xFF, nbytes)


for _suffix, _stream in (("", ()), ("Async", (P,))):
    _entry(f"cudaMemcpy{_suffix}", P, P, SIZE, I, *_stream)(_copy)
    _entry(f"cudaMemcpy2D{_suffix}", P, SIZE, P, SIZE, SIZE, SIZE, I, *_stream)(_copy_rows)
    _entry(f"cudaMemset{_suffix}", P, I, SIZE, *_stream)(_fill)
    _entry(f"cudaMemcpyPeer{_suffix}", P, I, P, I, SIZE, *_stream)(
        lambda target, _to, source, _of, nbytes, *_rest: _copy(target, source, nbytes, ON_DEVICE)
    )


class PointerAttributes(ctypes.Structure):
    """The runtime's cudaPointerAttributes."""

    _fields_ = [("type", I), ("device", I), ("device_pointer", P), ("host_pointer", P), ("reserved", ctypes.c_long * 8)]


@_entry("cudaPointerGetAttributes", P, P)
def pointer_attributes(out: int, address: int) -> None:
    """Say what memory an address lies in; of host memory that is not pinned: cudaMemoryTypeUnregistered, 0."""
    found = unified.find(address)
    if found is None:
        made = PointerAttributes(0, -2, 0, address)
    elif calls.is_pinned(found.allocation.start):
        made = PointerAttributes(HOST_MEMORY, found.ordinal, address, address)
    else:
        made = PointerAttributes(DEVICE_MEMORY, found.ordinal, address, 0)
    ctypes.memmove(out, ctypes.byref(made), ctypes.sizeof(made))


def _last(forget: bool) -> int:
    status = _LAST[0]
    if forget:
        _LAST[0] = 0
    return status


ENTRIES["cudaGetLastError"] = ctypes.CFUNCTYPE(I)(lambda: _last(True))
ENTRIES["cudaPeekAtLastError"] = ctypes.CFUNCTYPE(I)(lambda: _last(False))


def _named(status: int) -> int:
    """The name of a status: the driver's numbers are the runtime's."""
    if not installed("cuda.bindings.runtime"):
        return libcuda.text(f"cudaError {status}" if status else "cudaSuccess")
    from cuda.bindings import runtime

    try:
        return libcuda.text(runtime.cudaError_t(status).name)
    except ValueError:
        return libcuda.text("unrecognized error code")


ENTRIES["cudaGetErrorName"] = ENTRIES["cudaGetErrorString"] = ctypes.CFUNCTYPE(P, I)(_named)


def _quiet(name: str, *types: Any) -> None:
    _entry(name, *types, release=True)(lambda *_args: None)


_quiet("cudaDeviceEnablePeerAccess", I, U32)
_quiet("cudaDeviceDisablePeerAccess", I)
_quiet("cudaDeviceSetLimit", I, SIZE)
_quiet("cudaDeviceReset")
_quiet("cudaMemPrefetchAsync", P, SIZE, U64, U32, P)
_quiet("cudaMemAdvise", P, SIZE, I, U64)


def refused(name: str) -> Any:
    """Make the callback of a function that is not here.

    CuPy does not look at the status of its own kernels' launches, and would go on with memory that none wrote. So what
    would run one stops everything, as a fault of a kernel does (`libcuda.stopped`).
    """
    error: Callable[[str], EmulatorError] = LaunchError
    said = f"the emulated CUDA runtime has no {name}"
    if name.startswith(_RUN):
        error, said = EmulatorError, f"{name}: {_NO_PTX}"

    def missing() -> int:
        if RUNTIME.devices:
            libcuda.refuse(error(said))
        return _remembered(NOT_SUPPORTED)

    return ctypes.CFUNCTYPE(I)(missing)
