"""Arguments of the embedding kernel: fake tensors to compile with, torch tensors wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
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


def launch_args(
    kernel: Embedding,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    streams: torch.Tensor | None,
    rows: torch.Tensor | None,
    stream: int = 0,
) -> tuple:
    """Arguments of `Embedding` from torch tensors: shapes as in `Embedding.__call__`, ``stream`` a handle.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    for name, value, needed in (("out.streams", streams, kernel.copies > 0), ("out.rows", rows, kernel.keep)):
        if (value is not None) != needed:
            raise ArgumentError(name, "given" if value is not None else None, "a tensor" if needed else "None")
    wrapped = wrap("weight", weight, BF16, (None, None), WIDE)
    count, d = len(tokens), weight.shape[1]
    if d % COLUMNS:
        raise ArgumentError("weight.shape", tuple(weight.shape), f"[V, d] with d a multiple of {COLUMNS}")
    return (
        wrap("tokens", tokens, cutlass.Int64 if kernel.wide else cutlass.Int32, (None,)),
        wrapped,
        None if streams is None else wrap("out.streams", streams, BF16, (count, kernel.copies, d), WIDE),
        None if rows is None else wrap("out.rows", rows, BF16, (count, d), WIDE),
        cuda.CUstream(stream),
    )
