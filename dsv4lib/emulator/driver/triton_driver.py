"""Let Triton launch in the emulator: scripts with ``@triton.jit`` run as they are.

Triton compiles by itself, to PTX and with its own ptxas to a cubin, and needs no GPU for it. What asks the driver is
one class, ``CudaUtils``: it loads a cubin, tells the properties of the device, encodes tensor maps and launches. The
class here answers instead; arguments, descriptors and scratch memory stay Triton's own code. The PTX of a cubin is
what Triton keeps beside it.

Written against Triton 3.9. No time is measured: each configuration of ``@triton.autotune`` runs once, and the one that
takes the least emulated time wins (`emulated_time`); ``triton.testing.do_bench`` runs its function once, too.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from dsv4lib.emulator.driver import binary, config, cubin, emulated_time, modules
from dsv4lib.emulator.driver.cuda_api import NO_TIME, timed
from dsv4lib.emulator.driver.on_import import when_imported
from dsv4lib.emulator.driver.patching import Patches, patches
from dsv4lib.emulator.driver.symbols import MAX_DYNAMIC_SMEM, RUNTIME, run_kernel
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.units import tensormap
from dsv4lib.errors import BackendUnavailable

KERNEL, TUPLE, CONSTEXPR = range(3)  # kinds of arguments
SMEM_OPT_IN, CLOCK, MEMORY_CLOCK, BUS_WIDTH, SM_COUNT, REGISTERS = 97, 13, 36, 37, 16, 12  # device attributes
CLUSTER_SPREAD, SPREAD = 5, 1  # launch attribute: policy of scheduling clusters
L2_128B = 2
_INTEGERS = {f"{sign}{bits}": bits // 8 for sign in "iu" for bits in (8, 16, 32, 64)} | {"i1": 4, "u1": 4}
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}
_DRIVER, _TESTING, _COMPILER = "triton.runtime.driver", "triton.testing", "triton.compiler.compiler"
_NEEDED = ("CudaDriver", "CudaLauncher", "annotate_arguments", "make_kernel_signature")


@contextmanager
def patched() -> Iterator[None]:
    """Let Triton find the emulated device, whenever it is imported inside the context."""
    loaded: weakref.WeakSet[Any] = weakref.WeakSet()
    with patches() as patch:
        actions = {
            _DRIVER: lambda module: _drive(patch, module),
            _TESTING: lambda module: _measure(patch, module),
            _COMPILER: lambda module: _remember(patch, module, loaded),
        }
        try:
            with when_imported(actions):
                yield
        finally:
            for kernel in loaded:  # its destructor would ask a driver that is gone
                RUNTIME.unload([kernel.module])
                kernel.module = kernel.function = kernel._run = None


def _drive(patch: Patches, module: ModuleType) -> None:
    """Make Triton's driver ours; a driver that it has found before comes back afterwards."""
    patch.set(module, "_create_driver", lambda: _driver(patch))
    for name in ("_default", "_active"):
        patch.set(module.driver, name, None)


def _measure(patch: Patches, module: ModuleType) -> None:
    """Answer benchmarks with the emulated time of one call, NaN in a group."""

    def bench(function: Callable[[], Any], *args: Any, quantiles: Any = None, **options: Any) -> Any:
        emulated_time.say()
        time = timed(function)
        time = time if RUNTIME.device().group is None else NO_TIME
        several = quantiles is not None and len(quantiles) != 1
        if quantiles is None and options.get("return_mode") == "all":
            return [time]
        return [time] * len(quantiles) if several else time

    for name in ("do_bench", "do_bench_cudagraph", "do_bench_cudagraph_proton"):
        if hasattr(module, name):
            patch.set(module, name, bench)


def _remember(patch: Patches, module: ModuleType, loaded: weakref.WeakSet[Any]) -> None:
    """Note the PTX of a kernel's cubin before the kernel is loaded, and that it is."""

    def load(original: Callable[..., Any], kernel: Any) -> Any:
        if kernel.module is None and kernel.metadata.target.backend == "cuda":
            if "ptx" not in kernel.asm:
                raise LaunchError(f"Triton keeps no PTX of {kernel.name}: unset TRITON_STORE_BINARY_ONLY")
            binary.remember(kernel.asm["cubin"], kernel.asm["ptx"])
            loaded.add(kernel)
        return original(kernel)

    patch.around(module.CompiledKernel, "_init_handles", load)


class DeviceNumber(int):
    """A device's number, equal to that of the same emulated device alone: Triton keeps kernels and targets by it."""

    def __new__(cls, index: int, gpu: Any) -> DeviceNumber:
        """Number ``gpu``."""
        made = super().__new__(cls, index)
        made._gpu = weakref.ref(gpu)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceNumber) and self._gpu() is not None and self._gpu() is other._gpu()

    def __hash__(self) -> int:
        return int.__hash__(self)


