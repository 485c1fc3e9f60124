"""Bind public kernels as providers of the rows. An op has a module with `providers()`; no code of theirs is here.

How to have them, on a machine with an sm_90 GPU and CUDA's compiler, in an environment of Python 3.12 and torch 2.11
(the release that vLLM 0.26 was built for)::

    pip install vllm==0.26.0 tilelang==0.1.15
    pip install --no-deps tile-kernels==2.1.0 quack-kernels==0.6.5

=====================  =====================================================================================
package                what it brings
=====================  =====================================================================================
vllm                   its CUDA, Triton and CuTe DSL operators for this model, and a copy of DeepGEMM
tilelang               the compiler of vLLM's mHC kernels and of TileKernels
tile-kernels           DeepSeek's TileKernels; its metadata ask for a newer torch, the kernels here do not
quack-kernels          RMSNorm in CuTe DSL, and what vLLM's CuTe DSL kernels import
=====================  =====================================================================================

A provider whose package is missing raises `Absent`. So does one that lacks what the row needs; the reason says what.
TileLang and DeepGEMM compile at the first call, up to a minute a kernel; both keep what they compiled
(`TILELANG_CACHE_DIR`, `DG_JIT_CACHE_DIR`). Importing quack adds its indexing to CuTe's tensors in the whole process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsv4lib.bench.ops.case import Absent, Call

Read = Callable[[Any], torch.Tensor]
NAMES = {"tile_kernels": "tile-kernels", "quack": "quack-kernels", "cutlass": "nvidia-cutlass-dsl"}


def installed(package: str) -> bool:
    """Tell whether a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def need(*packages: str) -> None:
    """Raise `Absent`, naming it, if one of these packages is not installed."""
    for package in packages:
        if not installed(package):
            raise Absent(f"package {NAMES.get(package, package)} is not installed")


def load(module: str, *others: str) -> ModuleType:
    """Return a module of a third party, which also needs the packages ``others``.

    Raises:
        Absent: its package or one of the others is not installed.
    """
    need(module.partition(".")[0], *others)
    return importlib.import_module(module)


def vllm_operators(library: str, namespace: str) -> Any:
    """Return vLLM's operators of a library, as ``torch.ops.<namespace>``.

    `_C_stable_libtorch`, `_moe_C_stable_libtorch`.

    Raises:
        Absent: vLLM, or this library of it, is not installed.
    """
    need("vllm")
    _loaded(library)
    return getattr(torch.ops, namespace)


@cache
def _loaded(library: str) -> None:
    places = importlib.util.find_spec("vllm").submodule_search_locations
    paths = [path for place in places for path in Path(place).glob(f"{library}.*so")]
    if not paths:
        raise Absent(f"this vllm has no {library}")
    torch.ops.load_library(str(paths[0]))


def capability() -> int:
    """Return the capability of the current device: 90, 100, ..."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


class Late(Mapping[str, torch.Tensor]):
    """Outputs of a function that returns new ones at every call. Converted when they are read, so never in the time.

    Args:
        run: the call; what it returns is kept.
        read: by output, how to get it from what the last call returned.
    """

    def __init__(self, run: Callable[[], Any], **read: Read) -> None:
        self._run, self._read, self._last = run, read, None

    def call(self) -> None:
        """Return what is timed."""
        self._last = self._run()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name](self._last)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


Bound = tuple[Call, Mapping[str, torch.Tensor]]


def bound(run: Callable[[], Any], **read: Read) -> Bound:
    """Return what `Provider.bind` returns; see `Late`."""
    outputs = Late(run, **read)
    return outputs.call, outputs


def new(like: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an output on the device of ``like``."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def exponent_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Return UE8M0 bytes of fp32 powers of two."""
    return (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
