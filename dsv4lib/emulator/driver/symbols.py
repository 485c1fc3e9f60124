"""Serve from Python the functions that CuTeDSL's generated host code calls.

The host code does not link the CUDA runtime; it calls a thin layer of ``_cuda*`` symbols which the DSL's runtime
library normally provides. A symbol registered on the execution engine before the first lookup wins over that library,
so ctypes callbacks are all that is needed: no driver, no shared object of ours.

An exception cannot cross generated code. A callback stores it in `pending` and answers "success" (generated code turns
other answers into misleading messages, or aborts the process); what comes after it in the same host function is
skipped, and the caller of the host function raises it (`raise_pending`). Only where no device is active, a callback
answers with an error, because then no Python frame is there to raise it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4lib.emulator.driver import binary, config
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.ptx.ir import Module
from dsv4lib.errors import ArgumentError

if TYPE_CHECKING:
    from dsv4lib.emulator.driver.interfaces import DeviceView
    from dsv4lib.emulator.driver.multi_device import Mark

P, I, U32, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t
NO_DEVICE = 100  # cudaErrorNoDevice
MAX_DYNAMIC_SMEM = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize
INIT = ctypes.CFUNCTYPE(I, P)
LOAD = ctypes.CFUNCTYPE(I, P, I)


@dataclass
class LoadedKernel:
    """What a kernel handle stands for."""

    module: Module
    name: str
    attributes: dict[int, int] = field(default_factory=dict)

    def static_smem(self) -> int:
        """Get the bytes of static shared memory."""
        kernel = self.module.kernels[self.name]
        return sum(v.size for v in (*self.module.variables, *kernel.variables) if v.space == "shared")


class Runtime:
    """State of the symbols: active devices, handles, the error to raise."""

    def __init__(self) -> None:
        self.devices: list[DeviceView] = []  # the active one last
        self.libraries: dict[int, Module] = {}
        self.cubins: dict[int, bytes] = {}  # of libraries that were loaded as one
        self.kernels: dict[int, LoadedKernel] = {}
        self.members: dict[int, list[int]] = {}  # kernels of a library
        self.pending: BaseException | None = None
        self.hidden: set[int] = set()  # device attributes that answer 0 in this process
        self.refused: BaseException | None = None  # what a function of the driver library has raised (libcuda)
        self.captured: list[LaunchRequest] | None = None  # launches of the CUDA graph that is being captured
        self.side_of: Callable[[Any], int | None] = lambda tensor: None  # device number of a torch tensor, if known
        self.place: Callable[[Any, int], None] = lambda tensor, index: None  # note the device of a torch tensor
        self.stream = 0  # handle of torch's current stream
        self.marks: dict[int, Mark | None] = {}  # of events that have been recorded, by handle
        # All events (cuda_api.Event), by handle.
        self.events: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._next = 0x1000

    def handle(self) -> int:
        """Make a new opaque handle, never reused."""
        self._next += 16
        return self._next

    def unload(self, libraries: Sequence[int]) -> None:
        """Forget libraries and their kernels, whose code no engine can call any more."""
        for library in libraries:
            self.libraries.pop(library, None)
            self.cubins.pop(library, None)
            for handle in self.members.pop(library, ()):
                self.kernels.pop(handle, None)

    def unload_with(self, engine: Any, libraries: Sequence[int]) -> None:
        """Forget libraries once an execution engine is gone."""
        weakref.finalize(engine, self.unload, tuple(libraries)).atexit = False

    def device(self) -> DeviceView:
        """Get the active device."""
        return self.devices[-1]

    def select(self, index: int) -> None:
        """Make another device of the group the active one (cudaSetDevice).

        Raises:
            LaunchError: there is no such device.
        """
        self.devices[-1] = self.sibling(index)

    def sibling(self, index: int) -> DeviceView:
        """Get a device by number: of the active one's group, or the active one itself."""
        gpu = self.device()
        if not 0 <= index < gpu.count:
            raise LaunchError(f"device {index} does not exist; there {'is' if gpu.count == 1 else 'are'} {gpu.count}")
        return gpu if gpu.group is None else gpu.group[index]

    def track(self, tensor: Any) -> None:
        """Register a torch tensor as memory of its device.

        The active device is taken if the tensor's is not known.
        """
        if self.devices:
            index = self.side_of(tensor)
            (self.device() if index is None else self.sibling(index)).memory.tensor(tensor)

    def synchronize(self) -> None:
        """Run what has been queued on the active device and its group."""
        if self.devices:
            self.device().synchronize()

    def pending_work(self) -> bool:
        """Tell whether launches are queued."""
        group = self.device().group if self.devices else None
        return group is not None and group.queues.pending()

    def record(self, stream: int) -> Mark | None:
        """Record an event on a stream of the active device. None where nothing is outstanding."""
        gpu = self.device() if self.devices else None
        return None if gpu is None or gpu.group is None else gpu.group.queues.record(gpu, stream)

    def wait(self, stream: int, mark: Mark | None) -> None:
        """Let a stream of the active device wait for an event."""
        if mark is not None:
            gpu = self.device()
            gpu.group.queues.wait(gpu, stream, mark)

    def raise_pending(self) -> None:
        """Raise what a callback stored, once."""
        error, self.pending = self.pending, None
        if error is not None:
            raise error


