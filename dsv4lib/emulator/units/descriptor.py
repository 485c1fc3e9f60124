"""Decode descriptors that tensor-core instructions take in registers. SMEM matrix, instruction, zero columns.

Decoding is strict: a reserved bit that is set, or a value the PTX ISA does not define, is an error with the field's
name. A mis-read descriptor gives plausible wrong numbers, which is the one thing an emulator must not do.

Source: PTX ISA, "Shared memory descriptor", "Instruction descriptor", "Zero-Column Mask Descriptor", tables 39-55
(tcgen05) and "Matrix Descriptor Format" (wgmma). The sparsity version of the 4-bit kinds, which is set in descriptors
that the CuTe DSL makes: its `Tcgen05MxOmmaInstrDesc`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from dsv4lib.emulator.errors import EmulatorError


class DescriptorError(EmulatorError):
    """A descriptor with a reserved bit set or an undefined or unsupported value."""


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: there is one object for each
class Swizzle:
    """A shared-memory swizzle.

    Attributes:
        name: for messages.
        width: bytes of a row of the swizzle atom.
        mask, shift: address bits 7.. (``mask`` wide) are XORed into the bits from ``shift`` on.
    """

    name: str
    width: int
    mask: int
    shift: int

    def apply(self, address: np.ndarray) -> np.ndarray:
        """Compute the physical byte address of a logical one; only bits 4 to 6 change."""
        return address ^ (address >> 7 & self.mask) << self.shift


NO_SWIZZLE = Swizzle("none", 16, 0, 4)
SWIZZLE_32B = Swizzle("32B", 32, 1, 4)
SWIZZLE_64B = Swizzle("64B", 64, 3, 4)
SWIZZLE_128B = Swizzle("128B", 128, 7, 4)
SWIZZLE_128B_ATOM_32B = Swizzle("128B with 32B atoms", 128, 3, 5)

_SWIZZLE_SM100 = {0: NO_SWIZZLE, 1: SWIZZLE_128B_ATOM_32B, 2: SWIZZLE_128B, 4: SWIZZLE_64B, 6: SWIZZLE_32B}
_SWIZZLE_SM90 = {0: NO_SWIZZLE, 1: SWIZZLE_128B, 2: SWIZZLE_64B, 3: SWIZZLE_32B}


@dataclass(frozen=True)
class SmemDescriptor:
    """Where a matrix lies in shared memory; all numbers in bytes.

    Attributes:
        start: offset in the CTA's shared window.
        leading, stride: leading and stride dimension byte offset (operand.py says which is which).
        swizzle: applied to the absolute address.
        further: offset at which rows go on past the end of their 128-byte line, -1 = they do not.
        base: the swizzle's pattern begins this much later than at multiples of 1,024 (the descriptor's base offset).
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    further: int = -1
    base: int = 0


def _bits(value: int, low: int, count: int) -> int:
    return value >> low & (1 << count) - 1


def _zero(value: int, low: int, count: int, what: str, name: str) -> None:
    if found := _bits(value, low, count):
        span = f"bit {low}" if count == 1 else f"bits {low}-{low + count - 1}"
        raise DescriptorError(f"{what} {value:#x}: {name} ({span}) is {found}, must be 0")


def _base_offset(bits: int, swizzle: Swizzle) -> int:
    """Bytes by which the swizzle's pattern begins later. Without a swizzle it says nothing, but Triton 3.9 sets it."""
    return 0 if swizzle is NO_SWIZZLE else _bits(bits, 49, 3) << 7


