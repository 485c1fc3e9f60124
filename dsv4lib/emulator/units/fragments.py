"""Convert register fragments of mma.sync and wgmma to and from matrices.

Operands are the same for all types: with g = lane / 4 and q = lane % 4, register r of A holds the bytes
16 (r / 2) + 4 q to + 3 of row g + 8 (r % 2); register r of B the bytes 16 r + 4 q to + 3 of column g. 32-bit
accumulator registers hold, for every 8 columns, (row g, columns 2 q and 2 q + 1), then row g + 8; 16-bit accumulators
are packed in pairs along the row. Shapes with 8 rows have only row g. fp64 has one element where the others have four
bytes.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k*", "mma.m8n8k*" and "wgmma.mma_async.m64nNk*".
"""

from __future__ import annotations

import numpy as np


def rows_of_a(registers: np.ndarray) -> np.ndarray:
    """uint8 (16, bytes of K), or (8, 16) for one register: A of uint32[n, 32]."""
    count = len(registers)
    halves = 1 if count == 1 else 2
    blocks = np.ascontiguousarray(registers).view(np.uint8).reshape(count // halves, halves, 8, 4, 4)
    return np.ascontiguousarray(blocks.transpose(1, 2, 0, 3, 4)).reshape(8 * halves, -1)


def columns_of_b(registers: np.ndarray) -> np.ndarray:
    """uint8 (8, bytes of K): B, transposed, of uint32[n, 32]."""
    blocks = np.ascontiguousarray(registers).view(np.uint8).reshape(len(registers), 8, 4, 4)
    return np.ascontiguousarray(blocks.transpose(1, 0, 2, 3)).reshape(8, -1)


def accumulator(registers: np.ndarray, fmt: str, rows: int) -> np.ndarray:
    """(rows, N) of uint32[n, 32] (uint64 for f64): float32, float16, float64 or int32 as ``fmt`` says."""
    halves = rows // 8
    if fmt == "f16":
        blocks = np.ascontiguousarray(registers).view(np.float16).reshape(-1, halves, 8, 4, 2)
        return blocks.transpose(1, 2, 0, 3, 4).reshape(rows, -1)
    blocks = np.ascontiguousarray(registers).view(_DTYPES[fmt]).reshape(-1, halves, 2, 8, 4)
    return blocks.transpose(1, 3, 0, 4, 2).reshape(rows, -1)


def registers_of(matrix: np.ndarray, fmt: str) -> np.ndarray:
    """The inverse of `accumulator`: uint32[n, 32], uint64 for f64."""
    rows, columns = matrix.shape
    halves = rows // 8
    if fmt == "f16":
        blocks = matrix.reshape(halves, 8, columns // 8, 4, 2).transpose(2, 0, 1, 3, 4)
        return np.ascontiguousarray(blocks).view(np.uint32).reshape(-1, 32)
    blocks = matrix.reshape(halves, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(blocks).view(np.uint64 if fmt == "f64" else np.uint32).reshape(-1, 32)


_DTYPES = {"f32": np.float32, "s32": np.int32, "f64": np.float64}


def unpack_bits(raw: np.ndarray) -> np.ndarray:
    """float32 (rows, 8 * bytes) of zeros and ones, lowest bit first."""
    return np.unpackbits(raw, axis=1, bitorder="little").astype(np.float32)


def unpack_nibbles(raw: np.ndarray, signed: bool) -> np.ndarray:
    """float32 (rows, 2 * bytes) of 4-bit integers, low nibble first."""
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1).astype(np.int32)
    return (np.where(codes > 7, codes - 16, codes) if signed else codes).astype(np.float32)
