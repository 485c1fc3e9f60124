"""Answer `torch.cuda` and the Python CUDA bindings from the active device.

Only what programs query before and around launches: which device, how many, its properties, streams and events.
Anything else stays as it is and fails as it does without a GPU.
"""

from __future__ import annotations

import ctypes
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsv4lib.emulator.driver import emulated_time, modules
from dsv4lib.emulator.driver.on_import import installed
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.errors import ArgumentError

if TYPE_CHECKING:
    from dsv4lib.emulator.driver.multi_device import Mark

NO_TIME = float("nan")
DRIVER_VERSION = 13040
_TORCH_PROFILE = torch.profiler.profile


class Stream:
    """A stream. On a single device work is done when it is issued, so all streams are the same, the default one."""

    priority = 0

    def __init__(self, device: Any = None, *args: Any, stream_ptr: int | None = None, **kwargs: Any):
        gpu = RUNTIME.device()
        self.device = torch.device("cuda", gpu.index if device is None else device_index(device))
        self.cuda_stream = (0 if gpu.group is None else RUNTIME.handle()) if stream_ptr is None else stream_ptr
        self.stream_id = self.cuda_stream

    def __enter__(self) -> Stream:
        self._before, RUNTIME.stream = RUNTIME.stream, self.cuda_stream
        return self

    def __exit__(self, *error: Any) -> None:
        RUNTIME.stream = self._before

    def synchronize(self) -> None:
        """Let what is queued run."""
        RUNTIME.synchronize()

    def wait_event(self, event: Event) -> None:
        """Order what follows on this stream after the event."""
        RUNTIME.wait(self.cuda_stream, event.mark)

    def wait_stream(self, stream: Stream) -> None:
        """Order what follows on this stream after what is queued on another one now."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Tell whether everything is done."""
        return not RUNTIME.pending_work()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after what is queued now."""
        event = event or Event()
        event.record(self)
        return event

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


class ExternalStream(Stream):
    """A stream by its handle."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any):
        super().__init__(device, stream_ptr=stream_ptr)


_LIVE = RUNTIME.events


class Event:
    """An event; times are emulated (`emulated_time`), NaN in a group. On a single device it has always happened."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.handle = RUNTIME.handle()
        self.time = NO_TIME
        _LIVE[self.handle] = self

    def __del__(self) -> None:
        RUNTIME.marks.pop(self.handle, None)

    @property
    def cuda_event(self) -> int:
        """The handle, of an event that has been recorded. 0 before: torch makes its event then."""
        return self.handle if self.handle in RUNTIME.marks else 0

    @property
    def mark(self) -> Mark | None:
        """What was queued when it was recorded, by this object or by generated code. None where nothing is left."""
        return RUNTIME.marks.get(self.handle)

    def record(self, stream: Stream | None = None) -> None:
        """Mark what is queued on a stream now."""
        self.put(RUNTIME.stream if stream is None else stream.cuda_stream)

    def put(self, stream: int) -> None:
        """Do as `record`, with the stream's handle."""
        RUNTIME.marks[self.handle], self.time = RUNTIME.record(stream), RUNTIME.device().tick()

    def wait(self, stream: Stream | None = None) -> None:
        """Order what follows on a stream after this event."""
        RUNTIME.wait(RUNTIME.stream if stream is None else stream.cuda_stream, self.mark)

    def synchronize(self) -> None:
        """Let what is queued run."""
        RUNTIME.synchronize()

    def query(self) -> bool:
        """Tell whether it has happened."""
        return self.mark is None or self.mark.reached

    def elapsed_time(self, end: Any) -> float:
        """Get the emulated milliseconds between two events, which count work; NaN if one was not recorded."""
        emulated_time.say()
        return end.time - self.time


class Scope:
    """``torch.cuda.nvtx.range("name")``: nothing changes inside."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class DeviceScope:
    """``torch.cuda.device(1)``: the current device inside. None and negative numbers change nothing."""

    def __init__(self, device: Any):
        self.index = -1 if device is None else device_index(device)

    def __enter__(self) -> DeviceScope:
        self._before = RUNTIME.device().index
        if self.index >= 0:
            RUNTIME.select(self.index)
        return self

    def __exit__(self, *error: Any) -> None:
        RUNTIME.select(self._before)


class TensorDeviceScope(DeviceScope):
    """``torch.cuda.device_of(tensor)``."""

    def __init__(self, tensor: Any):
        super().__init__(tensor.device if tensor.is_cuda else None)


class StreamScope:
    """``torch.cuda.stream(s)``: the current stream inside; None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        self._before = RUNTIME.stream
        if self.stream is not None:
            RUNTIME.stream = self.stream.cuda_stream

    def __exit__(self, *error: Any) -> None:
        RUNTIME.stream = self._before


