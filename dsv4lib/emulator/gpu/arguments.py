"""Turn Python values into a kernel's parameter block: arrays, scalars, structs and tensor maps.

Arrays lie in host memory as the caller made them. For a launch they are copied to device memory, at addresses that are
aligned as in the caller's own allocation on a GPU would be, and copied back afterwards. Views that overlap stay one.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4lib.emulator.driver.device import ALIGNMENT, Device
from dsv4lib.emulator.machine.cta import aligned_zeros
from dsv4lib.emulator.ptx.ir import Kernel, Param
from dsv4lib.emulator.units import tensormap
from dsv4lib.errors import ArgumentError

FLOATS = {2: "<e", 4: "<f", 8: "<d"}
SWIZZLES: dict[Any, int] = {
    0: 0, 32: 1, 64: 2, 128: 3, "128_atom32": 4, "128_atom32_flip8": 5, "128_atom64": 6,
}  # fmt: skip
# Names of numpy's and torch's types -> the element type of a tensor map.
_ELEMENTS = {
    "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
    "uint8": "u8", "int8": "u8", "bool": "u8", "uint16": "u16", "int16": "u16",
    "uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64",
}  # fmt: skip
ELEMENT_NAMES = tuple(t.name for t in tensormap.ELEMENT_TYPES)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map by description, encoded when the address of its tensor is known.

    Attributes:
        tensor: array whose memory it describes.
        box: elements of a copy, dimension 0 (the contiguous one) first.
        dims: sizes, dimension 0 first; None = the array's shape, reversed.
        strides: bytes of dimensions 1 and up; None = the array's own.
        dtype: element type as PTX names it, such as "bf16"; None = the array's.
        swizzle: 0, 32, 64 or 128 bytes; SM100 also "128_atom32", "128_atom32_flip8", "128_atom64".
        traversal: element strides; None = 1 everywhere.
        interleave: 0, 1 (16 bytes) or 2 (32 bytes). fill: 1 = NaN out of bounds. offset: bytes into the tensor.
    """

    tensor: Any
    box: Sequence[int]
    dims: Sequence[int] | None = None
    strides: Sequence[int] | None = None
    dtype: str | None = None
    swizzle: int | str = 0
    traversal: Sequence[int] | None = None
    interleave: int = 0
    fill: int = 0
    offset: int = 0

    def encode(self, address: int, sm100: bool) -> bytes:
        """Encode the 128 bytes for a tensor at ``address``.

        Raises:
            ArgumentError: what ``cuTensorMapEncodeTiled`` refuses.
        """
        memory = Memory.of("tensor", self.tensor)
        dims = [*memory.shape][::-1] if self.dims is None else _wholes("dims", self.dims)
        strides = [*memory.strides][::-1][1:] if self.strides is None else _wholes("strides", self.strides)
        if len(strides) != max(len(dims) - 1, 0):
            raise ArgumentError("strides", strides, f"{max(len(dims) - 1, 0)} strides in bytes: of dimensions 1 and up")
        name = self.dtype or _ELEMENTS.get(memory.dtype, "u8" if memory.dtype.startswith("float8") else None)
        if name not in ELEMENT_NAMES:
            allowed = "an element type of tensor maps: " + ", ".join(ELEMENT_NAMES)
            raise ArgumentError("dtype", self.dtype or memory.dtype, allowed)
        if not isinstance(self.swizzle, int | str) or self.swizzle not in SWIZZLES:
            raise ArgumentError("swizzle", self.swizzle, "one of " + ", ".join(map(str, SWIZZLES)))
        traversal = [1] * len(dims) if self.traversal is None else _wholes("traversal", self.traversal)
        if len(traversal) != len(dims):
            raise ArgumentError("traversal", traversal, f"{len(dims)} element strides")
        codes = [_whole(key, getattr(self, key)) for key in ("interleave", "fill", "offset")]
        kind = next(i for i, e in enumerate(tensormap.DRIVER_TYPES) if ELEMENT_NAMES[e] == name)
        return tensormap.encode_tiled(
            kind, address + codes[2], dims, strides, _wholes("box", self.box), traversal, codes[0],
            SWIZZLES[self.swizzle], 0, codes[1], sm100=sm100,
        )  # fmt: skip


@dataclass(frozen=True)
class Struct:
    """A parameter that is a struct, by its fields.

    Attributes:
        fields: values by their offset in bytes: arrays (as pointers), numpy scalars, bytes, tensor maps.
    """

    fields: Mapping[int, Any]


