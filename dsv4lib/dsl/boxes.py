"""Load TMA boxes of a tensor as the tensor core reads them, by any thread. Coordinates and address are in registers.

The tensor map comes from the DSL's tiled TMA atom; the copy itself is inline PTX, so that lanes of a warp can issue
boxes of their own and how many there are may depend on the data.

Source: PTX ISA, "cp.async.bulk.tensor"; CUTLASS for the padded layout of 4-bit values.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as cute_nvgpu_ir
import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cutlass_dsl import dsl_user_op

_DESCRIPTOR = "!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>"


def box_atom(tensor: cute.Tensor, box: tuple[int, ...], swizzle: bool = True, padded: bool = False) -> cute.CopyAtom:
    """Make a TMA atom for boxes of ``tensor``.

    What lies outside of it arrives as zeros.

    Args:
        tensor: modes from the contiguous one outwards, 2 or 3 of them.
        box: extents in the same order.
        swizzle: the swizzle of a row of the box in SMEM, which is 64 or 128 bytes; else row after row.
        padded: 4-bit values arrive as 16 values in the first 8 of every 16 bytes, as kind::mxf8f6f4 reads them.
    """
    strides, size = [], 1
    for extent in box:
        strides.append(size)
        size *= extent
    layout = cute.make_layout(box, stride=tuple(strides))
    if swizzle:
        bits = 2 if box[0] * tensor.element_type.width == 8 * 64 and not padded else 3
        layout = cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, layout)
    operation = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    kind = cutlass.Uint8 if padded else None
    return cpasync.make_tiled_tma_atom(operation, tensor, layout, box, internal_type=kind)[0]


@dsl_user_op
def prefetch_box(
    atom: cute.CopyAtom, barrier: cute.Pointer, coordinates: tuple[Any, ...], *, loc: Any = None, ip: Any = None
) -> None:
    """Bring one box to L2, see `load_box`.

    No mbarrier completes when it is there (the atom wants some address).
    """
    rank = len(coordinates)
    places = ", ".join(f"{{$r{1 + i}}}" for i in range(rank))
    text = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [{{$r0}}, {{{places}}}];"
    args = [_descriptor(atom._unpack(tma_bar_ptr=barrier, loc=loc, ip=ip), loc, ip), *map(cutlass.Int32, coordinates)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)


def _descriptor(executable: Any, loc: Any, ip: Any) -> Any:
    """Return the address of an atom's tensor map."""
    descriptor = cute_nvgpu_ir.get_tma_desc_addr(ir.Type.parse(_DESCRIPTOR), executable, loc=loc, ip=ip)
    return descriptor.toint(loc=loc, ip=ip)


@dsl_user_op
def load_box(
    atom: cute.CopyAtom,
    smem: cutlass.Int32,
    barrier: cute.Pointer,
    coordinates: tuple[Any, ...],
    pair: bool = False,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Copy one box to SMEM; every active thread issues one.

    Args:
        atom: from `box_atom`.
        smem: address, where a swizzled box starts a row of 8 x 128 bytes.
        barrier: mbarrier that counts the bytes.
        coordinates: first element of the box in every mode of the tensor.
        pair: the bytes are counted at the same barrier of the first CTA of the pair.
    """
    descriptor = _descriptor(atom._unpack(tma_bar_ptr=barrier, loc=loc, ip=ip), loc, ip)
    signal = cute.arch.map_dsmem_ptr(barrier, 0, loc=loc, ip=ip) if pair else barrier
    rank = len(coordinates)
    places = ", ".join(f"{{$r{3 + i}}}" for i in range(rank))
    target, group = ("cluster", ".cta_group::2") if pair else ("cta", "")
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::{target}.global.tile.mbarrier::complete_tx::bytes{group} "
        f"[{{$r0}}], [{{$r1}}, {{{places}}}], [{{$r2}}];"
    )
    args = [smem, descriptor, signal.toint(loc=loc, ip=ip), *map(cutlass.Int32, coordinates)]
    cute.arch.inline_ptx(text, read_only_args=args, loc=loc, ip=ip)
