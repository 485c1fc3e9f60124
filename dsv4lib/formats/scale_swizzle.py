"""Lay scales out in 128x4 as tcgen05 block-scaled MMAs (and cuBLAS) read them. 512-byte blocks, rows interleaved.

A block covers 128 rows and 4 consecutive scales of a row (one MMA's worth of K). Within it row r, column c is byte

    (r mod 32) * 16 + (r div 32) * 4 + c

so that 16 consecutive bytes hold rows r, r+32, r+64, r+96: one ``tcgen05.cp.32x128b.warpx4`` moves the block to TMEM
with row r in lane r mod 32 and word r div 32. Blocks follow each other along K first, then along the rows. Rows are
padded to 128 and columns to 4, with zero bytes. Source: cuBLAS documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks

ROWS = 128
COLS = 4
BLOCK_BYTES = ROWS * COLS
_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def swizzled_bytes(rows: int, cols: int) -> int:
    """Return the size in bytes of the swizzled image of a [rows, cols] scale matrix."""
    return -(-rows // ROWS) * -(-cols // COLS) * BLOCK_BYTES


def byte_offset(row: int, col: int, cols: int) -> int:
    """Return the offset of scale [row, col] in the image of a matrix.

    The matrix has ``cols`` columns.
    """
    return offset_of(row, col, -(-cols // COLS))


def offset_of(row: int, col: int, across: int) -> int:
    """Return the offset with ``across`` blocks side by side. Whatever adds, multiplies and divides may be given."""
    block = row // ROWS * across + col // COLS
    return block * BLOCK_BYTES + row % 32 * 16 + row % ROWS // 32 * 4 + col % COLS


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Swizzle row-major scales to bytes.

    Args:
        scales: [..., M, C], one byte each: uint8, float8_e4m3fn or float8_e8m0fnu. Leading dimensions (experts) are
            swizzled separately.

    Returns:
        [..., swizzled_bytes(M, C)], dtype of ``scales``.
    """
    raw = _checks.as_bytes("scales", scales, *_BYTE_DTYPES[1:])
    if raw.dim() < 2:
        raise ArgumentError("scales.shape", tuple(raw.shape), "at least two dimensions [..., M, C]")
    *lead, rows, cols = raw.shape
    row_blocks, col_blocks = -(-rows // ROWS), -(-cols // COLS)
    padded = raw.new_zeros(*lead, row_blocks * ROWS, col_blocks * COLS)
    padded[..., :rows, :cols] = raw
    # [row block, r div 32, r mod 32, column block, c] -> [row block, column block, r mod 32, r div 32, c]
    split = padded.reshape(*lead, row_blocks, 4, 32, col_blocks, COLS)
    image = split.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return image.reshape(*lead, swizzled_bytes(rows, cols)).view(scales.dtype)


def unswizzle(image: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Invert ``swizzle``. bytes [..., swizzled_bytes(rows, cols)] -> row-major [..., rows, cols]."""
    raw = _checks.as_bytes("image", image, *_BYTE_DTYPES[1:])
    for name, value in (("rows", rows), ("cols", cols)):
        if not isinstance(value, int) or value < 0:
            raise ArgumentError(name, value, "an integer >= 0")
    _checks.last_dim("image", raw, equal_to=swizzled_bytes(rows, cols))
    lead = raw.shape[:-1]
    row_blocks, col_blocks = -(-rows // ROWS), -(-cols // COLS)
    split = raw.reshape(*lead, row_blocks, col_blocks, 32, 4, COLS)
    padded = split.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    full = padded.reshape(*lead, row_blocks * ROWS, col_blocks * COLS)
    return full[..., :rows, :cols].contiguous().view(image.dtype)
