"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.ops.rmsnorm.kernel import RmsNorm

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16


def fake_args(kernel: RmsNorm) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    residual, total = (fake(BF16, "TD", WIDE), fake(BF16, "TD", WIDE)) if kernel.add else (None, None)
    weight = fake(FP32, "D", WIDE) if kernel.weighted else None
    return fake(BF16, "TD", WIDE), residual, weight, total, fake(BF16, "TD", WIDE), FP32(1.0), cuda.CUstream(0)


def launch_args(kernel: RmsNorm, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and eps by name, as `op.Norm` has them, or `op.AddNorm` if it adds.
        stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    residual = getattr(call, "residual", None)
    h, y = call.out if kernel.add else (None, call.out)
    wrapped, shape = wrap("x", call.x, BF16, (None, kernel.d), WIDE), tuple(call.x.shape)
    return (
        wrapped,
        wrap_if(kernel.add, "residual", residual, BF16, shape, WIDE),
        wrap_if(kernel.weighted, "weight", call.weight, FP32, (kernel.d,), WIDE),
        wrap_if(kernel.add, "out[0]", h, BF16, shape, WIDE),
        wrap("out[1]" if kernel.add else "out", y, BF16, shape, WIDE),
        FP32(call.eps),
        cuda.CUstream(stream),
    )
