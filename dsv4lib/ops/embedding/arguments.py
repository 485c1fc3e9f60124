"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.embedding.kernel import COLUMNS, Embedding

BF16, WIDE = cutlass.BFloat16, 16


def fake_args(kernel: Embedding) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return (
        fake(cutlass.Int64 if kernel.wide else cutlass.Int32, "T"),
        fake(BF16, "VD", WIDE),
        fake(BF16, "TCD", WIDE) if kernel.copies else None,
        fake(BF16, "TD", WIDE) if kernel.keep else None,
        cuda.CUstream(0),
    )


def launch_args(kernel: Embedding, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    weight, (streams, rows), count = call.weight, call.out, len(call.tokens)
    wrapped = wrap("weight", weight, BF16, (None, None), WIDE)
    d = weight.shape[1]
    if d % COLUMNS:
        raise ArgumentError("weight.shape", tuple(weight.shape), f"[V, d] with d a multiple of {COLUMNS}")
    return (
        wrap("tokens", call.tokens, cutlass.Int64 if kernel.wide else cutlass.Int32, (None,)),
        wrapped,
        wrap_if(kernel.copies > 0, "out.streams", streams, BF16, (count, kernel.copies, d), WIDE),
        wrap_if(kernel.keep, "out.rows", rows, BF16, (count, d), WIDE),
        cuda.CUstream(stream),
    )