@functools.lru_cache(maxsize=1 << 16)
def smem_descriptor(bits: int) -> SmemDescriptor:
    """Decode the 64-bit matrix descriptor of tcgen05.mma and tcgen05.cp.

    Raises:
        DescriptorError: reserved bits, version, swizzle mode; an absolute leading address (for rows of 48 bytes on
            sm_103a) without the 128B swizzle that it needs, or with a base offset.
    """
    what = "SMEM descriptor"
    _zero(bits, 14, 2, what, "reserved")
    _zero(bits, 30, 2, what, "reserved")
    if _bits(bits, 46, 3) != 1:
        raise DescriptorError(f"{what} {bits:#x}: version (bits 46-48) is {_bits(bits, 46, 3)}, must be 1")
    _zero(bits, 53, 8, what, "reserved")
    swizzle = _SWIZZLE_SM100.get(_bits(bits, 61, 3))
    if swizzle is None:
        raise DescriptorError(f"{what} {bits:#x}: swizzle mode (bits 61-63) is {_bits(bits, 61, 3)}, not 0, 1, 2, 4, 6")
    start, leading, stride = (_bits(bits, low, 14) << 4 for low in (0, 16, 32))
    if not _bits(bits, 52, 1):
        return SmemDescriptor(start, leading, stride, swizzle, base=_base_offset(bits, swizzle))
    if swizzle is not SWIZZLE_128B or _bits(bits, 49, 3):
        text = "an absolute leading address (bit 52) needs the 128B swizzle, and no base offset"
        raise DescriptorError(f"{what} {bits:#x}: {text}")
    return SmemDescriptor(start, 0, stride, swizzle, leading)


@functools.lru_cache(maxsize=1 << 16)
def smem_descriptor_sm90(bits: int) -> SmemDescriptor:
    """Decode the 64-bit matrix descriptor of wgmma.

    Raises:
        DescriptorError: reserved bits.
    """
    what = "wgmma descriptor"
    for low, count in ((14, 2), (30, 2), (46, 3), (52, 10)):
        _zero(bits, low, count, what, "reserved")
    swizzle = _SWIZZLE_SM90[_bits(bits, 62, 2)]
    start, leading, stride = (_bits(bits, low, 14) << 4 for low in (0, 16, 32))
    return SmemDescriptor(start, leading, stride, swizzle, base=_base_offset(bits, swizzle))


# --- instruction descriptor ----------------------------------------------------------------------------------------

_F16 = {0: "f16", 1: "bf16"}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FORMATS = {
    "f16": _F16,
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1x2"},
    "mxf4nvf4": {1: "e2m1x2"},
}
_D_FORMATS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
K_OF_KIND = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
K_OF_SM103 = 96  # of mxf4 and mxf4nvf4, with bit 31 of the descriptor
ELEMENT_BITS = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8, "mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
BLOCK_SCALED = frozenset(("mxf8f6f4", "mxf4", "mxf4nvf4"))
_SPARSITY_VERSION = frozenset(("mxf4", "mxf4nvf4"))  # kinds whose B type is bits 10-11: bit 12 has no effect on sm_100


@dataclass(frozen=True)
class InstrDescriptor:
    """What a tcgen05.mma multiplies.

    Attributes:
        kind: without the ``kind::`` prefix.
        m, n, k: shape of the whole operation (both CTAs of a pair).
        a, b: element formats as numeric.decode knows them; 4- and 6-bit formats of (mx)f8f6f4 name the byte container.
        d: "f32", "f16" or "s32".
        negate_a, negate_b, mn_major_a, mn_major_b, saturate: flags.
        max_shift: columns that a zero-column mask may shift.
        scale: "ue8m0" or "ue4m3", "" without block scaling.
        sfa_id, sfb_id: scale factor data ids.
    """

    kind: str
    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate_a: bool
    negate_b: bool
    mn_major_a: bool
    mn_major_b: bool
    saturate: bool = False
    max_shift: int = 0
    scale: str = ""
    sfa_id: int = 0
    sfb_id: int = 0


def _choose(table: dict[int, str], bits: int, low: int, count: int, field: str) -> str:
    code = _bits(bits, low, count)
    if code not in table:
        allowed = ", ".join(f"{k} ({v})" for k, v in table.items())
        raise DescriptorError(
            f"instruction descriptor {bits:#x}: {field} (bits {low}-{low + count - 1}) is {code}; {allowed}"
        )
    return table[code]


