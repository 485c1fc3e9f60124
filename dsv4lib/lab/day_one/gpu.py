"""Run a micro-kernel on this machine's GPU through libcuda alone; the driver compiles its PTX."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.day_one.probe import POISON, THREADS, Probe

POINTER = ctypes.c_void_p
MAJOR, MINOR = 75, 76  # CUdevice_attribute: compute capability
ERROR_LOG, ERROR_LOG_BYTES = 5, 6  # CUjit_option
LOG = 4096
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


OUT_OF_MEMORY = 2  # CUresult
REFUSING = ("cuModuleLoadDataEx", "cuModuleGetFunction", "cuLaunchKernel")
LAUNCHED = ("cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemFree_v2", "cuModuleUnload")  # these tell of a kernel's fault


class GpuError(DSV4Error, RuntimeError):
    """A call of the driver failed; the message names the call and the driver's error.

    Args:
        message: in words. name: of the call, "" if it is none. code: CUresult.
    """

    def __init__(self, message: str, name: str = "", code: int = 0):
        super().__init__(message)
        self.name, self.code = name, code

    @property
    def refused(self) -> bool:
        """Whether the driver refuses the kernel."""
        return self.name in REFUSING and self.code != OUT_OF_MEMORY

    @property
    def faulted(self) -> bool:
        """Whether the kernel failed while it ran; else, if it is not refused either, the kernel is not to blame."""
        return self.name in LAUNCHED and self.code != OUT_OF_MEMORY


@dataclass(frozen=True)
class Gpu:
    """A GPU: its product name, compute capability and the newest CUDA of its driver."""

    name: str
    capability: tuple[int, int]
    cuda: str

    @property
    def arch(self) -> str | None:
        """The target whose kernels it runs, None if the lab has no kernels for it."""
        return ARCHITECTURES.get(self.capability)


def load() -> Any:
    """Load the driver's library."""
    return ctypes.CDLL("libcuda.so.1")


class Driver:
    """The few calls that are needed, each checked.

    Raises:
        GpuError: no driver or no GPU.
    """

    def __init__(self) -> None:
        try:
            self.library: Any = load()
        except OSError as error:
            raise GpuError("no NVIDIA driver (libcuda.so.1)") from error
        self.device = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver."""
        code = getattr(self.library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise GpuError(f"{name}: {(text.value or b'').decode() or 'error'} ({code})", name, code)

    def describe(self) -> Gpu:
        """What the first GPU is."""
        name, version = ctypes.create_string_buffer(96), ctypes.c_int()
        self.call("cuDeviceGetName", name, len(name), self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        found = []
        for attribute in (MAJOR, MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self.device)
            found.append(value.value)
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return Gpu(name.value.decode(errors="replace"), (found[0], found[1]), cuda)

    def open(self) -> None:
        """Make the device's context current."""
        context = POINTER()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def run(self, probe: Probe) -> bytes:
        """Compile and launch a probe; its output.

        Raises:
            GpuError: which call failed, with the compiler's messages where it refuses the PTX.
        """
        module, function = self._module(probe.ptx), POINTER()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        inputs = np.ascontiguousarray(probe.image).reshape(-1)
        out = np.full(probe.out_bytes, POISON, np.uint8)
        buffers = [ctypes.c_uint64(), ctypes.c_uint64()]
        for buffer, data in zip(buffers, (inputs, out), strict=True):
            size = ctypes.c_size_t(data.nbytes)
            self.call("cuMemAlloc_v2", ctypes.byref(buffer), size)
            self.call("cuMemcpyHtoD_v2", buffer, POINTER(data.ctypes.data), size)
        arguments = (POINTER * 2)(*(ctypes.cast(ctypes.byref(buffer), POINTER) for buffer in buffers))
        self.call("cuLaunchKernel", function, probe.ctas, 1, 1, THREADS, 1, 1, 0, None, arguments, None)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", POINTER(out.ctypes.data), buffers[1], ctypes.c_size_t(out.nbytes))
        for buffer in buffers:
            self.call("cuMemFree_v2", buffer)
        self.call("cuModuleUnload", module)
        return out.tobytes()

    def _module(self, ptx: str) -> POINTER:
        module, log = POINTER(), ctypes.create_string_buffer(LOG)
        options = (ctypes.c_int * 2)(ERROR_LOG, ERROR_LOG_BYTES)
        values = (POINTER * 2)(ctypes.cast(log, POINTER), POINTER(LOG))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except GpuError as error:
            said = " ".join(log.value.decode(errors="replace").split())
            raise GpuError(f"{error}: {said}" if said else str(error), error.name, error.code) from error
        return module


def find() -> Gpu | None:
    """The first GPU, None without one."""
    try:
        return Driver().describe()
    except GpuError:
        return None
