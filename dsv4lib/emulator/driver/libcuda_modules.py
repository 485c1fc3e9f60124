"""The functions of the driver library: modules, libraries, kernels, launches, linking."""

from __future__ import annotations

import ctypes
from typing import Any

from dsv4lib.emulator.driver import config, modules
from dsv4lib.emulator.driver.libcuda import (
    INVALID_VALUE,
    NOT_FOUND,
    SIZE,
    U32,
    U64,
    C,
    I,
    P,
    entry,
    put,
    queue,
    succeed,
    text,
)  # fmt: skip
from dsv4lib.emulator.driver.symbols import MAX_DYNAMIC_SMEM, RUNTIME, occupancy, run_kernel, tensor_map_encoders
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.errors import ArgumentError

PTX_INPUT = 1  # CUjitInputType
_LINKS: dict[int, list[Any]] = {}  # code handed to a linker, by its handle


def _load(out: int, image: int) -> None:
    put(out, P, modules.load_image(image))


entry("cuModuleLoadData", P, P)(_load)
entry("cuModuleLoadDataEx", P, P, U32, P, P)(lambda out, image, *_options: _load(out, image))
entry("cuModuleLoadFatBinary", P, P)(_load)
entry("cuLibraryLoadData", P, P, P, P, U32, P, P, U32)(lambda out, image, *_options: _load(out, image))


@entry("cuModuleLoad", P, C)
def load_file(out: int, path: bytes, *_options: Any) -> None:
    """Load a file."""
    put(out, P, modules.load_file(path))


entry("cuLibraryLoadFromFile", P, C, P, P, U32, P, P, U32)(load_file)


@entry("cuModuleUnload", P, release=True)
def unload(library: int) -> None:
    """Forget a module and its kernels."""
    RUNTIME.unload([library])


entry("cuLibraryUnload", P, release=True)(unload)


@entry("cuModuleGetFunction", P, P, C)
def get_function(out: int, library: int, name: bytes) -> int:
    """Find a kernel of a module."""
    module = RUNTIME.libraries.get(library)
    if module is not None and (name or b"").decode(errors="replace") not in module.kernels:
        return NOT_FOUND  # packages ask whether there is one
    put(out, P, modules.kernel_handle(library, name))
    return 0


entry("cuLibraryGetKernel", P, P, C)(get_function)


@entry("cuLibraryGetModule", P, P)
def library_module(out: int, library: int) -> None:
    """Get the module of a library: itself."""
    put(out, P, library)


@entry("cuLibraryGetKernelCount", P, P)
def kernel_count(out: int, library: int) -> None:
    """Count the kernels of a library."""
    put(out, U32, len(modules.module(library).kernels))


entry("cuModuleGetFunctionCount", P, P)(kernel_count)


@entry("cuLibraryEnumerateKernels", P, U32, P)
def kernels_of(out: int, count: int, library: int) -> None:
    """Get the kernels of a library."""
    for i, name in enumerate(list(modules.module(library).kernels)[:count]):
        put(out + 8 * i, P, modules.kernel_handle(library, name))


@entry("cuModuleGetGlobal", P, P, P, C)
def get_global(address: int, nbytes: int, library: int, name: bytes) -> int:
    """Find a variable of a module."""
    if not modules.has_variable(library, name):
        return NOT_FOUND
    at, size = modules.variable_at(library, name)
    put(address, U64, at)
    put(nbytes, SIZE, size)
    return 0


entry("cuLibraryGetGlobal", P, P, P, C)(get_global)


@entry("cuKernelGetFunction", P, P)
def kernel_function(out: int, kernel: int) -> None:
    """Get the function of a kernel: itself."""
    put(out, P, kernel)


@entry("cuKernelGetName", P, P)
def kernel_name(out: int, kernel: int) -> None:
    """Get a kernel's name."""
    put(out, P, text(modules.loaded(kernel).name))


entry("cuFuncGetName", P, P)(kernel_name)


@entry("cuKernelGetParamInfo", P, SIZE, P, P)
def parameter_info(kernel: int, index: int, offset: int, nbytes: int) -> int:
    """Get place and size of a parameter; the status tells where they end."""
    found = modules.loaded(kernel)
    params = found.module.kernels[found.name].params
    if index >= len(params):
        return INVALID_VALUE
    put(offset, SIZE, params[index].offset)
    put(nbytes, SIZE, params[index].size)
    return 0


entry("cuFuncGetParamInfo", P, SIZE, P, P)(parameter_info)


@entry("cuKernelGetAttribute", P, I, P, I)
def kernel_attribute(out: int, number: int, kernel: int, *_device: int) -> int:
    """Get an attribute of a kernel; the status says which only a compiler knows."""
    known = modules.attributes(kernel)
    if number not in known:
        return INVALID_VALUE
    put(out, I, known[number])
    return 0


entry("cuFuncGetAttribute", P, I, P)(kernel_attribute)


@entry("cuKernelSetAttribute", I, I, P, I)
def kernel_set_attribute(number: int, value: int, kernel: int, _device: int) -> None:
    """Set an attribute of a kernel."""
    modules.loaded(kernel).attributes[number] = value


@entry("cuFuncSetAttribute", P, I, I)
def function_set_attribute(kernel: int, number: int, value: int) -> None:
    """Set an attribute of a function."""
    modules.loaded(kernel).attributes[number] = value


