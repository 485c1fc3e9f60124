"""Read the description of a launch: a TOML file beside the kernel's PTX or CUDA C++.

    source = "scale.ptx"              # or a .cu file, which NVRTC compiles; beside this file
    arch = "sm_90a"                   # default: the .target of PTX; of a .cu file sm_100a
    options = ["-DN=4"]               # of NVRTC

    [tensors.x]
    shape = [500]
    dtype = "f32"                     # f64 f32 f16 bf16 e4m3 e5m2 u8 u16 u32 u64 s8 s16 s32 s64
    fill = "normal"                   # zeros ones value arange normal uniform integers ties nan bits
    seed = 1                          # and value, low, high, scale; or file = "x.npy" in place of shape, dtype and fill

    [tensors.y]
    shape = [500]
    expect = {tensor = "want", rtol = 1e-6}     # or value = 2.0, file = "want.npy"; atol. Without it y is only shown

    [maps.a]                          # a tensor map; dimension 0, the contiguous one, comes first
    tensor = "x"
    box = [64]                        # and dims, strides, dtype, swizzle, traversal, interleave, fill, offset

    [[launch]]                        # one or more, in order
    kernel = "scale"                  # not needed if the file has one
    grid = [4]
    block = [128]
    cluster = [1]                     # not needed if the kernel names it
    shared = 0                        # bytes of dynamic shared memory
    args = ["x", "y", 2.0, 500]       # one for each parameter: a tensor or map by name, a number, or a table:
                                      # {tensor = "x", offset = 64}, {value = 1, dtype = "bf16"}, {bytes = "00ff"},
                                      # {fields = [{at = 0, tensor = "x"}, {at = 8, value = 3, dtype = "u32"}]}

``[variables.NAME]`` fills a variable of the module as a tensor is filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.gpu import Pointer, Struct, TensorMap
from dsv4lib.emulator.gpu.arguments import ELEMENT_NAMES, SWIZZLES
from dsv4lib.emulator.machine.limits import BYTES
from dsv4lib.emulator.sanitize import numbers, tables
from dsv4lib.emulator.sanitize.tables import Table
from dsv4lib.errors import ArgumentError

SOURCES = (".ptx", ".cu")
MAX_RANK = 8
_TO_MAP = {"f32": "f32", "f16": "f16", "f64": "f64", "bf16": "bf16", "e4m3": "u8", "e5m2": "u8", "s8": "u8"}
_TO_MAP |= {"u8": "u8", "u16": "u16", "s16": "u16", "u32": "u32", "s32": "s32", "u64": "u64", "s64": "s64"}
# How many fields a struct may have, and where its last one may begin.
MAX_FIELDS, MAX_PARAMETERS = 1000, 32764


@dataclass(frozen=True)
class Expectation:
    """What a tensor should hold after the launches: ``value``, or what tensor or file ``name`` holds."""

    kind: str
    name: str
    value: float
    rtol: float
    atol: float


@dataclass(frozen=True)
class Tensor:
    """A tensor's type, contents and what it should become. ``file``: a .npy file in place of a fill."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: numbers.Fill
    file: Path | None = None
    expect: Expectation | None = None

    @property
    def nbytes(self) -> int:
        """Count its bytes."""
        return math.prod(self.shape) * numbers.bits_of(self.dtype).itemsize

    def make(self) -> np.ndarray:
        """Make its bits."""
        if self.file is not None:
            return numbers.read_npy(self.file, f"tensors.{self.name}.file", int(BYTES.value()))[0].copy()
        return numbers.make(self.shape, self.dtype, self.fill)


