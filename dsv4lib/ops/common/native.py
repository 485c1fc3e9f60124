"""Launches on a GPU from words in memory: the arguments of compiled host code, laid out once and called by address.

The DSL's own call path converts every argument anew, hundreds of Python calls a launch. Its compiled function takes an
array of addresses, one for each argument, and one more for the CUDA error that it answers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dsv4lib.dsl.tensors import DeviceTensor, leaf_bytes, leaves
from dsv4lib.errors import ArgumentError, DSV4Error

WORD = 8
Entry = Callable[[int], Any]
_ENTRIES: weakref.WeakKeyDictionary[Any, Entry] = weakref.WeakKeyDictionary()


class LaunchFailed(DSV4Error, RuntimeError):
    """The CUDA runtime refused a launch; the message says what it calls the error."""


class Block:
    """Arguments of launches, one after the other.

    Attributes:
        words: the memory, 8 bytes a word.
        pointers: (word, address, bytes of memory it points to) of each tensor.
        calls: (address for `entry`, where the error comes) of each launch.
    """

    def __init__(self, launches: Sequence[Sequence[Any]]):
        packed = [[leaf_bytes(one) for one in values] for values in launches]
        sizes = [[-(-len(one) // WORD) for one in values] for values in packed]
        self.words = (ctypes.c_uint64 * max(1, sum(map(sum, sizes))))()
        self.pointers: list[tuple[int, int, int]] = []
        self.calls: list[tuple[int, ctypes.c_int32]] = []
        self._arrays = []  # of addresses
        start, word = ctypes.addressof(self.words), 0
        for values, contents, counts in zip(launches, packed, sizes, strict=True):
            addresses, result = (ctypes.c_uint64 * (len(values) + 1))(), ctypes.c_int32(0)
            for i, (value, content, count) in enumerate(zip(values, contents, counts, strict=True)):
                ctypes.memmove(start + WORD * word, content, len(content))
                addresses[i] = start + WORD * word
                if isinstance(value, DeviceTensor):
                    self.pointers.append((word, value.data_ptr, value.nbytes))
                word += count
            addresses[len(values)] = ctypes.addressof(result)
            self._arrays.append(addresses)
            self.calls.append((ctypes.addressof(addresses), result))


def entry(function: Any) -> Entry:
    """Return the C function of a compiled one, its kernels loaded; ``function`` must outlive it."""
    found = _ENTRIES.get(function)
    if found is None:
        found = _ENTRIES[function] = function.to(None).capi_func
    return found


def values_of(code: Any, args: tuple) -> list[Any]:
    """The values of a launch, which generated code trusts blindly: as many, and of the kinds, that it was compiled for.

    Args:
        code: a `Compiled`.

    Raises:
        ArgumentError: they are others.
    """
    given, wanted = list(leaves(args)), list(leaves(code.arguments))
    if len(given) != len(wanted):
        raise ArgumentError("args", len(given), f"the {len(wanted)} values that {code.name} was compiled for")
    for one, like in zip(given, wanted, strict=True):
        if isinstance(one, DeviceTensor):
            if one.element_type is not like.element_type or len(one.shape) != len(like.shape):
                raise ArgumentError("args", one, f"{like}, as {code.name} was compiled for")
        elif type(one) is not type(like):
            raise ArgumentError("args", type(one).__name__, f"{type(like).__name__}, as {code.name} was compiled for")
    return given


def launch(function: Any, values: Sequence[Any]) -> None:
    """Queue a kernel, on the GPU that holds its tensors.

    Raises:
        LaunchFailed: the CUDA runtime refuses it.
    """
    block = Block([values])
    ((address, result),) = block.calls
    device = next((one.source.device for one in values if isinstance(one, DeviceTensor)), None)
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        entry(function)(address)
    if result.value:
        raise failure(result.value)


def failure(code: int) -> LaunchFailed:
    """Make the error of a launch that ended with a CUDA error."""
    from cuda.bindings import runtime

    return LaunchFailed(f"CUDA error {code}: {runtime.cudaError_t(code).name}")