succeed("cuFuncSetCacheConfig", "cuKernelSetCacheConfig", "cuFuncSetSharedMemConfig", "cuFuncLoad")


@entry("cuLaunchKernel", P, U32, U32, U32, U32, U32, U32, U32, P, P, P)
def launch(
    kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, smem: int, stream: int | None,
    params: int | None, extra: int | None,
) -> None:  # fmt: skip
    """Run a kernel, launched without attributes."""
    grid, block = config.Dimensions(gx, gy, gz), config.Dimensions(bx, by, bz)
    _run(config.Config(grid, block, smem, queue(stream), None, 0), kernel, params, extra)


@entry("cuLaunchCooperativeKernel", P, U32, U32, U32, U32, U32, U32, U32, P, P)
def launch_cooperative(kernel: int, *rest: Any) -> None:
    """Run a kernel whose CTAs are all resident."""
    gx, gy, gz, bx, by, bz, smem, stream, params = rest
    attribute = (config.Attribute * 1)()
    attribute[0].id, attribute[0].value[0] = config.COOPERATIVE, 1
    grid, block = config.Dimensions(gx, gy, gz), config.Dimensions(bx, by, bz)
    _run(config.Config(grid, block, smem, queue(stream), attribute, 1), kernel, params, None)


@entry("cuLaunchKernelEx", P, P, P, P)
def launch_ex(settings: int, kernel: int, params: int | None, extra: int | None) -> None:
    """Run a kernel. CUlaunchConfig has the layout of the runtime's, with 32 bits of shared memory."""
    raw = config.Config.from_buffer_copy(ctypes.string_at(settings, ctypes.sizeof(config.Config)))
    raw.smem &= 0xFFFFFFFF
    raw.stream = queue(raw.stream)
    _run(raw, kernel, params, extra)


def _run(settings: config.Config, kernel: int, params: int | None, extra: int | None) -> None:
    if extra:
        raise LaunchError("kernel parameters in `extra` are not supported: pass kernelParams")
    found = modules.loaded(kernel)
    if found.module.kernels[found.name].params and not params:
        raise ArgumentError("kernelParams", params, f"the parameters of {found.name}")
    found.attributes.setdefault(MAX_DYNAMIC_SMEM, 0)
    run_kernel(settings, kernel, params or 0)


@entry("cuOccupancyMaxActiveBlocksPerMultiprocessor", P, P, I, SIZE)
def occupancy_blocks(out: int, kernel: int, threads: int, smem: int, *_flags: int) -> None:
    """Count CTAs an SM, by threads and shared memory."""
    occupancy(out, kernel, threads, smem)


entry("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", P, P, I, SIZE, U32)(occupancy_blocks)


@entry("cuOccupancyMaxPotentialBlockSize", P, P, P, P, SIZE, I)
def occupancy_block_size(least: int, block: int, kernel: int, _smem_of: int, smem: int, limit: int) -> None:
    """Choose the largest block; ``least`` CTAs fill the device."""
    threads = limit if 0 < limit < 1024 else 1024
    found = modules.loaded(kernel)
    request = LaunchRequest(found.name, found.module, (1, 1, 1), (threads, 1, 1), dynamic_smem=smem)
    put(block, I, threads)
    put(least, I, config.ctas_per_sm(request, RUNTIME.device().arch) * RUNTIME.device().settings.sm_count)


entry("cuOccupancyMaxPotentialBlockSizeWithFlags", P, P, P, P, SIZE, I, U32)(
    lambda *args: occupancy_block_size(*args[:6])
)
for _name, (_function, _types) in tensor_map_encoders().items():
    entry(_name, *_types)(_function)


@entry("cuLinkCreate", U32, P, P, P)
def link_create(_count: int, _options: int, _values: int, out: int) -> None:
    """Begin to link."""
    handle = RUNTIME.handle()
    _LINKS[handle] = []
    put(out, P, handle)


@entry("cuLinkAddData", P, I, P, SIZE, C, U32, P, P)
def link_add(link: int, kind: int, data: int, nbytes: int, _name: bytes, *_options: Any) -> None:
    """Take PTX."""
    if kind != PTX_INPUT:
        raise LaunchError(f"the emulated driver links PTX alone, not input of kind {kind} of CUjitInputType")
    parts = _linked(link)
    if not data:
        raise ArgumentError("data", data, "the address of PTX")
    parts.append(ctypes.string_at(data, nbytes).rstrip(b"\0") + b"\0")


def _linked(link: int) -> list[Any]:
    """What a linker was given.

    Raises:
        ArgumentError: there is no such linker.
    """
    if link not in _LINKS:
        raise ArgumentError("state", hex(link), "what cuLinkCreate returned and is not destroyed yet")
    return _LINKS[link]


@entry("cuLinkComplete", P, P, P)
def link_complete(link: int, out: int, nbytes: int) -> None:
    """Hand back the PTX: it is loaded as a cubin would be."""
    parts = _linked(link)
    if len(parts) != 1:
        raise LaunchError(f"the emulated driver links one file of PTX, not {len(parts)}")
    (image,) = parts
    buffer = ctypes.create_string_buffer(image, len(image))
    parts.append(buffer)  # kept until the link is destroyed
    put(out, P, ctypes.addressof(buffer))
    put(nbytes, SIZE, len(image))


@entry("cuLinkDestroy", P, release=True)
def link_destroy(link: int) -> None:
    """Forget what was linked."""
    _LINKS.pop(link, None)
