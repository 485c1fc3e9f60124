"""Stand between compiled packages and NVRTC: note the PTX of every cubin, and ask for the lines of the source.

NVRTC itself needs no GPU; every function leads to the real library but for two. Packages that call it from compiled
code (cuda.core) cannot be patched in Python, so a library of its name is loaded before them (`shared_object`). Where
NVRTC itself has been loaded before, its name is taken: the stand-in has another, and cuda.bindings finds its functions
among the process's global ones. One for nvJitLink has no functions at all: cuda.core then links by the driver, which
hands PTX through.
"""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

from dsv4lib.emulator.driver import binary, shared_object
from dsv4lib.emulator.driver.on_import import installed
from dsv4lib.emulator.driver.patching import Patches
from dsv4lib.errors import BackendUnavailable

BINDINGS = "cuda.bindings._internal.nvrtc"  # the module that finds NVRTC for cuda.bindings and cuda.core
JITLINK = "libnvJitLink.so.{}"
LINES, DEBUG = b"-lineinfo", (b"-G", b"--device-debug", b"-lineinfo", b"--generate-line-info")
_KEPT: list[Any] = []  # libraries and callbacks: compiled code has their addresses
_API = """
    AddNameExpression CompileProgram CreateProgram DestroyProgram GetCUBIN GetCUBINSize GetErrorString GetLTOIR
    GetLTOIRSize GetLoweredName GetNumSupportedArchs GetOptiXIR GetOptiXIRSize GetPCHCreateStatus GetPCHHeapSize
    GetPCHHeapSizeRequired GetPTX GetPTXSize GetProgramLog GetProgramLogSize GetSupportedArchs SetFlowCallback
    SetPCHHeapSize Version
"""
P, I = ctypes.c_void_p, ctypes.c_int


def load(folder: str) -> None:
    """Load the stand-ins, once in a process; without NVRTC there is nothing to stand before.

    Raises:
        BackendUnavailable: nvJitLink is loaded already, or NVRTC is no library.
    """
    if _KEPT:
        return
    from dsv4lib import nvrtc

    try:
        path = nvrtc.path()
    except BackendUnavailable:
        return  # the package says so when it needs it
    names = tuple(_names())
    version = path.rpartition(".so.")[2].partition(".")[0]
    soname = f"libnvrtc.so.{version}"
    stand_in = shared_object.load(f"dsv4-{soname}" if shared_object.loaded(soname) else soname, names, folder)
    try:
        real = nvrtc.opened(path)
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"{path} is no NVRTC that can be loaded: {error}") from error
    own = _functions(real)
    own_addresses = {name: ctypes.cast(function, P).value for name, function in own.items()}
    missing = ctypes.CFUNCTYPE(I)(lambda: 11)  # NVRTC_ERROR_INTERNAL_ERROR: this version has no such function
    addresses = {
        name: own_addresses.get(name) or ctypes.cast(getattr(real, name, missing), P).value or 0 for name in names
    }
    shared_object.fill(stand_in, names, addresses)
    jitlink = shared_object.load(JITLINK.format(version), (), folder)
    _KEPT.extend((stand_in, real, own, missing, jitlink))


def lead(patch: Patches, module: ModuleType, folder: str) -> None:
    """Let `BINDINGS` find the stand-in, also before a package that loads it is imported.

    It looks for NVRTC once in a process, and cuda.core takes the functions from it.
    """
    original = getattr(module, "load_nvidia_dynamic_lib", None)
    if original is None:
        return  # versions that load NVRTC by its name alone

    def find(name: str) -> Any:
        load(folder)
        return SimpleNamespace(_handle_uint=_KEPT[0]._handle) if _KEPT else original(name)

    patch.set(module, "load_nvidia_dynamic_lib", find)


def _names() -> list[str]:
    """The functions that cuda.bindings knows, or those of NVRTC 13."""
    if not installed("cuda.bindings.nvrtc"):
        return [f"nvrtc{name}" for name in _API.split()]
    from cuda.bindings import nvrtc

    return [name for name in dir(nvrtc) if name.startswith("nvrtc") and not isinstance(getattr(nvrtc, name), type)]


def _functions(real: ctypes.CDLL) -> dict[str, Any]:
    """The functions that do more than the real ones."""

    @ctypes.CFUNCTYPE(I, P, I, P)
    def compile_program(program: int, count: int, options: int) -> int:
        given = [ctypes.cast(options, ctypes.POINTER(ctypes.c_char_p))[i] for i in range(count)]
        if not any(option in DEBUG for option in given):
            given.append(LINES)
        return real.nvrtcCompileProgram(P(program), len(given), (ctypes.c_char_p * len(given))(*given))

    @ctypes.CFUNCTYPE(I, P, P)
    def get_cubin(program: int, out: int) -> int:
        status = real.nvrtcGetCUBIN(P(program), P(out))
        size, ptx_size = ctypes.c_size_t(), ctypes.c_size_t()
        known = not real.nvrtcGetCUBINSize(P(program), ctypes.byref(size))
        if status == 0 and known and not real.nvrtcGetPTXSize(P(program), ctypes.byref(ptx_size)):
            text = ctypes.create_string_buffer(max(ptx_size.value, 1))
            if not real.nvrtcGetPTX(P(program), text):
                binary.remember(ctypes.string_at(out, size.value), text.value.decode())
        return status

    return {"nvrtcCompileProgram": compile_program, "nvrtcGetCUBIN": get_cubin}