@dataclass(frozen=True)
class Launch:
    """One launch; ``args`` as the file has them, checked when the tensors are there."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...] | None
    shared: int
    cooperative: bool
    args: list[Any]


@dataclass(frozen=True)
class Description:
    """A whole file. ``maps``: fields of each tensor map, the tensor by name."""

    path: Path
    source: Path
    arch: str | None
    options: tuple[str, ...]
    tensors: dict[str, Tensor]
    variables: dict[str, Tensor]
    maps: dict[str, dict[str, Any]]
    launches: list[Launch] = field(default_factory=list)


def read(path: Path) -> Description:
    """Read a description.

    Raises:
        ArgumentError: a value that is not allowed, a name that is not known, or tensors larger than the memory.
    """
    table = tables.read(path)
    folder = path.parent
    source = folder / table.text("source", str(path.with_suffix(".ptx").name))
    if source.suffix not in SOURCES:
        raise table.refuse("source", source.name, "a .ptx or .cu file")
    options = table.take("options", [])
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise table.refuse("options", options, "a list of texts, options of NVRTC")
    arch = table.text("arch", None)
    tensors = {name: _tensor(name, one, folder) for name, one in table.tables("tensors").items()}
    variables = {name: _tensor(name, one, folder) for name, one in table.tables("variables").items()}
    maps = {name: _map(one, tensors) for name, one in table.tables("maps").items()}
    if twice := sorted(set(maps) & set(tensors)):
        raise table.refuse("maps", twice[0], "a name that no tensor has")
    launches = [_launch(one) for one in table.several("launch")]
    table.done()
    if not launches:
        raise table.refuse("launch", [], "one or more [[launch]] tables")
    limit, total = int(BYTES.value()), sum(one.nbytes for one in tensors.values())
    if 2 * total > limit:  # the host's and the device's copy
        raise table.refuse("tensors", total, f"at most {limit // 2:,} bytes in all ({BYTES.how})")
    for one in tensors.values():
        if one.expect is not None and one.expect.kind == "tensor" and one.expect.name not in tensors:
            allowed = "one of " + ", ".join(tensors)
            raise ArgumentError(f"tensors.{one.name}.expect.tensor", one.expect.name, allowed)
    return Description(path, source, arch, tuple(options), tensors, variables, maps, launches)


def _tensor(name: str, table: Table, folder: Path) -> Tensor:
    file = table.text("file", None)
    if file is not None:
        raw, dtype = numbers.read_npy(folder / file, table.name("file"), int(BYTES.value()))
        expect = _expectation(table, folder)
        table.done()
        return Tensor(name, raw.shape, dtype, numbers.Fill(), folder / file, expect)
    shape = table.wholes("shape", count=range(0, MAX_RANK + 1))
    dtype = table.text("dtype", "f32", numbers.DTYPES)
    kind = table.text("fill", "zeros", numbers.FILLS)
    value = table.number("value") if kind == "value" else 0.0
    low, high, scale = table.number("low", -4.0), table.number("high", 4.0), 1.0
    if kind == "normal":
        scale = table.number("scale", 1.0)
    if not math.isfinite(low) or not math.isfinite(high) or not -(2**62) <= low <= high <= 2**62:
        raise table.refuse("low", low, f"numbers from -2^62 to 2^62, low <= high={high}")
    fill = numbers.Fill(kind, value, low, high, scale, table.whole("seed", 0))
    expect = _expectation(table, folder)
    table.done()
    return Tensor(name, shape, dtype, fill, None, expect)


def _expectation(table: Table, folder: Path) -> Expectation | None:
    if "expect" not in table:
        return None
    inner = Table(table.name("expect"), table.take("expect"))
    kinds = [kind for kind in ("value", "tensor", "file") if kind in inner]
    if len(kinds) != 1:
        raise inner.refuse("value", kinds, "one of value, tensor and file")
    value = inner.number("value", 0.0)
    name = inner.text("tensor", "") or inner.text("file", "")
    rtol, atol = inner.number("rtol", 0.0, 0.0), inner.number("atol", 0.0, 0.0)
    inner.done()
    return Expectation(kinds[0], str(folder / name) if kinds[0] == "file" else name, value, rtol, atol)


def _map(table: Table, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    swizzle = table.take("swizzle", 0)
    if isinstance(swizzle, bool) or not isinstance(swizzle, int | str) or swizzle not in SWIZZLES:
        raise table.refuse("swizzle", swizzle, "one of " + ", ".join(map(str, SWIZZLES)))
    ranks = range(1, 6)
    tensor = tensors[table.text("tensor", among=tensors)]
    out = {
        "tensor": tensor.name,
        "box": table.wholes("box", count=ranks, least=1),
        "dims": table.wholes("dims", None, ranks, 1),
        "strides": table.wholes("strides", None, range(0, 5)),
        "dtype": table.text("dtype", None, ELEMENT_NAMES) or _TO_MAP[tensor.dtype],
        "swizzle": swizzle,
        "traversal": table.wholes("traversal", None, ranks, 1),
        "interleave": table.whole("interleave", 0, 0, 2),
        "fill": table.whole("fill", 0, 0, 1),
        "offset": table.whole("offset", 0),
    }
    table.done()
    return out


def _launch(table: Table) -> Launch:
    extents = range(1, 4)
    args = table.take("args", [])
    if not isinstance(args, list):
        raise table.refuse("args", args, "a list with a value for each parameter")
    out = Launch(
        table.text("kernel", ""),
        table.wholes("grid", count=extents, least=1),
        table.wholes("block", count=extents, least=1),
        table.wholes("cluster", None, extents, 1),
        table.whole("shared", 0, 0, 1 << 31),
        table.flag("cooperative"),
        args,
    )
    table.done()
    return out


def argument(place: str, value: Any, arrays: Mapping[str, np.ndarray], maps: Mapping[str, dict[str, Any]]) -> Any:
    """Make what `Kernel.launch` takes of one entry of ``args``.

    Raises:
        ArgumentError: a name that is not known, or a table of another form.
    """
    if isinstance(value, str):
        if value in maps:
            wanted = maps[value]
            return TensorMap(**{**wanted, "tensor": arrays[wanted["tensor"]]})
        if value in arrays:
            return arrays[value]
        raise ArgumentError(place, value, "a tensor or map: " + ", ".join([*arrays, *maps]))
    if isinstance(value, bool | int | float):
        if isinstance(value, int) and abs(value) >= tables.LARGEST:
            raise ArgumentError(place, tables.shown(value), "a number of at most 64 bits")
        return value
    if not isinstance(value, dict):
        raise ArgumentError(place, tables.shown(value), "a name, a number or a table")
    table = Table(place, value)
    if "fields" not in table:
        out = _leaf(table, arrays, maps)
        table.done()
        return out
    fields: dict[int, Any] = {}
    for one in table.several("fields", MAX_FIELDS):
        at = one.whole("at", least=0, most=MAX_PARAMETERS)
        if at in fields:
            raise one.refuse("at", at, "an offset of its own")
        fields[at] = _leaf(one, arrays, maps)
        one.done()
    table.done()
    return Struct(fields)


def _leaf(table: Table, arrays: Mapping[str, np.ndarray], maps: Mapping[str, dict[str, Any]]) -> Any:
    """A tensor with offset, a map, a typed value or bytes."""
    kinds = [kind for kind in ("tensor", "map", "value", "bytes") if kind in table]
    if len(kinds) != 1:
        raise table.refuse("value", kinds, "one of tensor, map, value, bytes (or fields)")
    if kinds[0] == "tensor":
        return Pointer(arrays[table.text("tensor", among=arrays)], table.whole("offset", 0))
    if kinds[0] == "map":
        return argument(table.name("map"), table.text("map", among=maps), arrays, maps)
    if kinds[0] == "bytes":
        text = table.text("bytes")
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise table.refuse("bytes", text, "hexadecimal digits, two a byte") from None
    value, dtype = table.number("value"), table.text("dtype", among=numbers.DTYPES)
    exact = isinstance(value, int) and dtype not in numbers.FLOATS
    if exact:
        bits = numbers.bits_of(dtype).itemsize * 8
        if not -(1 << bits - 1) <= value < 1 << bits:
            raise table.refuse("value", value, f"what {dtype} holds")
        return (value & (1 << bits) - 1).to_bytes(bits // 8, "little")
    return numbers.encode(np.array([float(value)]), dtype).tobytes()
