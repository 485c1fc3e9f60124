"""The functions of the driver library: devices, memory, streams and events.

Names are those of cuda.h without version, the parameters are those of the newest version. What is not here answers
CUDA_ERROR_NOT_SUPPORTED, and its name is in the error (`libcuda.address`). Source: CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dsv4lib.emulator.driver import cuda_api, libcuda, unified
from dsv4lib.emulator.driver.cuda_api import DRIVER_VERSION, Stream, properties
from dsv4lib.emulator.driver.libcuda import (
    INVALID_VALUE,
    NOT_SUPPORTED,
    SIZE,
    U8,
    U16,
    U32,
    U64,
    C,
    I,
    P,
    entry,
    put,
    queue,
    succeed,
    text,
)
from dsv4lib.emulator.driver.modules import CONTEXT
from dsv4lib.emulator.driver.on_import import installed
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import ArgumentError

POOL = 0x20  # handle of the one pool of memory
STREAM_FLAGS, STREAM_ID = 1, 1  # non-blocking
MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, IS_MANAGED, ORDINAL, BUFFER_ID = 2, 3, 4, 8, 9, 7  # CUpointer_attribute
RANGE_START, RANGE_SIZE, MAPPED, POINTER_CONTEXT = 11, 12, 13, 1
DEVICE_MEMORY = 2  # CUmemorytype
FEATURES = (42, *range(84, 160), 50)  # CUdevice_attribute
_HOST: set[int] = set()  # addresses of pinned memory


# Versions, names of errors, and how functions are found.


@entry("cuInit", U32)
def init(_flags: int) -> None:
    """Do nothing."""


@entry("cuDriverGetVersion", P)
def driver_version(out: int) -> None:
    """Get the version of the API."""
    put(out, I, DRIVER_VERSION)


@entry("cuGetErrorName", I, P, release=True)
def error_name(status: int, out: int) -> int:
    """Get a status's name: of cuda.bindings if they are there, else one with its number."""
    if not installed("cuda.bindings.driver"):
        put(out, P, text(f"CUDA_ERROR_{status}" if status else "CUDA_SUCCESS"))
        return 0
    from cuda.bindings import driver

    try:
        put(out, P, text(driver.CUresult(status).name))
    except ValueError:
        return INVALID_VALUE
    return 0


entry("cuGetErrorString", I, P, release=True)(error_name)


@entry("cuGetProcAddress", C, P, I, U64)
def find_function_first(name: bytes, out: int, version: int, _flags: int) -> None:
    """Find a function, as version 1 of this function does."""
    find_function(name, out, version, 0, None)


@entry("cuGetProcAddress_v2", C, P, I, U64, P)
def find_function(name: bytes, out: int, version: int, _flags: int, status: int | None) -> None:
    """Find a function by name, as it is in a version of the API; all names have one."""
    put(out, P, libcuda.address((name or b"").decode(errors="replace"), version))
    put(status, I, 0)


@entry("cuGetExportTable", P, P)
def export_table(_out: int, _number: int) -> int:
    """Refuse the tables of functions without names that the CUDA runtime asks for."""
    raise LaunchError("the emulated driver has no cuGetExportTable: code that contains the CUDA runtime cannot use it")


# Devices.


@entry("cuDeviceGetCount", P)
def device_count(out: int) -> None:
    """Count the devices."""
    put(out, I, RUNTIME.device().count)


@entry("cuDeviceGet", P, I)
def device_get(out: int, index: int) -> None:
    """Get a device's handle, its number."""
    put(out, I, RUNTIME.sibling(index).index)


@entry("cuDeviceGetName", P, I, I)
def device_name(out: int, size: int, device: int) -> None:
    """Get a device's name."""
    RUNTIME.sibling(device)
    _put_text(out, size, properties().name)


def _put_text(out: int, size: int, text: str) -> None:
    """Write a text, cut off where it does not fit."""
    if size < 1:
        raise ArgumentError("len", size, "at least 1")
    raw = text.encode()[: size - 1] + b"\0"
    ctypes.memmove(out, raw, len(raw))


@entry("cuDeviceGetUuid", P, I)
def device_uuid(out: int, device: int) -> None:
    """Get 16 bytes that tell devices apart."""
    ctypes.memmove(out, b"emulated device" + bytes([RUNTIME.sibling(device).index]), 16)


