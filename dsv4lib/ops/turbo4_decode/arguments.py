"""Arguments of both kernels: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import torch
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.ops.turbo4_decode.kernel import Output, Turbo4Decode
from dsv4lib.ops.turbo4_decode.output import Turbo4Combine
from dsv4lib.ops.turbo4_encode.arguments import view_pages

WIDE = 16  # bytes of a load


def row_align(kernel: Turbo4Decode | Turbo4Combine, size: int) -> int:
    """Bytes on which rows of q or O start: those of a lane's elements of ``size`` bytes, 16 at most."""
    return min(WIDE, kernel.run * size)


def fake_args(kernel: Turbo4Decode) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, align = Fakes(), row_align(kernel, 2)
    caches = fake(Int32, "PKW", WIDE), fake(Int32, "VKW", WIDE)
    out = (Float32, "SBHD", "SBH", WIDE) if kernel.split else (kernel.element, "BHD", "BH", align)
    output = Output(fake(out[0], out[1], min(out[3], row_align(kernel, out[0].width // 8))), fake(Float32, out[2]))
    table = fake(Int32, "BT"), fake(Int32, "B")
    numbers = Float32(1.0), Int32(0), Int32(1)
    return fake(kernel.element, "BHD", align), *caches, *table, output, *numbers, cuda.CUstream(0)


def launch_args(kernel: Turbo4Decode, call: Any, o: Any, lse: Any, splits: int, stream: int = 0) -> tuple:
    """Wrap a call's tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them.
        o, lse: what is written, of a split kernel [splits, ..]. splits: of the tokens. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape, stride or address.
    """
    q = call.q
    batch, heads, dim = len(q), q.shape[1], kernel.head_dim
    kv_heads, lead = heads // kernel.group, (splits,) if kernel.split else ()
    caches = [
        wrap(name, view_pages(name, pages, torch.int32), Int32, (None, kv_heads, None), WIDE)
        for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages))
    ]
    element = Float32 if kernel.split else kernel.element
    return (
        wrap("q", q, kernel.element, (batch, heads, dim), row_align(kernel, 2)),
        *caches,
        wrap("block_table", call.block_table, Int32, (batch, None)),
        wrap("lengths", call.lengths, Int32, (batch,)),
        Output(
            wrap("out.o", o, element, (*lead, batch, heads, dim), row_align(kernel, element.width // 8)),
            wrap("out.lse", lse, Float32, (*lead, batch, heads)),
        ),
        Float32(call.scale),
        Int32(call.seed),
        Int32(splits),
        cuda.CUstream(stream),
    )


def fake_combine_args(kernel: Turbo4Combine) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    partial = fake(Float32, "SBHD", row_align(kernel, 4)), fake(Float32, "SBH")
    return (
        *partial,
        fake(kernel.element, "BHD", row_align(kernel, 2)),
        fake(Float32, "BH"),
        Int32(0),
        cuda.CUstream(0),
    )


def combine_args(kernel: Turbo4Combine, partial: Any, o: Any, lse: Any, seed: int, stream: int = 0) -> tuple:
    """Wrap what the splits wrote and the outputs.

    Args:
        kernel: what was compiled. partial: `op.Attention` of the splits, o [splits, B, H, D].
        o, lse: [B, H, D] and [B, H]. seed: of the signs. stream: CUDA stream.
    """
    size = tuple(o.shape)
    return (
        wrap("partial.o", partial.o, Float32, (None, *size), row_align(kernel, 4)),
        wrap("partial.lse", partial.lse, Float32, (None, *size[:2])),
        wrap("out.o", o, kernel.element, size, row_align(kernel, 2)),
        wrap("out.lse", lse, Float32, size[:2]),
        Int32(seed),
        cuda.CUstream(stream),
    )
