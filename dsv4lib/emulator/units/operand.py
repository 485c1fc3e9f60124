"""Read a matrix operand from shared memory by its descriptor.

One ``take`` per operand.

Shared memory is addressed in 16-byte chunks, the unit of every swizzle, so an operand is an array of chunk numbers. It
depends only on the shape, the layout and the start address modulo 1024 (the swizzle looks at bits 7 to 9 of the
absolute address), and is cached under these.

Source: PTX ISA, "Major-ness supported by Strides" and "Canonical Layouts" (T = elements of 16 bytes):

| major | swizzle | layout of 16-byte chunks |
| --- | --- | --- |
| K | none | ((8, m), (1, k)) : ((16, SBO), (., LBO)) |
| K | W bytes | ((8, m), k) : ((W, SBO), 16) |
| MN | none | (m, (8, k)) : (SBO, (16, LBO)) |
| MN | W bytes | ((W / 16, m), (8, k)) : ((16, LBO), (W, SBO)); 4 instead of 8 for 32-byte atoms |
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.errors import MemoryFault
from dsv4lib.emulator.units import shared
from dsv4lib.emulator.units.descriptor import (
    NO_SWIZZLE,
    SWIZZLE_128B_ATOM_32B,
    DescriptorError,
    SmemDescriptor,
    Swizzle,
)

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Smem

CHUNK = np.complex128  # any 16-byte type that numpy copies whole
_PERIOD = 1024
_KEPT = 4096  # operands of one CTA


@functools.lru_cache(maxsize=8192)
def k_major_chunks(rows: int, nbytes: int, leading: int, stride: int, swizzle: Swizzle, phase: int) -> np.ndarray:
    """Number the chunks of a K-major matrix that starts at byte ``phase``.

    int64 (rows, nbytes / 16).
    """
    row, chunk = np.arange(rows)[:, None], np.arange(nbytes // 16)[None, :]
    step = leading if swizzle is NO_SWIZZLE else 16
    offset = row % 8 * swizzle.width + row // 8 * stride + chunk * step
    return _frozen(swizzle.apply(phase + offset) >> 4)


@functools.lru_cache(maxsize=8192)
def mn_major_chunks(
    mn: int, k: int, element: int, leading: int, stride: int, swizzle: Swizzle, phase: int
) -> np.ndarray:
    """Number the chunks of an MN-major matrix of ``element``-byte elements.

    int64 (k, mn * element / 16).
    """
    row, chunk = np.arange(k)[:, None], np.arange(mn * element // 16)[None, :]
    if swizzle is NO_SWIZZLE:
        offset = chunk * stride + row % 8 * 16 + row // 8 * leading
    else:
        across, deep = swizzle.width // 16, 4 if swizzle is SWIZZLE_128B_ATOM_32B else 8
        offset = chunk % across * 16 + chunk // across * leading + row % deep * swizzle.width + row // deep * stride
    return _frozen(swizzle.apply(phase + offset) >> 4)


@functools.lru_cache(maxsize=8192)
def crossing_chunks(rows: int, nbytes: int, stride: int, swizzle: Swizzle, start: int, further: int) -> np.ndarray:
    """Number the chunks of a K-major matrix with rows in two places.

    int64 (rows, nbytes / 16); rows go on at ``further`` after 128 bytes.
    """
    row, chunk = np.arange(rows)[:, None], np.arange(nbytes // 16)[None, :]
    column = start % 128 + chunk * 16
    line = np.where(column < 128, start - start % 128 + column, further + column - 128)
    return _frozen(swizzle.apply(line + row % 8 * 128 + row // 8 * stride) >> 4)


def _frozen(chunks: np.ndarray) -> np.ndarray:
    chunks = np.ascontiguousarray(chunks)
    chunks.setflags(write=False)
    return chunks


class Operand:
    """An operand in shared memory: which chunks, and what they hold.

    Attributes:
        smem: the memory; first: chunk number of the start of the 1024-byte period that the indices count from.
        chunks: relative chunk numbers.
        mn_major: the rows of ``read`` run along K instead of along M or N.
    """

    __slots__ = ("chunks", "first", "mn_major", "smem")

    def __init__(self, smem: Smem, first: int, chunks: np.ndarray, mn_major: bool):
        self.smem, self.first, self.chunks, self.mn_major = smem, first, chunks, mn_major

    def read(self) -> np.ndarray:
        """uint8 (rows, bytes): K-major (mn, k bytes), MN-major (k, mn bytes).

        Raises:
            MemoryFault: outside the CTA's shared memory.
        """
        return self._take(self.smem.data, CHUNK).view(np.uint8)

    def initialised(self, used: int = 16) -> bool:
        """Has every byte been written? Of each 16 the first ``used`` count."""
        smem, key = self.smem, (self.first, id(self.chunks), used)
        # Written bytes stay written, but for those of a new mbarrier.
        if smem.written.get(key) is self.chunks:
            return True
        init = self._take(smem.init, CHUNK)
        if used < 16:
            init = init.view(np.uint8).reshape(-1, 16)[:, :used]
        if b"\0" in init.tobytes():
            return False
        smem.written[key] = self.chunks
        return True

    def unfenced(self) -> tuple[str, str, list[int]] | None:
        """Find writes to these bytes that no proxy fence has covered yet.

        Hazard kind, its text, the warps; None if none.
        """
        dirty = self._take(self.smem.dirty, np.uint16)
        if dirty.tobytes() == bytes(dirty.nbytes):
            return None
        return shared.unfenced(dirty[dirty != 0])

    def span(self) -> tuple[int, int]:
        """First and last + 1 byte offset in the CTA's shared memory."""
        return 16 * (self.first + int(self.chunks.min())), 16 * (self.first + int(self.chunks.max()) + 1)

    def _take(self, array: np.ndarray, dtype: type) -> np.ndarray:
        size = np.dtype(dtype).itemsize // array.itemsize
        whole = array[: len(array) // size * size].view(dtype) if size > 1 else array
        try:
            return whole[self.first :].take(self.chunks)
        except IndexError:
            low, high = self.span()
            raise MemoryFault(
                f"matrix operand reads shared memory [{low:#x}, {high:#x}), the CTA has {self.smem.nbytes:#x} bytes"
            ) from None


def k_major(smem: Smem, descriptor: SmemDescriptor, rows: int, nbytes: int) -> Operand:
    """Make a K-major operand of ``rows`` rows of ``nbytes`` bytes.

    ``nbytes`` is a multiple of 16.

    Raises:
        DescriptorError: 32-byte swizzle atoms, which K-major matrices do not have; rows of more than 32 bytes that
            cross a line of the swizzle without saying where they go on.
    """
    known = smem.operands.get((descriptor, rows, nbytes))
    if known is not None:
        return known
    swizzle = descriptor.swizzle
    if swizzle is SWIZZLE_128B_ATOM_32B:
        raise DescriptorError("a K-major matrix cannot use the 128B swizzle with 32B atoms")
    if descriptor.further >= 0:
        base = min(descriptor.start, descriptor.further) // _PERIOD * _PERIOD
        places = descriptor.start - base, descriptor.further - base
        operand = Operand(smem, base >> 4, crossing_chunks(rows, nbytes, descriptor.stride, swizzle, *places), False)
        return _keep(smem, (descriptor, rows, nbytes), operand)
    if nbytes > 32 and swizzle is not NO_SWIZZLE and descriptor.start % swizzle.width + nbytes > swizzle.width:
        where = "an absolute leading address is needed" if nbytes == 48 else "where they go on is not known"
        raise DescriptorError(f"rows of {nbytes} bytes cross a line of the swizzle ({swizzle.name}): {where}")
    phase = _phase(descriptor)
    # Swizzled K-major layouts do not use the leading offset; leave it out of the cache key.
    leading = descriptor.leading if swizzle is NO_SWIZZLE else 0
    chunks = k_major_chunks(rows, nbytes, leading, descriptor.stride, swizzle, phase)
    operand = Operand(smem, (descriptor.start - phase) >> 4, chunks, False)
    return _keep(smem, (descriptor, rows, nbytes), operand)


def mn_major(smem: Smem, descriptor: SmemDescriptor, mn: int, k: int, element: int) -> Operand:
    """An M- or N-major operand of ``mn`` x ``k`` elements of ``element`` bytes.

    Raises:
        DescriptorError: a swizzle that the element size does not have; mn not a multiple of 16 bytes.
    """
    known = smem.operands.get((descriptor, mn, k, element))
    if known is not None:
        return known
    swizzle = descriptor.swizzle
    if descriptor.further >= 0:
        raise DescriptorError("an MN-major matrix has no absolute leading address")
    if (element == 4) != (swizzle is SWIZZLE_128B_ATOM_32B):
        raise DescriptorError(f"an MN-major matrix of {8 * element}-bit elements cannot use swizzle {swizzle.name}")
    if mn * element % 16:
        raise DescriptorError(f"an MN-major matrix needs a multiple of 16 bytes along M or N, not {mn * element}")
    phase = _phase(descriptor)
    chunks = mn_major_chunks(mn, k, element, descriptor.leading, descriptor.stride, swizzle, phase)
    operand = Operand(smem, (descriptor.start - phase) >> 4, chunks, True)
    return _keep(smem, (descriptor, mn, k, element), operand)


def _phase(descriptor: SmemDescriptor) -> int:
    """Where in the swizzle's period the matrix starts: an H200 subtracts the base offset from the address (wgmma).

    Raises:
        DescriptorError: the period would begin below the shared window.
    """
    phase = (descriptor.start - descriptor.base) % _PERIOD
    if phase > descriptor.start:
        raise DescriptorError(f"a matrix at {descriptor.start:#x} with the base offset {descriptor.base >> 7}")
    return phase


def part(whole: Operand, first: int, end: int) -> Operand:
    """Take chunk columns (MN-major) or rows (K-major) ``first`` to ``end``.

    The operand stays as it is.
    """
    key = (id(whole.chunks), whole.first, first, end)
    known = whole.smem.operands.get(key)
    # The chunks are compared by identity: a part is a view of those it was made from.
    if known is not None and known.chunks.base is whole.chunks:
        return known
    chunks = whole.chunks[:, first:end] if whole.mn_major else whole.chunks[first:end]
    return _keep(whole.smem, key, Operand(whole.smem, whole.first, chunks, whole.mn_major))


def _keep(smem: Smem, key: tuple[object, ...], operand: Operand) -> Operand:
    """Remember an operand of this memory: kernels use a few hundred again and again."""
    if len(smem.operands) >= _KEPT:
        smem.operands.clear()
    smem.operands[key] = operand
    return operand
