"""Find the bytes that a tensor copy moves: boxes, im2col columns, gathered rows. Fill out of bounds; swizzle.

A copy is a list of rows. A row is contiguous in global memory and, before swizzling, in shared memory: the elements of
dimension 0 (tiled, gather and scatter) or the channels of a pixel (im2col). Boxes that lie in the tensor as a whole are
copied as one strided array; others row by row.

Source: PTX ISA, "Tensors" (5.5): tiled mode, gather4/scatter4, im2col mode, interleave and swizzling modes. Checked
against tensor copies of an H200 (tests/emulator/units/test_tma_h200.py), from which these rules come:

* rows start at multiples of 16 bytes, else the instruction is illegal; dimension 0 has no traversal stride;
* an im2col column starts inside its bounding box, else the instruction is illegal;
* TF32 types round to nearest even on the way to shared memory, NaNs become 0x7FFFE000; ".ftz" types do not flush;
* with swizzle, rows are as far apart as the swizzle is wide, even if they are shorter;
* stores clip dimension 0 at multiples of 16 bytes: padding past the end of the row is overwritten.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsv4lib.emulator.errors import HazardError, UnsupportedInstruction
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.units.reduction import reduce
from dsv4lib.emulator.units.shared import CHUNK_TYPE, Where
from dsv4lib.emulator.units.tensormap import SWIZZLE_BYTES, TensorMap

CHUNK = 16  # bytes; the unit of swizzling, alignment and clipping
SMEM_ALIGN = 128
NAN_FILL = 0x7FF7  # every 16 bits of an out-of-bounds element in NaN fill mode, whatever the type (measured)


@dataclass(slots=True)
class Box:
    """The rows of one copy.

    Attributes:
        tensor: descriptor; row_bytes: packed bytes of a row; first: byte offset of its start in dimension 0 (may be
            negative); width: bytes of the tensor's rows.
        rows: how many; base: byte offset of the first row from dimensions 1 and up.
        whole: tiled mode, all elements lie inside the tensor; valid: tiled mode, per dimension from 1 up the range of
            indices in the box whose elements exist.
        offsets: other modes: int64[rows], byte offset of each row from dimensions 1 and up; inside: bool[rows], the
            row exists.
    """

    tensor: TensorMap
    row_bytes: int
    first: int
    width: int
    rows: int
    base: int = 0
    whole: bool = False
    valid: tuple[tuple[int, int], ...] = ()
    offsets: np.ndarray | None = None
    inside: np.ndarray | None = None

    @property
    def tx_bytes(self) -> int:
        """Count what the copy adds at its mbarrier: packed bytes, those out of bounds too."""
        return self.row_bytes * self.rows

    @property
    def smem_row(self) -> int:
        """Count the bytes of a row in shared memory, padding of the type included."""
        chunk = self.tensor.element.chunk
        return self.row_bytes if chunk is None else self.row_bytes // chunk[0] * chunk[1]

    @property
    def pitch(self) -> int:
        """Compute the bytes from row to row in shared memory. A swizzled row takes the swizzle's width."""
        return SWIZZLE_BYTES[self.tensor.swizzle] or self.smem_row

    def span(self) -> tuple[int, int]:
        """Find the first valid byte of a row within the box, and the one past the last."""
        return max(0, -self.first), min(self.row_bytes, self.width - self.first)


# --- rows -------------------------------------------------------------------------------------------------------------


def _dimension_0(tensor: TensorMap, elements: int, start: int, where: Where) -> tuple[int, int, int]:
    """Packed row bytes, byte offset of the start and bytes of the tensor's rows."""
    if tensor.interleave:
        raise UnsupportedInstruction(f"tensor copies with a {CHUNK << tensor.interleave - 1}-byte interleave", where())
    bits = tensor.element.bits
    first = start * bits
    aligned = 128 if tensor.element.chunk else 0
    if first % (8 * CHUNK) or (aligned and start % aligned):
        rule = f"a multiple of {aligned} elements" if aligned else "a multiple of 16 bytes"
        raise HazardError(f"coordinate 0 is {start} elements of {bits} bits: it must be {rule}", where())
    return elements * bits // 8, first // 8, tensor.dims[0] * bits // 8


