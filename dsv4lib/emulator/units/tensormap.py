"""Read and write tensor maps in the hardware's format.

They are the 128-byte descriptors of tensor copies.

Kernels get descriptors from three places: host code that computes the bytes itself (CuTeDSL), the driver's encode
functions, and ``tensormap.replace`` on the device. All three share this code. The layout of the format is not
documented; it was measured: 135 descriptors that the driver's ``cuTensorMapEncode*`` functions made for an H200, and
every field that ``tensormap.replace`` changes there (tests/emulator/units/h200_tensormap.json). Bits that differ on
SM100 are those of descriptors that CuTeDSL makes for it. Decoding is strict: a bit without a known meaning is refused.

| where | meaning |
| --- | --- |
| bytes 0-7 | global address |
| word 2, bit 0 | im2col |
| bit 1 | set in descriptors for SM100 |
| bits 4-6 | rank - 1 |
| bits 7-10 | element type (`HARDWARE_TYPES`) |
| bits 11-12, 13-14 | interleave; swizzle: none, 32, 64, 128 bytes |
| bit 15, bit 16 | out-of-bounds fill with NaN; TF32 |
| bits 17-18 | L2 promotion: none, 64, 128, 256 bytes |
| bits 19-20 | atom of the 128-byte swizzle: 16, 32, 32 with 8-byte flip, 64 bytes |
| bit 21 | set on SM100 for tensors of 128 KiB and more |
| words 3-6 | strides of dimensions 1-4 in 16-byte units, low 32 bits; word 7: the four high nibbles |
| words 8-12 | sizes - 1 |
| word 13, bits 0-14 | traversal strides - 1, three bits each |
| byte 55, bytes 56-59 | box sizes - 1; in im2col mode bytes 56-59 hold the corners |
| word 15 | im2col: pixels per column - 1 |

Bytes 64-127 are not used for copies: host code leaves them uninitialised.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4lib.emulator.errors import HazardError, UnsupportedInstruction
from dsv4lib.emulator.units.shared import Where
from dsv4lib.errors import ArgumentError

NBYTES, USED = 128, 64
MAX_RANK, MAX_BOX, MAX_PIXELS, MAX_TRAVERSAL = 5, 256, 1024, 8
SWIZZLE_BYTES = (0, 32, 64, 128)
LARGE_TENSOR = 1 << 17
KNOWN_FLAGS = 0x003FFFF3  # of word 2


@dataclass(frozen=True)
class ElementType:
    """What one element is.

    Attributes:
        name: as the PTX ISA calls it; hardware: code in the descriptor; tf32: the TF32 bit.
        bits: of an element in global memory; number: name of its numpy/ml_dtypes number type.
        chunk: for padded types (packed bytes, bytes in shared memory) of 16 elements, else None.
    """

    name: str
    hardware: int
    bits: int
    tf32: bool = False
    chunk: tuple[int, int] | None = None

    def nbytes(self, elements: int) -> int:
        """Count the bytes of ``elements`` in global memory (packed)."""
        return elements * self.bits // 8

    def smem_bytes(self, elements: int) -> int:
        """Count the bytes of ``elements`` in shared memory."""
        return self.nbytes(elements) if self.chunk is None else elements // 16 * self.chunk[1]

    @property
    def is_float(self) -> bool:
        """Tell whether it can be filled with NaN."""
        return self.name in ("f16", "bf16", "f32", "f32.ftz", "f64", "tf32", "tf32.ftz")


# In the order of tensormap.replace .elemtype and, but for the places of bf16 and tf32, of CUtensorMapDataType. The
# hardware code of the 6-bit type follows from the order; no descriptor with it has been seen.
ELEMENT_TYPES = (
    ElementType("u8", 0, 8),
    ElementType("u16", 1, 16),
    ElementType("u32", 2, 32),
    ElementType("s32", 3, 32),
    ElementType("u64", 4, 64),
    ElementType("s64", 5, 64),
    ElementType("f16", 6, 16),
    ElementType("f32", 7, 32),
    ElementType("f32.ftz", 8, 32),
    ElementType("f64", 9, 64),
    ElementType("bf16", 10, 16),
    ElementType("tf32", 7, 32, tf32=True),
    ElementType("tf32.ftz", 8, 32, tf32=True),
    ElementType("b4x16", 11, 4),
    ElementType("b4x16_p64", 12, 4, chunk=(8, 16)),
    ElementType("b6x16_p32", 13, 6, chunk=(12, 16)),
)
HARDWARE_TYPES = {(t.hardware, t.tf32): t for t in ELEMENT_TYPES}
# CUtensorMapDataType -> index in ELEMENT_TYPES.
DRIVER_TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14, 15)
# CUtensorMapSwizzle -> (swizzle, atom) fields.
DRIVER_SWIZZLES = ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3))


@dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor. Dimension 0 is contiguous; sizes and boxes count elements.

    Attributes:
        address: of element (0, ..., 0); element: type.
        dims: sizes; strides: bytes, of dimensions 1 and up (one shorter).
        box: tiled mode: box sizes; im2col mode: (channels per pixel,).
        traversal: strides of the traversal, 1 = every element.
        im2col: im2col mode; pixels: per column; lower, upper: corners of dimensions 1 .. rank - 2.
        interleave, swizzle, atom, promotion: field values; nan_fill: out-of-bounds elements are NaN.
        sm100: the SM100 form.
    """

    address: int
    element: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    traversal: tuple[int, ...]
    im2col: bool = False
    pixels: int = 0
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    atom: int = 0
    promotion: int = 0
    nan_fill: bool = False
    sm100: bool = False

    @functools.cached_property
    def rank(self) -> int:
        """Count the dimensions."""
        return len(self.dims)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """List the rows that a tiled copy moves along dimensions 1 and up."""
        return tuple(-(-b // t) for b, t in zip(self.box[1:], self.traversal[1:], strict=True))

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """List the bytes between those rows (tiled mode)."""
        return tuple(s * t for s, t in zip(self.strides, self.traversal[1:], strict=True))

    @functools.cached_property
    def flaw(self) -> str:
        """What no copy can use it for, "" if nothing. Drivers refuse to encode such a map, kernels and hosts may not.

        Source: PTX ISA, "Bounding Box", and the restrictions on sub-byte types of ``cp.async.bulk.tensor``.
        """
        row, width = self.element.smem_bytes(self.box[0]), SWIZZLE_BYTES[self.swizzle]
        align = 32 if self.interleave == 2 or self.element.chunk else 16
        if self.address % align or any(s % align for s in self.strides):
            return f"address {self.address:#x} and strides {self.strides} must be multiples of {align}"
        if self.interleave:
            return ""
        if self.element.nbytes(self.box[0]) % 16:
            return f"a row of the box, {self.box[0]} elements of {self.element.name}, must be a multiple of 16 bytes"
        if width and row > width:
            return f"a row of the box, {row} bytes, must fit in the {width} bytes of the swizzle"
        if self.element.chunk and (self.box[0] != 128 or self.dims[0] % 128):
            return f"box and size of dimension 0, {self.box[0]} and {self.dims[0]}, must be 128 and a multiple of it"
        if self.element.chunk and (self.swizzle in (1, 2) or self.atom == 2):
            return f"{self.element.name} has no {width}-byte swizzle with atom code {self.atom}"
        if self.nan_fill and not self.element.is_float:
            return f"{self.element.name} cannot be filled with NaN"
        return ""

    def __str__(self) -> str:
        mode = f"im2col {self.pixels} pixels x {self.box[0]}" if self.im2col else f"box {self.box}"
        swizzle = SWIZZLE_BYTES[self.swizzle]
        return f"{self.element.name}{self.dims} strides {self.strides} {mode} swizzle {swizzle}"


def _bits(value: int, low: int, count: int) -> int:
    return value >> low & ((1 << count) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


# Bits of a corner per rank, and where the first lower and upper corner begin in words 14 (as one 32-bit field).
_CORNERS = {3: 16, 4: 8, 5: 5}


@functools.lru_cache(4096)
def decode(raw: bytes) -> TensorMap:
    """Decode the first 64 bytes of a descriptor.

    Raises:
        ValueError: a bit or code without a known meaning; the message names it.
    """
    address = struct.unpack_from("<Q", raw)[0]
    words = struct.unpack_from("<16I", raw)
    flags = words[2]
    rank = _bits(flags, 4, 3) + 1
    if rank > MAX_RANK:
        raise ValueError(f"rank {rank}")
    unknown = flags & ~KNOWN_FLAGS
    if unknown:
        raise ValueError(f"unknown bits {unknown:#x} of word 2 ({flags:#010x})")
    element = HARDWARE_TYPES.get((_bits(flags, 7, 4), bool(_bits(flags, 16, 1))))
    if element is None:
        raise ValueError(f"element type code {_bits(flags, 7, 4)}, TF32 bit {_bits(flags, 16, 1)}")
    interleave, swizzle, atom = _bits(flags, 11, 2), _bits(flags, 13, 2), _bits(flags, 19, 2)
    if interleave == 3:
        raise ValueError("interleave code 3")
    if atom and swizzle != 3:
        raise ValueError(f"swizzle atom code {atom} with swizzle code {swizzle}")
    im2col = bool(flags & 1)
    if im2col and rank < 3:
        raise ValueError(f"im2col mode with rank {rank}")
    if _bits(words[13], 15, 9):
        raise ValueError(f"unknown bits of word 13 ({words[13]:#010x})")
    if words[7] >> 16:
        raise ValueError(f"unknown bits of word 7 ({words[7]:#010x})")
    if words[15] and not im2col:
        raise ValueError(f"word 15 of a tiled map is not 0 ({words[15]:#010x})")
    strides = tuple((words[3 + d] | _bits(words[7], 4 * d, 4) << 32) * 16 for d in range(rank - 1))
    traversal = tuple(_bits(words[13], 3 * d, 3) + 1 for d in range(rank))
    boxes = (raw[55] + 1, *(b + 1 for b in raw[56:60]))
    common = {
        "address": address,
        "element": element,
        "dims": tuple(w + 1 for w in words[8 : 8 + rank]),
        "strides": strides,
        "traversal": traversal,
        "interleave": interleave,
        "swizzle": swizzle,
        "atom": atom,
        "promotion": _bits(flags, 17, 2),
        "nan_fill": bool(_bits(flags, 15, 1)),
        "sm100": bool(flags & 2),
    }
    if not im2col:
        return TensorMap(box=boxes[:rank], **common)
    if words[15] >= MAX_PIXELS:
        raise ValueError(f"{words[15] + 1} pixels per column")
    width = _CORNERS[rank]
    lower = tuple(_signed(_bits(words[14], width * d, width), width) for d in range(rank - 2))
    upper = tuple(_signed(_bits(words[14], 16 + width * d, width), width) for d in range(rank - 2))
    return TensorMap(box=boxes[:1], im2col=True, pixels=words[15] + 1, lower=lower, upper=upper, **common)


def encode(tensor: TensorMap) -> bytes:
    """Encode the 128 bytes of a descriptor; the second half is zero."""
    raw = bytearray(NBYTES)
    struct.pack_into("<Q", raw, 0, tensor.address)
    flags = int(tensor.im2col) | int(tensor.sm100) << 1 | tensor.rank - 1 << 4 | tensor.element.hardware << 7
    flags |= (
        tensor.interleave << 11 | tensor.swizzle << 13 | int(tensor.nan_fill) << 15 | int(tensor.element.tf32) << 16
    )
    flags |= tensor.promotion << 17 | tensor.atom << 19
    if tensor.sm100 and _tensor_bytes(tensor) >= LARGE_TENSOR:
        flags |= 1 << 21
    high = 0
    for d, stride in enumerate(tensor.strides):
        struct.pack_into("<I", raw, 12 + 4 * d, stride >> 4 & 0xFFFFFFFF)
        high |= (stride >> 36 & 15) << 4 * d
    for d, size in enumerate(tensor.dims):
        struct.pack_into("<I", raw, 32 + 4 * d, size - 1)
    steps = sum((t - 1) << 3 * d for d, t in enumerate(tensor.traversal))
    struct.pack_into("<I", raw, 8, flags)
    struct.pack_into("<I", raw, 28, high)
    struct.pack_into("<H", raw, 52, steps)
    raw[55] = tensor.box[0] - 1
    if tensor.im2col:
        width = _CORNERS[tensor.rank]
        word = 0
        for d, (low, up) in enumerate(zip(tensor.lower, tensor.upper, strict=True)):
            word |= (low & (1 << width) - 1) << width * d | (up & (1 << width) - 1) << 16 + width * d
        struct.pack_into("<II", raw, 56, word, tensor.pixels - 1)
    else:
        for d, size in enumerate(tensor.box[1:]):
            raw[56 + d] = size - 1
    return bytes(raw)


def _tensor_bytes(tensor: TensorMap) -> int:
    """Bytes from the first to past the last element."""
    inner = tensor.element.nbytes(tensor.dims[0])
    return inner + sum((n - 1) * s for n, s in zip(tensor.dims[1:], tensor.strides, strict=True))


# --- the driver's encode functions ------------------------------------------------------------------------------------


def _limit(name: str, values: Sequence[int], low: int, high: int) -> None:
    if any(not low <= v <= high for v in values):
        raise ArgumentError(name, list(values), f"values in [{low}, {high}]")


def _driver_fields(
    data_type: int, address: int, dims: Sequence[int], strides: Sequence[int], traversal: Sequence[int],
    interleave: int, swizzle: int, promotion: int, fill: int, sm100: bool,
) -> dict[str, object]:  # fmt: skip
    """What the three encode functions have in common, checked.

    Raises:
        ArgumentError: what the driver refuses with CUDA_ERROR_INVALID_VALUE.
    """
    if not 0 <= data_type < len(DRIVER_TYPES) or (data_type > 12 and not sm100):
        raise ArgumentError("tensorDataType", data_type, "a CUtensorMapDataType of this architecture")
    element = ELEMENT_TYPES[DRIVER_TYPES[data_type]]
    rank = len(dims)
    align = 32 if interleave == 2 or element.chunk else 16
    if not 1 <= rank <= MAX_RANK or (interleave and rank < 3):
        raise ArgumentError("tensorRank", rank, "1 to 5, and at least 3 with interleave")
    if address % align:
        raise ArgumentError("globalAddress", hex(address), f"a multiple of {align}")
    _limit("globalDim", dims, 1, 1 << 32)
    _limit("globalStrides", strides, 0, (1 << 40) - 1)
    if any(s % align for s in strides):
        raise ArgumentError("globalStrides", list(strides), f"multiples of {align}")
    _limit("elementStrides", traversal, 1, MAX_TRAVERSAL)
    if interleave not in (0, 1, 2):
        raise ArgumentError("interleave", interleave, "0 (none), 1 (16 bytes) or 2 (32 bytes)")
    if not 0 <= swizzle < (len(DRIVER_SWIZZLES) if sm100 else 4):
        raise ArgumentError("swizzle", swizzle, "a CUtensorMapSwizzle of this architecture")
    if promotion not in (0, 1, 2, 3):
        raise ArgumentError("l2Promotion", promotion, "0 to 3")
    if fill not in (0, 1) or (fill and not element.is_float):
        raise ArgumentError("oobFill", fill, "0, or 1 (NaN) with a floating-point type")
    mode, atom = DRIVER_SWIZZLES[swizzle]
    return {
        "address": address,
        "element": element,
        "dims": tuple(dims),
        "strides": tuple(strides[: rank - 1]),
        "traversal": (1, *traversal[1:]) if rank == 1 else tuple(traversal),
        "interleave": interleave,
        "swizzle": mode,
        "atom": atom,
        "promotion": promotion,
        "nan_fill": bool(fill),
        "sm100": sm100,
    }


def _check_inner(element: ElementType, elements: int, swizzle: int, interleave: int, name: str) -> None:
    """Bytes of a row in shared memory: a multiple of 16, and not wider than the swizzle."""
    nbytes = element.smem_bytes(elements)
    if interleave:
        return
    if nbytes % 16:
        raise ArgumentError(name, elements, "a multiple of 16 bytes")
    if swizzle and nbytes > SWIZZLE_BYTES[min(swizzle, 3)]:
        raise ArgumentError(name, elements, f"at most the {SWIZZLE_BYTES[min(swizzle, 3)]} bytes of the swizzle")
    if element.chunk and elements != 128:
        raise ArgumentError(name, elements, "128 elements for a padded type")


def encode_tiled(
    data_type: int, address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int],
    traversal: Sequence[int], interleave: int = 0, swizzle: int = 0, promotion: int = 0, fill: int = 0, *,
    sm100: bool = True,
) -> bytes:  # fmt: skip
    """``cuTensorMapEncodeTiled``: all arguments by their driver enums. Strides in bytes, of dimensions 1 and up.

    Raises:
        ArgumentError: what the driver refuses.
    """
    fields = _driver_fields(data_type, address, dims, strides, traversal, interleave, swizzle, promotion, fill, sm100)
    _limit("boxDim", box, 1, MAX_BOX)
    if len(box) != len(dims):
        raise ArgumentError("boxDim", list(box), f"{len(dims)} sizes")
    _check_inner(fields["element"], box[0], swizzle, interleave, "boxDim[0]")
    return encode(TensorMap(box=tuple(box), **fields))


def encode_im2col(
    data_type: int, address: int, dims: Sequence[int], strides: Sequence[int], lower: Sequence[int],
    upper: Sequence[int], channels: int, pixels: int, traversal: Sequence[int], interleave: int = 0, swizzle: int = 0,
    promotion: int = 0, fill: int = 0, *, sm100: bool = True,
) -> bytes:  # fmt: skip
    """``cuTensorMapEncodeIm2col``; corners of dimensions 1 .. rank - 2.

    Raises:
        ArgumentError: what the driver refuses.
    """
    fields = _driver_fields(data_type, address, dims, strides, traversal, interleave, swizzle, promotion, fill, sm100)
    rank = len(dims)
    if rank < 3:
        raise ArgumentError("tensorRank", rank, "3 to 5 in im2col mode")
    half = 1 << _CORNERS[rank] - 1
    _limit("pixelBoxLowerCorner", lower, -half, half - 1)
    _limit("pixelBoxUpperCorner", upper, -half, half - 1)
    if len(lower) != rank - 2 or len(upper) != rank - 2:
        raise ArgumentError("pixelBoxLowerCorner", list(lower), f"{rank - 2} coordinates")
    _limit("channelsPerPixel", [channels], 1, MAX_BOX)
    _limit("pixelsPerColumn", [pixels], 1, MAX_PIXELS)
    _check_inner(fields["element"], channels, swizzle, interleave, "channelsPerPixel")
    return encode(
        TensorMap(box=(channels,), im2col=True, pixels=pixels, lower=tuple(lower), upper=tuple(upper), **fields)
    )


def encode_im2col_wide(
    data_type: int, address: int, dims: Sequence[int], strides: Sequence[int], lower: int, upper: int, channels: int,
    pixels: int, traversal: Sequence[int], interleave: int = 0, mode: int = 0, swizzle: int = 3, promotion: int = 0,
    fill: int = 0, *, sm100: bool = True,
) -> bytes:  # fmt: skip
    """``cuTensorMapEncodeIm2colWide``: an im2col descriptor with corners in W only (mode 0 W, 1 W128: same bytes).

    Raises:
        ArgumentError: what the driver refuses.
    """
    if mode not in (0, 1):
        raise ArgumentError("mode", mode, "0 (W) or 1 (W128)")
    if interleave:
        raise ArgumentError("interleave", interleave, "0: wide modes have no interleave")
    if swizzle not in (1, 2, 3, 4, 6):
        raise ArgumentError("swizzle", swizzle, "a swizzle other than none and 32-byte atoms with 8-byte flip")
    rest = [0] * (len(dims) - 3)
    return encode_im2col(
        data_type, address, dims, strides, [lower, *rest], [upper, *rest], channels, pixels, traversal, 0, swizzle,
        promotion, fill, sm100=sm100,
    )  # fmt: skip


# --- tensormap.replace ------------------------------------------------------------------------------------------------


def _field(raw: bytearray, low: int, count: int, value: int) -> None:
    """Put ``count`` bits at bit ``low`` of the descriptor."""
    at, shift = low // 32 * 4, low % 32
    word = struct.unpack_from("<I", raw, at)[0]
    mask = (1 << count) - 1 << shift
    struct.pack_into("<I", raw, at, word & ~mask | value << shift & mask)


# field -> (largest value + 1 of the immediate, lowest bit, bits)
_CODES = {
    "interleave_layout": (3, 64 + 11, 2),
    "swizzle_mode": (4, 64 + 13, 2),
    "fill_mode": (2, 64 + 15, 1),
    "swizzle_atomicity": (4, 64 + 19, 2),
}
REPLACE_FIELDS = (
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype", *_CODES,
)  # fmt: skip


def replace(raw: bytes, field: str, value: int, ordinal: int = 0, where: Where = lambda: None) -> bytes:
    """``tensormap.replace.tile.<field>``: the descriptor with one field changed.

    Raises:
        HazardError: an ordinal or value that the field does not have.
    """
    out = bytearray(raw)
    if not 0 <= ordinal < MAX_RANK or (field == "global_stride" and ordinal == 4):
        raise HazardError(f"tensormap.replace.{field}: ordinal {ordinal}", where())
    if field == "global_address":
        struct.pack_into("<Q", out, 0, value)
    elif field == "rank":
        _require(value < MAX_RANK, field, value, where)
        _field(out, 64 + 4, 3, value)
    elif field == "box_dim":
        _require(1 <= value <= MAX_BOX, field, value, where)
        out[55 + ordinal] = value - 1
    elif field == "global_dim":
        struct.pack_into("<I", out, 32 + 4 * ordinal, value - 1 & 0xFFFFFFFF)
    elif field == "global_stride":
        _require(value % 16 == 0 and value < 1 << 40, field, value, where)
        struct.pack_into("<I", out, 12 + 4 * ordinal, value >> 4 & 0xFFFFFFFF)
        _field(out, 7 * 32 + 4 * ordinal, 4, value >> 36)
    elif field == "element_stride":
        _require(1 <= value <= MAX_TRAVERSAL, field, value, where)
        _field(out, 13 * 32 + 3 * ordinal, 3, value - 1)
    elif field == "elemtype":
        _require(value < len(ELEMENT_TYPES), field, value, where)
        element = ELEMENT_TYPES[value]
        _field(out, 64 + 7, 4, element.hardware)
        _field(out, 64 + 16, 1, int(element.tf32))
    elif field in _CODES:
        limit, low, count = _CODES[field]
        if field == "swizzle_mode" and value == 4:
            raise UnsupportedInstruction("tensormap.replace: the 96-byte swizzle is not implemented", where())
        _require(value < limit, field, value, where)
        _field(out, low, count, value)
    else:
        raise UnsupportedInstruction(f"tensormap.replace of {field}", where())
    return bytes(out)


def _require(good: bool, field: str, value: int, where: Where) -> None:
    if not good:
        raise HazardError(f"tensormap.replace.{field}: value {value}", where())
