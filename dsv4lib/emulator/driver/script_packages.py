"""Settings and small repairs for packages whose scripts run through the driver library: numba-cuda, CuPy and Warp.

numba-cuda needs none but the lines of the source. CuPy is kept from kernels of its own binary. Warp's native library
contains the CUDA runtime, which asks the driver for functions that no document describes. Warp calls that runtime for
memory only, by functions of its own, which are served here. Its kernels are loaded and launched through the driver.
What runs a kernel of Warp's own binary (sorting, scanning, meshes, hash grids on the device) is refused: there is no
PTX of it.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from dsv4lib.emulator.driver import cuda_api, unified
from dsv4lib.emulator.driver.on_import import when_imported
from dsv4lib.emulator.driver.patching import Patches, patches
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import BackendUnavailable

REGULAR, INDEXED, MAX_DIMS = 0, 1, 4  # kinds of Warp's arrays
MEMORY_POOLS = 115  # device attribute: without them Warp allocates by one function
_NUMBA, _NUMBA_DRIVER = "numba.cuda.decorators", "numba.cuda.cudadrv.driver"
_CUPY, _CUPY_CORE = "cupy", "cupy._core._accelerator"
_WARP, _WARP_CONFIG = "warp._src.context", "warp.config"


@contextmanager
def patched() -> Iterator[None]:
    """Prepare the packages, whenever they are imported inside the context."""
    with patches() as patch:
        actions = {
            _NUMBA: lambda module: _numba(patch, module),
            "numba_cuda." + _NUMBA: lambda module: _numba(patch, module),
            _NUMBA_DRIVER: _built_in,
            _WARP: lambda module: _warp(patch, module),
            _WARP_CONFIG: lambda module: _warp_config(patch, module),
            _CUPY_CORE: lambda module: _cupy(patch, module),
            _CUPY: _cupy_memory,
        }
        with when_imported(actions):
            yield


def _numba(patch: Patches, module: ModuleType) -> None:
    """Let ``cuda.jit`` keep lines by default; and no word about nvJitLink, whose work the driver does here."""
    original = module.jit

    @functools.wraps(original)
    def jit(*args: Any, **options: Any) -> Any:
        if not options.get("debug"):
            options.setdefault("lineinfo", True)
        return original(*args, **options)

    patch.set(module, "jit", jit)
    warnings.filterwarnings("ignore", message=r".*nvJitLink.*", category=RuntimeWarning)


def _built_in(module: ModuleType) -> None:
    """Refuse numba's own CUDA target; numba-cuda has a module of the same name.

    Raises:
        BackendUnavailable: numba-cuda is not installed.
    """
    if "numba_cuda" not in (module.__file__ or ""):
        raise BackendUnavailable("numba's built-in CUDA target is not supported: pip install numba-cuda, its successor")


def _cupy(patch: Patches, module: ModuleType) -> None:
    """Let CuPy reduce by kernels that it compiles, not by those of CUB in its binary, and compile them here."""
    patch.env("CUPY_CACHE_IN_MEMORY", "1")  # of a cubin from its files no PTX is known
    module.set_reduction_accelerators([])
    module.set_routine_accelerators([])


def _cupy_memory(module: ModuleType) -> None:
    """Let each array of CuPy be an allocation: its ends are checked, and no pool keeps memory of an earlier device."""
    module.cuda.set_allocator(None)
    module.cuda.set_pinned_memory_allocator(None)


def _warp_config(patch: Patches, module: ModuleType) -> None:
    """Let Warp compile to PTX, with lines."""
    patch.set(module, "cuda_output", "ptx")
    patch.set(module, "lineinfo", True)


def _warp(patch: Patches, module: ModuleType) -> None:
    """Serve what Warp's native library does by the CUDA runtime."""
    patch.set(RUNTIME, "hidden", RUNTIME.hidden | {MEMORY_POOLS})
    patch.around(module.Runtime, "load_dll", lambda original, runtime, path: WarpLibrary(original(runtime, path)))


class WarpLibrary:
    """Warp's native library; functions of `_SERVED` are ours, others on the device are refused."""

    def __init__(self, real: ctypes.CDLL):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        """Find a function, once: Warp then sets its types."""
        if name in _SERVED:
            found: Any = functools.partial(_SERVED[name], self._real)
        elif name.endswith("_device") and name.startswith("wp_"):
            found = functools.partial(_refused, name)
        else:
            return getattr(self._real, name)
        setattr(self, name, found)
        return found


def _refused(name: str, *_args: Any) -> None:
    raise LaunchError(f"{name} runs a kernel of Warp's own binary, of which no PTX is known: run this part on the CPU")


def _allocate(_real: Any, _context: Any, nbytes: int, *_tag: Any) -> int:
    return cuda_api.allocate(nbytes, "array of Warp")


def _allocate_pinned(real: Any, nbytes: int, *_tag: Any) -> int:
    return _allocate(real, None, nbytes)


