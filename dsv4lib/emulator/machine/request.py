"""Hold a launch's request and result, and the settings of its device, as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.limits import BYTES, INSTRUCTIONS, SECONDS
from dsv4lib.emulator.native.abi import CHECK_INIT, CHECK_PROXY
from dsv4lib.emulator.ptx.ir import Module

Dim3 = tuple[int, int, int]

# Limits of compute capability 9.0, 10.0 and 10.3 alike. Source: CUDA programming guide, table of technical
# specifications per compute capability.
MAX_THREADS_PER_CTA = 1024
MAX_CLUSTER_CTAS = 16
SMEM_RESERVED = 1024  # system-reserved bytes at the start of the shared window
SMEM_OF_GROUPS = 512  # where in there is room for CUDA's cooperative groups, which take 288 bytes
SMEM_PER_CTA = 227 * 1024
SMEM_PER_SM = 228 * 1024
MAX_THREADS_PER_SM = 2048
MAX_CTAS_PER_SM = 32


@dataclass(frozen=True)
class LaunchRequest:
    """One kernel launch.

    Attributes:
        kernel_name, module: which entry of which parsed PTX.
        grid, block, cluster: dimensions, x first.
        dynamic_smem: bytes.
        params: the parameter block, at least as long as the kernel's parameters.
        attributes: further launch attributes by name: ``cooperative``, ``programmatic``; ``cluster`` if the launch
            names a cluster shape.
        ctas: run only clusters that hold one of these CTAs; None = all.
    """

    kernel_name: str
    module: Module
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0
    params: bytes = b""
    attributes: dict[str, Any] = field(default_factory=dict)
    ctas: frozenset[Dim3] | None = None


@dataclass
class LaunchResult:
    """What happened.

    Attributes:
        instructions: warp-instructions executed.
        seconds: wall time of the run itself.
        schedule_hash: hash of the interleaving of warps and asynchronous completions.
        reordered: asynchronous operations completed after a later-issued one.
        stats: counts by name.
        hazards: what the checks reported.
        trace: `trace.Trace` if the device traces, else None.
    """

    instructions: int
    seconds: float
    schedule_hash: int
    reordered: int
    stats: Counter[str]
    hazards: list[Hazard]
    trace: Any = None


@dataclass(frozen=True)
class Settings:
    """How a device runs kernels.

    Attributes:
        arch: target, ``sm_100a``.
        schedule: a policy (machine/policies.py), or ``hold:`` and lines (machine/directed.py).
        seed: of the random policies.
        sm_count: SMs; limits how many CTAs are resident.
        native_checks: CHECK_* bits of native/abi.py.
        padding: bytes to which CUDA allocators round: loads in there are reported, not faults; 0 = nothing is padded.
        fatal: hazard kinds that stop the launch; "error" stops at any of that severity, "all" at any.
        muted: hazard kinds that are not reported.
        instruction_limit: warp-instructions of one launch; time_limit: seconds of processor time of one launch.
        memory_limit: bytes that the device may allocate by itself.
        cores: processes that run one launch, at most (cores.py).
    """

    arch: str = "sm_100a"
    schedule: str = "round_robin"
    seed: int = 0
    sm_count: int = 148
    native_checks: int = CHECK_INIT | CHECK_PROXY
    padding: int = 512
    fatal: frozenset[str] = frozenset()
    muted: frozenset[str] = frozenset()
    instruction_limit: int = INSTRUCTIONS.default
    time_limit: float = SECONDS.default
    memory_limit: int = BYTES.default
    cores: int = 1


def check_shape(request: LaunchRequest, smem_bytes: int) -> None:
    """Refuse launches that the architecture refuses.

    Raises:
        LaunchError: grid, block, cluster or shared memory out of range.
    """
    for name in ("grid", "block", "cluster"):
        value = getattr(request, name)
        if len(value) != 3 or any(not isinstance(v, int) or v < 1 for v in value):
            raise LaunchError(f"{name}={value}: three positive integers are needed")
    threads = request.block[0] * request.block[1] * request.block[2]
    if threads > MAX_THREADS_PER_CTA or request.block[2] > 64:
        raise LaunchError(f"block={request.block}: at most {MAX_THREADS_PER_CTA} threads and z <= 64")
    if request.grid[0] >= 2**31 or request.grid[1] > 65535 or request.grid[2] > 65535:
        raise LaunchError(f"grid={request.grid}: at most (2^31 - 1, 65535, 65535)")
    ctas = request.cluster[0] * request.cluster[1] * request.cluster[2]
    if ctas > MAX_CLUSTER_CTAS:
        raise LaunchError(f"cluster={request.cluster}: at most {MAX_CLUSTER_CTAS} CTAs")
    if any(g % c for g, c in zip(request.grid, request.cluster, strict=True)):
        raise LaunchError(f"grid={request.grid} is not a multiple of cluster={request.cluster}")
    kernel = request.module.kernels[request.kernel_name]
    if len(request.params) < kernel.param_bytes:
        raise LaunchError(f"{request.kernel_name}: {len(request.params)} parameter bytes, needs {kernel.param_bytes}")
    if kernel.reqntid is not None and tuple(kernel.reqntid) != tuple(request.block):
        raise LaunchError(f"block={request.block}, but {request.kernel_name} has .reqntid {kernel.reqntid}")
    if kernel.maxntid is not None and threads > (most := kernel.maxntid[0] * kernel.maxntid[1] * kernel.maxntid[2]):
        raise LaunchError(f"block={request.block}, but {request.kernel_name} has .maxntid: at most {most} threads")
    if kernel.max_cluster is not None and ctas > kernel.max_cluster:
        message = f"cluster={request.cluster}, but {request.kernel_name} has .maxclusterrank {kernel.max_cluster}"
        raise LaunchError(message)
    if kernel.cluster is not None and tuple(kernel.cluster) != tuple(request.cluster):
        raise LaunchError(
            f"cluster={request.cluster}, but {request.kernel_name} has .reqnctapercluster {kernel.cluster}"
        )
    if smem_bytes > SMEM_PER_CTA:
        raise LaunchError(f"{smem_bytes:,} bytes of shared memory, at most {SMEM_PER_CTA:,} per CTA")
