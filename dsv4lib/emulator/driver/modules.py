"""Load and launch PTX through the driver API of cuda.bindings: modules, libraries, kernels, contexts.

What a program hands over is PTX, or a cubin that NVRTC has made under our eyes; kernels run as generated host code's do
(`symbols.run_kernel`). A refusal is raised, not returned: a status that a script ignores would pass for a launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.driver import binary, config, cubin
from dsv4lib.emulator.driver.symbols import MAX_DYNAMIC_SMEM, RUNTIME, LoadedKernel, run_kernel
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.ptx.ir import Kernel, Module
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.emulator.units import tensormap
from dsv4lib.errors import ArgumentError

NUM_REGS, LOCAL_BYTES = 4, 3  # CU_FUNC_ATTRIBUTE_*
CONTEXT = 0x10  # handle of the one context
_BINARY = (binary.ELF_MAGIC, binary.FATBIN_MAGIC.to_bytes(4, "little"))


def table(driver: Any) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """Make the functions of cuda.bindings.driver that load and launch; each returns what follows the status."""

    def load(kind: Any) -> Callable[..., tuple[Any]]:
        return lambda image, *_options: (kind(load_image(image)),)

    def context(*_args: Any) -> tuple[Any]:
        return (driver.CUcontext(CONTEXT),)

    def nothing(*_args: Any) -> tuple[()]:
        return ()

    return {
        "cuCtxCreate": context,
        "cuCtxDestroy": nothing,
        "cuCtxPopCurrent": context,
        "cuCtxPushCurrent": nothing,
        "cuDevicePrimaryCtxRelease": nothing,
        "cuDevicePrimaryCtxRetain": context,
        "cuFuncGetAttribute": lambda number, kernel: (_attribute(kernel, number),),
        "cuFuncSetAttribute": lambda kernel, number, value: _set_attribute(kernel, number, value),
        "cuKernelGetAttribute": lambda number, kernel, _device: (_attribute(kernel, number),),
        "cuKernelSetAttribute": lambda number, value, kernel, _device: _set_attribute(kernel, number, value),
        "cuKernelGetFunction": lambda kernel: (driver.CUfunction(int(kernel)),),
        "cuLaunchKernel": _launch,
        "cuLaunchKernelEx": _launch_ex,
        "cuLibraryGetGlobal": lambda library, name: _variable(driver, library, name),
        "cuLibraryGetKernel": lambda library, name: (driver.CUkernel(kernel_handle(library, name)),),
        "cuLibraryLoadData": load(driver.CUlibrary),
        "cuLibraryLoadFromFile": lambda path, *_options: (driver.CUlibrary(load_file(path)),),
        "cuLibraryUnload": _unload,
        "cuModuleGetFunction": lambda module, name: (driver.CUfunction(kernel_handle(module, name)),),
        "cuModuleGetGlobal": lambda module, name: _variable(driver, module, name),
        "cuModuleLoad": lambda path: (driver.CUmodule(load_file(path)),),
        "cuModuleLoadData": load(driver.CUmodule),
        "cuModuleLoadDataEx": load(driver.CUmodule),
        "cuModuleUnload": _unload,
        "cuTensorMapEncodeTiled": lambda *args: (_tensor_map(driver, *args),),
    }


def compilers() -> Iterator[tuple[Any, str, Any]]:
    """Replace ``nvrtcGetCUBIN``: it also notes which PTX the cubin was made of."""
    from cuda.bindings import nvrtc

    original = nvrtc.nvrtcGetCUBIN

    def get(program: Any, cubin: Any) -> tuple[Any, ...]:
        result = original(program, cubin)
        status, size = nvrtc.nvrtcGetPTXSize(program)
        if not int(result[0]) and not int(status):
            text = bytearray(size)
            if not int(nvrtc.nvrtcGetPTX(program, text)[0]):
                binary.remember(bytes(cubin), text.decode())
        return result

    yield nvrtc, "nvrtcGetCUBIN", get


def load_image(image: Any) -> int:
    """Load PTX or a known binary from bytes, a buffer, or a host address; returns its handle.

    Raises:
        LaunchError: a binary whose PTX is not known.
        PtxSyntaxError: text that is no PTX.
    """
    if isinstance(image, bytes | bytearray | memoryview | np.ndarray):
        raw = bytes(image)
    else:
        address = int(image)
        if not address:
            raise ArgumentError("image", image, "PTX or a cubin")
        binaries = ctypes.string_at(address, 4) in _BINARY
        raw = binary.cubin_at(address) if binaries else ctypes.string_at(address)
    handle = RUNTIME.handle()
    if raw[:4] in _BINARY:
        ptx = binary.ptx_of(raw)
        if ptx is None:
            raw = binary.cubin_at(np.frombuffer(raw, np.uint8).ctypes.data)
            ptx = binary.known_ptx_of(raw)
        RUNTIME.cubins[handle] = raw
    else:
        ptx = raw.decode(errors="replace")
    RUNTIME.libraries[handle] = parse(ptx)  # parsed anew: each load has variables of its own
    return handle


def load_file(path: Any) -> int:
    """Load a file; see `load_image`."""
    name = path.decode() if isinstance(path, bytes) else str(path)
    if not Path(name).is_file():
        raise ArgumentError("path", name, "a file of PTX, or of a cubin that was compiled here")
    return load_image(Path(name).read_bytes())


def _unload(library: Any) -> tuple[()]:
    RUNTIME.unload([int(library)])
    return ()


def module(library: Any) -> Module:
    """Find a loaded module.

    Raises:
        LaunchError: it is not loaded, or not any more.
    """
    found = RUNTIME.libraries.get(int(library))
    if found is None:
        raise LaunchError(f"module {int(library):#x} is not loaded")
    return found


def _text(name: Any) -> str:
    return name.decode(errors="replace").rstrip("\0") if isinstance(name, bytes) else str(name)


def kernel_handle(library: Any, name: Any) -> int:
    """Make the handle of a kernel of a module."""
    here, text = module(library), _text(name)
    if text not in here.kernels:
        raise LaunchError(f"no kernel {text} in the loaded module; it has {', '.join(here.kernels)}")
    handle = RUNTIME.handle()
    RUNTIME.kernels[handle] = LoadedKernel(here, text, _compiled(int(library), text))
    RUNTIME.members.setdefault(int(library), []).append(handle)
    return handle


def _compiled(library: int, name: str) -> dict[int, int]:
    """The attributes of a kernel that its assembler knows; of PTX nothing is known."""
    if library not in RUNTIME.cubins:
        return {}
    used = cubin.resources(RUNTIME.cubins[library], name)
    return {NUM_REGS: used.registers, LOCAL_BYTES: used.local_bytes}


def loaded(kernel: Any) -> LoadedKernel:
    """Find a kernel by its handle.

    Raises:
        LaunchError: its module is not loaded, or not any more.
    """
    found = RUNTIME.kernels.get(int(kernel))
    if found is None:
        raise LaunchError(f"kernel {int(kernel):#x} is not loaded")
    return found


def has_variable(library: Any, name: Any) -> bool:
    """Tell whether a module has a variable of that name."""
    return any(variable.name == _text(name) for variable in module(library).variables)


def variable_at(library: Any, name: Any) -> tuple[int, int]:
    """Find address and size of a variable of a module.

    Raises:
        LaunchError: there is none.
    """
    here, text = module(library), _text(name)
    sizes = {variable.name: variable.size for variable in here.variables}
    addresses = RUNTIME.device().variables(here)
    if text not in sizes or text not in addresses:
        raise LaunchError(f"no variable {text} in the loaded module; it has {', '.join(sizes)}")
    return addresses[text], sizes[text]


def _variable(driver: Any, library: Any, name: Any) -> tuple[Any, int]:
    address, size = variable_at(library, name)
    return driver.CUdeviceptr(address), size


def attributes(kernel: Any) -> dict[int, int]:
    """Collect the values of CU_FUNC_ATTRIBUTE_*; the registers of a kernel loaded as PTX are 0."""
    found = loaded(kernel)
    number = int(found.module.target.strip("sm_af"))
    known = {0: 1024, 1: found.static_smem(), 2: 0, LOCAL_BYTES: 0, NUM_REGS: 0, 5: number, 6: number, 7: 0}
    return {**known, MAX_DYNAMIC_SMEM: 0, 9: -1, **found.attributes}


def _attribute(kernel: Any, number: Any) -> int:
    known = attributes(kernel)
    if int(number) not in known:
        raise LaunchError(f"kernel attribute {int(number)} is not known to the emulator")
    return known[int(number)]


def _set_attribute(kernel: Any, number: Any, value: Any) -> tuple[()]:
    loaded(kernel).attributes[int(number)] = int(value)
    return ()


def _launch(
    kernel: Any, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, smem: int, stream: Any, params: Any, extra: Any
) -> tuple[()]:
    """``cuLaunchKernel``."""
    grid, block = config.Dimensions(gx, gy, gz), config.Dimensions(bx, by, bz)
    return _run(config.Config(grid, block, smem, _handle(stream), None, 0), kernel, params, extra)


def _launch_ex(settings: Any, kernel: Any, params: Any, extra: Any) -> tuple[()]:
    """``cuLaunchKernelEx``. CUlaunchConfig has the layout of the runtime's, with 32 bits of shared memory."""
    raw = config.Config.from_buffer_copy(ctypes.string_at(settings.getPtr(), ctypes.sizeof(config.Config)))
    raw.smem &= 0xFFFFFFFF
    return _run(raw, kernel, params, extra)


