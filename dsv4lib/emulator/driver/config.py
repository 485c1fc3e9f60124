"""Decode a launch. The runtime's configuration struct, its attributes and the kernel's arguments.

The generated host code calls ``_cudaLaunchKernelEx(config, kernel, args)``. The struct is cudaLaunchConfig_t of the
CUDA runtime; sizes of the arguments come from the kernel's own .param list, so the parameter block (TMA descriptors
passed by value included) is rebuilt exactly as the driver would.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from dsv4lib.emulator.driver.arch import Architecture
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest
from dsv4lib.emulator.ptx.ir import Kernel, Module

SMEM_WITHOUT_OPT_IN = 48 << 10
INVALID_VALUE, NO_KERNEL_IMAGE, COOPERATIVE_TOO_LARGE = 1, 209, 720  # cudaError_t
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 2, 4, 6
EVENTS = frozenset((7, 12))  # recorded when all CTAs have triggered (programmatic), or have begun (launch completion)
# Attributes that cannot change results: cache policy, scheduling preference, priority, memory domains, carve-out.
HINTS = frozenset((0, 1, 3, 5, 8, 9, 10, 11, 14, 16))
MAX_ATTRIBUTES = 64


class LaunchRefused(LaunchError):
    """A launch to which the CUDA runtime answers with the error ``code``."""

    def __init__(self, message: str, code: int):
        self.code = code
        super().__init__(message)


class Dimensions(ctypes.Structure):
    """dim3."""

    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    def triple(self) -> Dim3:
        """Return (x, y, z)."""
        return self.x, self.y, self.z


class Attribute(ctypes.Structure):
    """cudaLaunchAttribute: number and 64 bytes of value."""

    _fields_ = [("id", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint8 * 64)]


class Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", Dimensions),
        ("block", Dimensions),
        ("smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint32),
    ]


def parameter_block(kernel: Kernel, arguments: int) -> bytes:
    """Copy the parameter block from the runtime's array of argument pointers.

    Args:
        arguments: host address of ``void*[len(kernel.params)]``; 0 if there are none.
    """
    block = bytearray(kernel.param_bytes)
    pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)) if kernel.params else None
    for i, param in enumerate(kernel.params):
        address = pointers[i]
        if not address:
            raise LaunchError(f"{kernel.name}: argument {i} is a null pointer")
        block[param.offset : param.offset + param.size] = ctypes.string_at(address, param.size)
    return bytes(block)


def attributes_of(config: Config) -> tuple[Dim3, dict[str, Any]]:
    """Read the cluster shape and the attributes that matter, by name.

    Raises:
        LaunchError: an attribute that is neither known nor a hint.
    """
    cluster: Dim3 = (1, 1, 1)
    named: dict[str, Any] = {}
    if config.count > MAX_ATTRIBUTES:
        raise LaunchError(f"a launch with {config.count} attributes")
    for i in range(config.count):
        attribute = config.attributes[i]
        value = bytes(attribute.value)
        if attribute.id == CLUSTER_DIMENSION:
            x, y, z = struct.unpack_from("<3I", value)
            cluster, named["cluster"] = (x, y, z), True  # explicit also if it is (1, 1, 1)
        elif attribute.id in (COOPERATIVE, PROGRAMMATIC_SERIALIZATION):
            name = "cooperative" if attribute.id == COOPERATIVE else "programmatic"
            named[name] = bool(struct.unpack_from("<i", value)[0])
        elif attribute.id in EVENTS:
            named["events"] = (*named.get("events", ()), struct.unpack_from("<Q", value)[0])
        elif attribute.id not in HINTS:
            raise LaunchError(f"launch attribute {attribute.id} is not supported")
    return cluster, named


def decode(
    config: Config,
    module: Module,
    kernel_name: str,
    arguments: int,
    ctas: frozenset[Dim3] | None = None,
) -> LaunchRequest:
    """Decode a configuration struct and an argument array into a launch request."""
    cluster, attributes = attributes_of(config)
    kernel = module.kernels[kernel_name]
    if kernel.cluster is not None and cluster == (1, 1, 1):
        cluster = kernel.cluster  # .reqnctapercluster is the shape when the launch names none
    return LaunchRequest(
        kernel_name,
        module,
        config.grid.triple(),
        config.block.triple(),
        cluster,
        config.smem,
        parameter_block(kernel, arguments),
        attributes,
        ctas,
    )


def check(request: LaunchRequest, arch: Architecture, sm_count: int, max_dynamic_smem: int) -> None:
    """Refuse what the architecture lacks beyond shapes.

    Shapes are checked by the machine.

    Args:
        max_dynamic_smem: the limit the host code set for this kernel, 0 if it set none.

    Raises:
        LaunchRefused: the target does not fit, clusters that the architecture lacks, shared memory without opt-in, or a
            cooperative grid that cannot be resident at once.
    """
    target = request.module.target
    if not runs_on(target, arch.name):
        message = f"{request.kernel_name} was compiled for {target}, this device is {arch.name}"
        raise LaunchRefused(message, NO_KERNEL_IMAGE)
    ctas = request.cluster[0] * request.cluster[1] * request.cluster[2]
    if ctas > arch.max_cluster:
        message = f"cluster={request.cluster}: {arch.name} has at most {arch.max_cluster} CTAs in a cluster"
        raise LaunchRefused(message, INVALID_VALUE)
    allowed = max(max_dynamic_smem, SMEM_WITHOUT_OPT_IN)
    if request.dynamic_smem > allowed:
        raise LaunchRefused(
            f"{request.kernel_name}: {request.dynamic_smem:,} bytes of dynamic shared memory, {allowed:,} are allowed "
            "(the host code did not raise the limit with cudaFuncAttributeMaxDynamicSharedMemorySize)",
            INVALID_VALUE,
        )
    if request.attributes.get("cooperative"):
        count = request.grid[0] * request.grid[1] * request.grid[2]
        resident = sm_count * ctas_per_sm(request, arch)
        if count > resident:
            message = f"a cooperative grid of {count} CTAs; {resident} can be resident on {sm_count} SMs"
            raise LaunchRefused(message, COOPERATIVE_TOO_LARGE)


def ctas_per_sm(request: LaunchRequest, arch: Architecture) -> int:
    """Count the CTAs that fit on one SM by threads and shared memory, not registers."""
    threads = request.block[0] * request.block[1] * request.block[2]
    threads = -(-threads // 32) * 32
    static = sum(v.size for v in request.module.variables if v.space == "shared")
    by_smem = arch.smem_per_sm // (request.dynamic_smem + static + 1024)
    return max(0, min(2048 // max(threads, 32), by_smem, 32))


def runs_on(target: str, arch: str) -> bool:
    """Tell whether code for ``target`` runs on ``arch``.

    ``sm_100a`` code runs on that architecture alone, ``sm_100f`` in its family, plain ``sm_90`` on 9.0 and later.
    """
    number, device = int(target.strip("sm_af")), int(arch.strip("sm_af"))
    if target.endswith("a"):
        return target == arch
    if target.endswith("f"):
        return number // 10 == device // 10 and device >= number
    return device >= number
