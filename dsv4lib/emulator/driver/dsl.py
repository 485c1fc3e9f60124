"""Patch CuTeDSL while a device is active.

Written against nvidia-cutlass-dsl 4.8.1, which the lab pins. Everything private of the DSL that the emulator touches is
in this file, in `host` and in `tvm_ffi`:

* its settings: the device's architecture, line info, no file cache (code compiled here must never reach a GPU run);
* every compile keeps PTX and cubin in a private folder, so that a loaded binary finds its PTX;
* every execution engine gets our runtime symbols;
* every call of a compiled function raises what a callback stored;
* tensors that enter are registered as device memory, and DLPack capsules of torch CPU tensors say "CUDA", so that the
  DSL gives them the global address space as on a GPU;
* questions about the hardware are answered from the device;
* exporting is refused, an object file made here could end up in the cache of a GPU run; and so is loading one, which
  was made for a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsv4lib.emulator.driver import host, tvm_ffi
from dsv4lib.emulator.driver.config import LaunchRefused
from dsv4lib.emulator.driver.device import Device, engines
from dsv4lib.emulator.driver.patching import Patches, patches
from dsv4lib.emulator.driver.symbols import RUNTIME, register, stored_error_first
from dsv4lib.emulator.errors import LaunchError

_DLPACK = ((b"dltensor", 8), (b"dltensor_versioned", 40))  # capsule name, offset of DLDevice.device_type
_CPU, _CUDA = 1, 2
_STATE = SimpleNamespace(patched=False)


@contextmanager
def patched(gpu: Device, folder: str) -> Iterator[None]:
    """Apply all of it for ``gpu``. ``folder`` is private to the context and outlives it by nothing.

    In nested contexts only the settings change: the rest is there, and looks up the active device. Applied twice, it
    would register each symbol twice on an engine, at which LLVM crashes.
    """
    with patches() as patch:
        _settings(patch, gpu)
        if _STATE.patched:
            yield
            return
        patch.set(_STATE, "patched", True)
        _compiler(patch, folder)
        _calls(patch)
        _tensors(patch)
        _hardware(patch)
        _exports(patch)
        tvm_ffi.apply(patch)
        yield


def _settings(patch: Patches, gpu: Device) -> None:
    from cutlass.base_dsl.cache_helpers import JitCacheDict
    from cutlass.base_dsl.compiler import CompileOptions
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cutlass_dsl import CuTeDSL

    for name, value in {
        "CUTE_DSL_ARCH": gpu.arch.name,
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        # Packages on top of the DSL keep object files; they read these when they are imported or called.
        "QUACK_CACHE_ENABLED": "0",
        "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "TORCHDYNAMO_DISABLE": os.environ.get("TORCHDYNAMO_DISABLE", "1"),  # 0: torch.compile compiles
    }.items():
        patch.env(name, value)
    CuTeDSL._get_dsl()
    for dsl in set(DSLSingletonMeta._instances.values()):
        patch.set(dsl.envar, "_arch", gpu.arch.name)
        patch.set(dsl.envar, "lineinfo", True)
        patch.set(dsl.envar, "disable_file_caching", True)
        # Functions compiled outside are bound to the real runtime, those compiled here to ours.
        patch.set(dsl, "compile_options", CompileOptions())
        patch.set(dsl, "jit_cache", JitCacheDict(max_elems=dsl.envar.jit_cache_max_elems))


def _compiler(patch: Patches, folder: str) -> None:
    from cutlass.base_dsl.compiler import CompileOptions, Compiler, DumpDir, KeepCUBIN, KeepPTX
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts

    def keep(original: Any, options: Any, *args: Any) -> None:
        # New option objects: those in place may be the user's, and used again outside.
        options.options[KeepPTX], options.options[KeepCUBIN] = KeepPTX(True), KeepCUBIN(True)
        named = options.options[DumpDir]
        if named.value == "" or isinstance(getattr(named, "folder", None), str):
            options.options[DumpDir] = private = DumpDir(folder)
            private.folder = folder
        original(options, *args)

    def jit(original: Any, compiler: Any, *args: Any, **kwargs: Any) -> Any:
        engine = original(compiler, *args, **kwargs)
        register(engine)
        engines().add(engine)
        return engine

    def read(original: Any, artifacts: Any) -> None:
        original(artifacts)
        host.remember_artifacts(artifacts)

    patch.around(CompileOptions, "apply_envar_settings", keep)
    patch.around(Compiler, "jit", jit)
    patch.around(JitFunctionArtifacts, "__post_init__", read)


def _calls(patch: Patches) -> None:
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

    def run(original: Any, executor: Any, pointers: list[Any]) -> Any:
        try:
            return stored_error_first(original, executor, pointers)
        except LaunchRefused as error:
            raise _dsl_error()(error) from error

    def run_compiled(original: Any, function: Any, pointers: list[Any]) -> Any:
        if function.engine in engines():
            return original(function, pointers)
        host.host_function(function).run(pointers)
        return 0

    def load(original: Any, function: Any) -> list[Any]:
        libraries = stored_error_first(original, function)
        RUNTIME.unload_with(function.engine, [int(library) for library in libraries])
        del libraries[:]  # the DSL would unload our handles through the real runtime, perhaps after the context
        return libraries

    patch.around(JitExecutor, "run_compiled_program", run)
    patch.around(Function, "run_compiled_program", run_compiled)
    patch.around(Function, "_load_cuda_library", load)
    patch.set(Function, "num_devices", property(lambda function: 1))


@functools.cache
def _dsl_error() -> type[Exception]:
    """A refused launch as the exception that the DSL documents for it, and ours."""
    from cuda.bindings.runtime import cudaError_t
    from cutlass.base_dsl.common import DSLCudaRuntimeError

    class CudaLaunchRefused(LaunchRefused, DSLCudaRuntimeError):
        """A launch that the CUDA runtime would refuse."""

        def __init__(self, error: LaunchRefused):
            code = cudaError_t(error.code)
            DSLCudaRuntimeError.__init__(self, code, code.name)
            self.place, self.text = error.place, str(error)

        def __str__(self) -> str:
            return self.text

    return CudaLaunchRefused


def _tensors(patch: Patches) -> None:
    import torch
    from cutlass.cute.runtime import _Tensor

    def init(original: Any, tensor: Any, source: Any, *args: Any, **kwargs: Any) -> None:
        original(tensor, source, *args, **kwargs)
        is_torch = hasattr(source, "untyped_storage")
        if is_torch:
            RUNTIME.track(source)
        elif hasattr(source, "__array_interface__") and RUNTIME.devices:
            RUNTIME.device().memory.array(source)
        # With the torch stand-ins a tensor knows which side it is on; without them all of them are device memory.
        if is_torch and (source.is_cuda or not torch.cuda.is_available()):
            claim_cuda(tensor._dlpack_data)

    patch.around(_Tensor, "__init__", init)


def claim_cuda(capsule: Any) -> None:
    """Make a DLPack capsule of CPU memory say that it is CUDA memory."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    for name, offset in _DLPACK:
        if api.PyCapsule_IsValid(capsule, name):
            kind = ctypes.cast(api.PyCapsule_GetPointer(capsule, name) + offset, ctypes.POINTER(ctypes.c_int32))
            if kind[0] == _CPU:
                kind[0] = _CUDA
            return