@entry("cuDeviceTotalMem", P, I)
def total_memory(out: int, device: int) -> None:
    """Get the memory of the product."""
    put(out, SIZE, RUNTIME.sibling(device).arch.memory_bytes)


@entry("cuDeviceGetAttribute", P, I, I)
def device_attribute(out: int, number: int, device: int) -> int:
    """Get a property. Features without a value here are not supported: 0; of limits, the status says so."""
    gpu = RUNTIME.sibling(device)
    try:
        value = 0 if number in RUNTIME.hidden else gpu.attribute(number)
    except LaunchError:
        if number not in FEATURES:
            return INVALID_VALUE
        value = 0
    put(out, I, value)
    return 0


@entry("cuDeviceGetPCIBusId", P, I, I)
def bus_id(out: int, size: int, device: int) -> None:
    """Get an address on a bus."""
    _put_text(out, size, f"0000:{RUNTIME.sibling(device).index + 1:02x}:00.0")


@entry("cuDeviceCanAccessPeer", P, I, I)
def can_access_peer(out: int, _device: int, _peer: int) -> None:
    """Say no: only symmetric memory is shared."""
    put(out, I, 0)


# Memory.


@entry("cuMemAlloc", P, SIZE)
def allocate(out: int, nbytes: int, *_rest: Any) -> None:
    """Allocate device memory."""
    put(out, U64, cuda_api.allocate(nbytes, "cuMemAlloc") if nbytes else 0)


entry("cuMemAllocManaged", P, SIZE, U32)(allocate)
entry("cuMemAllocAsync", P, SIZE, P)(allocate)
entry("cuMemAllocFromPoolAsync", P, SIZE, P, P)(allocate)


@entry("cuMemFree", U64, release=True)
def release(address: int, *_stream: Any) -> None:
    """Free device memory."""
    cuda_api.free(address)


entry("cuMemFreeAsync", U64, P, release=True)(release)


@entry("cuMemGetInfo", P, P)
def memory_info(free: int, total: int) -> None:
    """Get free and all memory."""
    put(free, SIZE, RUNTIME.device().arch.memory_bytes)
    put(total, SIZE, RUNTIME.device().arch.memory_bytes)


@entry("cuMemHostAlloc", P, SIZE, U32)
def host_allocate(out: int, nbytes: int, *_flags: Any) -> None:
    """Allocate host memory that kernels may use at the same address."""
    address = cuda_api.allocate(nbytes, "cuMemHostAlloc")
    _HOST.add(address)
    put(out, P, address)


entry("cuMemAllocHost", P, SIZE)(host_allocate)


@entry("cuMemFreeHost", P, release=True)
def host_release(address: int | None) -> None:
    """Free host memory."""
    if not address:
        return
    if address not in _HOST:
        raise ArgumentError("p", hex(address), "pinned memory that is not freed yet")
    _HOST.remove(address)
    cuda_api.free(address)


@entry("cuMemHostGetDevicePointer", P, P, U32)
def host_pointer(out: int, address: int, _flags: int) -> None:
    """Get the address that kernels use: the same."""
    put(out, U64, address)


@entry("cuMemGetAddressRange", P, P, U64)
def address_range(start: int, nbytes: int, address: int) -> None:
    """Get the allocation that an address lies in."""
    found = unified.allocation(address).allocation
    put(start, U64, found.start)
    put(nbytes, SIZE, found.nbytes)


@entry("cuPointerGetAttributes", U32, P, P, U64)
def pointer_attributes(count: int, numbers: int, out: int, address: int) -> None:
    """Get several properties of an address; zeros if it is no device memory."""
    wanted = ctypes.cast(numbers, ctypes.POINTER(I))[:count]
    places = ctypes.cast(out, ctypes.POINTER(P))[:count]
    for number, place in zip(wanted, places, strict=True):
        _pointer_attribute(place, number, address)


@entry("cuPointerGetAttribute", P, I, U64)
def pointer_attribute(out: int, number: int, address: int) -> None:
    """Get a property of an address of device memory."""
    unified.allocation(address)
    _pointer_attribute(out, number, address)


