"""TMA gather4: four rows of a matrix, named by index, in one copy.

The tensor map comes from an ordinary tiled TMA atom whose box is one row of 128 bytes; the DSL's own gather4 atom wants
the indices as a tensor in memory, while here every lane has its four in registers.

Source: PTX ISA, "cp.async.bulk.tensor", ``.tile::gather4``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu_ir
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op

ROW_BYTES = 128  # of one row of a box: one row of the 128-byte swizzle
GROUP_BYTES = 4 * ROW_BYTES  # of a copy
AT_ONCE = 4  # groups whose rows a lane holds
_DESCRIPTOR = "!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>"
_OPERANDS = "[{$r0}+%d], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}]"
_TX = "global.tile::gather4.mbarrier::complete_tx::bytes"
_GATHER4 = f"cp.async.bulk.tensor.2d.shared::cta.{_TX} {_OPERANDS};"
_OF_PAIR = f"cp.async.bulk.tensor.2d.shared::cluster.{_TX}.cta_group::2 {_OPERANDS};"


def row_atom(rows: cute.Tensor) -> cute.CopyAtom:
    """Make a TMA atom of ``rows`` in boxes of one row x 128 bytes.

    ``rows`` is [R, D], stride (ld, 1).
    """
    count, depth = rows.shape
    columns_first = cute.make_tensor(rows.iterator, cute.make_layout((depth, count), stride=(1, rows.stride[0])))
    width = ROW_BYTES * 8 // rows.element_type.width
    box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout((width, 1), stride=(1, width)))
    operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    atom, _ = cpasync.make_tiled_tma_atom(operation, columns_first, box, (width, 1))
    return atom


@dsl_user_op
def gather4(
    atom: cute.CopyAtom,
    smem: cutlass.Int32,
    barrier: cute.Pointer,
    column: cutlass.Int32,
    rows: tuple[cutlass.Int32, ...],
    pair: bool = False,
    offset: int = 0,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Copy 128 bytes of each of four rows to SMEM.

    Every active thread issues one copy.

    Args:
        atom: from `row_atom`.
        smem: address of 4 x 128 bytes, where the 128-byte swizzle of the whole tile starts at a 1024-byte boundary.
        barrier: mbarrier that counts the 512 bytes.
        column: first element of each row.
        rows: four row numbers; one outside the matrix (-1) is filled with zeros, its bytes still count.
        pair: the bytes are counted at the same barrier of the first CTA of the pair.
        offset: bytes from ``smem`` on, a constant of the instruction.
    """
    executable = atom._unpack(tma_bar_ptr=barrier, loc=loc, ip=ip)
    descriptor = cute_nvgpu_ir.get_tma_desc_addr(ir.Type.parse(_DESCRIPTOR), executable, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(barrier, 0, loc=loc, ip=ip) if pair else barrier
    args = [smem, descriptor.toint(loc=loc, ip=ip), column, *rows, signal.toint(loc=loc, ip=ip)]
    cute.arch.inline_ptx((_OF_PAIR if pair else _GATHER4) % offset, read_only_args=args, loc=loc, ip=ip)


@cute.jit
def gather_tile(
    atom: cute.CopyAtom,
    rows: tuple[cutlass.Int32, ...],
    groups: tuple[cutlass.Int32, cutlass.Int32],
    columns: tuple[cutlass.Int32, ...],
    smem: cutlass.Int32,
    barrier: cute.Pointer,
    tile_rows: cutlass.Constexpr = 64,
    pair: cutlass.Constexpr = False,
):
    """Gather rows of a tile by a warp, in the 128-byte swizzle. They are ``tile_rows`` x 128 bytes a chunk of columns.

    One lane issues for all: a copy's operands are uniform registers, so of a copy that lanes issue together the
    compiler makes a loop that elects one after the other and moves seven operands each time. Here the four rows of a
    group are moved once for all chunks.

    Args:
        atom: from `row_atom`.
        rows: the four rows of this lane's group; lane i has those of group i.
        groups: (first, end) of the groups to gather, of four rows each; first <= end.
        columns: first element of each chunk, in the order in which they lie in SMEM.
        smem: where the tile begins, a multiple of 1024.
        barrier: counts 512 bytes a group and chunk.
        tile_rows: of a chunk in SMEM.
        pair: see `gather4`.
    """
    first, end = groups
    whole = first + ((end - first) & -AT_ONCE)
    for group in cutlass.range(first, whole, AT_ONCE, unroll=1):
        send(atom, rows, group, AT_ONCE, columns, smem, barrier, tile_rows, pair)
    for group in cutlass.range(whole, end, unroll=1):
        send(atom, rows, group, 1, columns, smem, barrier, tile_rows, pair)


@cute.jit
def send(
    atom: cute.CopyAtom,
    rows: tuple[cutlass.Int32, ...],
    group: cutlass.Int32,
    groups: cutlass.Constexpr,
    columns: tuple[cutlass.Int32, ...],
    smem: cutlass.Int32,
    barrier: cute.Pointer,
    tile_rows: cutlass.Constexpr,
    pair: cutlass.Constexpr,
):
    """Send all copies of some groups from ``group`` on; arguments as of `gather_tile`."""
    of_groups = tuple(tuple(cute.arch.shuffle_sync(row, group + i) for row in rows) for i in range(groups))
    target = smem + group * GROUP_BYTES
    with cute.arch.elect_one():
        for i, of_group in enumerate(of_groups):
            for j, column in enumerate(columns):
                offset = i * GROUP_BYTES + j * tile_rows * ROW_BYTES
                gather4(atom, target, barrier, column, of_group, pair, offset)