def _driver(patch: Patches) -> Any:
    """Make Triton's CUDA driver with our utilities.

    Raises:
        BackendUnavailable: a Triton whose launcher is another.
    """
    import triton
    from triton.backends.nvidia import driver as nvidia

    missing = [name for name in _NEEDED if not hasattr(nvidia, name)]
    if missing:
        raise BackendUnavailable(
            f"Triton {triton.__version__} launches in another way than 3.9, for which the emulator's driver is written "
            f"(it has no {missing[0]}): pip install triton==3.9.0"
        )
    # What Triton's launcher takes from the C module that it would compile.
    taken = {"PyKernelArg": KernelArgument, "PyCUtensorMap": TensorMapArgument}
    for name, value in (taken | {"ARG_KERNEL": KERNEL, "ARG_TUPLE": TUPLE, "ARG_CONSTEXPR": CONSTEXPR}).items():
        patch.set(nvidia, name, value)

    class Driver(nvidia.CudaDriver):
        """Triton's own driver; its native part is `Utilities`."""

        def __init__(self) -> None:
            self.utils = Utilities()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_device_capability = lambda *_device: RUNTIME.device().arch.capability
            self.get_current_stream = lambda *_device: RUNTIME.stream
            self.get_current_device = lambda: DeviceNumber(RUNTIME.device().index, RUNTIME.device())
            self.set_current_device = RUNTIME.select

        def get_benchmarker(self) -> Callable[..., list[float]]:
            return _once

        def get_empty_cache_for_benchmark(self) -> Any:
            import torch

            return torch.empty(1, dtype=torch.int32)

    return Driver()


def _once(call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_options: Any) -> list[float]:
    """What ``@triton.autotune`` compares: the emulated time of a configuration, which runs once."""
    return [timed(call)] * len(quantiles)


class KernelArgument:
    """How an argument of a launch is flattened: itself, a tuple of others, or dropped."""

    def __init__(self, nested_tuple: Any, type: int):
        self.nested_tuple, self.type = nested_tuple, type


class TensorMapArgument(bytes):
    """A tensor map as an argument."""