def _pointer_attribute(out: int | None, number: int, address: int) -> None:
    found = unified.find(address)
    here = found is not None
    start, nbytes = (found.allocation.start, found.allocation.nbytes) if found else (0, 0)
    kinds: dict[int, tuple[Any, int]] = {
        POINTER_CONTEXT: (U64, CONTEXT + found.ordinal if found else 0),
        MEMORY_TYPE: (U32, DEVICE_MEMORY if here else 0),
        DEVICE_POINTER: (U64, address if here else 0),
        HOST_POINTER: (U64, address if address in _HOST else 0),
        BUFFER_ID: (U64, start),
        IS_MANAGED: (U8, 0),
        ORDINAL: (I, found.ordinal if found else -2),
        RANGE_START: (U64, start),
        RANGE_SIZE: (SIZE, nbytes),
        MAPPED: (U8, int(here)),
    }
    if number not in kinds:
        raise ArgumentError("attribute", number, "of CUpointer_attribute: " + ", ".join(map(str, kinds)))
    put(out, *kinds[number])


@entry("cuDeviceGetDefaultMemPool", P, I)
def default_pool(out: int, _device: int) -> None:
    """Get the one pool there is."""
    put(out, P, POOL)


entry("cuDeviceGetMemPool", P, I)(default_pool)
entry("cuMemPoolCreate", P, P)(default_pool)
entry("cuMemGetDefaultMemPool", P, P, I)(default_pool)
entry("cuMemGetMemPool", P, P, I)(default_pool)


@entry("cuMemPoolGetAttribute", P, I, P)
def pool_attribute(_pool: int, number: int, out: int) -> None:
    """Get a property of the pool: reuse is allowed (1 to 3), nothing is reserved (4 and up)."""
    put(out, *((I, 1) if number <= 3 else (U64, 0)))


@entry("cuMemPoolGetAccess", P, P, P)
def pool_access(out: int, _pool: int, _location: int) -> None:
    """Say that the pool can be read and written."""
    put(out, I, 3)


succeed("cuMemPoolSetAttribute", "cuMemPoolTrimTo", "cuMemPoolSetAccess", "cuDeviceSetMemPool")
succeed("cuMemPoolDestroy", release=True)


def _copy(target: int, source: int, nbytes: int, *_stream: Any) -> None:
    unified.copy(target, source, nbytes)


def _to_device(target: int, source: int, nbytes: int, *_stream: Any) -> None:
    unified.copy(target, source, nbytes, to=True)


def _to_host(target: int, source: int, nbytes: int, *_stream: Any) -> None:
    unified.copy(target, source, nbytes, of=True)


def _on_device(target: int, source: int, nbytes: int, *_stream: Any) -> None:
    unified.copy(target, source, nbytes, to=True, of=True)


for _suffix, _stream in (("", ()), ("Async", (P,))):
    entry(f"cuMemcpy{_suffix}", U64, U64, SIZE, *_stream)(_copy)
    entry(f"cuMemcpyHtoD{_suffix}", U64, P, SIZE, *_stream)(_to_device)
    entry(f"cuMemcpyDtoH{_suffix}", P, U64, SIZE, *_stream)(_to_host)
    entry(f"cuMemcpyDtoD{_suffix}", U64, U64, SIZE, *_stream)(_on_device)


def _fill(kind: Any) -> Any:
    def fill(target: int, value: int, count: int, *_stream: Any) -> None:
        if count:
            RUNTIME.synchronize()
            nbytes = count * ctypes.sizeof(kind)
            unified.view(target, nbytes).view(kind)[:] = value

    return fill


fill_bytes = _fill(U8)


def is_pinned(address: int) -> bool:
    """Tell whether pinned host memory begins at an address."""
    return address in _HOST


def _fill_rows(kind: Any) -> Any:
    def fill(target: int, pitch: int, value: int, width: int, height: int, *_stream: Any) -> None:
        for row in range(height):
            _fill(kind)(target + row * pitch, value, width)

    return fill


for _bits, _kind in ((8, U8), (16, U16), (32, U32)):
    for _suffix, _stream in (("", ()), ("Async", (P,))):
        entry(f"cuMemsetD{_bits}{_suffix}", U64, _kind, SIZE, *_stream)(_fill(_kind))
        entry(f"cuMemsetD2D{_bits}{_suffix}", U64, SIZE, _kind, SIZE, SIZE, *_stream)(_fill_rows(_kind))


