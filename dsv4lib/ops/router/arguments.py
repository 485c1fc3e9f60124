"""Arguments of the router kernels: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.router.fused import UNIT, FusedRouter
from dsv4lib.ops.router.kernel import Router, Table
from dsv4lib.ops.router.picks import Picks, padded

BF16, FP32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64


def fake_args(kernel: Router) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    rows = 4 * kernel.width
    chosen = Table(fake(I64, "VK"), fake(I64, "T")) if kernel.hashed else fake(FP32, "E", rows)
    ends, stream = (fake(I32, "TK"), fake(FP32, "TK"), FP32(1.0)), cuda.CUstream(0)
    if not isinstance(kernel, FusedRouter):
        return fake(FP32, "TE", rows), chosen, *ends, stream
    operands = fake(BF16, "TD", 16), fake(BF16, "ED", 16)
    return *operands, Picks(chosen, fake(FP32, "PTF", 16), *ends), stream


def launch_args(
    kernel: Router,
    logits: torch.Tensor,
    chosen: Any,
    experts: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    stream: int = 0,
) -> tuple:
    """Arguments of `Router` from torch tensors: shapes as in `Router.__call__`, ``stream`` a handle.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    rows = 4 * kernel.width
    wrapped = wrap("logits", logits, FP32, (None, kernel.experts), rows)
    tokens = logits.shape[0]
    ends = _ends(kernel, tokens, experts, weights, factor)
    return wrapped, _chosen(kernel, tokens, chosen), *ends, cuda.CUstream(stream)


def fused_args(
    kernel: FusedRouter,
    x: torch.Tensor,
    weight: torch.Tensor,
    chosen: Any,
    slots: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    stream: int = 0,
) -> tuple:
    """Arguments of `FusedRouter` from torch tensors: x bf16 [T, d], weight bf16 [E, d], then as in `Picks`.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    wrapped = wrap("x", x, BF16, (None, None), 16)
    tokens, d = x.shape
    if d % UNIT:
        raise ArgumentError("x.shape", tuple(x.shape), f"[T, d] with d a multiple of {UNIT}")
    if kernel.whole and d != kernel.splits * kernel.deep * kernel.units * UNIT:
        raise ArgumentError(
            "x.shape", tuple(x.shape), f"[T, {kernel.splits * kernel.deep * kernel.units * UNIT}]: whole shares"
        )
    gate = wrap("weight", weight, BF16, (kernel.experts, d), 16)
    chosen = _chosen(kernel, tokens, chosen)
    memory = wrap("slots", slots, FP32, (kernel.splits, tokens, padded(kernel.experts)), 16)
    ends = _ends(kernel, tokens, experts, weights, factor)
    return wrapped, gate, Picks(chosen, memory, *ends), cuda.CUstream(stream)


def _chosen(kernel: Router, tokens: int, chosen: Any) -> Any:
    """Return what selects: a bias, or (table, token ids)."""
    if isinstance(chosen, tuple) != kernel.hashed:
        raise ArgumentError("chosen", type(chosen).__name__, "(table, tokens)" if kernel.hashed else "a bias")
    if kernel.hashed:
        table, ids = chosen
        return Table(wrap("hashed.table", table, I64, (None, kernel.k)), wrap("hashed.tokens", ids, I64, (tokens,)))
    return wrap("bias", chosen, FP32, (kernel.experts,), 4 * kernel.width)


def _ends(kernel: Router, tokens: int, experts: torch.Tensor, weights: torch.Tensor, factor: float) -> tuple:
    """Return where the picks go, and the sum of their weights."""
    return (
        wrap("experts", experts, I32, (tokens, kernel.k)),
        wrap("weights", weights, FP32, (tokens, kernel.k)),
        FP32(factor),
    )
