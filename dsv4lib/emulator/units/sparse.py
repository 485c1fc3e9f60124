"""Expand structured sparsity of A. Half of every row is stored, and metadata says where the stored elements stand.

A row is divided into chunks of four elements, of which two are stored; a 4-bit code gives their positions, the lower
two bits that of the first. 4-bit integers go in pairs: 4 of 8. tf32 has chunks of two elements, of which one is stored:
its code is that of two 16-bit halves.

For mma.sp and wgmma with .sp a lane holds eight codes. Of every four lanes 4 g + t as many take part as 16 rows of a
warp need, from the selector times that number on. Of 16- and 32-bit types each holds four chunks of row g, in its lower
half, and of row g + 8; of the others eight chunks of row g, if it is the first of two, or of row g + 8.

Source: PTX ISA, "Sparse matrix storage" of mma.sp and of wgmma.mma_async.sp; which lane holds what is in figures, and
measured on an H200.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator.errors import EmulatorError

WIDE = ("f16", "bf16", "tf32")
_FIRST_OF_TF32, _SECOND_OF_TF32 = 0b0100, 0b1110


def codes_of(words: np.ndarray, selector: int, fmt: str, k_bytes: int) -> np.ndarray:
    """Return uint8 (16, chunks). They are the codes of a warp's rows of ``k_bytes`` bytes, from uint32[32] metadata.

    Raises:
        EmulatorError: the selector names threads that do not exist.
    """
    count = k_bytes // (8 if fmt in WIDE else 4)
    threads = count // 4
    if not 0 <= selector < 4 // threads:
        raise EmulatorError(f"sparsity selector {selector}, must be less than {4 // threads}")
    mine = words.reshape(8, 4)[:, selector * threads : (selector + 1) * threads]
    codes = (mine[..., None] >> np.arange(0, 32, 4, np.uint32) & np.uint32(15)).astype(np.uint8)
    if fmt in WIDE:
        return codes.reshape(8, threads, 2, 4).transpose(2, 0, 1, 3).reshape(16, count)
    return codes.reshape(8, threads // 2, 2, 8).transpose(2, 0, 1, 3).reshape(16, count)


def expand(stored: np.ndarray, codes: np.ndarray, fmt: str, ordered: bool) -> np.ndarray:
    """Return (rows, 2 n): A with its zeros. From the stored elements (rows, n) and one code per chunk (rows, chunks).

    Args:
        stored: of any dtype; pairs of 4-bit elements are one.
        fmt: their type.
        ordered: the first stored element stands before the second (``.sp::ordered_metadata``, tcgen05).

    Raises:
        EmulatorError: a code that the ISA leaves undefined.
    """
    first, second = codes & 3, codes >> 2
    if fmt == "tf32":
        wrong = (codes != _FIRST_OF_TF32) & (codes != _SECOND_OF_TF32)
    else:
        wrong = first >= second if ordered else first == second
    if wrong.any():
        row, chunk = np.argwhere(wrong)[0]
        raise EmulatorError(f"sparsity metadata {codes[row, chunk]:#06b} of row {row}, chunk {chunk}: not allowed")
    places = (first >> 1)[..., None] if fmt == "tf32" else np.stack([first, second], -1)
    rows, count, kept = places.shape
    full = np.zeros((rows, count, 2 * kept), stored.dtype)
    np.put_along_axis(full, places.astype(np.intp), stored.reshape(rows, count, kept), 2)
    return full.reshape(rows, -1)


def expand_bytes(stored: np.ndarray, codes: np.ndarray, fmt: str, ordered: bool) -> np.ndarray:
    """`expand` of the bytes of the rows: uint8 (rows, n) to (rows, 2 n)."""
    dtype = {"tf32": np.uint32, "f16": np.uint16, "bf16": np.uint16}.get(fmt, np.uint8)
    return expand(np.ascontiguousarray(stored).view(dtype), codes, fmt, ordered).view(np.uint8)