@dataclass(frozen=True)
class Pointer:
    """The address of an array plus an offset in bytes."""

    tensor: Any
    offset: int = 0


@dataclass(frozen=True)
class Memory:
    """The host memory of an array: bytes [low, high), what a pointer to it holds, and who keeps it alive.

    Attributes:
        root: where the allocation begins: alignment is counted from there.
        dtype: name of the element type, of numpy or torch. strides: in bytes.
    """

    low: int
    high: int
    pointer: int
    root: int
    writable: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    owner: Any = field(repr=False)

    @classmethod
    def of(cls, name: str, value: Any) -> Memory:
        """Look at a numpy array or a torch tensor on the CPU.

        Raises:
            ArgumentError: it is neither.
        """
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            raise ArgumentError(name, value.dtype, "an array of numbers")
        if isinstance(value, np.ndarray):
            owner = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            low, high = np.lib.array_utils.byte_bounds(value) if value.size else (value.ctypes.data,) * 2
            root, writable = np.lib.array_utils.byte_bounds(owner)[0], value.flags.writeable
            return cls(
                low, high, value.ctypes.data, root, writable, value.shape, value.strides, value.dtype.name, value
            )
        if hasattr(value, "untyped_storage") and hasattr(value, "data_ptr"):
            if value.device.type != "cpu":
                raise ArgumentError(name, value.device, "a tensor on the CPU")
            size, shape = value.element_size(), tuple(value.shape)
            strides = tuple(size * stride for stride in value.stride())
            pointer = value.data_ptr()
            span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + size if value.numel() else 0
            dtype = str(value.dtype).removeprefix("torch.")
            root = value.untyped_storage().data_ptr()
            return cls(pointer, pointer + span, pointer, root, True, shape, strides, dtype, value)
        raise ArgumentError(name, value, "a numpy array or a torch tensor on the CPU")


def is_array(value: Any) -> bool:
    """Tell whether ``value`` is something that `Memory.of` can look at."""
    return isinstance(value, np.ndarray) or (hasattr(value, "untyped_storage") and hasattr(value, "data_ptr"))


