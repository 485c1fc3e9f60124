"""Let ``torch.compile`` make Triton kernels for the emulated device.

Dynamo traces and Inductor writes Triton kernels without a GPU. Four things ask for one: what Inductor does while it
compiles, outside of the modes of its caller; the function that allocates results, which is C++; compiling in other
processes, which know nothing of the device; and indexing of fake tensors, which sets their device as the current one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsv4lib.emulator.driver.cuda_api import timed
from dsv4lib.emulator.driver.patching import Patches
from dsv4lib.emulator.driver.symbols import RUNTIME

COMPILER = "torch._inductor.compile_fx"
_LIBRARY = str(Path(torch.__file__).parent / "lib" / "libc10.so")
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CPU, _CUDA, _DEVICE_TYPES = 0, 1, 2
_SWITCH = "TORCHDYNAMO_DISABLE"
_SAID: list[bool] = []


def told(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``torch.compile``: the first call by a script, while it is off, writes a line to standard error.

    Calls by packages, which decorate functions with it, write nothing.
    """

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if not _SAID and sys._getframe(1).f_globals.get("__name__") == "__main__" and _disabled():
            _SAID.append(True)
            said = "torch.compile is off, its functions run eagerly on the CPU"
            print(f"dsv4: {said}; {_SWITCH}=0 compiles them for the emulated device", file=sys.stderr)
        return original(*args, **kwargs)

    return compile


def _disabled() -> bool:
    """Whether Dynamo does nothing; it reads its switch when it is imported."""
    config = sys.modules.get("torch._dynamo.config")
    return os.environ.get(_SWITCH) == "1" if config is None else bool(config.disable)


def lead(patch: Patches, mode: Any, module: ModuleType) -> None:
    """Prepare Inductor, whose module of `COMPILER` has been imported.

    Args:
        mode: rewrites devices in calls of torch (`torch_shims.CudaMode`).
    """
    from torch._C._dynamo import guards
    from torch._dynamo import device_interface
    from torch._inductor import config, output_code
    from torch._inductor.runtime import benchmarking
    from torch._subclasses import meta_utils

    def under(original: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with mode:
            return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")

    _guard(patch)
    patch.around(module, "compile_fx", under)
    patch.around(output_code.CompiledFxGraph, "__call__", under)
    patch.around(meta_utils.MetaTensorDescriber, "describe_tensor", under)
    patch.set(guards, "_empty_strided_cuda", empty)
    patch.set(config, "compile_threads", 1)
    patch.set(config, "use_static_triton_launcher", False)  # C++ that a build without CUDA does not have
    patch.set(torch._C, "_cuda_getCurrentRawStream", lambda _device: RUNTIME.stream)
    patch.set(device_interface.CudaInterface, "get_raw_stream", staticmethod(lambda _device: RUNTIME.stream))
    patch.set(benchmarking.benchmarker, "benchmark_gpu", lambda call, *_args, **_options: timed(call))


def _guard(patch: Patches) -> None:
    """Let torch set a CUDA device as the current one: nothing is done, as for the CPU.

    A build without CUDA has no guard of that device in its registry (c10::impl::device_guard_impl_registry).
    """
    try:
        registry = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(_LIBRARY), _REGISTRY)
    except (OSError, ValueError):
        return  # another build of torch: what it cannot do, it says
    if not registry[_CUDA]:
        patch.set(_Registry(registry), "cuda", registry[_CPU])


class _Registry:
    """The entry of CUDA, as an attribute."""

    def __init__(self, entries: Any):
        self.__dict__["entries"] = entries
        self.__dict__["cuda"] = entries[_CUDA]

    def __setattr__(self, name: str, value: Any) -> None:
        self.entries[_CUDA] = value