# Streams and events.


@entry("cuStreamCreate", P, U32)
def stream_create(out: int, *_options: int) -> None:
    """Make a stream."""
    put(out, P, RUNTIME.handle() if RUNTIME.device().group is None else Stream().cuda_stream)


entry("cuStreamCreateWithPriority", P, U32, I)(stream_create)


@entry("cuStreamGetFlags", P, P)
def stream_flags(stream: int | None, out: int) -> None:
    """Get a stream's flags."""
    put(out, U32, STREAM_FLAGS if stream else 0)


@entry("cuStreamGetPriority", P, P)
def stream_priority(_stream: int, out: int) -> None:
    """Get a stream's priority."""
    put(out, I, 0)


@entry("cuStreamGetId", P, P)
def stream_id(stream: int | None, out: int) -> None:
    """Get a stream's number."""
    put(out, U64, stream or STREAM_ID)


@entry("cuStreamGetCtx", P, P)
def stream_context(_stream: int, out: int) -> None:
    """Get a stream's context."""
    put(out, P, CONTEXT + RUNTIME.device().index)


@entry("cuStreamGetCtx_v2", P, P, P)
def stream_contexts(stream: int, out: int, green: int) -> None:
    """Get a stream's context; it has no green one."""
    stream_context(stream, out)
    put(green, P, 0)


@entry("cuStreamGetDevice", P, P)
def stream_device(_stream: int, out: int) -> None:
    """Get a stream's device."""
    put(out, I, RUNTIME.device().index)


@entry("cuStreamIsCapturing", P, P)
def stream_capturing(_stream: int, out: int) -> None:
    """Say no: graphs cannot be captured by this way."""
    put(out, I, 0)


@entry("cuStreamGetCaptureInfo", P, P, P, P, P, P, P)
def capture_info(_stream: int, out: int, *_rest: Any) -> None:
    """Say that nothing is captured."""
    put(out, I, 0)


@entry("cuStreamQuery", P)
def stream_query(_stream: int) -> int:
    """Tell whether everything is done."""
    return 600 if RUNTIME.pending_work() else 0  # CUDA_ERROR_NOT_READY


entry("cuEventQuery", P)(stream_query)


@entry("cuStreamWaitEvent", P, P, U32)
def stream_wait(stream: int | None, event: int, _flags: int) -> None:
    """Order a stream after an event."""
    RUNTIME.wait(queue(stream), cuda_api.event(event).mark)


@entry("cuLaunchHostFunc", P, P, P)
def host_function(_stream: int, function: int, data: int | None) -> None:
    """Call a function of the host when what is queued is done."""
    RUNTIME.synchronize()
    ctypes.CFUNCTYPE(None, P)(function)(data)


@entry("cuStreamAddCallback", P, P, P, U32)
def add_callback(stream: int | None, function: int, data: int | None, _flags: int) -> None:
    """Call a function of the host with the stream and its status."""
    RUNTIME.synchronize()
    ctypes.CFUNCTYPE(None, P, I, P)(function)(stream, 0, data)


@entry("cuEventCreate", P, U32)
def event_create(out: int, _flags: int) -> None:
    """Make an event."""
    put(out, P, cuda_api.make_event())


@entry("cuEventRecord", P, P)
def event_record(event: int, stream: int | None, *_flags: int) -> None:
    """Mark what is queued on a stream."""
    cuda_api.event(event).put(queue(stream))


entry("cuEventRecordWithFlags", P, P, U32)(event_record)


@entry("cuEventElapsedTime", P, P, P)
def event_elapsed(out: int, start: int, end: int) -> None:
    """Get the emulated time between two events, in ms."""
    put(out, ctypes.c_float, cuda_api.event(start).elapsed_time(cuda_api.event(end)))


@entry("cuEventDestroy", P, release=True)
def event_destroy(event: int) -> None:
    """Forget an event."""
    cuda_api.drop_event(event)


succeed("cuStreamDestroy", release=True)


@entry("cuIpcGetMemHandle", P, U64)
def ipc(*_args: int) -> int:
    """Refuse: the memory of other processes is not emulated."""
    libcuda.refuse(LaunchError("memory of other processes (cuIpc...) is not supported by the emulator"))
    return NOT_SUPPORTED
