"""Call a compiled CuTeDSL function on a device without patching anything. `launch(compiled, *args)`.

The function's lowered host code is given an execution engine of its own on which our runtime symbols are registered.
That also serves functions that were compiled before a device was active.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from dsv4lib.emulator.driver import binary
from dsv4lib.emulator.driver.device import Device, active, engines, make
from dsv4lib.emulator.driver.memory import extent
from dsv4lib.emulator.driver.signature import check_layout, check_types
from dsv4lib.emulator.driver.symbols import RUNTIME, register
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import ArgumentError

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LOCK = threading.RLock()


def _parameters(compiled: Any) -> list[str]:
    """LLVM types of the host function's parameters."""
    for operation in compiled.ir_module.body.operations:
        attributes = operation.operation.attributes
        if "sym_name" in attributes and str(attributes["sym_name"]).strip('"') == compiled.function_name:
            text = str(attributes["function_type"])
            inner = text[text.index("(") + 1 : text.rindex(")")]
            return _split(inner)
    raise LaunchError(f"the compiled code has no function {compiled.function_name}")


def _split(text: str) -> list[str]:
    """``text`` at its outermost commas.

    >>> _split("struct<(ptr, i32)>, i32")
    ['struct<(ptr, i32)>', 'i32']
    """
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "<(") - (char in ">)")
        if char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]


class HostFunction:
    """A compiled host function bound to our symbols."""

    def __init__(self, compiled: Any):
        from cutlass._mlir.execution_engine import ExecutionEngine

        remember_artifacts(compiled.artifacts)
        if compiled.ir_module is None:
            raise LaunchError("the compiled function has no host code: it was loaded from an object file")
        self.engine = ExecutionEngine(compiled.ir_module, opt_level=2, shared_libs=_libraries())
        register(self.engine)
        engines().add(self.engine)
        self.entry = self.engine.lookup(compiled.function_name)
        self.has_kernels = compiled.has_gpu_module
        self.parameters = _parameters(compiled)
        self.library = ctypes.c_void_p(0)
        self.loaded = False

    def _load(self) -> None:
        """Load the kernels, as the DSL does before the first call."""
        library = ctypes.pointer(self.library)
        result, index = ctypes.c_int32(0), ctypes.c_int32(0)
        for name, values in (("cuda_init", (library, result)), ("cuda_load_to_device", (library, index, result))):
            self._call(_ENTRY(self.engine.raw_lookup(name)), [ctypes.addressof(v) for v in values], result)
        self.loaded = True
        RUNTIME.unload_with(self.engine, [self.library.value])

    def _call(self, function: Any, pointers: list[int], result: ctypes.c_int32) -> None:
        """Call a packed function; errors of callbacks come first."""
        function((ctypes.c_void_p * len(pointers))(*pointers))
        RUNTIME.raise_pending()
        if result.value:
            raise LaunchError(f"the host code ended with CUDA error {result.value}")

    def run(self, pointers: list[Any]) -> None:
        """Call the host function with prepared argument pointers."""
        if self.has_kernels and not self.loaded:
            self._load()
        result = ctypes.c_int32(0)
        values = [p.value if isinstance(p, ctypes.c_void_p) else p for p in pointers]
        self._call(self.entry, [*values, ctypes.addressof(result)], result)


_FUNCTIONS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def host_function(compiled: Any) -> HostFunction:
    """Bind a compiled function to our symbols, once."""
    with _LOCK:
        if compiled not in _FUNCTIONS:
            _FUNCTIONS[compiled] = HostFunction(compiled)
        return _FUNCTIONS[compiled]


def _libraries() -> list[str]:
    """The DSL's runtime library: it has the helpers we do not replace (printing, asserting)."""
    from cutlass.cutlass_dsl import CuTeDSL

    return list(CuTeDSL._get_dsl().get_shared_libs())


def remember_artifacts(artifacts: Any) -> None:
    """Note the PTX and cubin of a compile that kept both."""
    if artifacts is None or not artifacts.PTX or not artifacts.CUBIN:
        return
    ptx = artifacts.PTX.decode() if isinstance(artifacts.PTX, bytes) else artifacts.PTX
    if ".version" in ptx and isinstance(artifacts.CUBIN, bytes):  # contents, not the paths of files that are not there
        binary.remember(artifacts.CUBIN, ptx)


