"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.template_op.kernel import COLUMNS, TemplateOp

BF16, WIDE = cutlass.BFloat16, 16


def fake_args(kernel: TemplateOp) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return *(fake(BF16, "TD", WIDE) for _ in range(3)), cuda.CUstream(0)


def launch_args(kernel: TemplateOp, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride.
    """
    wrapped, shape = wrap("out", call.out, BF16, (None, None), WIDE), tuple(call.out.shape)
    if shape[1] % COLUMNS:
        raise ArgumentError("out.shape", shape, f"[T, d] with d a multiple of {COLUMNS}")
    inputs = wrap("gate", call.gate, BF16, shape, WIDE), wrap("up", call.up, BF16, shape, WIDE)
    return *inputs, wrapped, cuda.CUstream(stream)
