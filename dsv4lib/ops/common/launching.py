"""Check tensors by name, choose the back end, compile once, launch: for all ops.

Launches overlap (programmatic dependent launch): a kernel starts while its predecessor ends, and waits for it before it
touches what that one may have written. Only weights are read before that wait: of norms, mHC's fn, the norm of a
compressor, a router's gate, of a Hopper's GEMMs; and groups of experts where the caller of a Hopper's GEMM says that
they may be. So the kernel that writes them may not be the predecessor. A synchronisation or any other launch in between
is enough, except one of attention on Blackwell (below).

A kernel starts early only if its predecessor asks for it (`griddepcontrol.launch_dependents`), else when the
predecessor's CTAs have left.

    kernel                                               asks
    all others                                           right after its own wait, so at most two kernels overlap
    GEMMs                                                after their last load
    `router`, mHC of many tokens, `kv_gather`,
    `quantize` of entries and for a scale of its own       not: their successor starts when their CTAs have left
    attention on Blackwell                               once it has its tensor memory, before its wait

The successor of attention may start there before the predecessor of attention has ended. It then waits for both, and
must not read before its wait what that one writes. The emulator's race detector reports such reads.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.dsl.tensors import DeviceTensor, leaves
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache, native, plans

ARCHS = ("sm_100a", "sm_103a", "sm_90a")
MOST_EXTENT = 1 << 31  # kernels count in 32 bits, with 64-bit strides
MOST_EPS = 2.0**62  # a finite fp32, and an int that torch takes


def check(wanted: dict[str, tuple[Tensor | None, torch.dtype, tuple]]) -> None:
    """Check types, shapes and devices; they are known of fake tensors too.

    Args:
        wanted: by name, (tensor or None, type, shape with None for any extent).

    Raises:
        ArgumentError: one is not as wanted, or not on the device of the first.
    """
    device = next(x.device for x, _, _ in wanted.values() if x is not None)
    for name, (x, dtype, shape) in wanted.items():
        if x is None:
            continue
        if x.dtype != dtype or x.dim() != len(shape):
            raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}".replace("None", "any"))
        if any(want is not None and have != want for have, want in zip(x.shape, shape, strict=True)):
            raise ArgumentError(f"{name}.shape", tuple(x.shape), str(shape).replace("None", "any"))
        if max(x.shape, default=0) >= MOST_EXTENT:
            raise ArgumentError(f"{name}.shape", tuple(x.shape), "extents below 2^31")
        if any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True)):
            raise ArgumentError(f"{name}.stride()", x.stride(), "no stride 0: an expanded tensor must be copied")
        if x.device != device:
            raise ArgumentError(f"{name}.device", str(x.device), f"that of {next(iter(wanted))}, {device}")


def check_eps(**given: float) -> None:
    """Check numbers that are added below a square root or a fraction bar.

    Raises:
        ArgumentError: one is negative, too large or NaN.
    """
    for name, eps in given.items():
        if not 0 <= eps <= MOST_EPS:
            raise ArgumentError(name, eps, "a number from 0 to 2^62")


def resolve(backend: str, name: str, x: Tensor, archs: tuple[str, ...] = ARCHS) -> str:
    """Choose the back end, on whose device ``x`` must be.

    Raises:
        ArgumentError: it is not, or there is no such back end.
        BackendUnavailable: it cannot run here.
    """
    found = backends.resolve(backend, arch(backend, archs))
    if found != "reference" and x.device.type != backends.device(found):
        raise ArgumentError(f"{name}.device", str(x.device), f"{backends.device(found)} on back end {found}")
    return found


def on_host(x: Tensor) -> bool:
    """Tell whether reading the values of ``x`` costs no wait."""
    return x.device.type == "cpu"


def arch(backend: str, archs: tuple[str, ...] = ARCHS) -> str:
    """Choose the architecture to compile for.

    The first of ``archs`` that a GPU here runs, else that of `backends.emulating`, else the first.
    """
    wanted = backends.emulated_arch()
    found = _native_arch(archs) if backend in ("auto", "native") else None
    return found or (wanted if wanted in archs else archs[0])


@functools.cache
def _native_arch(archs: tuple[str, ...]) -> str | None:
    """Find the first of ``archs`` that a GPU here runs."""
    return next((one for one in archs if backends.status("native", one).available), None)


def stream(name: str, x: Tensor) -> int:
    """Get the handle of torch's current stream on ``x``'s device.

    0 in the emulator.
    """
    return torch.cuda.current_stream(x.device).cuda_stream if name == "native" else 0


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def enqueue(name: str, code: Any, args: tuple) -> None:
    """Do `backends.enqueue`; what the emulator reports of hazards becomes a warning.

    On a device of a group the launch is only queued: what it reports is in the group's ``hazards`` later.
    On a GPU the kernel is launched from words that a plan of the op can write again.
    """
    if name == "native":
        runtime = backends.emulated()
        if runtime is None:
            values = native.values_of(code, args)
            plans.note(code.function, values)
            return native.launch(code.function, values)
        for one in leaves(args):
            if isinstance(one, DeviceTensor):
                runtime.track(one.source)
    gpu = backends.enqueue(name, code, *args)
    if gpu is not None:
        warn_of_hazards(gpu)


def warn_of_hazards(gpu: Any) -> None:
    """Warn of what an emulated device has reported of its last launch.

    Nothing has been launched yet on a device of a group, or while a CUDA graph is captured.
    """
    runtime = backends.emulated()
    if gpu.group is not None or (runtime is not None and runtime.captured is not None):
        return
    found = gpu.launches[-1].result.hazards
    if found:
        warnings.warn(f"the emulator reports {len(found)} hazards, first: {found[0].message}", stacklevel=3)


def launch(
    name: str,
    kernel_type: type,
    settings: dict[str, Any],
    fake_args: Callable[[Any], tuple],
    args: Callable[..., tuple],
    *given: Any,
) -> None:
    """Queue a kernel for any architecture on torch's current stream.

    Args:
        name: `native` or `emulator`. kernel_type, settings, fake_args: as for `CompileCache.get`.
        args: makes the launch's arguments of (kernel, *given, stream=handle).
    """
    kernel, code = compile_cache.default().get(kernel_type, settings, fake_args, arch(name))
    where = next(x for x in leaves(given) if isinstance(x, Tensor))
    enqueue(name, code, args(kernel, *given, stream=stream(name, where)))
