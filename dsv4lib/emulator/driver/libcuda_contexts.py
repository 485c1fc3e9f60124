"""The functions of the driver library: contexts. A device has one; which is current is the top of a stack.

Signatures of some functions changed with versions: each form has its name, `libcuda.VERSIONS` says since when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4lib.emulator.driver.libcuda import INVALID_CONTEXT, U32, U64, I, P, entry, put, succeed
from dsv4lib.emulator.driver.modules import CONTEXT
from dsv4lib.emulator.driver.symbols import RUNTIME

CONTEXT_API = 3020
_STACK: list[int] = []  # handles, the current one last


@contextmanager
def fresh() -> Iterator[None]:
    """Begin with the first device's context where a thread of this process has made one current, else with none.

    Packages remember for as long as the process lives that they have made it so.
    """
    before = list(_STACK)
    _STACK[:] = [CONTEXT] * bool(before)
    try:
        yield
    finally:
        _STACK[:] = before or [CONTEXT] * bool(_STACK)


def current() -> int:
    """Get the handle of the current context, 0 if there is none."""
    return _STACK[-1] if _STACK else 0


def handle(device: int) -> int:
    """Get the handle of a device's context.

    Raises:
        LaunchError: there is no such device.
    """
    return CONTEXT + RUNTIME.sibling(device).index


@entry("cuDevicePrimaryCtxGetState", I, P, P)
def primary_state(device: int, flags: int, active: int) -> None:
    """Say that the context is there."""
    handle(device)
    put(flags, U32, 0)
    put(active, I, 1)


@entry("cuDevicePrimaryCtxRetain", P, I)
def primary_retain(out: int, device: int) -> None:
    """Get a device's context."""
    put(out, P, handle(device))


@entry("cuCtxGetCurrent", P, release=True)
def get(out: int) -> None:
    """Get the current context, 0 before one is made so."""
    put(out, P, current())


@entry("cuCtxPushCurrent", P, release=True)
def push(context: int) -> None:
    """Make a context the current one, and its device; the one before waits below it."""
    RUNTIME.select(context - CONTEXT)
    _STACK.append(context)


@entry("cuCtxPopCurrent", P, release=True)
def pop(out: int) -> int:
    """Take the current context off; the one below it is current again, and its device."""
    if not _STACK:
        return INVALID_CONTEXT
    put(out, P, _STACK.pop())
    if _STACK:
        RUNTIME.select(_STACK[-1] - CONTEXT)
    return 0


@entry("cuCtxSetCurrent", P, release=True)
def set_current(context: int) -> None:
    """Put a context in the place of the current one; 0 takes that off."""
    if not context:
        pop(0)
        return
    RUNTIME.select(context - CONTEXT)
    _STACK[-1:] = [context]


@entry("cuCtxCreate_v4", P, P, U32, I)
def create(out: int, _parameters: int, _flags: int, device: int) -> None:
    """Get the one context that a device has, and make it current."""
    push(handle(device))
    put(out, P, current())


@entry("cuCtxCreate_v3", P, P, I, U32, I)
def create_with_affinity(out: int, _parameters: int, _count: int, flags: int, device: int) -> None:
    """Do as `create`, with the parameters of version 11.4."""
    create(out, 0, flags, device)


@entry("cuCtxCreate_v2", P, U32, I)
def create_plain(out: int, flags: int, device: int) -> None:
    """Do as `create`, with the parameters of version 3.2."""
    create(out, 0, flags, device)


entry("cuCtxCreate", P, U32, I)(create_plain)


@entry("cuCtxDestroy", P, release=True)
def destroy(context: int) -> None:
    """Take a context off if it is current; there is nothing to destroy."""
    if context and context == current():
        pop(0)


@entry("cuCtxGetDevice", P)
def device_of_current(out: int) -> None:
    """Get the current device."""
    put(out, I, RUNTIME.device().index)


@entry("cuCtxGetDevice_v2", P, P)
def device_of(out: int, context: int) -> None:
    """Get a context's device; 0 stands for the current one."""
    put(out, I, RUNTIME.sibling(context - CONTEXT).index if context else RUNTIME.device().index)


@entry("cuCtxGetStreamPriorityRange", P, P)
def priorities(least: int, greatest: int) -> None:
    """Get the range of priorities of a stream."""
    put(least, I, 0)
    put(greatest, I, -5)


@entry("cuCtxGetApiVersion", P, P)
def api_version(_context: int, out: int) -> None:
    """Get a context's version."""
    put(out, U32, CONTEXT_API)


@entry("cuCtxGetId", P, P)
def number(context: int, out: int) -> None:
    """Get a context's number."""
    put(out, U64, context or current())


def _synchronize(*_args: Any) -> None:
    """Wait for everything that is queued."""
    RUNTIME.synchronize()


for _name in ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"):
    entry(_name, P)(_synchronize)
succeed("cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxSetFlags", release=True)
succeed("cuCtxSetLimit", release=True)
succeed("cuCtxSetCacheConfig", "cuProfilerStart", "cuProfilerStop")