def _run(settings: config.Config, kernel: Any, params: Any, extra: Any) -> tuple[()]:
    if extra is not None and int(extra):
        raise LaunchError("kernel parameters in `extra` are not supported: pass kernelParams")
    found = loaded(kernel)
    pointers, keep = _pointers(found.module.kernels[found.name], params)
    found.attributes.setdefault(MAX_DYNAMIC_SMEM, 0)
    run_kernel(settings, int(kernel), pointers)
    del keep
    return ()


def _handle(stream: Any) -> int:
    return 0 if stream is None else int(stream)


def _pointers(kernel: Kernel, params: Any) -> tuple[int, Any]:
    """Make the address of ``void*[n]``, and what keeps it alive, from what cuda.bindings takes as ``kernelParams``.

    An address stands for itself. (values, types): a value of a ctypes type; with type None a ctypes object, or an
    object of the bindings, which has its own memory.

    Raises:
        ArgumentError: another number of values than the kernel has parameters, or one of another size.
    """
    if params is None or isinstance(params, int | np.integer):
        address = int(params or 0)
        if not address and kernel.params:
            raise ArgumentError("kernelParams", params, f"{len(kernel.params)} parameters of {kernel.name}")
        return address, None
    if not isinstance(params, tuple) or len(params) != 2:
        raise ArgumentError("kernelParams", params, "an address, or a pair: values and their ctypes types")
    values, types = ((item if isinstance(item, tuple | list) else (item,)) for item in params)
    if not len(values) == len(types) == len(kernel.params):
        raise ArgumentError(
            "kernelParams", len(values), f"{len(kernel.params)} values, as {kernel.name} has parameters"
        )
    keep: list[Any] = []
    addresses = []
    for param, value, kind in zip(kernel.params, values, types, strict=True):
        if kind is None and hasattr(value, "getPtr"):
            keep.append(value)
            addresses.append(int(value.getPtr()))
            continue
        item = value if kind is None else kind(int(value)) if kind is ctypes.c_void_p else kind(value)
        if not isinstance(item, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
            raise ArgumentError(param.name, value, "a ctypes object, or a value with a ctypes type")
        if ctypes.sizeof(item) < param.size:
            raise ArgumentError(
                param.name, value, f"{param.size} bytes; {type(item).__name__} has {ctypes.sizeof(item)}"
            )
        keep.append(item)
        addresses.append(ctypes.addressof(item))
    array = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
    return ctypes.addressof(array), (array, keep)


def _tensor_map(
    driver: Any, kind: Any, rank: int, address: Any, dims: Any, strides: Any, box: Any, steps: Any, interleave: Any,
    swizzle: Any, promotion: Any, fill: Any,
) -> Any:  # fmt: skip
    """``cuTensorMapEncodeTiled``."""
    lists = [[int(value) for value in values] for values in (dims, strides or [], box, steps)]
    codes = [int(code) for code in (interleave, swizzle, promotion, fill)]
    if int(rank) != len(lists[0]):
        raise ArgumentError("tensorRank", rank, f"the number of sizes, {len(lists[0])}")
    sm100 = RUNTIME.device().arch.tmem
    raw = tensormap.encode_tiled(int(kind), int(address), *lists, *codes, sm100=sm100)
    out = driver.CUtensorMap()
    ctypes.memmove(out.getPtr(), raw, len(raw))
    return out
