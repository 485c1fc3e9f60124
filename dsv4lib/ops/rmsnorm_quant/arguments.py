"""Arguments of the kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.dsl.words import as_words
from dsv4lib.errors import ArgumentError
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


def launch_args(
    kernel: RmsnormQuant,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    total: torch.Tensor | None,
    y: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    eps: float,
    stream: int = 0,
) -> tuple:
    """Arguments of `RmsnormQuant` from torch tensors.

    Args:
        kernel: which says what is needed.
        x, residual, total, y: bf16 [T, d], rows on 16 bytes; residual and total None unless added, y unless kept.
        weight: fp32 [d] or None.
        global_scale: fp32 [1] of nvfp4, else None.
        codes: uint8 [T, bytes of a row]. scales: uint8 [T, blocks], swizzled: [bytes]. eps: added to the mean.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    wanted = (
        ("residual", residual, kernel.add),
        ("out.h", total, kernel.add),
        ("weight", weight, kernel.weighted),
        ("global_scale", global_scale, kernel.recipe == "nvfp4"),
        ("y", y, kernel.keep),
    )
    for name, value, needed in wanted:
        if (value is not None) != needed:
            raise ArgumentError(name, "given" if value is not None else None, "a tensor" if needed else "None")
    wrapped, shape = wrap("x", x, BF16, (None, kernel.d), WIDE), tuple(x.shape)
    if kernel.swizzled:
        size = scale_swizzle.swizzled_bytes(shape[0], kernel.blocks * kernel.format.repeats)
        scales = wrap_image(kernel, scales, (size,))
    else:
        scales = wrap("out.scales", scales, cutlass.Uint8, (shape[0], kernel.blocks))
    words = as_words("out.codes", codes)
    return (
        wrapped,
        None if residual is None else wrap("residual", residual, BF16, shape, WIDE),
        None if weight is None else wrap("weight", weight, FP32, (kernel.d,), WIDE),
        None if global_scale is None else wrap("global_scale", global_scale, FP32, (1,)),
        None if total is None else wrap("out.h", total, BF16, shape, WIDE),
        None if y is None else wrap("out.y", y, BF16, shape, WIDE),
        wrap("out.codes", words, cutlass.Int32, (shape[0], kernel.d * kernel.format.bits // 32), 4 * kernel.words),
        scales,
        FP32(eps),
        cuda.CUstream(stream),
    )