def tiled(tensor: TensorMap, coords: Sequence[int], where: Where) -> Box:
    """Make a box at ``coords`` (elements, dimension 0 first).

    Raises:
        HazardError: the row start is not aligned.
    """
    row_bytes, first, width = _dimension_0(tensor, tensor.box[0], coords[0], where)
    base, rows, whole = 0, 1, first >= 0 and first + row_bytes <= width and row_bytes % CHUNK == 0
    valid = []
    for d, (count, stride) in enumerate(zip(tensor.counts, tensor.strides, strict=True), 1):
        c, step, size = coords[d], tensor.traversal[d], tensor.dims[d]
        base += c * stride
        rows *= count
        if c >= 0 and c + (count - 1) * step < size:
            valid.append((0, count))
        else:
            whole = False
            low = min(max(0, -(c // step)), count)
            valid.append((low, max(low, min(count, -(-(size - c) // step)))))
    # Address arithmetic is modulo 2^64: quack's and Triton's ragged tensors have strides whose offsets add up to that.
    base = ((tensor.address + base + (1 << 63)) & (1 << 64) - 1) - (1 << 63) - tensor.address
    return Box(tensor, row_bytes, first, width, rows, base, whole, tuple(valid))


def rows4(tensor: TensorMap, coords: Sequence[int], where: Where) -> Box:
    """``tile::gather4`` and ``tile::scatter4``: {column, row 0, ..., row 3}.

    Raises:
        HazardError: not a two-dimensional tensor without interleave, or the row start is not aligned.
    """
    if tensor.rank != 2 or tensor.interleave:
        raise HazardError(f"gather4 and scatter4 need a 2-dimensional tensor without interleave, got {tensor}", where())
    row_bytes, first, width = _dimension_0(tensor, tensor.box[0], coords[0], where)
    rows = np.array(coords[1:5], np.int64)
    inside = (rows >= 0) & (rows < tensor.dims[1])
    return Box(tensor, row_bytes, first, width, 4, offsets=rows * tensor.strides[0], inside=inside)


def im2col(tensor: TensorMap, coords: Sequence[int], filter_offsets: Sequence[int], where: Where) -> Box:
    """Find a column of pixels. From ``coords`` through the bounding box in W, H, D, then on to the next image.

    ``filter_offsets`` (W first) are added to every pixel's position.

    Raises:
        HazardError: the descriptor is no im2col one, the start lies outside the bounding box or is not aligned.
    """
    if not tensor.im2col:
        raise HazardError("im2col copy with a descriptor in tiled mode", where())
    row_bytes, first, width = _dimension_0(tensor, tensor.box[0], coords[0], where)
    spatial = tensor.rank - 2
    sizes, steps = tensor.dims[1 : 1 + spatial], tensor.traversal[1 : 1 + spatial]
    ends = [size - 1 + up for size, up in zip(sizes, tensor.upper, strict=True)]
    start = coords[1 : 1 + spatial]
    if any(not low <= c <= end for low, c, end in zip(tensor.lower, start, ends, strict=True)):
        raise HazardError(f"im2col start {tuple(start)} outside the box {tensor.lower} to {tuple(ends)}", where())
    # Pixel k as mixed-radix digits. The first image begins in the middle, so count from its start with carry.
    k = np.arange(tensor.pixels, dtype=np.int64)
    offsets = np.zeros(tensor.pixels, np.int64)
    inside = np.ones(tensor.pixels, bool)
    for d in range(spatial):
        left = (ends[d] - start[d]) // steps[d] + 1  # positions until the first wrap
        full = (ends[d] - tensor.lower[d]) // steps[d] + 1
        wrapped = k >= left
        position = np.where(wrapped, tensor.lower[d] + (k - left) % full * steps[d], start[d] + k * steps[d])
        k = np.where(wrapped, 1 + (k - left) // full, 0)
        position += filter_offsets[d]
        inside &= (position >= 0) & (position < sizes[d])
        offsets += position * tensor.strides[d]
    image = coords[-1] + k
    inside &= (image >= 0) & (image < tensor.dims[-1])
    offsets += image * tensor.strides[-1]
    return Box(tensor, row_bytes, first, width, tensor.pixels, offsets=offsets, inside=inside)


# --- shared memory ----------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)
def _chunks(start: int, rows: int, per_row: int, pitch: int, swizzle: int, atom: int) -> np.ndarray:
    """int64[rows * per_row]: chunk number in shared memory of every 16-byte chunk of a buffer at ``start``."""
    inner = CHUNK * np.arange(per_row, dtype=np.int64)
    address = (start + pitch * np.arange(rows, dtype=np.int64)[:, None] + inner).ravel()
    if atom == 0:
        target = address ^ (address >> 7 & (0, 1, 3, 7)[swizzle]) << 4
    elif atom == 1:
        target = address ^ (address >> 7 & 3) << 5
    else:
        target = address ^ (address >> 7 & 1) << 6
    index = target >> 4
    index.setflags(write=False)
    return index


@dataclass(slots=True)
class Placement:
    """Where a box lies in a CTA's shared memory.

    Swizzling moves chunks only inside the 32, 64 or 128 bytes of their row, so the range is that of the plain box.

    Attributes:
        first, end: byte range.
        index: chunk numbers in shared memory, in the order of the box's chunks; None where they lie in order.
        full: the box fills its range (no gaps after short swizzled rows).
    """

    first: int
    end: int
    index: np.ndarray | None
    full: bool


def place(box: Box, offset: int, where: Where) -> Placement:
    """Lay a box out at byte ``offset`` of shared memory.

    Raises:
        HazardError: misaligned. UnsupportedInstruction: the 8-byte flip, whose exact pattern is not known.
    """
    tensor, rows = box.tensor, box.rows
    if offset % SMEM_ALIGN:
        raise HazardError(f"tensor copy at shared offset {offset:#x}: it must be a multiple of {SMEM_ALIGN}", where())
    end = offset + rows * box.pitch
    if tensor.swizzle == 0:
        return Placement(offset, end, None, True)
    if tensor.atom == 2:
        raise UnsupportedInstruction("128-byte swizzle with 32-byte atoms and 8-byte flip", where())
    row, pitch = box.smem_row, box.pitch
    index = _chunks(offset, rows, row // CHUNK, pitch, tensor.swizzle, tensor.atom)
    return Placement(offset, end, index, row == pitch)


# --- global memory ----------------------------------------------------------------------------------------------------


def _strided(box: Box, gmem: GlobalMemory, write: bool) -> np.ndarray:
    """16-byte chunks of a box that lies inside, as an array over global memory: dimension 0 last."""
    tensor = box.tensor
    counts, steps = tensor.counts[::-1], tensor.steps[::-1]
    span = box.row_bytes
    for count, step in zip(counts, steps, strict=True):
        span += (count - 1) * step
    raw = gmem.view(tensor.address + box.base + box.first, span, write)
    return np.ndarray((*counts, box.row_bytes // CHUNK), CHUNK_TYPE, raw, strides=(*steps, CHUNK))


def _window(box: Box, gmem: GlobalMemory, low: int, high: int, write: bool) -> np.ndarray:
    """Bytes [low, high) of the existing rows of a tiled box, as an array over global memory; may be empty."""
    tensor = box.tensor
    shape, start, span = [], tensor.address + box.base + box.first + low, high - low
    for (begin, end), step in zip(box.valid, tensor.steps, strict=True):
        shape.append(end - begin)
        start += begin * step
        span += (end - begin - 1) * step
    if high <= low or 0 in shape:
        return np.empty((*shape[::-1], 0), np.uint8)
    raw = gmem.view(start, span, write)
    return np.ndarray((*shape[::-1], high - low), np.uint8, raw, strides=(*tensor.steps[::-1], 1))


def ranges(box: Box) -> tuple[np.ndarray, int]:
    """List where the existing rows of a box lie: int64 addresses, and bytes of each."""
    tensor = box.tensor
    low, high = box.span()
    if box.offsets is not None:
        return tensor.address + box.offsets[box.inside] + box.first + low, high - low
    starts = np.array([tensor.address + box.base + box.first + low], np.int64)
    for (begin, end), step in zip(box.valid, tensor.steps, strict=True):
        starts = (starts + step * np.arange(begin, end, dtype=np.int64)[:, None]).reshape(-1)
    return starts, high - low


def _part(box: Box, data: np.ndarray, low: int, high: int) -> np.ndarray:
    """The same part of the box's packed bytes."""
    rows = tuple(slice(begin, end) for begin, end in box.valid[::-1])
    return data.reshape(*box.tensor.counts[::-1], box.row_bytes)[(*rows, slice(low, max(low, high)))]


def read(box: Box, gmem: GlobalMemory) -> np.ndarray:
    """Read the box as uint8[rows * packed row bytes], out-of-bounds elements filled."""
    tf32 = box.tensor.element.tf32
    if box.whole:
        data = np.ascontiguousarray(_strided(box, gmem, False)).reshape(-1).view(np.uint8)
        return _round_tf32(data) if tf32 else data
    data = _filled(box)
    low, high = box.span()
    if box.offsets is None:
        window = _window(box, gmem, low, high, False)
        if window.size:
            _part(box, data, low, high)[...] = _round_tf32(np.ascontiguousarray(window)) if tf32 else window
    elif high > low:
        for row in np.nonzero(box.inside)[0].tolist():
            start = box.tensor.address + int(box.offsets[row]) + box.first + low
            line = gmem.view(start, high - low)
            data[row, low:high] = _round_tf32(line) if tf32 else line
    return data.reshape(-1)


def _filled(box: Box) -> np.ndarray:
    """uint8[rows, row bytes] of fill."""
    shape = (box.rows, box.row_bytes)
    if not box.tensor.nan_fill:
        return np.zeros(shape, np.uint8)
    return np.full((shape[0], shape[1] // 2), NAN_FILL, np.uint16).view(np.uint8)


def _round_tf32(data: np.ndarray) -> np.ndarray:
    """float32 bits rounded to TF32 (10 mantissa bits), ties to even; every NaN becomes 0x7FFFE000."""
    bits = data.view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded).view(np.uint8)


def write(box: Box, gmem: GlobalMemory, data: np.ndarray, op: str = "") -> int:
    """Store or, with ``op``, reduce uint8[rows * row bytes] into the tensor.

    Returns how many bytes past the end of the tensor's rows were overwritten: dimension 0 is clipped at a multiple of
    16 bytes. Padding that is not in registered memory (past the end of the last row, as a rule) is left alone.
    """
    if box.whole:
        _apply(box, _strided(box, gmem, True), data.view(CHUNK_TYPE), op)
        return 0
    low, high = box.span()
    end = min(box.row_bytes, -(-box.width // CHUNK) * CHUNK - box.first)  # with the padding
    if box.offsets is None:
        window = _window(box, gmem, low, high, True)
        if window.size:
            _apply(box, window, np.ascontiguousarray(_part(box, data, low, high)), op)
    rows = data.reshape(box.rows, -1)
    over = 0
    for row, offset in _existing(box) if box.offsets is not None or end > high > low else ():
        start = box.tensor.address + offset + box.first
        if box.offsets is not None and high > low:
            _apply(box, gmem.view(start + low, high - low, write=True), rows[row, low:high], op)
        if end > high > low and gmem.find(start + high, end - high) is not None:
            _apply(box, gmem.view(start + high, end - high, write=True), rows[row, high:end], op)
            over += end - high
    return over


def _existing(box: Box) -> Iterator[tuple[int, int]]:
    """(number, byte offset from dimensions 1 and up) of the rows of a box that exist."""
    if box.offsets is not None:
        for row in np.nonzero(box.inside)[0].tolist():
            yield row, int(box.offsets[row])
        return
    counts, steps = box.tensor.counts, box.tensor.steps
    for index in itertools.product(*(range(*bounds) for bounds in box.valid[::-1])):
        row, offset = 0, box.base
        for i, count, step in zip(index, counts[::-1], steps[::-1], strict=True):
            row, offset = row * count + i, offset + i * step
        yield row, offset


def _apply(box: Box, target: np.ndarray, data: np.ndarray, op: str) -> None:
    """Store ``data`` in ``target``, or reduce it into it; same number of items."""
    if op:
        old = np.ascontiguousarray(target).reshape(-1).view(np.uint8)
        data = reduce(op, box.tensor.element.name, old, data.reshape(-1).view(np.uint8)).view(target.dtype)
    target[...] = data.reshape(target.shape)


# --- padded types -----------------------------------------------------------------------------------------------------


def pad(box: Box, data: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Lay out packed bytes as in shared memory. The padding keeps what was there (``before``)."""
    chunk = box.tensor.element.chunk
    if chunk is None:
        return data
    out = before.reshape(-1, chunk[1]).copy()
    out[:, : chunk[0]] = data.reshape(-1, chunk[0])
    return out.reshape(-1)