class Utilities:
    """What Triton's C module over the driver provides."""

    def load_binary(self, name: str, image: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Load a cubin: handles of module and kernel, registers, spilled words and threads at most."""
        library = modules.load_image(image)
        kernel = modules.kernel_handle(library, name)
        static = RUNTIME.kernels[kernel].static_smem()
        most = self.get_device_properties(device)["max_shared_mem"]
        if shared > config.SMEM_WITHOUT_OPT_IN:
            RUNTIME.kernels[kernel].attributes[MAX_DYNAMIC_SMEM] = most - static
        used = cubin.resources(image, name)
        return library, kernel, used.registers, used.local_bytes // 4, 1024

    def unload_module(self, module: int) -> None:
        """Forget a module."""
        RUNTIME.unload([module])

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Answer what Triton wants to know of the device."""
        attribute = RUNTIME.device().attribute
        return {
            "max_shared_mem": attribute(SMEM_OPT_IN),
            "max_num_regs": attribute(REGISTERS),
            "multiprocessor_count": attribute(SM_COUNT),
            "warpSize": 32,
            "sm_clock_rate": attribute(CLOCK),
            "mem_clock_rate": attribute(MEMORY_CLOCK),
            "mem_bus_width": attribute(BUS_WIDTH),
        }

    def get_device_capability(self, _device: int) -> tuple[int, int]:
        """Get (major, minor)."""
        return RUNTIME.device().arch.capability

    def get_current_device(self) -> int:
        """Get the active device's number."""
        return RUNTIME.device().index

    def set_current_device(self, device: int) -> None:
        """Make another device the active one."""
        RUNTIME.select(device)

    def get_default_stream(self, _device: int) -> int:
        """Get the handle of the default stream."""
        return 0

    def is_stream_capturing(self, _stream: int) -> bool:
        """Tell whether a CUDA graph is being captured."""
        return RUNTIME.captured is not None

    def set_printf_fifo_size(self, nbytes: int) -> None:
        """Do nothing: what kernels print is written at once."""

    def cuOccupancyMaxActiveClusters(self, kernel: int, shared: int, ctas: int) -> int:
        """Count the clusters that can be resident, by shared memory and one CTA an SM at least."""
        device = RUNTIME.device()
        smem = shared + RUNTIME.kernels[kernel].static_smem()
        return 0 if smem > device.attribute(SMEM_OPT_IN) else device.settings.sm_count // ctas

    def fill_tma_descriptor_tiled(
        self, address: int, swizzle: int, size: int, kind: int, box: Any, shape: Any, strides: Any, padding: int
    ) -> TensorMapArgument:
        """Encode a tiled tensor map; sizes are in Triton's order, the contiguous dimension last."""
        rank = len(box)
        if not rank == len(shape) == len(strides):
            raise LaunchError(f"a descriptor of {rank} sizes has {len(shape)} extents and {len(strides)} strides")
        outer = [size * stride for stride in strides[-2::-1]]
        fill = int(padding == 1)
        sm100 = RUNTIME.device().arch.tmem
        made = tensormap.encode_tiled(
            kind, address, shape[::-1], outer, box[::-1], [1] * rank, 0, swizzle, L2_128B, fill, sm100=sm100
        )
        return TensorMapArgument(made)

    def fill_tma_descriptor_im2col(
        self, address: int, swizzle: int, size: int, kind: int, box: Any, shape: Any, strides: Any, padding: int,
        lower: Any, upper: Any, steps: Any,
    ) -> TensorMapArgument:  # fmt: skip
        """Encode an im2col tensor map; ``box`` is (pixels a column, channels a pixel)."""
        outer = [size * stride for stride in strides[-2::-1]]
        pixels, channels = box
        made = tensormap.encode_im2col(
            kind, address, shape[::-1], outer, lower[::-1], upper[::-1], channels, pixels, steps[::-1], 0, swizzle,
            L2_128B, int(padding == 1), sm100=RUNTIME.device().arch.tmem,
        )  # fmt: skip
        return TensorMapArgument(made)

    def build_signature_metadata(self, types: Sequence[str]) -> tuple[str, ...]:
        """Keep the types of the arguments that are left when tuples are flattened and constants dropped."""
        return tuple(types)

    def launch(
        self, gx: int, gy: int, gz: int, stream: int, kernel: int, cooperative: bool, programmatic: bool,
        packed: tuple[int, int, int], metadata: Any, enter: Any, leave: Any, scratch: Any, profile: Any,
        annotations: Any, types: Sequence[str], arguments: Any,
    ) -> None:  # fmt: skip
        """Run a kernel, unless its grid is empty."""
        warps, ctas, shared = packed
        if enter is not None:
            enter(metadata)
        values = list(_flattened(annotations, arguments))
        raw = [encoded(kind, value) for kind, value in zip(types, values, strict=True)]
        raw += [encoded("*i8", scratch), encoded("*i8", profile)]
        if gx * gy * gz > 0:
            grid, block = config.Dimensions(gx * ctas, gy, gz), config.Dimensions(32 * warps, 1, 1)
            attributes = _attributes(cooperative, programmatic, ctas)
            settings = config.Config(grid, block, shared, stream, attributes, len(attributes))
            _launch(settings, kernel, raw)
        if leave is not None:
            leave(metadata)


def _launch(settings: config.Config, kernel: int, raw: Sequence[bytes]) -> None:
    """Run a kernel with its parameters as bytes."""
    loaded = RUNTIME.kernels[kernel]
    count = len(loaded.module.kernels[loaded.name].params)
    if len(raw) != count:
        raise LaunchError(f"{loaded.name} has {count} parameters, Triton passes {len(raw)}")
    buffers = [ctypes.create_string_buffer(item, max(len(item), 8)) for item in raw]
    pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    run_kernel(settings, kernel, ctypes.addressof(pointers))


def _attributes(cooperative: bool, programmatic: bool, ctas: int) -> Any:
    """Launch attributes as the runtime's struct has them."""
    found = []
    if programmatic:
        found.append((config.PROGRAMMATIC_SERIALIZATION, struct.pack("<i", 1)))
    if cooperative:
        found.append((config.COOPERATIVE, struct.pack("<i", 1)))
    if ctas != 1:
        found.append((config.CLUSTER_DIMENSION, struct.pack("<3I", ctas, 1, 1)))
        found.append((CLUSTER_SPREAD, struct.pack("<i", SPREAD)))
    made = (config.Attribute * len(found))()
    for attribute, (number, value) in zip(made, found, strict=True):
        attribute.id = number
        attribute.value[: len(value)] = value
    return made


def _flattened(annotations: Any, arguments: Any) -> Iterator[Any]:
    """The arguments of a kernel: tuples opened, constants left out."""
    for annotation, argument in zip(annotations, arguments, strict=False):
        if annotation.type == TUPLE:
            yield from _flattened(annotation.nested_tuple, argument)
        elif annotation.type == KERNEL:
            yield argument


def encoded(kind: str, value: Any) -> bytes:
    """Encode an argument as Triton's launcher does.

    Args:
        kind: "*fp32" and other pointers, "i32", "bf16", "nvTmaDesc".

    Raises:
        ValueError: a tensor that is not on the device, with the words of Triton's launcher.
        TypeError: no pointer where one is wanted, and no tensor map.
    """
    if kind.startswith("*"):
        return struct.pack("<Q", _pointer(value))
    if kind == "nvTmaDesc":
        if not isinstance(value, TensorMapArgument):
            raise TypeError(f"object must be of type PyCUtensorMap, got {type(value).__name__}")
        return bytes(value)
    if kind in _INTEGERS:
        size = _INTEGERS[kind]
        return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
    if kind == "bf16":
        return struct.pack("<f", float(value))[2:]
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], float(value))
    raise LaunchError(f"Triton's argument type {kind} is not known to the emulator")


def _pointer(value: Any) -> int:
    """The address of a pointer argument: None, a number, or what has ``data_ptr()``."""
    if value is None or isinstance(value, int):
        return int(value or 0) & (1 << 64) - 1
    if not hasattr(value, "data_ptr"):
        raise TypeError("Pointer argument must be either uint64 or have data_ptr method")
    address = value.data_ptr()
    if address and getattr(value, "is_cuda", True) is False:
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    return address