def device_index(device: Any) -> int:
    """Read the number that a device argument names. The current device's if it names none."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return RUNTIME.device().index if index is None else index


class Graph:
    """A CUDA graph of kernel launches, in their order. torch's own work cannot be captured (`torch_shims` refuses)."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.launches: list[LaunchRequest] = []

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Record launches instead of running them."""
        if RUNTIME.captured is not None:
            raise LaunchError("a CUDA graph is being captured already")
        RUNTIME.captured = self.launches

    def capture_end(self) -> None:
        """Run launches again."""
        RUNTIME.captured = None

    def replay(self) -> None:
        """Run what was recorded."""
        for request in self.launches:
            RUNTIME.device().launch(request)

    def reset(self) -> None:
        """Forget what was recorded."""
        self.launches.clear()


class Capture:
    """``torch.cuda.graph(graph)``: captures what is launched inside."""

    def __init__(self, cuda_graph: Graph, *args: Any, **kwargs: Any):
        self.graph = cuda_graph

    def __enter__(self) -> None:
        self.graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self.graph.capture_end()


def _exchange(index: int) -> int:
    """Make a device the current one; returns the one before. A negative number changes nothing."""
    before = RUNTIME.device().index
    if index < 0:
        return -1
    RUNTIME.select(index)
    return before


def properties(*_args: Any) -> types.SimpleNamespace:
    """Answer ``torch.cuda.get_device_properties``."""
    gpu = RUNTIME.device()
    return types.SimpleNamespace(
        name=f"{gpu.arch.device} (emulated)",
        major=gpu.arch.capability[0],
        minor=gpu.arch.capability[1],
        multi_processor_count=gpu.settings.sm_count,
        total_memory=gpu.arch.memory_bytes,
        L2_cache_size=gpu.arch.l2_bytes,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.arch.smem_per_cta,
        shared_memory_per_multiprocessor=gpu.arch.smem_per_sm,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _torch_cuda() -> dict[str, Any]:
    def answer(value: Any) -> Any:
        """Make a function of its own for every name: dynamo distinguishes them by identity."""
        return lambda *args, **kwargs: value

    quiet = "manual_seed manual_seed_all empty_cache init reset_peak_memory_stats"
    zero = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    return {
        **{name: answer(None) for name in quiet.split()},
        **{name: answer(0) for name in zero.split()},
        "is_available": answer(True),
        "is_initialized": answer(False),
        "device_count": lambda: RUNTIME.device().count,
        "current_device": lambda: RUNTIME.device().index,
        "get_device_capability": lambda *a: RUNTIME.device().arch.capability,
        "get_device_properties": properties,
        "get_device_name": lambda *a: properties().name,
        "get_arch_list": lambda: [RUNTIME.device().arch.name],
        "mem_get_info": lambda *a: (RUNTIME.device().arch.memory_bytes,) * 2,
        "is_current_stream_capturing": lambda: RUNTIME.captured is not None,
        "is_bf16_supported": answer(True),
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": answer(None),
        "synchronize": lambda *a: RUNTIME.synchronize(),
        "set_device": lambda device: RUNTIME.select(device_index(device)),
        "_exchange_device": _exchange,
        "_maybe_exchange_device": lambda index: _exchange(index),
        "set_stream": lambda stream: setattr(RUNTIME, "stream", stream.cuda_stream),
        "current_stream": lambda device=None: Stream(device, stream_ptr=RUNTIME.stream),
        "default_stream": lambda device=None: Stream(device, stream_ptr=0),
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Capture,
        "device": DeviceScope,
        "device_of": TensorDeviceScope,
        "stream": StreamScope,
    }


def _torch_accelerator() -> dict[str, Any]:
    """torch.accelerator, torch.cuda by names that name no vendor."""
    table = _torch_cuda()
    same = "is_available device_count synchronize empty_cache current_stream set_stream reset_peak_memory_stats"
    memory = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    return {
        **{name: table[name] for name in f"{same} {memory}".split()},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": table["current_device"],
        "set_device_index": table["set_device"],
        "device_index": table["device"],
        "get_memory_info": table["mem_get_info"],
    }


def _bindings() -> Iterator[tuple[Any, str, Any]]:
    """cuda.bindings.driver and .runtime: functions return (status, values...)."""
    from cuda.bindings import driver, runtime

    def answers(status: Any, table: dict[str, Any], owner: Any) -> Iterator[tuple[Any, str, Any]]:
        for name, value in table.items():
            yield owner, name, lambda *a, _value=value, **k: (status, *_value(*a))

    def attribute(number: Any, _device: Any) -> tuple[int]:
        return (RUNTIME.device().attribute(int(number)),)

    def synchronize(*_args: Any) -> tuple[()]:
        RUNTIME.synchronize()
        return ()

    driver_table = {
        "cuInit": lambda *a: (),
        "cuDriverGetVersion": lambda: (DRIVER_VERSION,),
        "cuDeviceGetCount": lambda: (RUNTIME.device().count,),
        "cuDeviceGet": lambda index: (driver.CUdevice(index),),
        "cuDeviceGetAttribute": attribute,
        "cuDeviceGetName": lambda *a: (properties().name.encode(),),
        "cuCtxGetCurrent": lambda: (driver.CUcontext(0),),
        "cuCtxSetCurrent": lambda *a: (),
        "cuCtxGetDevice": lambda: (driver.CUdevice(RUNTIME.device().index),),
        "cuCtxSynchronize": synchronize,
        "cuStreamCreate": lambda *a: (driver.CUstream(Stream().cuda_stream),),
        "cuStreamCreateWithPriority": lambda *a: (driver.CUstream(Stream().cuda_stream),),
        "cuStreamSynchronize": synchronize,
        "cuStreamDestroy": lambda *a: (),
        "cuMemAlloc": lambda nbytes: tuple(map(driver.CUdeviceptr, _allocate(nbytes))),
        "cuMemFree": _free,
        "cuMemsetD8": _fill,
        "cuMemcpyHtoD": copy,
        "cuMemcpyDtoH": copy,
        "cuMemcpyDtoD": copy,
        **{f"cuMemcpy{way}Async": copy for way in ("HtoD", "DtoH", "DtoD")},
        **_events("cuEvent", driver.CUevent),
        **modules.table(driver),
    }
    runtime_table = {
        "cudaGetDeviceCount": lambda: (RUNTIME.device().count,),
        "cudaGetDevice": lambda: (RUNTIME.device().index,),
        "cudaSetDevice": lambda index: RUNTIME.select(int(index)) or (),
        "cudaDeviceGetAttribute": attribute,
        "cudaDriverGetVersion": lambda: (DRIVER_VERSION,),
        "cudaDeviceSynchronize": synchronize,
        "cudaStreamCreate": lambda *a: (runtime.cudaStream_t(Stream().cuda_stream),),
        "cudaStreamSynchronize": synchronize,
        "cudaStreamDestroy": lambda *a: (),
        "cudaMalloc": _allocate,
        "cudaMallocAsync": _allocate,
        "cudaFree": _free,
        "cudaFreeAsync": _free,
        "cudaMemset": _fill,
        "cudaMemsetAsync": _fill,
        "cudaMemcpy": copy,
        "cudaMemcpyAsync": copy,
        "cudaGetLastError": lambda: (),
        **_events("cudaEvent", runtime.cudaEvent_t),
    }
    del driver_table["cuEventCreateWithFlags"]  # of the runtime alone
    yield from answers(driver.CUresult.CUDA_SUCCESS, driver_table, driver)
    yield from answers(runtime.cudaError_t.cudaSuccess, runtime_table, runtime)


_MADE: dict[int, Event] = {}  # by the handle that the bindings gave out


def make_event() -> int:
    """Make an event; returns its handle."""
    made = Event()
    _MADE[made.handle] = made
    return made.handle


def drop_event(handle: Any) -> None:
    """Forget an event."""
    _MADE.pop(int(handle), None)


def event(handle: Any) -> Event:
    """Find the event of a handle.

    Raises:
        ArgumentError: it was never created, or has been destroyed.
    """
    found = _LIVE.get(int(handle))
    if found is None:
        raise ArgumentError("event", handle, "an event that exists")
    return found


def _events(prefix: str, handle: Any) -> dict[str, Any]:
    """The functions on events of a binding whose handles are ``handle(number)``."""

    def create(*_args: Any) -> tuple[Any]:
        return (handle(make_event()),)

    def record(of: Any, stream: Any = 0) -> tuple[()]:
        event(of).put(int(stream))
        return ()

    table = {
        "Create": create,
        "CreateWithFlags": create,
        "Record": record,
        "Synchronize": lambda of: event(of).synchronize() or (),
        "ElapsedTime": lambda start, end: (event(start).elapsed_time(event(end)),),
        "Destroy": lambda of: drop_event(of) or (),
    }
    return {prefix + name: function for name, function in table.items()}


_OWNERS: dict[int, weakref.ref[Any]] = {}  # devices by the addresses that `allocate` gave out


def allocate(nbytes: int, label: str = "cudaMalloc") -> int:
    """Allocate memory of the active device; returns its address."""
    address = RUNTIME.device().empty(nbytes, label).ctypes.data
    _OWNERS[address] = weakref.ref(RUNTIME.device())
    return address


def free(address: int) -> None:
    """Give back what `allocate` returned. Memory of a device that is not the active one any more is gone already.

    Raises:
        ArgumentError: nothing is allocated there.
    """
    if not address or not RUNTIME.devices:
        return
    RUNTIME.synchronize()
    if address not in _OWNERS:
        raise ArgumentError("address", hex(address), "what was allocated and is not freed yet")
    owner, active = _OWNERS.pop(address)(), RUNTIME.device()
    if owner is active or (owner is not None and active.group is not None and owner.group is active.group):
        owner.free(address)


def _allocate(nbytes: int, *_args: Any) -> tuple[int]:
    return (allocate(int(nbytes)),)


def _free(address: Any, *_args: Any) -> tuple[()]:
    free(int(address))
    return ()


def copy(target: Any, source: Any, nbytes: int, *_args: Any) -> tuple[()]:
    """Copy between host and device memory, which are both the host's.

    Raises:
        LaunchError: while a CUDA graph is captured.
    """
    if RUNTIME.captured is not None:
        raise LaunchError("a copy while a CUDA graph is captured: only kernel launches can be")
    RUNTIME.synchronize()
    ctypes.memmove(_address(target), _address(source), int(nbytes))
    return ()


def _fill(target: Any, value: int, nbytes: int, *_args: Any) -> tuple[()]:
    """cudaMemset: inside one allocation."""
    RUNTIME.synchronize()
    RUNTIME.device().gmem.view(int(target), int(nbytes), write=True)[:] = value & 0xFF
    return ()


def _address(pointer: Any) -> int:
    """Address of a pointer argument: a number, a binding's pointer object, or a host buffer."""
    if isinstance(pointer, bytes | bytearray | memoryview | np.ndarray):
        return np.frombuffer(pointer, np.uint8).ctypes.data
    return int(pointer)


