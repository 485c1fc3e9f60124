"""TMA gather4: four rows of a matrix, named by index, in one copy.

The tensor map comes from an ordinary tiled TMA atom whose box is one row of 128 bytes; the DSL's own gather4 atom wants
the indices as a tensor in memory, while here every lane has its four in registers, so 32 lanes issue 32 copies with one
instruction of the warp.

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
_DESCRIPTOR = "!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>"
_OPERANDS = "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}]"
_TX = "global.tile::gather4.mbarrier::complete_tx::bytes"
_GATHER4 = f"cp.async.bulk.tensor.2d.shared::cta.{_TX} {_OPERANDS};"
_OF_PAIR = f"cp.async.bulk.tensor.2d.shared::cluster.{_TX}.cta_group::2 {_OPERANDS};"


def row_atom(rows: cute.Tensor) -> cute.CopyAtom:
    """A TMA atom whose tensor map describes ``rows`` ([R, D], stride (ld, 1)) in boxes of one row x 128 bytes."""
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
    rows: tuple,
    pair: bool = False,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Copy 128 bytes of each of four rows to SMEM; every active thread issues one copy.

    Args:
        atom: from `row_atom`.
        smem: address of 4 x 128 bytes, where the 128-byte swizzle of the whole tile starts at a 1024-byte boundary.
        barrier: mbarrier that counts the 512 bytes.
        column: first element of each row.
        rows: four row numbers; one outside the matrix (-1) is filled with zeros, its bytes still count.
        pair: the bytes are counted at the same barrier of the first CTA of the pair.
    """
    executable = atom._unpack(tma_bar_ptr=barrier, loc=loc, ip=ip)
    descriptor = cute_nvgpu_ir.get_tma_desc_addr(ir.Type.parse(_DESCRIPTOR), executable, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(barrier, 0, loc=loc, ip=ip) if pair else barrier
    args = [smem, descriptor.toint(loc=loc, ip=ip), column, *rows, signal.toint(loc=loc, ip=ip)]
    cute.arch.inline_ptx(_OF_PAIR if pair else _GATHER4, read_only_args=args, loc=loc, ip=ip)


@cute.jit
def gather_tile(
    atom: cute.CopyAtom,
    rows: tuple,
    tile_rows: cutlass.Constexpr,
    chunks: cutlass.Constexpr,
    smem: cutlass.Int32,
    barrier: cute.Pointer,
    column: Any = 0,
    pair: cutlass.Constexpr = False,
):
    """A warp gathers a tile in the 128-byte swizzle: chunk after chunk, ``tile_rows`` x 128 bytes each.

    Args:
        atom: from `row_atom`.
        rows: the four rows of this lane.
        tile_rows: at most 128: lanes from ``tile_rows / 4`` on have nothing to do.
        chunks: columns of 128 bytes.
        smem: where the first of this lane's rows goes, a multiple of 512 in a tile that starts at one of 1024.
        barrier: counts ``chunks * tile_rows * 128`` bytes.
        column: first element of the first chunk.
        pair: see `gather4`.
    """
    width = ROW_BYTES * 8 // atom.value_type.width
    if cute.arch.lane_idx() < tile_rows // 4:
        for chunk in cutlass.range_constexpr(chunks):
            target = smem + chunk * (tile_rows * ROW_BYTES)
            gather4(atom, target, barrier, cutlass.Int32(column + chunk * width), rows, pair)
