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


def _mma(form: str, a_operand: str) -> str:
    return (
        "{ .reg .pred accumulate; setp.ne.b32 accumulate, {$r4}, 0; "
        f"tcgen05.{form}.cta_group::1.kind::f16 [{{$r0}}], {a_operand}, {{$r2}}, {{$r3}}, accumulate; }}"
    )


@dsl_user_op
def mma_ss(
    d: cutlass.Int32,
    a: cutlass.Int64,
    b: cutlass.Int64,
    instruction: int,
    accumulate: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D[TMEM] (+)= A[SMEM] @ B[SMEM], row i of an M of 128 in lane i; one thread issues it. See `mma_ws_ss`."""
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(_mma("mma", "{$r1}"), read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def mma_ts(
    d: cutlass.Int32,
    a: cutlass.Int32,
    b: cutlass.Int64,
    instruction: int,
    accumulate: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D[TMEM] (+)= A[TMEM] @ B[SMEM], row i of A in lane i, two elements a column. Arguments as `mma_ws_ts`."""
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(_mma("mma", "[{$r1}]"), read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def mma_ws_ss(
    d: cutlass.Int32,
    a: cutlass.Int64,
    b: cutlass.Int64,
    instruction: int,
    accumulate: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D[TMEM] (+)= A[SMEM] @ B[SMEM], weight-stationary; one thread issues it.

    Args:
        d: TMEM address of the accumulator.
        a, b: matrix descriptors.
        instruction: instruction descriptor, a constant.
        accumulate: 0 overwrites D.
    """
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(_mma("mma.ws", "{$r1}"), read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def mma_ws_ts(
    d: cutlass.Int32,
    a: cutlass.Int32,
    b: cutlass.Int64,
    instruction: int,
    accumulate: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """D[TMEM] (+)= A[TMEM] @ B[SMEM], weight-stationary; one thread issues it.

    With M 64 the two halves of the lanes work alone: lanes 0-63 multiply the A that they hold with the left half of N,
    lanes 64-127 theirs with the right half (accumulator layout E). Arguments as `mma_ws_ss`, ``a`` a TMEM address.
    """
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(_mma("mma.ws", "[{$r1}]"), read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def fence_before_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's earlier tcgen05 operations before the synchronisation that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def fence_after_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's later tcgen05 operations after the synchronisation that came before."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", loc=loc, ip=ip)
