"""Show what the compiler emits for a swizzled store to shared memory.

It is evidence that the XOR acts on byte addresses.

A kernel of one store is compiled for sm_100a and its PTX read back. Between the linear byte address and ``st.shared``
stand three instructions: shift right, and, xor. Their constants are the swizzle, in bytes.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.memory import SmemAllocator

from dsv4lib.dsl.compile import compile_for
from dsv4lib.dsl.layouts import ARCH, DTYPES, LayoutGrid, apply_swizzle, check_choice, without_swizzle
from dsv4lib.errors import ArgumentError, DSV4Error

_KINDS = {"32B": "K_SW32", "64B": "K_SW64", "128B": "K_SW128"}


class _StoreOnce:
    """Every thread stores one element of a K-major swizzle atom in shared memory."""

    def __init__(self, dtype: str, swizzle: str):
        self.dtype, self.kind = DTYPES[dtype], getattr(tcgen05.SmemLayoutAtomKind, _KINDS[swizzle])
        self.columns = int(swizzle[:-1]) * 8 // self.dtype.width

    @cute.jit
    def __call__(self):
        """Launch one CTA of a thread per element of the atom (8 rows)."""
        self.kernel().launch(grid=(1, 1, 1), block=(min(8 * self.columns, 1024), 1, 1))

    @cute.kernel
    def kernel(self):
        """Store 1.0 at (thread / columns, thread mod columns)."""
        atom = tcgen05.make_smem_layout_atom(self.kind, self.dtype)
        tile = SmemAllocator().allocate_tensor(self.dtype, atom.outer, byte_alignment=1024, swizzle=atom.inner)
        thread, _, _ = cute.arch.thread_idx()
        tile[thread // self.columns, thread % self.columns] = self.dtype(1.0)


@lru_cache(maxsize=16)
def store_instructions(dtype: str = "bf16", swizzle: str = "128B") -> tuple[str, ...]:
    """Return the PTX instructions of one swizzled store.

    From the thread's index to ``st.shared``.

    Args:
        dtype: "bf16" or "fp16".
        swizzle: "32B", "64B" or "128B".
    """
    check_choice("dtype", dtype, ("bf16", "fp16"))
    check_choice("swizzle", swizzle, tuple(_KINDS))
    ptx = compile_for(_StoreOnce(dtype, swizzle), (), ARCH).ptx
    body = re.search(r"\{(.*?st\.shared[^\n]*)", ptx, re.DOTALL)
    if body is None:
        raise DSV4Error("the compiled probe holds no st.shared")
    lines = (line.strip() for line in body[1].splitlines())
    return tuple(line for line in lines if re.match(r"(mov|shfl|shl|add|shr|and|xor|or|st)\.", line))


def swizzle_of(instructions: tuple[str, ...]) -> tuple[int, int, int]:
    """Return (bits, base, shift) over byte addresses.

    Read from the shift and the mask of ``shr``, ``and``, ``xor``.

    Raises:
        ArgumentError: the instructions hold no such sequence.
    """
    text = "\n".join(instructions)
    found = re.search(r"shr\.u32 \s*(%r\d+), (%r\d+), (\d+);\s*and\.b32 \s*(%r\d+), \1, (\d+);\s*xor\.b32[^;]*\4", text)
    if found is None:
        raise ArgumentError("instructions", text, "PTX with shr, and, xor before the store")
    shift, mask = int(found[3]), int(found[5])
    base = (mask & -mask).bit_length() - 1
    return mask.bit_count(), base, shift


def store_addresses(grid: LayoutGrid, swizzle: str) -> np.ndarray:
    """Compute every element's byte address as the compiled store does.

    From the linear address, of all elements of ``grid``.

    Args:
        grid: a shared-memory tile, as `layouts.smem_operand` returns it.
        swizzle: its swizzle: "none", "32B", "64B" or "128B".

    Returns:
        int64 [rows, columns].
    """
    check_choice("swizzle", swizzle, ("none", *_KINDS))
    linear = without_swizzle(grid).byte_addresses
    if swizzle == "none":
        return linear
    return apply_swizzle(linear, *swizzle_of(store_instructions("bf16", swizzle)))
