"""Arguments of the kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.template_op.kernel import COLUMNS, TemplateOp

BF16, WIDE = cutlass.BFloat16, 16


def fake_args(kernel: TemplateOp) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return *(fake(BF16, "TD", WIDE) for _ in range(3)), cuda.CUstream(0)


def launch_args(kernel: TemplateOp, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, stream: int = 0) -> tuple:
    """Arguments of `TemplateOp` from torch tensors: shapes as in `TemplateOp.__call__`, ``stream`` a handle.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride.
    """
    wrapped = wrap("out", out, BF16, (None, None), WIDE)
    if out.shape[1] % COLUMNS:
        raise ArgumentError("out.shape", tuple(out.shape), f"[T, d] with d a multiple of {COLUMNS}")
    shape = tuple(out.shape)
    return wrap("gate", gate, BF16, shape, WIDE), wrap("up", up, BF16, shape, WIDE), wrapped, cuda.CUstream(stream)
