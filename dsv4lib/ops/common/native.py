"""Launch on a GPU from words in memory. They are arguments of compiled host code, laid out once, called by address.

The DSL's own call path converts every argument anew, hundreds of Python calls a launch. Its compiled function takes an
array of addresses, one for each argument, and one more for the CUDA error that it answers.
"""

from __future__ import annotations

import copy
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
        self.pointers: list[tuple[int, int, int]] = []
        self._places: list[list[int]] = []  # words of each launch's values
        contents, word = bytearray(), 0
        for values in launches:
            self._places.append([])
            for value in values:
                content = leaf_bytes(value)
                contents += content + bytes(-len(content) % WORD)
                if isinstance(value, DeviceTensor):
                    self.pointers.append((word, value.data_ptr, value.nbytes))
                self._places[-1].append(word)
                word = len(contents) // WORD
        self._lay(bytes(contents))

    def copy(self) -> Block:
        """The same words in other memory."""
        made = copy.copy(self)
        made._lay(bytes(self.words))
        return made

    def _lay(self, contents: bytes) -> None:
        self.words = (ctypes.c_uint64 * max(1, len(contents) // WORD)).from_buffer_copy(contents or bytes(WORD))
        self.calls: list[tuple[int, ctypes.c_int32]] = []
        self._arrays = []  # of addresses
        start = ctypes.addressof(self.words)
        for places in self._places:
            result = ctypes.c_int32(0)
            addresses = (ctypes.c_uint64 * (len(places) + 1))(*(start + WORD * word for word in places))
            addresses[len(places)] = ctypes.addressof(result)
            self._arrays.append(addresses)
            self.calls.append((ctypes.addressof(addresses), result))


def entry(function: Any) -> Entry:
    """Return the C function of a compiled one, its kernels loaded.

    ``function`` must outlive it.
    """
    found = _ENTRIES.get(function)
    if found is None:
        found = _ENTRIES[function] = function.to(None).capi_func
    return found


def address_of(call: Entry) -> int | None:
    """Address of a C function; None of one of Python."""
    return ctypes.cast(call, ctypes.c_void_p).value if isinstance(call, ctypes._CFuncPtr) else None  # type: ignore[attr-defined]


def values_of(code: Any, args: tuple) -> list[Any]:
    """Return the values of a launch.

    Generated code trusts them blindly: as many, and of the kinds, as it was compiled for.

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
