"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.linear.sm90.config import BLOCK, PIECE
from dsv4lib.ops.linear.sm90.kernel import HopperLinear
from dsv4lib.ops.linear.sm90.load import Sources

_OUT = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
_SCALES = {"e8m0": cutlass.Uint8, "fp32": cutlass.Float32}


def fake_args(kernel: HopperLinear) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, u8 = Fakes(), cutlass.Uint8
    return (
        Sources(
            fake(u8, "GTK", PIECE),
            fake(_SCALES[kernel.x_scales], "GTB") if kernel.scaled else None,
            fake(u8, "GNK", PIECE),
            fake(_SCALES[kernel.w_scales], "GMB") if kernel.scaled else None,
            divisor(1),
            divisor(1),
        ),
        fake(_OUT[kernel.out], "GTN"),
        cutlass.Int32(1),
        cuda.CUstream(0),
    )


def launch_args(kernel: HopperLinear, call: Any, grid: int, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors by name, as `op.Call` has them, with a dimension of groups; bf16
            operands as bytes.
        grid: CTAs to launch, a multiple of ``split``. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or alignment, or a number that does not fit.
    """
    if grid < 1 or grid % kernel.split:
        raise ArgumentError("grid", grid, f"a multiple of {kernel.split}")
    u8, (groups, tokens, k), features = cutlass.Uint8, call.x.shape, call.w.shape[1]
    if k % PIECE or call.w.shape[2] != k or call.w.shape[0] != groups:
        found = tuple(call.x.shape), tuple(call.w.shape)
        raise ArgumentError("x, w", found, f"bytes [G, T, K] and [G, N, K], K a multiple of {PIECE}")
    if kernel.split > -(-k // kernel.step_k):
        raise ArgumentError("split", kernel.split, f"at most the steps of K, {-(-k // kernel.step_k)}")
    blocks, x_scales, w_scales = -(-k // BLOCK), None, None
    if kernel.scaled:
        x_scales = wrap("x_scales", call.x_scales, _SCALES[kernel.x_scales], (groups, tokens, blocks))
        of_w = groups, -(-features // BLOCK), blocks
        w_scales = wrap("w_scales", call.w_scales, _SCALES[kernel.w_scales], of_w)
    return (
        Sources(
            wrap("x", call.x, u8, (None,) * 3, PIECE),
            x_scales,
            wrap("w", call.w, u8, (None,) * 3, PIECE),
            w_scales,
            divisor(-(-tokens // kernel.tile_n)),
            divisor(-(-features // kernel.tile_m)),
        ),
        wrap("out", call.out, _OUT[kernel.out], (groups, tokens, features)),
        cutlass.Int32(grid),
        cuda.CUstream(stream),
    )
