"""Read sparsity metadata of tcgen05.mma.sp. 4-bit codes (sparse.py) in tensor memory, and the bits that select them.

A CTA's codes for one MMA are 32 or 64 bits a row, in a pair of columns that begins at an even one. The 8-bit kinds use
both columns, lane as row. f16 and tf32 use one of the two, which the sparsity selector names; there a word is shared by
rows i and i + 8 (lower and upper half), and lanes i and i + 8 hold the first and second four codes of both. With
M = 64 (layout F) lanes are those of D.

Source: PTX ISA, "Sparse Matrices" and the figures of "Sparsity selector", of which those of f16 and tf32 with M = 64
are swapped.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.units.descriptor import DescriptorError, InstrDescriptor, instruction_descriptor
from dsv4lib.emulator.units.tmem import tmem_of

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

_HALVED = ("f16", "tf32")  # kinds with 32 bits of codes a row
COLUMNS = 2
_NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)


@functools.lru_cache(maxsize=4096)
def sparse_descriptor(kind: str, bits: int, cta_group: int) -> tuple[InstrDescriptor, int]:
    """Read the instruction descriptor of a sparse MMA and its sparsity selector.

    K is twice that of a dense MMA.

    Raises:
        DescriptorError: not sparse; a selector or shape that is not supported.
    """
    if not bits >> 2 & 1:
        raise DescriptorError(f"instruction descriptor {bits:#x}: sparsity (bit 2) is 0, must be 1 with .sp")
    selector = bits & 3
    if selector > (kind in _HALVED):
        raise DescriptorError(f"instruction descriptor {bits:#x}: sparsity selector {selector} with kind::{kind}")
    shape = instruction_descriptor(kind, bits & ~7, cta_group)
    if cta_group == 2 and shape.m == 128:
        raise DescriptorError(f"instruction descriptor {bits:#x}: sparse A with M=128 of a CTA pair is not supported")
    return dataclasses.replace(shape, k=2 * shape.k), selector


class SparseMma(Protocol):
    """An MMA whose A is sparse, `tcgen05_core.Mma`, as its metadata are read.

    Attributes:
        metadata, d: tensor-memory addresses. selector: of the metadata. shape: decoded instruction descriptor.
        place: of the instruction. regions: of tensor memory, one a CTA.
    """

    metadata: int
    selector: int
    d: int
    shape: Any
    place: Any
    regions: Any

    def reads(self, cta: Cta, column: int, count: int, what: str) -> bool:
        """Tell whether columns are allocated; report if not."""

    def report(self, kind: str, message: str) -> None:
        """Report a hazard at the instruction."""


def codes_of(op: SparseMma, cta: Cta) -> np.ndarray:
    """uint8 (rows, chunks): where the elements of a CTA's A stand."""
    lane, column = op.metadata >> 16, op.metadata & 0xFFFF
    if lane != op.d >> 16 or column % COLUMNS:
        raise EmulatorError(
            f"tcgen05.mma.sp: metadata at lane {lane}, column {column} of tensor memory; the lane must be that of D, "
            f"{op.d >> 16}, the column even",
            op.place,
        )
    halved = op.shape.kind in _HALVED
    count = 1 if halved else COLUMNS
    column += op.selector
    if not op.reads(cta, column, count, "sparsity metadata"):
        raise EmulatorError(f"tcgen05.mma reads sparsity metadata from column {column}", op.place)
    tmem, region = tmem_of(cta), op.regions[0]
    data, init = (region.view(x, lane, column, count) for x in (tmem.data, tmem.init))
    if not tmem.written(region.key(lane, column, count), init):
        op.report("uninitialised_tmem", f"reads uninitialised sparsity metadata (column {column})")
    if cta.machine.race is not None and cta.machine.race.full:
        cta.machine.race.tensor(cta, region.cells(lane, column, count), False)
    words = np.ascontiguousarray(data).reshape(-1, count)
    nibbles = (words[:, :, None] >> _NIBBLES & np.uint32(15)).astype(np.uint8)  # (lanes, columns, 8)
    if not halved:
        return nibbles.reshape(len(words), -1)
    # [16 rows, chunk half, row % 8, row half, 4 codes] -> rows, chunks
    return nibbles.reshape(-1, 2, 8, 2, 4).transpose(0, 3, 2, 1, 4).reshape(-1, 8)
