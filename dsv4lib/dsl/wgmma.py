"""Issue warpgroup MMAs.

m64nNk32 of E4M3, m64nNk16 of bf16, fp32 sums; B in swizzled shared memory, A in registers or there.

A warpgroup's fragment of A in registers: warp w, lane 4 g + t has rows 16 w + g and 16 w + g + 8, 4 words of 32 bits:

    word    row        E4M3, K of the byte c    bf16, K of the half h
    0       g          4 t + c                  2 t + h
    1       g + 8      4 t + c                  2 t + h
    2       g          16 + 4 t + c             8 + 2 t + h
    3       g + 8      16 + 4 t + c             8 + 2 t + h

Sums: value 4 i + 2 j + l is row g + 8 j, column 8 i + 2 t + l.

The sums of `multiply` and `multiply_shared` may be read after `wait` only, and by instructions that the compiler does
not move before it: `multiply_add` and `add`. The words of A must not change before it either, which the assembler sees
to. `wait_for` gives sums back that any instruction may read.

Source: PTX ISA, "wgmma.mma_async", "Matrix Descriptor Format" of sm_90.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64

from dsv4lib.dsl.asm import asm

SHAPES = {"e4m3": ("k32.f32.e4m3.e4m3", ""), "bf16": ("k16.f32.bf16.bf16", ", 0")}  # and B is not transposed
STEP_BYTES = 32  # of a row of B that an instruction reads
# Bits 16-29: leading dimension (not used), 32-45: 1,024 bytes / 16 from 8 rows to the next, 62-63: 128-byte swizzle.
_DESCRIPTOR = 0x4000004000010000


def fence() -> None:
    """Order registers of this thread before the MMAs that follow."""
    asm("wgmma.fence.sync.aligned;", [], [])


def commit() -> None:
    """Close a group of MMAs."""
    asm("wgmma.commit_group.sync.aligned;", [], [])


def wait(groups: int) -> None:
    """Wait until at most ``groups`` groups are in flight."""
    asm(f"wgmma.wait_group.sync.aligned {groups};", [], [])


def wait_for(sums: list) -> list:
    """Wait for all groups; return ``sums``, which any instruction may then read."""
    return asm("wgmma.wait_group.sync.aligned 0;", [Float32] * len(sums), [], kept=sums)


def operand(address: Int32) -> Int64:
    """Make the descriptor of A or B. Rows of 128 bytes, 128-byte swizzle, 8 rows on 1,024 bytes."""
    text = f"{{ .reg .b32 a; .reg .b64 b; shr.u32 a, $1, 4; cvt.u64.u32 b, a; or.b64 $0, b, {_DESCRIPTOR:#x}; }}"
    return asm(text, [Int64], [address], pure=True)


def rows_of_k(address: Int32, chunk_bytes: int) -> Int64:
    """Make the descriptor of a bf16 B whose rows are K. 64 of N on 128 bytes, 128-byte swizzle, 8 rows on 1,024 bytes.

    The next 64 of N are ``chunk_bytes`` further.
    """
    fields = 1 << 62 | 1024 // 16 << 32 | chunk_bytes // 16 << 16
    text = f"{{ .reg .b32 a; .reg .b64 b; shr.u32 a, $1, 4; cvt.u64.u32 b, a; or.b64 $0, b, {fields:#x}; }}"
    return asm(text, [Int64], [address], pure=True)


def accumulate(sums: list, a: list, b: Int64, offsets: list[int], rows_are_k: bool = True) -> list:
    """Issue MMAs of bf16 that add to their sums.

    Args:
        sums: N / 2 in fp32. a: 4 words an MMA. b: descriptor. offsets: bytes from there to each MMA's 16 of K of B.
        rows_are_k: B is from `rows_of_k`; else from `operand`.

    Returns:
        the sums, to be read after `wait_for`.
    """
    n = len(sums)
    d = ", ".join(f"${c}" for c in range(n))
    lines = ["{ .reg .pred more; .reg .b64 d;", "setp.eq.b32 more, 0, 0;"]
    for i, offset in enumerate(offsets):
        words = ", ".join(f"${2 * n + 4 * i + c}" for c in range(4))
        lines.append(f"add.s64 d, ${2 * n + len(a)}, {offset // 16};")
        shape = f"m64n{2 * n}{SHAPES['bf16'][0]}"
        b_format = int(rows_are_k)
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{d}}}, {{{words}}}, d, more, 1, 1, {b_format};")
    return asm("\n".join([*lines, "}"]), [Float32] * n, [*a, b], early=True, kept=sums)


def accumulate_shared(sums: list, a: Int64, b: Int64, offsets: list[tuple[int, int]], rows_are_k: bool = True) -> list:
    """Issue MMAs of bf16 with A in shared memory too that add to their sums.

    Args:
        sums: N / 2 in fp32. a: from `operand`. b: descriptor. offsets: bytes from there to each MMA's operands.
        rows_are_k: B is from `rows_of_k`; else from `operand`.

    Returns:
        the sums, to be read after `wait_for`.
    """
    n = len(sums)
    d = ", ".join(f"${c}" for c in range(n))
    lines = ["{ .reg .pred more; .reg .b64 da, db;", "setp.eq.b32 more, 0, 0;"]
    for of_a, of_b in offsets:
        lines.append(f"add.s64 da, ${2 * n}, {of_a // 16}; add.s64 db, ${2 * n + 1}, {of_b // 16};")
        shape = f"m64n{2 * n}{SHAPES['bf16'][0]}"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{d}}}, da, db, more, 1, 1, 0, {int(rows_are_k)};")
    return asm("\n".join([*lines, "}"]), [Float32] * n, [a, b], early=True, kept=sums)


def multiply(a: list, b: Int64, offsets: list[int], columns: int, kind: str, apart: bool) -> list:
    """Issue MMAs that overwrite their sums.

    Args:
        a: 4 words an MMA. b: descriptor of B. offsets: bytes from there to each MMA's operand.
        columns: N, a multiple of 8. kind: key of `SHAPES`.
        apart: every MMA has sums of its own; else all are added up.

    Returns:
        fp32 sums, columns / 2 of them, or as many for each MMA one after the other.
    """
    shape, last = SHAPES[kind]
    each = columns // 2
    sums = each * (len(offsets) if apart else 1)
    lines = ["{ .reg .pred first, more; .reg .b64 d;", "setp.ne.b32 first, 0, 0; setp.eq.b32 more, 0, 0;"]
    for i, offset in enumerate(offsets):
        own = i * each if apart else 0
        d = ", ".join(f"${own + c}" for c in range(each))
        words = ", ".join(f"${sums + 4 * i + c}" for c in range(4))
        predicate = "first" if apart or i == 0 else "more"
        lines.append(f"add.s64 d, ${sums + len(a)}, {offset // 16};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}{shape} {{{d}}}, {{{words}}}, d, {predicate}, 1, 1{last};"
        )
    return asm("\n".join([*lines, "}"]), [Float32] * sums, [*a, b], early=True)


def multiply_shared(a: Int64, b: Int64, offsets: list[tuple[int, int]], columns: int, kind: str) -> list:
    """Issue MMAs with A in shared memory too, whose sum overwrites what was there.

    Args:
        a, b: descriptors. offsets: bytes from there to each MMA's operands.
        columns: N, a multiple of 8. kind: key of `SHAPES`.

    Returns:
        columns / 2 sums in fp32.
    """
    shape, last = SHAPES[kind]
    sums = columns // 2
    d = ", ".join(f"${c}" for c in range(sums))
    lines = ["{ .reg .pred first, more; .reg .b64 da, db;", "setp.ne.b32 first, 0, 0; setp.eq.b32 more, 0, 0;"]
    for i, (of_a, of_b) in enumerate(offsets):
        lines.append(f"add.s64 da, ${sums}, {of_a // 16}; add.s64 db, ${sums + 1}, {of_b // 16};")
        predicate = "more" if i else "first"
        transposed = ", 0" + last if last else ""
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}{shape} {{{d}}}, da, db, {predicate}, 1, 1{transposed};"
        )
    return asm("\n".join([*lines, "}"]), [Float32] * sums, [a, b], early=True)


def multiply_add(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c, not before a `wait` that precedes it."""
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [a, b, c])


def add(a: Float32, b: Float32) -> Float32:
    """a + b, not before a `wait` that precedes it."""
    return asm("add.rn.f32 $0, $1, $2;", [Float32], [a, b])
