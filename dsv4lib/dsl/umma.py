"""Issue tcgen05.mma with the attention kernels' descriptors, by inline PTX.

The DSL has no operation for the weight-stationary MMA (`.ws`, where 64 rows use all 128 lanes of tensor memory) nor
for the thread-sync fences; and an attention kernel reads one tile of SMEM in two ways (K and V), which descriptors say
more plainly than two layouts.

Source: PTX ISA, "tcgen05.mma.ws", "Instruction descriptor", "Matrix descriptor", "tcgen05.fence".
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cutlass_dsl import dsl_user_op

LAYOUT_TYPES = {64: 4, 128: 2}  # of a matrix descriptor, by the bytes of a swizzled row
SWIZZLE_ATOM = 1024  # bytes: 8 rows of 128 B, the period of the 128-byte swizzle
_FORMAT = {"fp16": 0, "bf16": 1, "e4m3": 0}  # of kind::f16, and of kind::f8f6f4
SCALE_BLOCK = 512  # bytes of the scales of 128 rows and 4 blocks, as `formats.scale_swizzle` and tcgen05.cp have them
SCALE_COLUMNS = 4  # of tensor memory that such a block takes


def instruction_descriptor(m: int, n: int, dtype: str, b_mn_major: bool = False) -> int:
    """Return the 32-bit descriptor of an MMA without scales. fp32 accumulator, A K-major, A and B of ``dtype``.

    Args:
        m, n: shape of the instruction.
        dtype: "fp16" or "bf16" of kind::f16, "e4m3" of kind::f8f6f4.
        b_mn_major: B is stored with N contiguous (a transposed B).
    """
    f = _FORMAT[dtype]
    return 1 << 4 | f << 7 | f << 10 | int(b_mn_major) << 16 | (n // 8) << 17 | (m // 16) << 24


def matrix_descriptor(leading_bytes: int, stride_bytes: int, row_bytes: int = 128) -> int:
    """Return the 64-bit descriptor of an operand in SMEM, without address.

    Swizzled in rows of ``row_bytes`` (64, 128).

    `at` adds the address. K-major: rows of so many bytes in groups of 8; ``stride_bytes`` from group to group,
    ``leading_bytes`` unused.
    MN-major: runs of 128 B along MN; ``leading_bytes`` from run to run, ``stride_bytes`` from 8 K rows to the next 8.
    """
    return (leading_bytes >> 4) << 16 | (stride_bytes >> 4) << 32 | 1 << 46 | LAYOUT_TYPES[row_bytes] << 61


def scaled_instruction_descriptor(m: int, a: int, b: int, ue8m0: bool, scale_id: int = 0) -> int:
    """Return the descriptor of a block-scaled MMA. fp32 accumulator, K-major operands, no N (`of_n` adds it).

    Args:
        m: rows of the instruction, 128 or 256.
        a, b: codes of the element types: of kind::mxf8f6f4 0 E4M3, 5 E2M1; of kind::mxf4nvf4 1 E2M1.
        ue8m0: type of the scales; else UE4M3.
        scale_id: which of the 4 scales in a word of tensor memory, where an MMA takes one.
    """
    return scale_id << 4 | a << 7 | b << 10 | int(ue8m0) << 23 | (m // 128) << 27 | scale_id << 29


def of_n(descriptor: int, n: cutlass.Int32) -> cutlass.Int32:
    """Give an instruction descriptor without N its ``n``, a multiple of 8."""
    return cutlass.Int32(descriptor) | (n >> 3) << 17


def scales_descriptor() -> int:
    """Return the descriptor of a block of scales for `copy_scales`.

    Without its address; rows of 16 bytes.
    """
    return (128 >> 4) << 32 | 1 << 46


def at(descriptor: int, address: cutlass.Int32) -> cutlass.Int64:
    """Give ``descriptor`` the start ``address`` (bytes in SMEM, a multiple of 16)."""
    field = (address & 0x3FFFF) >> 4
    return cutlass.Int64(field) | cutlass.Int64(descriptor)


def advanced(descriptor: cutlass.Int64, offset: int) -> cutlass.Int64:
    """Advance ``descriptor`` by ``offset`` bytes.

    A multiple of 16; its start address stays below 256 KiB.
    """
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
    kind: str = "f16",
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
        kind: "f16" or "f8f6f4".
    """
    name = "mma.ws" if ws else "mma"
    operand = "{$r1}" if isinstance(a, cutlass.Int64) else "[{$r1}]"
    text = (
        "{ .reg .pred accumulate; setp.ne.b32 accumulate, {$r4}, 0; "
        f"tcgen05.{name}.cta_group::{ctas}.kind::{kind} [{{$r0}}], {operand}, {{$r2}}, {{$r3}}, accumulate; }}"
    )
    args = [d, a, b, cutlass.Int32(instruction), cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def scaled_mma(
    d: cutlass.Int32,
    a: cutlass.Int64,
    b: cutlass.Int64,
    instruction: Any,
    sfa: cutlass.Int32,
    sfb: cutlass.Int32,
    accumulate: Any,
    kind: str,
    ctas: int = 1,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Issue D[TMEM] (+)= (A * its scales) @ (B * its scales); one thread issues it.

    Args:
        d: TMEM address of the accumulator.
        a, b: matrix descriptors.
        instruction: instruction descriptor.
        sfa, sfb: TMEM addresses of the scales of A and B, 4 columns per 128 rows.
        accumulate: 0 overwrites D.
        kind: "mxf4nvf4.block_scale.block16" or "mxf8f6f4.block_scale.block32": the instruction variant that `a` and
            `f` targets take, while ``.scale_vec::NX`` is refused on some.
        ctas: 2: a pair multiplies together. Each CTA has half of the rows of A with their scales, half of the rows of B
            and the scales of all rows of B.
    """
    text = (
        "{ .reg .pred accumulate; setp.ne.b32 accumulate, {$r6}, 0; "
        f"tcgen05.mma.cta_group::{ctas}.kind::{kind} "
        "[{$r0}], {$r1}, {$r2}, {$r3}, [{$r4}], [{$r5}], accumulate; }"
    )
    args = [d, a, b, cutlass.Int32(instruction), sfa, sfb, cutlass.Int32(accumulate)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


@dsl_user_op
def copy_scales(
    column: cutlass.Int32, source: cutlass.Int64, ctas: int = 1, *, loc: Any = None, ip: Any = None
) -> None:
    """Copy a block of scales from SMEM to 4 columns of TMEM.

    The same in all four lane groups; in order with MMAs.

    Args:
        column: TMEM address.
        source: matrix descriptor (`scales_descriptor`).
        ctas: 2: each CTA of a pair from and to its own, at the same places.
    """
    text = f"tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [{{$r0}}], {{$r1}};"
    cute.arch.inline_ptx(text, read_only_args=[column, source], loc=loc, ip=ip)


@dsl_user_op
def copy_rows(column: cutlass.Int32, source: cutlass.Int64, ctas: int = 1, *, loc: Any = None, ip: Any = None) -> None:
    """Copy 32 bytes of each of 128 rows from SMEM to 8 columns of TMEM.

    Row i to lane i; one thread issues it.

    Later MMAs of the thread see them; what MMAs before it read or write there must be known to be done.

    Args:
        column: TMEM address.
        source: matrix descriptor, K-major.
        ctas: 2: each CTA of a pair from and to its own, at the same places.
    """
    text = f"tcgen05.cp.cta_group::{ctas}.128x256b [{{$r0}}], {{$r1}};"
    cute.arch.inline_ptx(text, read_only_args=[column, source], loc=loc, ip=ip)


@dsl_user_op
def fence_before_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's earlier tcgen05 operations before the next sync."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;", loc=loc, ip=ip)


@dsl_user_op
def fence_after_thread_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Order this thread's later tcgen05 operations after the last sync."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;", loc=loc, ip=ip)
