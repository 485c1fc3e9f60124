"""Call functions compiled with ``--enable-tvm-ffi``.

quack, FlashInfer and FlashAttention 4 compile so.

Such a function exists in the same host module as ``__tvm_ffi_<name>(handle, args, count, result)``; it decodes tensors
itself and calls the ordinary host function. The DSL would throw the execution engine away and link the module anew as
an object file, where no symbols can be registered; here the engine is kept. What the engine finds by name is the packed
wrapper, so the C function that tvm-ffi needs is a callback of ours around it.

The generated code compares each tensor's device with the one it was compiled for. torch's CPU tensors arrive as what
they are; the builder is made to take the declared device for the actual one. Code built that way must not leave the
process (`dsl` refuses exports).
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

from dsv4lib.emulator.driver.patching import Patches
from dsv4lib.emulator.driver.symbols import RUNTIME, stored_error_first
from dsv4lib.emulator.errors import LaunchError

_PACKED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SAFE_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
_LIBRARY_SYMBOLS = ("TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts", "TVMFFIEnvGetStream")
_OBJECT_HEADER, _DEVICE_TYPE = 24, 8  # bytes: header of a tvm-ffi object; DLTensor.device, after the data pointer
_CPU, _CUDA = 1, 2
_OUTSIDE = "this function was compiled for the emulator: it runs inside of emulator.device() only"
_KEPT: list[Any] = []  # callbacks that compiled functions hold


def apply(patch: Patches) -> None:
    """Patch the tvm-ffi path, if tvm-ffi is installed."""
    found = importlib.util.find_spec("tvm_ffi")
    if found is None or found.origin is None:  # a folder of that name beside a script is a package without origin
        return
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.base_dsl.tvm_ffi_builder import tvm_ffi_builder
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider

    from dsv4lib.emulator.driver import dsl

    patch.around(Compiler, "jit", _register_library)
    patch.set(provider.TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", _create)
    patch.around(provider.TVMFFIJitCompiledFunctionBase, "export_to_c", dsl.refuse_export)
    for kind in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        patch.around(kind, "__call__", _call)
    patch.around(tvm_ffi_builder.TVMFFIFunctionBuilder, "decode_param_tensor", _decode)
    patch.set(tvm_ffi_builder.TVMFFIBuilder, "load_dltensor_device_type", _declared_device)
    patch.around(_Tensor, "__init__", _claim_cuda)


def _library() -> ctypes.CDLL:
    """libtvm_ffi itself."""
    import tvm_ffi

    return ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), mode=ctypes.RTLD_GLOBAL)


def _register_library(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the engine the functions of libtvm_ffi that generated code calls."""
    engine = original(*args, **kwargs)
    library = _library()
    for name in _LIBRARY_SYMBOLS:
        engine.raw_register_runtime(name, ctypes.cast(getattr(library, name), ctypes.c_void_p))
    return engine


def _create(function: Any) -> Any:
    """The tvm-ffi function of a compiled function, on its own engine; None without one (cross compile)."""
    import tvm_ffi

    engine = function.engine
    if engine is None:
        return None
    address = engine.raw_lookup("__tvm_ffi_" + function.function_name)
    if not address:
        raise LaunchError(f"{function.function_name} has no tvm-ffi entry")
    packed = _PACKED(address)

    library = _library()

    def safe_call(handle: int, args: int, count: int, result: int) -> int:
        if not RUNTIME.devices:  # kept by its caller, or in the caller's cache, beyond the device
            library.TVMFFIErrorSetRaisedFromCStr(b"RuntimeError", _OUTSIDE.encode())
            return -1
        values = [ctypes.c_void_p(handle), ctypes.c_void_p(args), ctypes.c_int32(count), ctypes.c_void_p(result)]
        code = ctypes.c_int32(0)
        packed((ctypes.c_void_p * 5)(*map(ctypes.addressof, (*values, code))))
        return code.value

    callback = _SAFE_CALL(safe_call)
    _KEPT.append((callback, engine))
    address = ctypes.cast(callback, ctypes.c_void_p).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=engine)


def _call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Register the tensors, call, raise what a callback stored."""
    from dsv4lib.emulator.driver.device import engines

    if function.engine not in engines():
        raise LaunchError("this tvm-ffi function was compiled outside of emulator.device(): compile it inside")
    for tensor in _torch_tensors((args, kwargs)):
        RUNTIME.track(tensor)
    return stored_error_first(original, function, *args, **kwargs)


def _torch_tensors(value: Any) -> Any:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _torch_tensors(item)
    elif isinstance(value, dict):
        yield from _torch_tensors(list(value.values()))


def _decode(original: Any, builder: Any, block: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
    """Remember which parameter is being decoded."""
    builder.emulated_param = param
    return original(builder, block, param, *args, **kwargs)


def _declared_device(builder: Any, dltensor: Any) -> Any:
    """The device type that the parameter declares, in place of the tensor's own."""
    return builder.i32(builder.emulated_param.dlpack_device_type)


def _claim_cuda(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
    """Example tensors at compile time: CPU memory says that it is CUDA memory, so that a device is declared."""
    original(tensor, *args, **kwargs)
    held = tensor.__dict__.get("_tvm_ffi_tensor")
    if held is not None:
        address = held.__chandle__() + _OBJECT_HEADER + _DEVICE_TYPE
        kind = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
        if kind[0] == _CPU:
            kind[0] = _CUDA
