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
_GATHER4 = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
    "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];"
)


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
    """
    executable = atom._unpack(tma_bar_ptr=barrier, loc=loc, ip=ip)
    descriptor = cute_nvgpu_ir.get_tma_desc_addr(ir.Type.parse(_DESCRIPTOR), executable, loc=loc, ip=ip)
    args = [smem, descriptor.toint(loc=loc, ip=ip), column, *rows, barrier.toint(loc=loc, ip=ip)]
    cute.arch.inline_ptx(_GATHER4, read_only_args=args, loc=loc, ip=ip)
