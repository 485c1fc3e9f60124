"""Wrap tensors of a kernel's call. Fake ones compile it; torch tensors, checked by name, launch it.

Kernels trust what they are given; everything that can be wrong with a tensor is caught here.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

from dsv4lib.dsl.kv_entry import page_divisor
from dsv4lib.errors import ArgumentError

WIDEST = 128  # bytes: what every copy's alignment divides
TORCH = {
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Float16: torch.float16,
    cutlass.Float32: torch.float32,
    cutlass.Float8E4M3FN: torch.float8_e4m3fn,
    cutlass.Int64: torch.int64,
    cutlass.Int32: torch.int32,
    cutlass.Uint8: torch.uint8,
}


class Fakes:
    """Fake row-major tensors whose extents are symbols: equal names are equal extents."""

    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}

    def __call__(self, dtype: Any, extents: str, align: int = 0) -> Any:
        """Return a tensor with one letter a mode. align: bytes on which its rows start, 0: those of an element."""
        align = align or dtype.width // 8
        shape = tuple(self.symbols.setdefault(e, cute.sym_int32(symbol=e)) for e in extents)
        units = 8 * align // dtype.width
        stride = (*(cute.sym_int64(divisibility=units) for _ in extents[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


class Divisor(NamedTuple):
    """Hold what a kernel needs to divide a 31-bit count by a number.

    See `kv_entry.page_divisor`.
    """

    number: cutlass.Int32
    multiplier: cutlass.Uint32
    shift: cutlass.Int32


def divisor(number: int) -> Divisor:
    """Make the `Divisor` of a number from 1 to 2^24."""
    multiplier, shift = page_divisor(number)
    return Divisor(cutlass.Int32(number), cutlass.Uint32(multiplier), cutlass.Int32(shift))


def strides_of(x: torch.Tensor) -> tuple[int, ...]:
    """Return strides of a tensor as kernels and TMA descriptors get them, in elements.

    That of an extent of 1 says nothing and may be any number in torch. It becomes what follows the dimensions after it,
    on `WIDEST` bytes; in the last dimension 1. Other strides are the tensor's.
    """
    if 1 not in x.shape:
        return x.stride()
    unit, reach = WIDEST // x.element_size(), 1
    found: list[int] = []
    for extent, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if extent == 1:
            stride = -(-reach // unit) * unit if found else 1
        found.append(stride)
        reach = max(reach, extent * stride)
    return tuple(reversed(found))


class DeviceTensor:
    """A torch tensor as compiled host code reads it. Pointer, every extent (int32), every stride but the last (int64).

    What `cute.runtime.from_dlpack(x).mark_layout_dynamic(leading_dim=x.dim() - 1)` describes, a hundred times cheaper.

    Attributes:
        source: the torch tensor; its last stride is 1.
        element_type: the DSL's type of an element.
        data_ptr, shape: of the source. stride: see `strides_of`.
    """

    __slots__ = ("__weakref__", "_memory", "data_ptr", "element_type", "shape", "source", "stride")

    def __init__(self, source: torch.Tensor, element_type: Any) -> None:
        self.source, self.element_type = source, element_type
        self.data_ptr, self.shape, self.stride = source.data_ptr(), tuple(source.shape), strides_of(source)
        self._memory: Any = None

    def __repr__(self) -> str:
        return f"tensor {self.element_type} {self.shape}:{self.stride}"

    @property
    def dynamic_shapes_mask(self) -> tuple[int, ...]:
        """Return 1 for every extent: all are read from the descriptor."""
        return (1,) * len(self.shape)

    @property
    def dynamic_strides_mask(self) -> tuple[int, ...]:
        """Return 1 for every stride but the last, which is the constant 1."""
        return (1,) * (len(self.shape) - 1) + (0,)

    @property
    def nbytes(self) -> int:
        """From the first to the last byte."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.source.element_size()

    def packed(self) -> bytes:
        """Return the descriptor; its first 8 bytes are the pointer.

        Raises:
            ArgumentError: an extent of 2^31 or more.
        """
        if max(self.shape) >= 1 << 31:
            raise ArgumentError("shape", self.shape, "extents below 2^31")
        return _descriptor(len(self.shape)).pack(self.data_ptr, *self.shape, *self.stride[:-1])

    def __c_pointers__(self) -> list[int]:
        """Return what the DSL's own call path asks for: addresses of the argument's words."""
        if self._memory is None:
            self._memory = ctypes.create_string_buffer(self.packed())
        return [ctypes.addressof(self._memory)]


@functools.cache
def _descriptor(rank: int) -> struct.Struct:
    return struct.Struct(f"@P{rank}i{rank - 1}q" if rank > 1 else "@Pi")


_NUMBERS = {
    cutlass.Int32: struct.Struct("@i"),
    cutlass.Uint32: struct.Struct("@I"),
    cutlass.Float32: struct.Struct("@f"),
    cutlass.Int64: struct.Struct("@q"),
}


def leaves(arguments: Any) -> Iterator[Any]:
    """List the values in the arguments of a launch, in host code's order.

    None is no value.
    """
    for one in arguments:
        if isinstance(one, (tuple, list)):
            yield from leaves(one)
        elif one is not None:
            yield one


def leaf_bytes(value: Any) -> bytes:
    """Return a value as host code reads it.

    Raises:
        ArgumentError: a value of another kind than launches of the lab have.
    """
    if isinstance(value, DeviceTensor):
        return value.packed()
    if isinstance(value, cuda.CUstream):
        return int(value).to_bytes(8, "little")
    number = _NUMBERS.get(type(value))
    if number is None:
        raise ArgumentError("args", type(value).__name__, "tensors of `wrap`, numbers of the DSL, a stream")
    return number.pack(value.value)


def starts_on(x: torch.Tensor, align: int) -> bool:
    """Tell whether the tensor and all its rows start on ``align`` bytes."""
    size = x.element_size()
    steps = (step for step, extent in zip(x.stride()[:-1], x.shape, strict=False) if extent > 1)
    return not (x.data_ptr() % align or any(step * size % align for step in steps))


def wrap(name: str, x: Any, dtype: Any, shape: tuple[int | None, ...], align: int = 0) -> Any:
    """Wrap ``x``, of this type and shape, for a launch. None: any extent; rows must be on ``align`` bytes.

    Raises:
        ArgumentError: it does not.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != TORCH[dtype]:
        raise ArgumentError(name, getattr(x, "dtype", type(x).__name__), f"a tensor of {TORCH[dtype]}")
    if x.dim() != len(shape) or any(want not in (None, have) for have, want in zip(x.shape, shape, strict=True)):
        raise ArgumentError(f"{name}.shape", tuple(x.shape), str(shape).replace("None", "any"))
    if 0 in x.shape:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), "no extent 0")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
    if 0 in x.stride() and any(step == 0 and extent > 1 for step, extent in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError(f"{name}.stride()", x.stride(), "no stride 0: an expanded tensor must be copied")
    align = align or x.element_size()
    if not starts_on(x, align):
        raise ArgumentError(f"{name}.stride()", x.stride(), f"rows that start on {align} bytes")
    return DeviceTensor(x, dtype)


def wrap_if(needed: bool, name: str, x: Any, dtype: Any, shape: tuple[int | None, ...], align: int = 0) -> Any:
    """Wrap what a kernel needs; what it does not need must be None.

    Raises:
        ArgumentError: a tensor that is missing or not wanted; else as in `wrap`.
    """
    if (x is not None) != needed:
        raise ArgumentError(name, None if x is None else "given", "a tensor" if needed else "None")
    return wrap(name, x, dtype, shape, align) if needed else None
