"""Arguments of the encoder: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import torch
from cutlass import Float16, Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.ops.turbo4_encode.kernel import Turbo4Encode

WIDE = 16  # bytes of a load and of a store


def fake_args(kernel: Turbo4Encode) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    pages = fake(Int32, "PHW", WIDE), fake(Float16, "PHN", WIDE)
    return (
        fake(kernel.element, "THD", WIDE),
        fake(Int32, "T"),
        *pages,
        divisor(64),
        divisor(8),
        Int32(0),
        cuda.CUstream(0),
    )


def launch_args(kernel: Turbo4Encode, call: Any, stream: int = 0) -> tuple:
    """Wrap a call's tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride.
    """
    heads, pages = call.x.shape[1], call.pages
    size = (None, heads, None)
    return (
        wrap("x", call.x, kernel.element, (None, heads, kernel.head_dim), WIDE),
        wrap("indices", call.indices, Int32, (len(call.x),)),
        wrap("pages", pages.view(torch.int32), Int32, size, WIDE),
        wrap("pages", pages.view(torch.float16), Float16, size, WIDE),
        divisor(call.page_size),
        divisor(heads),
        Int32(call.seed),
        cuda.CUstream(stream),
    )