class Staging:
    """Device memory of one launch's arrays. A context: memory is copied back and released at its end."""

    def __init__(self, device: Device):
        self.device = device
        self._spans: list[tuple[int, int, bool, np.ndarray]] = []  # host bytes, whether to copy back, device memory
        self._keep: list[Any] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        for low, high, writable, part in self._spans:
            if writable:
                _host(low, high)[:] = part
            self.device.free(part.ctypes.data)
        self._spans.clear()
        self._keep.clear()

    def stage(self, named: Mapping[str, Any]) -> None:
        """Copy the memory of all arrays among the arguments to the device."""
        found = [(name, Memory.of(name, array)) for name, value in named.items() for array in _arrays(value)]
        self._keep += [memory.owner for _, memory in found]
        groups: list[list[tuple[str, Memory]]] = []
        for one in sorted((item for item in found if item[1].high > item[1].low), key=lambda item: item[1].low):
            if groups and one[1].low < max(memory.high for _, memory in groups[-1]):
                groups[-1].append(one)
            else:
                groups.append([one])
        for group in groups:
            low, high = min(m.low for _, m in group), max(m.high for _, m in group)
            if self.device.gmem.find(low, high - low) is None:  # else it is device memory already
                self._copy(low, high, group)

    def _copy(self, low: int, high: int, group: list[tuple[str, Memory]]) -> None:
        nbytes, first = high - low, group[0][1]
        self.device.claim(nbytes)
        shift = (low - first.root) % ALIGNMENT
        try:
            part = aligned_zeros(nbytes + shift, ALIGNMENT)[shift:]
        except MemoryError as error:
            raise ArgumentError(group[0][0], nbytes, "bytes that this machine's memory has room for") from error
        part[:] = _host(low, high)
        names = " and ".join(dict.fromkeys(name for name, _ in group))
        writable = any(memory.writable for _, memory in group)
        label = f"{names} {first.shape} {first.dtype}" if len(group) == 1 else names
        self.device.gmem.register(
            part.ctypes.data, nbytes, label, writable=writable, owner=part, padded=True
        )  # as cudaMalloc rounds up
        self._spans.append((low, high, writable, part))

    def address(self, value: Any, name: str) -> int:
        """Find the device address of an array; 0 for one without elements."""
        memory = Memory.of(name, value)
        if memory.high == memory.low:
            return 0
        for low, high, _, part in self._spans:
            if low <= memory.low and memory.high <= high:
                return part.ctypes.data + memory.pointer - low
        return memory.pointer

    def block(self, kernel: Kernel, named: Mapping[str, Any]) -> bytes:
        """Make the parameter block from a value for each parameter.

        Raises:
            ArgumentError: a value that its parameter cannot hold.
        """
        out = bytearray(kernel.param_bytes)
        for param in kernel.params:
            out[param.offset : param.offset + param.size] = self.pack(param, named[param.name])
        return bytes(out)

    def pack(self, param: Param, value: Any) -> bytes:
        """Pack one value as the bytes of a parameter."""
        name, size = param.name, param.size
        raw = self._raw(name, value)
        if raw is None:
            raw = _scalar(param, value)
        if len(raw) < size and isinstance(value, Struct):
            raw = raw.ljust(size, b"\0")
        if len(raw) != size:
            shown = type(value).__name__ if is_array(value) else value
            raise ArgumentError(name, shown, f"{size} bytes, as .param .{param.type} of the kernel; it has {len(raw)}")
        return raw

    def _raw(self, name: str, value: Any) -> bytes | None:
        """What needs no parameter's type; None for a Python number."""
        if isinstance(value, Pointer):
            return (self.address(value.tensor, name) + _whole("offset", value.offset) & 2**64 - 1).to_bytes(8, "little")
        if is_array(value):
            return self.address(value, name).to_bytes(8, "little")
        if isinstance(value, bytes | bytearray | ctypes.Structure):
            return bytes(value)
        if isinstance(value, TensorMap):
            address = self.address(value.tensor, name)
            return value.encode(address, sm100=self.device.arch.tmem)
        if isinstance(value, Struct):
            return self._struct(name, value)
        return None

    def _struct(self, name: str, value: Struct) -> bytes:
        out = bytearray()
        for offset, item in sorted(value.fields.items()):
            _whole(f"{name}.offset", offset)
            raw = item.tobytes() if isinstance(item, np.generic) else self._raw(f"{name}+{offset}", item)
            if raw is None:
                raise ArgumentError(f"{name}+{offset}", item, "an array, a numpy scalar, bytes or a TensorMap")
            if offset < len(out):
                raise ArgumentError(f"{name}.offset", offset, f"at least {len(out)}: fields do not overlap")
            if offset > 4096 * 8:
                raise ArgumentError(f"{name}.offset", offset, "an offset within the parameters of a kernel")
            out += bytes(offset - len(out)) + raw
        return bytes(out)


def _arrays(value: Any) -> Iterator[Any]:
    """The arrays in an argument."""
    if is_array(value):
        yield value
    elif isinstance(value, TensorMap | Pointer):
        yield value.tensor
    elif isinstance(value, Struct):
        for item in value.fields.values():
            yield from _arrays(item)


def _host(low: int, high: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)


def _scalar(param: Param, value: Any) -> bytes:
    """A number in the type of its parameter.

    Raises:
        ArgumentError: no number, or one that does not fit.
    """
    name, size, is_float = param.name, param.size, param.type.startswith("f")
    if isinstance(value, np.generic) and not isinstance(value, np.bool_):
        if value.dtype.itemsize == size and (value.dtype.kind not in "iu" or not is_float):
            return value.tobytes()
        value = value.item()
    if isinstance(value, bool | np.bool_):
        value = int(value)
    if isinstance(value, float) or (isinstance(value, int) and is_float):
        if size not in FLOATS or param.type[0] in "us" or (size == 2 and not is_float):
            raise ArgumentError(name, value, f"what .{param.type} holds" + (": a numpy scalar" if size == 2 else ""))
        try:
            return struct.pack(FLOATS[size], value)
        except OverflowError:
            return struct.pack(FLOATS[size], math.copysign(math.inf, value))
    if not isinstance(value, int):
        allowed = "a number, bytes, an array, a Struct or a TensorMap"
        raise ArgumentError(name, value, allowed)
    least, most = -(1 << 8 * size - 1), (1 << 8 * size) - 1
    if size > 8 or not least <= value <= most:
        what = f"bytes or a Struct of {size} bytes" if size > 8 else f"a whole number from {least} to {most}"
        raise ArgumentError(name, value, what)
    return (value & most).to_bytes(size, "little")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ArgumentError(name, value, "a whole number from 0")
    return int(value)


def _wholes(name: str, values: Any) -> list[int]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise ArgumentError(name, values, "a list of whole numbers")
    return [_whole(name, value) for value in values]