def launch(compiled: Any, *args: Any, gpu: Device | None = None, **kwargs: Any) -> Device:
    """Call a compiled function in the emulator; needs no context and patches nothing.

    Args:
        compiled: result of ``cute.compile(..., options="--keep-ptx --keep-cubin")``, or a dsv4lib ``Compiled``: only
            that keeps what it was compiled with, so that element types and static extents can be checked.
        args: what it takes: CuTe tensors over CPU memory, numbers.
        gpu: where to run; default the active device, else a new one of the function's architecture.

    Returns:
        the device, with the launch's result in ``launches``.

    Raises:
        ArgumentError: ``compiled`` is no compiled function, ``gpu`` no device, or the arguments are not its own.
        LaunchError: the PTX was not kept, or the launch is not allowed.
        EmulatorError: what stopped the kernel.
    """
    function = getattr(compiled, "function", compiled)  # a dsv4lib Compiled holds the DSL's own
    if not all(hasattr(function, name) for name in ("execution_args", "ir_module", "artifacts")):
        raise ArgumentError("compiled", compiled, "the result of cute.compile")
    if gpu is not None and not isinstance(gpu, Device):
        raise ArgumentError("gpu", gpu, "a device of emulator.device() or devices(), or None")
    if gpu is None:
        gpu = RUNTIME.device() if RUNTIME.devices else make(_target(function))
    host, inside = host_function(function), bool(RUNTIME.devices)
    with active(gpu):
        for tensor in _tensors((args, kwargs)):
            if inside and hasattr(tensor, "source"):  # of a torch tensor: all of its storage is the device's memory
                RUNTIME.track(tensor.source)
            register_argument(gpu, tensor)
        pointers, keep = _packed(function, host, args, kwargs, getattr(compiled, "arguments", ()))
        host.run(pointers)
        del keep
    return gpu


def _packed(
    function: Any, host: HostFunction, args: tuple[Any, ...], kwargs: dict[str, Any], examples: tuple[Any, ...]
) -> tuple[list[Any], Any]:
    """Pointers to the arguments, and what keeps them alive. Generated code trusts them blindly: they are checked here.

    ``examples``: the arguments at compile time, empty if they are not known.

    Raises:
        ArgumentError: the arguments do not fit the function.
    """
    signature = function.execution_args.signature
    allowed = f"what {function.function_name}{signature.replace(return_annotation=signature.empty)} takes"
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError("args", (*args, *kwargs), f"{allowed} ({error})") from None
    try:
        pointers, keep = function.execution_args.generate_execution_args(args, kwargs)
    except Exception as error:
        raise ArgumentError("args", (*args, *kwargs), allowed) from error
    leaves = [(name, leaf) for name, argument in bound.arguments.items() for leaf in _leaves(argument)]
    if len(pointers) != len(host.parameters):
        raise ArgumentError("args", (*args, *kwargs), f"{allowed}; it was compiled for {len(host.parameters)} values")
    if len(leaves) == len(pointers):
        for (name, value), kind in zip(leaves, host.parameters, strict=True):
            if isinstance(value, bool | int | float) != (kind[0] in "if" and kind[1:].isdigit()):
                raise ArgumentError("args", value, f"{allowed}; this one is of type {kind}")
            check_layout(name, value, kind)
    check_types(list(bound.arguments), tuple(bound.arguments.values()), examples)
    return pointers, keep


def _leaves(argument: Any) -> Iterator[Any]:
    """The values in tuples, lists and dictionaries; numbers of the DSL as Python's."""
    if isinstance(argument, tuple | list):
        for item in argument:
            yield from _leaves(item)
    elif isinstance(argument, dict):
        yield from _leaves(tuple(argument.values()))
    else:
        value = getattr(argument, "value", argument)
        yield value if isinstance(value, bool | int | float) else argument


def _tensors(argument: Any) -> Iterator[Any]:
    """The tensors in an argument, however deep in tuples, lists and dictionaries."""
    if hasattr(argument, "_dltensor_wrapper") or hasattr(argument, "data_ptr"):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _tensors(item)
    elif isinstance(argument, dict):
        yield from _tensors(tuple(argument.values()))


def register_argument(gpu: Device, tensor: Any) -> None:
    """Register the memory of a torch tensor or a CuTe tensor."""
    if hasattr(tensor, "untyped_storage"):
        gpu.memory.tensor(tensor)
        return
    low, high = extent(tuple(tensor.shape), tuple(tensor.stride), tensor.element_type.width)
    gpu.memory.span(tensor.data_ptr + low, high - low, tensor, f"tensor {tuple(tensor.shape)} {tensor.element_type}")


def _target(function: Any) -> str:
    """The architecture a compiled function is for."""
    ptx = function.__ptx__
    if not ptx:
        raise LaunchError("the compiled function kept no PTX: compile it with --keep-ptx --keep-cubin")
    return binary.parsed(ptx.rstrip("\0")).target
