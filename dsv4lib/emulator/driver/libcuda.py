"""Stand in for ``libcuda.so.1``: the driver API for packages that are compiled against it, such as cuda.core and Warp.

They find the driver by its file's name, then every function by ``cuGetProcAddress``. Both lead here: a library of that
name (`shared_object`) is loaded before the first of them is imported, and its functions are Python's (`libcuda_calls`).

An exception cannot cross compiled code. What a call raises becomes the status that the driver would give, and is kept
(`Runtime.refused`): an error that ends the script has a note of it. A stopped launch is the cause of that error, and is
raised at the end if the script went on; after it every call fails, as on a GPU.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

from dsv4lib.emulator.driver import shared_object
from dsv4lib.emulator.driver.config import LaunchRefused
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import EmulatorError, LaunchError, PtxSyntaxError
from dsv4lib.errors import DSV4Error

SONAME = "libcuda.so.1"
SUCCESS, INVALID_VALUE, NO_DEVICE, INVALID_CONTEXT, INVALID_PTX, NOT_FOUND = 0, 1, 100, 201, 218, 500
LAUNCH_FAILED, NOT_SUPPORTED = 719, 801
ENTRIES: dict[str, Any] = {}  # callbacks by name, without version but for those in `VERSIONS`
# Functions whose parameters changed: the form that a version of the API has, the newest first. Source: cudaTypedefs.h.
VERSIONS: dict[str, tuple[tuple[int, str], ...]] = {
    "cuCtxCreate": ((12050, "cuCtxCreate_v4"), (11040, "cuCtxCreate_v3"), (0, "cuCtxCreate_v2")),
    "cuCtxGetDevice": ((13000, "cuCtxGetDevice_v2"), (0, "cuCtxGetDevice")),
    "cuGetProcAddress": ((12000, "cuGetProcAddress_v2"), (0, "cuGetProcAddress")),
    "cuStreamGetCtx": ((12050, "cuStreamGetCtx_v2"), (0, "cuStreamGetCtx")),
}
SPARE = tuple(f"dsv4_spare_{i}" for i in range(1024))  # names for functions that are not here
P, I, U8, U16, U32, U64, SIZE = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t,
)  # fmt: skip
C = ctypes.c_char_p
_TEXTS: dict[str, Any] = {}  # texts that C code keeps pointers to
_VERSION, _STREAM = re.compile(r"_v\d+$"), re.compile(r"_(ptsz|ptds)$")
_MISSING: dict[str, tuple[str, Any]] = {}  # of functions that are not here: the spare name and the callback
LOADED: list[ctypes.CDLL] = []


def entry(name: str, *types: Any, release: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the server of the driver's function ``name``, whose parameters have the ctypes ``types``.

    It returns None, or a status. ``release``: succeeds also without a device: destructors run when all is over.
    A null pointer is 0, as a handle is.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        ENTRIES[name] = ctypes.CFUNCTYPE(ctypes.c_int, *types)(guarded(function, types, release))
        return function

    return add


def guarded(function: Callable[..., Any], types: Sequence[Any], release: bool) -> Callable[..., int]:
    """Let a server answer a status whatever it raises; arguments as for `entry`."""
    pointers = [kind is P for kind in types]

    def serve(*args: Any) -> int:
        if not RUNTIME.devices:
            return SUCCESS if release else NO_DEVICE
        if stopped() and not release:
            return LAUNCH_FAILED
        try:
            given = (0 if a is None and pointer else a for a, pointer in zip(args, pointers, strict=True))
            return function(*given) or SUCCESS
        except BaseException as error:  # also KeyboardInterrupt: it must not be lost
            return refuse(error)

    return serve


def put(address: int | None, kind: Any, value: Any) -> None:
    """Write a result, unless the caller wants none."""
    if address:
        ctypes.cast(address, ctypes.POINTER(kind))[0] = value


def text(value: str) -> int:
    """Get the address of a text that lives as long as the process."""
    if value not in _TEXTS:
        _TEXTS[value] = ctypes.create_string_buffer(value.encode())
    return ctypes.addressof(_TEXTS[value])


def succeed(*names: str, release: bool = False) -> None:
    """Serve functions that have nothing to do here."""
    for name in names:
        entry(name, release=release)(lambda: None)


def queue(stream: int | None) -> int:
    """Get the handle of a stream; those of the legacy default and of each thread are the default one."""
    return 0 if stream in (None, 0, 1, 2) else stream  # type: ignore[return-value]


def stopped() -> bool:
    """Tell whether a launch was stopped: nothing works any more."""
    return RUNTIME.refused is not None and status_of(RUNTIME.refused) == LAUNCH_FAILED


def refuse(error: BaseException) -> int:
    """Keep an error and return its status."""
    if not stopped():
        RUNTIME.refused = error
    return status_of(error)


def status_of(error: BaseException) -> int:
    """Choose the driver's status for an error."""
    if isinstance(error, LaunchRefused):
        return error.code
    if isinstance(error, PtxSyntaxError):
        return INVALID_PTX
    if isinstance(error, LaunchError) or (isinstance(error, DSV4Error) and not isinstance(error, EmulatorError)):
        return INVALID_VALUE
    return LAUNCH_FAILED


def served(name: str, version: int | None = None) -> str | None:
    """Find the name under which a function is served: its own, or that without version. None: it is not here.

    Args:
        version: of the API, as 12050; a name without one means the newest form that this version has.
    """
    if version is not None and name in VERSIONS:
        return next(form for since, form in VERSIONS[name] if version >= since)
    name = _STREAM.sub("", name)
    plain = _VERSION.sub("", name)
    return name if name in ENTRIES else plain if plain in ENTRIES and plain not in VERSIONS else None


def address(name: str, version: int | None = None) -> int:
    """Find the address of a driver function; of one that is not here, of a function that refuses.

    It lies in the library, not in this process's Python: packages keep it and call it when Python is gone.
    """
    known = served(name, version)
    (library,) = LOADED
    if known is not None:
        return shared_object.address_of(library, known)
    if name not in _MISSING:
        if len(_MISSING) == len(SPARE):
            raise LaunchError(f"more than {len(SPARE)} functions that the emulated driver does not have")

        def missing() -> int:
            refuse(LaunchError(f"the emulated driver has no {name}"))
            return NOT_SUPPORTED

        _MISSING[name] = SPARE[len(_MISSING)], ctypes.CFUNCTYPE(ctypes.c_int)(missing)
        fill()
    return shared_object.address_of(library, _MISSING[name][0])


def fill() -> None:
    """Write the addresses of all functions into the library's table."""
    (library,) = LOADED
    zero = shared_object.address_of(library, shared_object.ZERO)
    callbacks = ENTRIES | dict(_MISSING.values())
    names = (*ENTRIES, *SPARE)
    where = {name: ctypes.cast(callback, P).value or 0 for name, callback in callbacks.items()}
    shared_object.fill(library, names, {name: where.get(name, zero) for name in names})


def finish() -> None:
    """Lead all functions to one that succeeds: Python ends, and destructors of compiled code still come."""
    (library,) = LOADED
    names = (*ENTRIES, *SPARE)
    shared_object.fill(library, names, dict.fromkeys(names, shared_object.address_of(library, shared_object.ZERO)))
