"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.moe_combine.kernel import COLUMNS, MoeCombine

BF16, FP32, I32, WIDE = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, 16


def fake_args(kernel: MoeCombine) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    weights = fake(FP32, "TK") if kernel.weighted else None
    shared = fake(BF16, "TD", WIDE) if kernel.shared else None
    return fake(BF16, "RD", WIDE), fake(I32, "TK"), weights, shared, fake(BF16, "TD", WIDE), cuda.CUstream(0)


def launch_args(kernel: MoeCombine, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    wrapped = wrap("out", call.out, BF16, (None, None), WIDE)
    tokens, d = call.out.shape
    if d % COLUMNS:
        raise ArgumentError("out.shape", (tokens, d), f"[T, d] with d a multiple of {COLUMNS}")
    return (
        wrap("y", call.y, BF16, (None, d), WIDE),
        wrap("row_of", call.row_of, I32, (tokens, kernel.k)),
        wrap_if(kernel.weighted, "weights", call.weights, FP32, (tokens, kernel.k)),
        wrap_if(kernel.shared, "shared", call.shared, BF16, (tokens, d), WIDE),
        wrapped,
        cuda.CUstream(stream),
    )
