"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.dsl.words import as_words
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize.arguments import image_of, wrap_image
from dsv4lib.ops.rmsnorm_quant.kernel import RmsnormQuant

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16


def fake_args(kernel: RmsnormQuant) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return (
        fake(BF16, "TD", WIDE),
        fake(BF16, "TD", WIDE) if kernel.add else None,
        fake(FP32, "D", WIDE) if kernel.weighted else None,
        fake(FP32, "O") if kernel.recipe == "nvfp4" else None,
        fake(BF16, "TD", WIDE) if kernel.add else None,
        fake(BF16, "TD", WIDE) if kernel.keep else None,
        fake(cutlass.Int32, "TW", 4 * kernel.words),
        image_of(kernel, fake, "S") if kernel.swizzled else fake(cutlass.Uint8, "TB"),
        FP32(1.0),
        cuda.CUstream(0),
    )


def launch_args(kernel: RmsnormQuant, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and eps by name, as `op.Norm` has them, or `op.AddNorm` if it adds.
        stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    out, residual, nvfp4 = call.out, getattr(call, "residual", None), kernel.recipe == "nvfp4"
    wrapped, (tokens, d) = wrap("x", call.x, BF16, (None, kernel.d), WIDE), call.x.shape
    if kernel.swizzled:
        size = scale_swizzle.swizzled_bytes(tokens, kernel.blocks * kernel.format.repeats)
        scales = wrap_image(kernel, out.scales, (size,))
    else:
        scales = wrap("out.scales", out.scales, cutlass.Uint8, (tokens, kernel.blocks))
    words = as_words("out.codes", out.codes)
    return (
        wrapped,
        wrap_if(kernel.add, "residual", residual, BF16, (tokens, d), WIDE),
        wrap_if(kernel.weighted, "weight", call.weight, FP32, (d,), WIDE),
        wrap_if(nvfp4, "global_scale", call.global_scale, FP32, (1,)),
        wrap_if(kernel.add, "out.h", getattr(out, "h", None), BF16, (tokens, d), WIDE),
        wrap_if(kernel.keep, "out.y", out.y, BF16, (tokens, d), WIDE),
        wrap("out.codes", words, cutlass.Int32, (tokens, d * kernel.format.bits // 32), 4 * kernel.words),
        scales,
        FP32(call.eps),
        cuda.CUstream(stream),
    )