RUNTIME = Runtime()


def stored_error_first(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call generated code; what a callback stored explains whatever else went wrong."""
    try:
        result = function(*args, **kwargs)
    except Exception:
        RUNTIME.raise_pending()
        raise
    RUNTIME.raise_pending()
    return result


_SYMBOLS: dict[str, tuple[Callable[..., Any], list[Any]]] = {}


def symbol(name: str, *types: Any, safe: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate the server of the C function ``int name(types...)``.

    ``safe`` functions do nothing on the device and also run while an error is pending or no device is active.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any) -> int:
            if not safe and not RUNTIME.devices:
                return NO_DEVICE
            if not safe and RUNTIME.pending is not None:
                return 0
            try:
                function(*args)
            except BaseException as error:  # also KeyboardInterrupt: it must reach the caller of the host function
                RUNTIME.pending = RUNTIME.pending or error
            return 0

        _SYMBOLS[name] = (guarded, list(types))
        return function

    return add


def tensor_map_encoders() -> dict[str, tuple[Callable[..., None], list[Any]]]:
    """List the encoders of tensor maps, which the driver has by the same parameters: function and types by name."""
    found = {name[1:]: served for name, served in _SYMBOLS.items() if name.startswith("_cuTensorMapEncode")}
    return {name: (served[0].__wrapped__, served[1]) for name, served in found.items()}  # type: ignore[attr-defined]


@functools.cache
def callbacks() -> dict[str, Any]:
    """Make ctypes callbacks by symbol, once. They live as long as the process, since code may hold their addresses."""
    return {name: ctypes.CFUNCTYPE(I, *types)(function) for name, (function, types) in _SYMBOLS.items()}


def register(engine: Any) -> None:
    """Register every symbol on an execution engine; must come before its first lookup."""
    for name, callback in callbacks().items():
        engine.raw_register_runtime(name, ctypes.cast(callback, P))


def _set(address: int, kind: Any, value: int) -> None:
    ctypes.cast(address, ctypes.POINTER(kind))[0] = value


@symbol("_cudaLibraryLoadData", P, P, P, P, I, P, P, I)
def library_load_data(out: int, data: int, *_options: Any) -> None:
    """Load a binary: its PTX must be known."""
    handle = RUNTIME.handle()
    RUNTIME.libraries[handle] = binary.module_at(data)
    _set(out, P, handle)


@symbol("_cudaLibraryGetKernel", P, P, P)
def library_get_kernel(out: int, library: int, name: int) -> None:
    """Get a kernel of a loaded binary by name."""
    module = RUNTIME.libraries[library]
    text = ctypes.string_at(name).decode()
    if text not in module.kernels:
        raise LaunchError(f"no kernel {text} in the loaded module; it has {', '.join(module.kernels)}")
    handle = RUNTIME.handle()
    RUNTIME.kernels[handle] = LoadedKernel(module, text)
    RUNTIME.members.setdefault(library, []).append(handle)
    _set(out, P, handle)


@symbol("_cudaLibraryUnload", P, safe=True)
def library_unload(library: int) -> None:
    """Forget a library and its kernels."""
    RUNTIME.unload([library])


@symbol("_cuKernelGetAttribute", P, I, P, I)
def kernel_get_attribute(out: int, attribute: int, kernel: int, _device: int) -> None:
    """Answer CU_FUNC_ATTRIBUTE_*, but for what only a compiler knows (registers)."""
    loaded = RUNTIME.kernels[kernel]
    known = {0: 1024, 1: loaded.static_smem(), 2: 0, MAX_DYNAMIC_SMEM: loaded.attributes.get(MAX_DYNAMIC_SMEM, 0)}
    if attribute not in known:
        raise LaunchError(f"kernel attribute {attribute} is not known to the emulator")
    _set(out, I, known[attribute])


@symbol("_cudaKernelSetAttributeForDevice", P, I, I, I)
def kernel_set_attribute(kernel: int, attribute: int, value: int, _device: int) -> None:
    """Set a cudaFuncAttribute* of a kernel."""
    RUNTIME.kernels[kernel].attributes[attribute] = value


@symbol("_cudaFuncSetAttribute", P, I, I)
def func_set_attribute(kernel: int, attribute: int, value: int) -> None:
    """Set a cudaFuncAttribute* of a kernel of the current device."""
    RUNTIME.kernels[kernel].attributes[attribute] = value


@symbol("_cudaDeviceGetAttribute", P, I, I)
def device_get_attribute(out: int, attribute: int, _device: int) -> None:
    """Get a property of the architecture."""
    _set(out, I, RUNTIME.device().attribute(attribute))


@symbol("_cudaGetDevice", P)
def get_device(out: int) -> None:
    """Get the active device's number."""
    _set(out, I, RUNTIME.device().index)


@symbol("_cudaGetDeviceCount", P)
def get_device_count(out: int) -> None:
    """Get the number of devices."""
    _set(out, I, RUNTIME.device().count)


@symbol("_cudaSetDevice", I)
def set_device(index: int) -> None:
    """Make another device the current one."""
    RUNTIME.select(index)


def _synchronize(*_args: Any) -> None:
    """Wait for everything that is queued, whatever stream or event the call names."""
    RUNTIME.synchronize()


symbol("_cudaDeviceSynchronize")(_synchronize)
symbol("_cudaStreamSynchronize", P)(_synchronize)
symbol("_cudaEventSynchronize", P)(_synchronize)


@symbol("_cudaEventRecord", P, P)
def event_record(event: int | None, stream: int | None) -> None:
    """Mark what is queued on a stream."""
    _event(event or 0).put(stream or 0)


def _event(handle: int) -> Any:
    """Find the event of a handle. That of torch's events is 0 until they are recorded first."""
    found = RUNTIME.events.get(handle)
    if found is None:
        raise ArgumentError("event", handle, "the handle of an event that exists; torch's have one once recorded")
    return found


@symbol("_cudaStreamWaitEvent", P, P, U32)
def stream_wait_event(stream: int | None, event: int | None, _flags: int) -> None:
    """Order a stream after an event; one that was never recorded orders nothing."""
    RUNTIME.wait(stream or 0, RUNTIME.marks.get(event or 0))


@symbol("_cudaLaunchKernelEx", P, P, P)
def launch_kernel_ex(settings: int, kernel: int, arguments: int) -> None:
    """Run a kernel to its end."""
    run_kernel(ctypes.cast(settings, ctypes.POINTER(config.Config))[0], kernel, arguments)


@symbol("_cudaLaunchKernel", P, U32, U32, U32, U32, U32, U32, P, SIZE, P)
def launch_kernel(kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, *rest: int) -> None:
    """Run a kernel, launched without attributes."""
    arguments, smem, stream = rest
    grid, block = config.Dimensions(gx, gy, gz), config.Dimensions(bx, by, bz)
    run_kernel(config.Config(grid, block, smem, stream, None, 0), kernel, arguments)


def run_kernel(settings: config.Config, kernel: int, arguments: int) -> None:
    """Run the kernel of a handle on the active device, or record it in the CUDA graph that is being captured."""
    loaded, device = RUNTIME.kernels[kernel], RUNTIME.device()
    request = config.decode(settings, loaded.module, loaded.name, arguments, device.ctas)
    config.check(request, device.arch, device.settings.sm_count, loaded.attributes.get(MAX_DYNAMIC_SMEM, 0))
    events = [_event(handle) for handle in request.attributes.get("events", ())]
    if RUNTIME.captured is not None:
        if events:
            raise LaunchError("a launch that records an event is not supported while a CUDA graph is captured")
        RUNTIME.captured.append(request)
    else:
        device.launch(request, settings.stream or 0)
        for event in events:  # late, which is allowed: after the whole launch
            event.put(settings.stream or 0)


@symbol("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", P, P, I, SIZE)
def occupancy(out: int, kernel: int, threads: int, dynamic_smem: int) -> None:
    """Count CTAs an SM, by threads and shared memory."""
    loaded = RUNTIME.kernels[kernel]
    request = LaunchRequest(loaded.name, loaded.module, (1, 1, 1), (threads, 1, 1), dynamic_smem=dynamic_smem)
    _set(out, I, config.ctas_per_sm(request, RUNTIME.device().arch))


@symbol("_cuTensorMapEncodeTiled", P, I, U32, P, P, P, P, P, I, I, I, I)
def tensor_map_encode_tiled(
    out: int, kind: int, rank: int, address: int, dims: int, strides: int, box: int, steps: int, *modes: int
) -> None:
    """Write a tiled tensor map. Rank entries in ``dims``, ``box`` and ``steps``, one less in ``strides``."""
    from dsv4lib.emulator.units import tensormap

    encoded = tensormap.encode_tiled(
        kind,
        address or 0,
        _array(dims, "Q", rank),
        _array(strides, "Q", rank - 1),
        _array(box, "I", rank),
        _array(steps, "I", rank),
        *modes,
        sm100=RUNTIME.device().arch.tmem,
    )
    ctypes.memmove(out, bytes(encoded), 128)


@symbol("_cuTensorMapEncodeIm2col", P, I, U32, P, P, P, P, P, U32, U32, P, I, I, I, I)
def tensor_map_encode_im2col(
    out: int, kind: int, rank: int, address: int, dims: int, strides: int, lower: int, upper: int, *rest: int
) -> None:
    """Write an im2col tensor map; corners have rank - 2 entries, of type int."""
    from dsv4lib.emulator.units import tensormap

    channels, pixels, steps, *modes = rest
    encoded = tensormap.encode_im2col(
        kind,
        address or 0,
        _array(dims, "Q", rank),
        _array(strides, "Q", rank - 1),
        _array(lower, "i", rank - 2),
        _array(upper, "i", rank - 2),
        channels,
        pixels,
        _array(steps, "I", rank),
        *modes,
        sm100=RUNTIME.device().arch.tmem,
    )
    ctypes.memmove(out, bytes(encoded), 128)


@symbol("_cuTensorMapEncodeIm2colWide", P, I, U32, P, P, P, I, I, U32, U32, P, I, I, I, I, I)
def tensor_map_encode_im2col_wide(
    out: int, kind: int, rank: int, address: int, dims: int, strides: int, lower: int, upper: int, *rest: int
) -> None:
    """Write an im2col tensor map whose corners bound dimension W alone."""
    from dsv4lib.emulator.units import tensormap

    channels, pixels, steps, *modes = rest
    encoded = tensormap.encode_im2col_wide(
        kind,
        address or 0,
        _array(dims, "Q", rank),
        _array(strides, "Q", rank - 1),
        lower,
        upper,
        channels,
        pixels,
        _array(steps, "I", rank),
        *modes,
        sm100=RUNTIME.device().arch.tmem,
    )
    ctypes.memmove(out, bytes(encoded), 128)


def _array(address: int, code: str, count: int) -> tuple[int, ...]:
    return (
        struct.unpack(f"<{count}{code}", ctypes.string_at(address, count * struct.calcsize(code))) if count > 0 else ()
    )


@symbol("cuda_dialect_init_library_once", P, P, P, P)
def init_library_once(state: int, init: int, load: int, _set_error: int) -> None:
    """Load a library the first time. What compiled code of the tvm-ffi path calls before a launch.

    The DSL's own version queries the real driver for its devices. ``init`` and ``load`` are generated functions that
    call back into this module.
    """
    slot = ctypes.cast(state, ctypes.POINTER(ctypes.c_uint64))
    if slot[0]:
        return
    library = ctypes.c_void_p(0)
    _KEPT.append(library)
    if INIT(init)(ctypes.addressof(library)) or (load and LOAD(load)(ctypes.addressof(library), 0)):
        raise LaunchError("the generated code could not load its module")
    if RUNTIME.pending is None:
        slot[0] = library.value or 1


@symbol("cuda_dialect_unload_library_once", P, safe=True)
def unload_library_once(_state: int) -> None:
    """Do nothing; destructors call it."""


_KEPT: list[Any] = []

# What the DSL's runtime library exports beyond this: refused by name when it is called.
_REFUSED = """
_cudaEventCreate _cudaEventDestroy _cudaEventElapsedTime _cudaFree _cudaFreeAsync _cudaFreeHost
_cudaGetDeviceProperties _cudaGraphDestroy _cudaGraphExecDestroy _cudaGraphInstantiate _cudaGraphLaunch
_cudaLibraryGetGlobal _cudaLibraryGetKernelCount _cudaLibraryGetManaged _cudaLibraryGetUnifiedFunction
_cudaLibraryLoadFromFile _cudaMalloc _cudaMallocAsync _cudaMallocHost _cudaMallocManaged _cudaMemcpy _cudaMemcpyAsync
_cudaMemset _cudaMemsetAsync _cudaProfilerStart _cudaProfilerStop _cudaStreamAddCallback _cudaStreamBeginCapture
_cudaStreamCreate _cudaStreamDestroy _cudaStreamEndCapture _cuTensorMapReplaceAddress
""".split()


def _refuse(name: str) -> None:
    def refused(*_args: Any) -> None:
        raise LaunchError(f"{name.lstrip('_')} is not supported by the emulator")

    symbol(name)(refused)


for _name in _REFUSED:
    _refuse(_name)
