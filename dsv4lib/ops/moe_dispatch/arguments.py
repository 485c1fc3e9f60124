"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.moe_dispatch.kernel import QUAD, MoeDispatch
from dsv4lib.ops.moe_dispatch.size import max_rows

FP32, I32, WIDE = cutlass.Float32, cutlass.Int32, 16


def fake_args(kernel: MoeDispatch) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    weights, row_weight = (fake(FP32, "N"), fake(FP32, "R", WIDE)) if kernel.weighted else (None, None)
    outputs = fake(I32, "E"), fake(I32, "O"), fake(I32, "R", WIDE), fake(I32, "N")
    return fake(I32, "N", WIDE), weights, *outputs, row_weight, I32(0), cuda.CUstream(0)


def launch_args(kernel: MoeDispatch, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    experts, weights, max_m = call.experts, call.weights, call.max_m
    counts, offsets, rows, row_of, row_weight = call.out
    if not isinstance(experts, torch.Tensor) or experts.dim() != 2 or experts.shape[1] != kernel.k:
        raise ArgumentError("experts", getattr(experts, "shape", type(experts).__name__), f"[T, {kernel.k}]")
    shape = tuple(experts.shape)
    if (max_m > 0) != kernel.masked or max_m % kernel.align:
        allowed = f"a multiple of {kernel.align}" if kernel.masked else "0: the kernel is not masked"
        raise ArgumentError("max_m", max_m, allowed)
    needed = kernel.experts * max_m if kernel.masked else max_rows(*shape, kernel.experts, kernel.align)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.numel() < needed or rows.numel() % QUAD:
        raise ArgumentError("rows", getattr(rows, "shape", None), f"[R], R a multiple of {QUAD}, at least {needed}")
    return (
        _flat("experts", experts, shape, I32),
        _flat("weights", weights, shape, FP32, kernel.weighted),
        wrap("counts", counts, I32, (kernel.experts,)),
        wrap("offsets", offsets, I32, (kernel.experts + 1,)),
        wrap("rows", rows, I32, (None,), WIDE),
        _flat("row_of", row_of, shape, I32),
        wrap_if(kernel.weighted, "row_weight", row_weight, FP32, (rows.numel(),), WIDE),
        I32(max_m),
        cuda.CUstream(stream),
    )


def _flat(name: str, x: Any, shape: tuple[int, ...], dtype: type, needed: bool = True) -> Any:
    """Wrap a contiguous matrix as a vector; not needed: None."""
    if needed and (not isinstance(x, torch.Tensor) or tuple(x.shape) != shape or not x.is_contiguous()):
        raise ArgumentError(name, getattr(x, "shape", type(x).__name__), f"a contiguous tensor {list(shape)}")
    x = None if x is None else x.view(-1)
    return wrap_if(needed, name, x, dtype, (None,), WIDE if name == "experts" else 0)
