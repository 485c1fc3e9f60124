"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, starts_on, wrap, wrap_if
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.mega_moe.kernel import Here, MegaMoe, Scaling, Workspace
from dsv4lib.ops.mega_moe.layout import ROW_BLOCK, WORD, Layout
from dsv4lib.ops.moe_gemm.arguments import PADDED_ALIGN
from dsv4lib.ops.moe_gemm.sm100 import Operand

U8, I32, I64, FP32, BF16 = cutlass.Uint8, cutlass.Int32, cutlass.Int64, cutlass.Float32, cutlass.BFloat16
WIDE = 16  # bytes on which rows start


def fake_args(kernel: MegaMoe) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, scaled = Fakes(), kernel.first.alpha
    return (
        Operand(fake(U8, "ENL", WIDE), fake(U8, "EBS", WIDE)),
        Operand(fake(U8, "EHJ", WIDE), fake(U8, "ECS", WIDE)),
        Scaling(*(fake(FP32, shape) for shape in ("EP", "E", "E"))) if scaled else None,
        Workspace(
            Operand(fake(U8, "RK", WIDE), fake(U8, "XS", WIDE)),
            Operand(fake(U8, "RI", WIDE), fake(U8, "YS", WIDE)),
            fake(I32, "R"),
            fake(FP32, "R"),
        ),
        Here(fake(U8, "M", 128), fake(I64, "W"), fake(I32, "V", 8), I32(0), I32(0)),
        fake(BF16, "TH", WIDE),
        FP32(1.0),
        I32(1),
        cuda.CUstream(0),
    )


def launch_args(kernel: MegaMoe, call: Any, grid: int, stream: int = 0) -> tuple:
    """Check a call's tensors and wrap them for the compiled kernel.

    Args:
        kernel: what was compiled. call: tensors and numbers by name, as `op.Call` has them. grid: CTAs.
        stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape, stride or address.
    """
    one, space, scaled = kernel.layout, call.workspace, kernel.first.alpha
    shapes = one.workspace()

    factors = [
        wrap_if(scaled, name, getattr(call, name), FP32, shape)
        for name, shape in {
            "l1_alphas": (one.local, 2),
            "l2_alphas": (one.local,),
            "l2_act_scales": (one.local,),
        }.items()
    ]

    def row(name: str, x: Any, dtype: Any) -> Any:
        return wrap(f"workspace.{name}", x, dtype, shapes[name], WIDE)

    return (
        weights("l1", call.l1, one, 2 * one.intermediate, one.hidden),
        weights("l2", call.l2, one, one.hidden, one.intermediate),
        Scaling(*factors) if scaled else None,
        Workspace(
            Operand(row("x_rows", space.x_rows, U8), row("x_row_scales", space.x_row_scales, U8)),
            Operand(row("h_rows", space.h_rows, U8), row("h_row_scales", space.h_row_scales, U8)),
            wrap("workspace.sources", space.sources, I32, shapes["sources"]),
            wrap("workspace.row_weights", space.row_weights, FP32, shapes["row_weights"]),
        ),
        Here(
            wrap("storage", call.storage, U8, (one.bytes,), 128),
            wrap("peers", call.peers, I64, (one.world,)),
            wrap("state", call.state, I32, (one.state_words,), 8),
            I32(call.rank),
            I32(call.tokens),
        ),
        wrap("out", call.out, BF16, (None, one.hidden), WIDE),
        FP32(call.clamp),
        I32(grid),
        cuda.CUstream(stream),
    )


def weights(name: str, given: Any, layout: Layout, features: int, k: int) -> Operand:
    """Wrap weights [E/W, N, K / 2] and their swizzled scales [E/W, bytes].

    Raises:
        ArgumentError: they are not so.
    """
    codes, scales = given
    experts, blocks = layout.local, -(-features // ROW_BLOCK) * (layout.scales(k) // WORD)
    wrapped = wrap(f"{name}.codes", codes, U8, (experts, features, k // 2), WIDE)
    if layout.mode == "w4a8" and not starts_on(codes, PADDED_ALIGN):
        raise ArgumentError(f"{name}.codes.stride()", codes.stride(), f"rows that start on {PADDED_ALIGN} bytes")
    wrap(f"{name}.scales", scales, U8, (experts, blocks * 512), WIDE)
    return Operand(wrapped, wrap(f"{name}.scales", scales.view(experts, blocks, 512), U8, (None, None, None), WIDE))