def _free(_real: Any, _context: Any, address: int, *_rest: Any) -> None:
    cuda_api.free(_number(address))


def _free_pinned(real: Any, address: int) -> None:
    _free(real, None, address)


def _copy(_real: Any, _context: Any, target: int, source: int, nbytes: int, *_stream: Any) -> bool:
    unified.copy(_number(target), _number(source), nbytes)
    return True


def _copy_between(real: Any, _to: Any, target: int, _of: Any, source: int, nbytes: int, *_stream: Any) -> bool:
    return _copy(real, None, target, source, nbytes)


def _fill(_real: Any, _context: Any, target: int, value: int, nbytes: int, *_stream: Any) -> None:
    if nbytes:
        RUNTIME.synchronize()
        unified.view(_number(target), nbytes)[:] = value & 0xFF


def _repeat(_real: Any, _context: Any, target: int, source: Any, nbytes: int, count: int, *_stream: Any) -> None:
    """Write a value ``count`` times."""
    if nbytes * count:
        RUNTIME.synchronize()
        view = unified.view(_number(target), nbytes * count)
        view.reshape(count, nbytes)[:] = list(ctypes.string_at(_number(source), nbytes))


class Array(ctypes.Structure):
    """Warp's array_t."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("grad", ctypes.c_uint64),
        ("shape", ctypes.c_int32 * MAX_DIMS),
        ("strides", ctypes.c_int32 * MAX_DIMS),
        ("ndim", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
    ]


class IndexedArray(ctypes.Structure):
    """Warp's indexedarray_t: along each dimension the elements that ``indices`` name, all of them if it is null."""

    _fields_ = [
        ("array", Array),
        ("indices", ctypes.c_void_p * MAX_DIMS),
        ("shape", ctypes.c_int32 * MAX_DIMS),
    ]


def extent(pointer: Any, kind: int, nbytes: int) -> tuple[int, int]:
    """Find the first address and the bytes from there to the end of all elements of an array of Warp.

    Args:
        kind: `REGULAR` or `INDEXED`. nbytes: of an element.

    Raises:
        LaunchError: an array of another kind.
        MemoryFault: indices that do not lie in one allocation.
    """
    if kind == REGULAR:
        array = Array.from_address(_number(pointer))
        ranges = [(0, array.shape[d] - 1) for d in range(array.ndim)]
    elif kind == INDEXED:
        indexed = IndexedArray.from_address(_number(pointer))
        array, ranges = indexed.array, []
        for d in range(array.ndim):
            count, at = indexed.shape[d], indexed.indices[d]
            chosen = unified.view(at, 4 * count).view("<i4") if at and count else range(count)
            ranges.append((int(min(chosen, default=0)), int(max(chosen, default=-1))))
    else:
        raise LaunchError(f"Warp's arrays of kind {kind} (fabric) are not supported by the emulator")
    if any(last < first for first, last in ranges):
        return array.data, 0
    ends = [(array.strides[d] * first, array.strides[d] * last) for d, (first, last) in enumerate(ranges)]
    low = sum(min(pair) for pair in ends)
    return array.data + low, sum(max(pair) for pair in ends) - low + nbytes


def _check(pointer: Any, kind: int, nbytes: int) -> None:
    """Look whether all elements of an array that is not empty lie in one allocation of the device."""
    start, length = extent(pointer, kind, nbytes)
    if length:
        unified.view(start, length)


def _fill_array(real: Any, _context: Any, array: Any, kind: int, value: Any, nbytes: int) -> None:
    """Fill a strided array as Warp does on the host: the memory is the same."""
    RUNTIME.synchronize()
    _check(array, kind, nbytes)
    real.wp_array_fill_host(array, kind, value, nbytes)


def _copy_array(real: Any, _context: Any, target: Any, source: Any, to: int, of: int, nbytes: int) -> Any:
    RUNTIME.synchronize()
    _check(target, to, nbytes)
    _check(source, of, nbytes)
    return real.wp_array_copy_host(target, source, to, of, nbytes)


def _number(pointer: Any) -> int:
    """The address of a pointer argument: a number, or an object of ctypes."""
    if isinstance(pointer, int):
        return pointer
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


_SERVED: dict[str, Callable[..., Any]] = {
    "wp_alloc_device": _allocate,
    "wp_alloc_device_default": _allocate,
    "wp_alloc_pinned": _allocate_pinned,
    "wp_free_device": _free,
    "wp_free_device_default": _free,
    "wp_free_pinned": _free_pinned,
    "wp_memcpy_h2d": _copy,
    "wp_memcpy_d2h": _copy,
    "wp_memcpy_d2d": _copy,
    "wp_memcpy_p2p": _copy_between,
    "wp_memset_device": _fill,
    "wp_memtile_device": _repeat,
    "wp_array_fill_device": _fill_array,
    "wp_array_copy_device": _copy_array,
}
