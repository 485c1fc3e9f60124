"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32, Int64

from dsv4lib.dsl.head_rows import DIM
from dsv4lib.dsl.rope import ROPE
from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.dsl.words import as_words
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.inv_rope_quant.kernel import GROUPS, InvRopeQuant

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16
_EXTENTS = {"rowmajor": ("TH", 0), "swizzled": ("GW", WIDE), "colmajor": ("HST", WIDE), "colmajor_ue8m0": ("HT", WIDE)}


def fake_args(kernel: InvRopeQuant) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    positions = fake(Int64, "T") if kernel.gathered else None
    outputs = fake(Int32, "THW", 8), fake(Int32, *_EXTENTS[kernel.layout])
    divisors = divisor(1), divisor(1) if kernel.layout == "swizzled" else None
    return fake(BF16, "THD", WIDE), positions, fake(FP32, "PR", WIDE), *outputs, *divisors, cuda.CUstream(0)


def launch_args(kernel: InvRopeQuant, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride, or too many heads.
    """
    o, (codes, scales) = call.o, call.out
    tokens, heads = o.shape[:2]
    blocks = kernel.blocks(heads)
    if len(o) * blocks >= 1 << 31:
        raise ArgumentError("o.shape", tuple(o.shape), "fewer than 2^31 blocks of heads")
    return (
        wrap("o", o, BF16, (None, None, DIM), WIDE),
        wrap("positions", call.positions, Int64, (len(o),)) if kernel.gathered else None,
        wrap("cos_sin", call.cos_sin, FP32, (None, ROPE), WIDE),
        wrap("out[0]", as_words("out[0]", codes), Int32, (tokens, heads, DIM // 4), 8),
        _scales(kernel.layout, scales, tokens, heads),
        divisor(blocks),
        divisor(heads // len(scales)) if kernel.layout == "swizzled" else None,
        cuda.CUstream(stream),
    )


def _scales(layout: str, scales: torch.Tensor, tokens: int, heads: int) -> Any:
    """Return the scales in words, with the dimensions that the kernel knows."""
    name = "out[1]"
    if layout == "rowmajor":
        return wrap(name, as_words(name, scales)[..., 0], Int32, (tokens, heads))
    if layout == "swizzled":
        size = scale_swizzle.swizzled_bytes(tokens, heads // len(scales) * DIM // 32)
        return wrap(name, as_words(name, scales), Int32, (len(scales), size // 4), WIDE)
    if layout == "colmajor":
        wrap(name, by_columns := scales.permute(1, 2, 0), FP32, (heads, GROUPS, tokens), WIDE)
        return wrap(name, by_columns.view(torch.int32), Int32, (heads, GROUPS, tokens), WIDE)
    return wrap(name, scales.t(), Int32, (heads, tokens), WIDE)
