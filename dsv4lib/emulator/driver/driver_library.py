"""Load the driver library before the first package that needs it, and raise what it has kept (`libcuda`)."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

from dsv4lib.emulator.driver import (
    libcuda,
    libcuda_contexts,
    libcudart,
    libnvrtc,
    script_packages,
    shared_object,
    static_runtime,
)
from dsv4lib.emulator.driver import libcuda_calls as _calls  # they fill `libcuda.ENTRIES`
from dsv4lib.emulator.driver import libcuda_modules as _modules
from dsv4lib.emulator.driver.on_import import before_import, when_imported
from dsv4lib.emulator.driver.patching import patches
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.errors import DSV4Error

__all__ = ["USERS", "_calls", "_modules", "load", "patched"]

RUNTIME_INSIDE = (  # CuPy's compiled modules that contain the CUDA runtime
    "cupy_backends.cuda.api.runtime",
    *(f"cupy.{name}" for name in ("cuda.cub", "cuda.thrust", "cuda.jitify", "random._generator_api")),
)
USERS = ("cuda.core", "numba.cuda", "numba_cuda", "warp", "cupy_backends")  # packages that load it


@contextmanager
def patched(folder: str) -> Iterator[None]:
    """Load the driver library before a package is imported that needs it, and raise what it has kept.

    Args:
        folder: private to this process; the library is written there.
    """
    RUNTIME.refused = None
    libcudart.forget()
    before = dict.fromkeys(USERS, lambda: load(folder))
    try:
        with libcuda_contexts.fresh(), patches() as patch, script_packages.patched(), before_import(before):
            actions = {name: lambda module: static_runtime.lead(module, folder) for name in RUNTIME_INSIDE}
            with when_imported(actions | {libnvrtc.BINDINGS: lambda module: libnvrtc.lead(patch, module, folder)}):
                yield
        if libcuda.stopped():
            raise RUNTIME.refused  # type: ignore[misc]  # not None
    except BaseException as error:
        cause = RUNTIME.refused
        if cause is not None and cause is not error and not isinstance(error, DSV4Error):
            if libcuda.stopped():
                raise error from cause
            error.add_note(f"before, the emulated driver refused a call: {cause}")
        raise
    finally:
        RUNTIME.refused = None


def load(folder: str) -> None:
    """Load the driver library, once in a process.

    Raises:
        BackendUnavailable: a driver is loaded already, or there is no stand-in for this machine.
    """
    if libcuda.LOADED:
        return
    libnvrtc.load(folder)
    libcuda.LOADED.append(shared_object.load(libcuda.SONAME, (*libcuda.ENTRIES, *libcuda.SPARE), folder))
    libcuda.fill()
    atexit.register(libcuda.finish)
