"""Arguments of the dispatch kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
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


def launch_args(
    kernel: MoeDispatch,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    row_of: torch.Tensor,
    row_weight: torch.Tensor | None,
    max_m: int = 0,
    stream: int = 0,
) -> tuple:
    """Arguments of `MoeDispatch` from torch tensors.

    Args:
        kernel: which says what is needed.
        experts: int32 [T, k], contiguous, as ``weights`` fp32 (or None) and ``row_of`` int32.
        counts: int32 [E].
        offsets: int32 [E + 1].
        rows: int32 [R], R a multiple of 4, at least `max_rows`, or E max_m if masked.
        row_weight: fp32 [R] or None.
        max_m: rows an expert if masked, a multiple of ``align``; else 0.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride; too few rows.
    """
    for name, value in (("weights", weights), ("row_weight", row_weight)):
        if (value is not None) != kernel.weighted:
            raise ArgumentError(name, "given" if value is not None else None, "a tensor" if kernel.weighted else "None")
    if not isinstance(experts, torch.Tensor) or experts.dim() != 2 or experts.shape[1] != kernel.k:
        raise ArgumentError("experts", getattr(experts, "shape", type(experts).__name__), f"[T, {kernel.k}]")
    shape = tuple(experts.shape)
    if (max_m > 0) != kernel.masked or max_m % kernel.align:
        allowed = f"a multiple of {kernel.align}" if kernel.masked else "0: the kernel is not masked"
        raise ArgumentError("max_m", max_m, allowed)
    needed = kernel.experts * max_m if kernel.masked else max_rows(*shape, kernel.experts, kernel.align)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.numel() < needed or rows.numel() % QUAD:
        raise ArgumentError("rows", getattr(rows, "shape", None), f"[R], R a multiple of {QUAD}, at least {needed}")
    given = {"experts": (experts, I32), "weights": (weights, FP32), "row_of": (row_of, I32)}
    flat = {name: _flat(name, x, shape, dtype) for name, (x, dtype) in given.items()}
    return (
        flat["experts"],
        flat["weights"],
        wrap("counts", counts, I32, (kernel.experts,)),
        wrap("offsets", offsets, I32, (kernel.experts + 1,)),
        wrap("rows", rows, I32, (None,), WIDE),
        flat["row_of"],
        None if row_weight is None else wrap("row_weight", row_weight, FP32, (rows.numel(),), WIDE),
        I32(max_m),
        cuda.CUstream(stream),
    )


def _flat(name: str, x: torch.Tensor | None, shape: tuple[int, ...], dtype: type) -> object:
    """Return a CuTe vector over a contiguous matrix."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor) or tuple(x.shape) != shape or not x.is_contiguous():
        raise ArgumentError(name, getattr(x, "shape", type(x).__name__), f"a contiguous tensor {list(shape)}")
    return wrap(name, x.view(-1), dtype, (None,), WIDE if name == "experts" else 0)
