"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64

from dsv4lib.dsl.rope import ROPE
from dsv4lib.dsl.tensors import Fakes, divisor, wrap, wrap_if
from dsv4lib.dsl.words import as_words
from dsv4lib.errors import ArgumentError
from dsv4lib.formats.indexer_key import DIM
from dsv4lib.ops.indexer_q.kernel import FORMATS, PIECE, IndexerQ

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16
SCALES = DIM // FORMATS["fp4"].block


def fake_args(kernel: IndexerQ) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return (
        fake(BF16, "THD", WIDE),
        fake(kernel.weight_element, "TH"),
        fake(Int64, "T") if kernel.gathered else None,
        fake(FP32, "PR", WIDE),
        fake(Int32, "THW", PIECE * kernel.format.bits // 8),
        fake(Int32, "TH") if kernel.variant == "fp4" else None,
        fake(FP32, "TH"),
        FP32(1.0),
        divisor(1),
        cuda.CUstream(0),
    )


def launch_args(kernel: IndexerQ, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    q, out = call.q, call.out
    wrapped, lead = wrap("q", q, BF16, (None, None, DIM), WIDE), tuple(q.shape[:2])
    blocks = kernel.blocks(q.shape[1])
    if len(q) * blocks >= 1 << 31:
        raise ArgumentError("q.shape", tuple(q.shape), "fewer than 2^31 blocks of heads")
    scales = None if out.scales is None else as_words("out.scales", out.scales)[..., 0]
    words = as_words("out.codes", out.codes)
    return (
        wrapped,
        wrap("weights", call.weights, kernel.weight_element, lead),
        wrap_if(kernel.gathered, "positions", call.positions, Int64, (len(q),)),
        wrap("cos_sin", call.cos_sin, FP32, (None, ROPE), WIDE),
        wrap("out.codes", words, Int32, (*lead, DIM * kernel.format.bits // 32), PIECE * kernel.format.bits // 8),
        wrap_if(kernel.variant == "fp4", "out.scales", scales, Int32, lead),
        wrap("out.weights", out.weights, FP32, lead),
        FP32((DIM * q.shape[1]) ** -0.5),
        divisor(blocks),
        cuda.CUstream(stream),
    )
