"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.quantize.kernel import ELEMENTS
from dsv4lib.ops.swiglu_quant.kernel import FORMAT, SwigluQuant

WIDE = 16  # bytes of a load
WORDS = 8  # bytes of a store of codes


def fake_args(kernel: SwigluQuant) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, element = Fakes(), ELEMENTS[kernel.dtype]
    rows = fake(element, "TI", WIDE), fake(element, "TI", WIDE)
    out = fake(cutlass.Int32, "TW", WORDS), fake(cutlass.Uint8, "TB")
    return *rows, *out, cutlass.Float32(1.0), cuda.CUstream(0)


def launch_args(kernel: SwigluQuant, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride.
    """
    element = ELEMENTS[kernel.dtype]
    wrap("x", call.x, element, (None, None), WIDE)
    rows, columns = call.x.shape
    if columns % (2 * FORMAT.block):
        raise ArgumentError("x.shape", tuple(call.x.shape), f"[T, 2 I], I a multiple of {FORMAT.block}")
    width = columns // 2
    wrap("codes", call.codes, cutlass.Uint8, (rows, width), WORDS)
    return (
        *(wrap("x", half, element, (rows, width), WIDE) for half in call.x.split(width, 1)),
        wrap("codes", call.codes.view(torch.int32), cutlass.Int32, (rows, width // 4), WORDS),
        wrap("scales", call.scales, cutlass.Uint8, (rows, width // FORMAT.block)),
        cutlass.Float32(call.limit),
        cuda.CUstream(stream),
    )