def _benchmark(
    function: Any, *, warmup_iterations: int = 10, iterations: int = 100, kernel_arguments: Any = None, **_options: Any
) -> float:
    """``cutlass.testing.benchmark``: no time is measured.

    On the script's own tensors the kernel runs once, because scripts check what it leaves there. What a
    ``workspace_generator`` makes is thrown away unseen: it is not made.
    """
    if kernel_arguments is not None and warmup_iterations + iterations > 0:
        function(*kernel_arguments.args, **kernel_arguments.kwargs)
    return NO_TIME


def _benchmark_for_autotune(
    callable: Any,
    *args: Any,
    warmup_iterations: int = 10,
    iterations: int = 100,
    use_cold_l2: bool = True,
    print_verbose: bool = False,
    current_stream: Any = None,
    **kwargs: Any,
) -> float:
    """What CuTeDSL's autotuners compare: every configuration runs once; its emulated time, in us."""
    del warmup_iterations, iterations, use_cold_l2, print_verbose, current_stream
    return 1e3 * timed(lambda: callable(*args, **kwargs))


def timed(call: Callable[[], Any]) -> float:
    """Run once what an autotuner compares; returns emulated milliseconds, for a group the same for all."""
    before = RUNTIME.device().tick()
    call()
    after = RUNTIME.device().tick()
    return after - before if after > before else 0.0


def _profile(*args: Any, activities: Any = None, **kwargs: Any) -> Any:
    """``torch.profiler.profile`` of the host's side: there are no device times to record."""
    del activities
    return _TORCH_PROFILE(*args, activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)


def _testing() -> Iterator[tuple[Any, str, Any]]:
    """Benchmarks answer NaN, those of autotuners emulated time, which can be compared."""
    import cutlass.cute.testing
    import cutlass.testing

    for module in {cutlass.testing, cutlass.cute.testing}:
        if hasattr(module, "benchmark"):
            yield module, "benchmark", _benchmark
    yield cutlass.testing, "_benchmark_for_autotune", _benchmark_for_autotune


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """List (owner, attribute, value) of everything that changes."""
    for name, value in _torch_cuda().items():
        yield torch.cuda, name, value
    for name, value in _torch_accelerator().items():
        yield torch.accelerator, name, value
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        yield torch.cuda.nvtx, name, lambda *a, **k: 0
    yield torch.cuda.nvtx, "range", Scope
    yield torch.profiler, "profile", _profile
    if installed("cuda.bindings.driver"):
        yield from _bindings()
        yield from modules.compilers()
    if installed("cutlass.cutlass_dsl"):
        yield from _testing()