@functools.lru_cache(maxsize=4096)
def instruction_descriptor(kind: str, bits: int, cta_group: int = 1, ws: bool = False) -> InstrDescriptor:
    """Decode and check the 32-bit instruction descriptor.

    Args:
        kind: "f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4" or "mxf4nvf4".
        bits: the descriptor.
        cta_group: 1 or 2.
        ws: weight-stationary form (tcgen05.mma.ws).

    Raises:
        DescriptorError: reserved bits, formats, or a shape that the kind does not have.
    """
    what = "instruction descriptor"
    scaled = kind in BLOCK_SCALED
    _zero(bits, 2, 1, what, "sparsity (without .sp)")
    _zero(bits, 0, 2, what, "sparsity selector")
    _zero(bits, 6, 1, what, "reserved")
    negate_a, negate_b = bool(_bits(bits, 13, 1)), bool(_bits(bits, 14, 1))
    mn_a, mn_b = bool(_bits(bits, 15, 1)), bool(_bits(bits, 16, 1))
    a = _choose(_FORMATS[kind], bits, 7, 3, "A type")
    b = _choose(_FORMATS[kind], bits, 10, 2 if kind in _SPARSITY_VERSION else 3, "B type")
    n = _bits(bits, 17, 6) << 3
    common = (a, b, negate_a, negate_b, mn_a, mn_b)
    if scaled:
        found = _block_scaled(kind, bits, n, common)
    else:
        found = _plain(kind, bits, n, common, ws)
    _check_shape(found, bits, cta_group, ws)
    return found


def _plain(kind: str, bits: int, n: int, common: tuple, ws: bool) -> InstrDescriptor:
    what = "instruction descriptor"
    a, b, negate_a, negate_b, mn_a, mn_b = common
    if kind != "i8":
        _zero(bits, 3, 1, what, "saturate (integer kinds only)")
    elif negate_a or negate_b:
        raise DescriptorError(f"{what} {bits:#x}: kind::i8 cannot negate A or B (bits 13, 14)")
    _zero(bits, 23, 1, what, "reserved")
    _zero(bits, 29, 1, what, "reserved")
    if not ws:
        _zero(bits, 30, 2, what, "maximum shift (.ws only)")
    d = _choose(_D_FORMATS[kind], bits, 4, 2, "D type")
    if d == "f16" and kind == "f16" and "bf16" in (a, b):
        raise DescriptorError(f"{what} {bits:#x}: bf16 operands need an f32 D, not f16 (bits 4-5)")
    shift = _bits(bits, 30, 2)
    return InstrDescriptor(
        kind=kind,
        m=_bits(bits, 24, 5) << 4,
        n=n,
        k=K_OF_KIND[kind],
        a=a,
        b=b,
        d=d,
        negate_a=negate_a,
        negate_b=negate_b,
        mn_major_a=mn_a,
        mn_major_b=mn_b,
        saturate=bool(_bits(bits, 3, 1)),
        max_shift=4 << shift if shift else 0,
    )


def _block_scaled(kind: str, bits: int, n: int, common: tuple) -> InstrDescriptor:
    what = "instruction descriptor"
    a, b, negate_a, negate_b, mn_a, mn_b = common
    _zero(bits, 3, 1, what, "reserved")
    _zero(bits, 24, 3, what, "reserved")
    if kind == "mxf8f6f4":
        _zero(bits, 31, 1, what, "reserved")
    elif mn_a or mn_b:
        raise DescriptorError(f"{what} {bits:#x}: kind::{kind} cannot transpose A or B (bits 15, 16)")
    scale = "ue8m0" if _bits(bits, 23, 1) else "ue4m3"
    if scale == "ue4m3" and kind != "mxf4nvf4":
        raise DescriptorError(f"{what} {bits:#x}: kind::{kind} takes ue8m0 scales (bit 23 must be 1)")
    return InstrDescriptor(
        kind=kind,
        m=_bits(bits, 27, 2) << 7,
        n=n,
        k=K_OF_SM103 if _bits(bits, 31, 1) else K_OF_KIND[kind],
        a=a,
        b=b,
        d="f32",
        negate_a=negate_a,
        negate_b=negate_b,
        mn_major_a=mn_a,
        mn_major_b=mn_b,
        scale=scale,
        sfa_id=_bits(bits, 29, 2),
        sfb_id=_bits(bits, 4, 2),
    )


