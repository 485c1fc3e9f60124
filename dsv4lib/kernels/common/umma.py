"""tcgen05.mma and its descriptors as the attention kernels use them: spelled out, as inline PTX.

The DSL has no operation for the weight-stationary form (`.ws`, in which 64 rows use all 128 lanes of tensor memory) nor
for the thread-sync fences; and an attention kernel reads one tile of SMEM in two ways (K and V), which descriptors say
more plainly than two layouts.

Source: PTX ISA, "tcgen05.mma.ws", "Instruction descriptor", "Matrix descriptor", "tcgen05.fence".
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import dsl_user_op

SWIZZLE_128B = 2  # layout type of a matrix descriptor
SWIZZLE_ATOM = 1024  # bytes: 8 rows of 128 B, the period of the 128-byte swizzle
_FORMAT = {"fp16": 0, "bf16": 1}


def instruction_descriptor(m: int, n: int, dtype: str, b_mn_major: bool = False) -> int:
    """The 32-bit descriptor of a kind::f16 MMA: fp32 accumulator, A K-major, A and B of ``dtype``.

    Args:
        m, n: shape of the instruction.
        dtype: "fp16" or "bf16".
        b_mn_major: B is stored with N contiguous (a transposed B).
    """
    f = _FORMAT[dtype]
    return 1 << 4 | f << 7 | f << 10 | int(b_mn_major) << 16 | (n // 8) << 17 | (m // 16) << 24


def matrix_descriptor(leading_bytes: int, stride_bytes: int) -> int:
    """The 64-bit descriptor of an operand in SMEM with the 128-byte swizzle, without its address (`at` adds it).

    K-major: rows of 128 B in groups of 8; ``stride_bytes`` from group to group, ``leading_bytes`` unused.
    MN-major: runs of 128 B along MN; ``leading_bytes`` from run to run, ``stride_bytes`` from 8 K rows to the next 8.
    """
    return (leading_bytes >> 4) << 16 | (stride_bytes >> 4) << 32 | 1 << 46 | SWIZZLE_128B << 61


def at(descriptor: int, address: cutlass.Int32) -> cutlass.Int64:
    """``descriptor`` with the start ``address`` (bytes in SMEM, a multiple of 16)."""
    field = (address & 0x3FFFF) >> 4
    return cutlass.Int64(field) | cutlass.Int64(descriptor)


def behind(descriptor: cutlass.Int64, offset: int) -> cutlass.Int64:
    """``descriptor`` with a start address ``offset`` bytes (a multiple of 16) further on, which stays below 256 KiB."""
    return descriptor + (offset >> 4)


@dsl_user_op
def mma(
    d: cutlass.Int32,
    a: Any,
    b: cutlass.Int64,
    instruction: int,
    accumulate: Any,
    *,
    ws: bool = False,
    ctas: int = 1,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D[TMEM] (+)= A @ B[SMEM]; one thread issues it.

    Args:
        d: TMEM address of the accumulator.
        a: Int64: matrix descriptor; Int32: TMEM address, row i in lane i, two elements a column.
        b: matrix descriptor.
        instruction: instruction descriptor, a constant.
        accumulate: 0 overwrites D.
        ws: weight-stationary. With M 64 and A in TMEM the two halves of the lanes work alone: lanes 0-63 multiply the A
            that they hold with the left half of N, lanes 64-127 theirs with the right half (accumulator layout E).
        ctas: 2: a pair multiplies together. Each CTA has half of the rows of A and of D and brings half of the N rows
            of B, from the same place in its SMEM. With M 128 the lanes are as with ``ws`` and M 64 (layout B), A in
            TMEM too.
    """
    form = "mma.ws" if ws else "mma"
    operand = "{$r1}" if isinstance(a, cutlass.Int64) else "[{$r1}]"
    text = (
        "{ .reg .pred accumulate; setp.ne.b32 accumulate, {$r4}, 0; "
        f"tcgen05.{form}.cta_group::{ctas}.kind::f16 [{{$r0}}], {operand}, {{$r2}}, {{$r3}}, accumulate; }}"
    )
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def fence_before_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's earlier tcgen05 operations before the synchronisation that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def fence_after_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's later tcgen05 operations after the synchronisation that came before."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", loc=loc, ip=ip)
