"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

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


def launch_args(kernel: Router, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    wrapped = wrap("logits", call.x, FP32, (None, kernel.experts), 4 * kernel.width)
    return wrapped, _chosen(kernel, call), *_ends(kernel, call), cuda.CUstream(stream)


def fused_args(kernel: FusedRouter, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: as in `launch_args`, of up to 128 tokens. stream: CUDA stream.
            Its space.slots: fp32 [splits, T, E to a multiple of 4], zeros.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    wrapped = wrap("x", call.x, BF16, (None, None), 16)
    tokens, d = call.x.shape
    if d % UNIT:
        raise ArgumentError("x.shape", (tokens, d), f"[T, d] with d a multiple of {UNIT}")
    whole = kernel.splits * kernel.deep * kernel.units * UNIT
    if kernel.whole and d != whole:
        raise ArgumentError("x.shape", (tokens, d), f"[T, {whole}]: whole shares")
    gate = wrap("weight", call.weight, BF16, (kernel.experts, d), 16)
    chosen = _chosen(kernel, call)
    memory = wrap("slots", call.space.slots, FP32, (kernel.splits, tokens, padded(kernel.experts)), 16)
    return wrapped, gate, Picks(chosen, memory, *_ends(kernel, call)), cuda.CUstream(stream)


def _chosen(kernel: Router, call: Any) -> Any:
    """Return what selects: a bias, or (table, token ids)."""
    if (call.hashed is not None) != kernel.hashed:
        given = "a bias" if call.hashed is None else "(table, tokens)"
        raise ArgumentError("chosen", given, "(table, tokens)" if kernel.hashed else "a bias")
    if kernel.hashed:
        table, ids = call.hashed
        table = wrap("hashed.table", table, I64, (None, kernel.k))
        return Table(table, wrap("hashed.tokens", ids, I64, (len(call.x),)))
    return wrap("bias", call.bias, FP32, (kernel.experts,), 4 * kernel.width)


def _ends(kernel: Router, call: Any) -> tuple:
    """Return where the picks go, and the sum of their weights."""
    (experts, weights), shape = call.out, (len(call.x), kernel.k)
    return wrap("experts", experts, I32, shape), wrap("weights", weights, FP32, shape), FP32(call.factor)