def _check_shape(found: InstrDescriptor, bits: int, cta_group: int, ws: bool) -> None:
    """M and N of table 39 of the PTX ISA, and the N steps of an 8-bit transposed B (table 50)."""
    if ws:
        if found.kind in BLOCK_SCALED or cta_group != 1:
            raise DescriptorError(f"tcgen05.mma.ws has no kind::{found.kind} with cta_group::{cta_group}")
        ms, ns = (32, 64, 128), (64, 128, 256)
    else:
        ms = (128, 256) if cta_group == 2 else (128,) if found.kind in BLOCK_SCALED else (64, 128)
        step = 8 * cta_group
        if found.kind == "i8":
            ns = (8, 16, 24, *range(32, 257, 16)) if cta_group == 1 else tuple(range(32, 257, 32))
        else:
            ns = tuple(range(step, 257, step))
        if found.mn_major_b and found.kind in ("f8f6f4", "mxf8f6f4", "i8"):
            ns = tuple(n for n in ns if n % (16 * cta_group) == 0)
    for name, value, allowed in (("M", found.m, ms), ("N", found.n, ns)):
        if value not in allowed:
            raise DescriptorError(
                f"instruction descriptor {bits:#x}: {name}={value} is not a shape of kind::{found.kind}"
                f"{' .ws' if ws else ''} with cta_group::{cta_group}; {name} is one of {', '.join(map(str, allowed))}"
            )
    for name, fmt, mn_major in (("A", found.a, found.mn_major_a), ("B", found.b, found.mn_major_b)):
        if mn_major and fmt in ("e2m3", "e3m2", "e2m1"):
            raise DescriptorError(f"instruction descriptor {bits:#x}: {name} of type {fmt} cannot be transposed")


# --- zero-column mask ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def zero_column_mask(bits: int, m: int, n: int, max_shift: int) -> tuple[np.ndarray, int]:
    """Find which columns of B count as zero in a tcgen05.mma.ws.

    Args:
        bits: the 64-bit zero-column mask descriptor.
        m, n: shape; M = 128, 64, 32 has 1, 2, 4 sub-masks over N.
        max_shift: of the instruction descriptor.

    Returns:
        bool[n], True where zeros are used instead of B; columns by which B is shifted.

    Raises:
        DescriptorError: reserved bits, or a shift beyond the maximum.
    """
    what = "zero-column mask descriptor"
    _zero(bits, 36, 3, what, "reserved")
    _zero(bits, 62, 2, what, "reserved")
    shift = _bits(bits, 56, 6)
    limit = min(max_shift, 16 if m == 32 else 32)
    if shift > limit:
        raise DescriptorError(f"{what} {bits:#x}: column shift (bits 56-61) is {shift}, at most {limit} here")
    mask = np.zeros(n, bool)
    if _bits(bits, 39, 1):
        # The prose of the ISA swaps the two spans; its examples 2 to 4 settle that "use" columns take B.
        zeros, used = _bits(bits, 40, 8) + 1, _bits(bits, 48, 8) + 1
        parts = 128 // m
        for part in range(parts):
            starts_with_zeros = _bits(bits, 32 + part, 1)
            pattern = [True] * zeros + [False] * used if starts_with_zeros else [False] * used + [True] * zeros
            # A start count beyond the first span leaves one column of it.
            start = min(_bits(bits, 8 * part, 8), (zeros if starts_with_zeros else used) - 1)
            column = np.arange(n // parts)
            mask[part * (n // parts) + column] = np.array(pattern)[(column + start) % (zeros + used)]
    mask.setflags(write=False)
    return mask, shift