def _hardware(patch: Patches) -> None:
    from cutlass.utils.hardware_info import HardwareInfo

    def init(info: Any, device_id: int = 0) -> None:
        if not 0 <= device_id < RUNTIME.device().count:
            raise ValueError(f"Device ID {device_id} is out of range for device count {RUNTIME.device().count}")
        info.device_id = device_id

    def clusters(info: Any, cluster_size: int, stream: Any = None) -> int:
        if not 1 <= cluster_size <= 32:
            raise ValueError(f"Cluster size must be between 1 and 32, {cluster_size} is not supported")
        return max(1, RUNTIME.device().settings.sm_count // cluster_size)

    patch.set(HardwareInfo, "__init__", init)
    patch.set(HardwareInfo, "get_max_active_clusters", clusters)
    patch.set(HardwareInfo, "get_l2_cache_size_in_bytes", lambda info: RUNTIME.device().arch.l2_bytes)
    patch.set(HardwareInfo, "get_device_multiprocessor_count", lambda info: RUNTIME.device().settings.sm_count)


def refuse_export(original: Any, function: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to write object files.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        "code compiled for the emulator must not be exported: it could reach a GPU run through a cache. "
        "Turn off the cache of the package that exports it"
    )


def _exports(patch: Patches) -> None:
    from cutlass.base_dsl.jit_executor import JitCompiledFunction
    from cutlass.cute import runtime

    def refuse_load(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not Path(path).exists():
            return original(path, *args, **kwargs)  # says so
        raise LaunchError(f"{path} was compiled for a GPU and cannot run here: compile inside of emulator.device()")

    for name in ("export_to_c", "dump_to_object"):
        patch.around(JitCompiledFunction, name, refuse_export)
    patch.around(runtime, "load_module", refuse_load)
    # quack reads its switch once; and it deletes the files of its cache that it cannot load.
    package = sys.modules.get("quack.cache")
    if package is not None:
        patch.set(package, "CACHE_ENABLED", False)
