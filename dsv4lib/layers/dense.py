"""Multiply by bf16 or FP8 weights, without bias.

Layers of one input are concatenated to one GEMM.

| weight                         | mode    | activation                                            |
|--------------------------------|---------|-------------------------------------------------------|
| bf16, fp32                     | bf16    | bf16                                                  |
| FP8 128x128, K a multiple of 128 | mxfp8 | FP8, a power of two for 1 x 128 elements (`quantize`) |
| FP8 128x128, other K           | bf16    | bf16: codes times a power of two are bf16 numbers     |

FP8 activations are written by the launch that makes them (mHC, `normed`) where there is one, else by `quantize`.

Source: DSV4's released code; the op is `dsv4lib.ops.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, scale_swizzle, ue8m0
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.output_proj.op import output_proj
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm.op import rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import rmsnorm_quant

BLOCK, STEP_N = 32, 16  # elements of an MXFP8 scale; N of a GEMM is a multiple
PRECISIONS = ("fp8", "bf16")


class Activations(NamedTuple):
    """What a sublayer reads, one of them or both: bf16 [T, K]; FP8 codes [T, K] and the image of their scales."""

    bf16: Tensor | None
    fp8: Operand | None = None


class Dense(torch.nn.Module):
    """y = x W^T of one weight, or of several whose outputs come side by side. Tensors are buffers.

    Args:
        weights: [N, K] each, all of one K: bf16 or fp32 tensors, or `FP8Tensor`.
        precision: of FP8 weights: "fp8", activations are quantised; or "bf16", neither is.
        out: "bf16" or "fp32".
        backend: of every op.

    Attributes:
        sizes: N of each weight. mode: of the GEMM, "bf16" or "mxfp8".

    Raises:
        ArgumentError: weights of different K, or an unknown precision.
    """

    def __init__(
        self, weights: Sequence[Tensor | FP8Tensor], precision: str = "fp8", out: str = "bf16", backend: str = "auto"
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise ArgumentError("precision", precision, "one of " + ", ".join(PRECISIONS))
        shapes = [tuple(_codes(w).shape) for w in weights]
        if len({shape[1] for shape in shapes}) != 1:
            raise ArgumentError("weights", shapes, "[N, K] of one K")
        self.sizes, self.out, self.backend = [shape[0] for shape in shapes], out, backend
        k, extra = shapes[0][1], -sum(self.sizes) % STEP_N
        fp8 = precision == "fp8" and k % 128 == 0 and all(isinstance(w, FP8Tensor) and _exact(w) for w in weights)
        self.mode = "mxfp8" if fp8 else "bf16"
        if fp8:
            codes = torch.cat([w.codes.view(torch.uint8) for w in weights])
            scales = torch.cat([spread(w) for w in weights])
            codes, scales = (torch.nn.functional.pad(t, (0, 0, 0, extra)) for t in (codes, scales))
            self.register_buffer("scales", scale_swizzle.swizzle(scales))
        else:
            codes = torch.nn.functional.pad(torch.cat([values(w) for w in weights]), (0, 0, 0, extra))
            self.register_buffer("scales", None)
        self.register_buffer("codes", codes.contiguous())

    def forward(self, x: Tensor | Operand) -> list[Tensor]:
        """Multiply by the weights of all layers.

        x bf16 [T, K], or quantised for `mode` -> an output [T, N] for each weight, columns of one matrix.
        """
        y = linear(
            activations(x, self.mode, self.backend),
            Operand(self.codes, self.scales),
            mode=self.mode,
            out_format=self.out,
            backend=self.backend,
        ).codes
        return list(y[:, : sum(self.sizes)].split(self.sizes, 1))


class GroupedDense(torch.nn.Module):
    """u = [o_g W_g^T] of G groups of heads: the first half of the output projection.

    Args:
        weight: [G * R, width], bf16, fp32 or `FP8Tensor`, rows of a group side by side.
        groups: G. precision, backend: as of `Dense`.
    """

    def __init__(self, weight: Tensor | FP8Tensor, groups: int, precision: str = "fp8", backend: str = "auto") -> None:
        super().__init__()
        self.groups, self.backend = groups, backend
        fp8 = precision == "fp8" and isinstance(weight, FP8Tensor) and _exact(weight)
        self.mode = "mxfp8" if fp8 and _codes(weight).shape[1] % 128 == 0 else "bf16"
        if self.mode == "mxfp8":
            codes, scales = weight.codes.view(torch.uint8), spread(weight)
            self.register_buffer("scales", scale_swizzle.swizzle(scales.unflatten(0, (groups, -1))))
        else:
            codes = values(weight)
            self.register_buffer("scales", None)
        self.register_buffer("codes", codes.unflatten(0, (groups, -1)).contiguous())

    def forward(self, o: Operand) -> Tensor:
        """Multiply each group of heads by its weight.

        o [T, H, D], bf16 or FP8 codes with an image of scales a group -> bf16 [T, G * R].
        """
        return output_proj(o, Operand(self.codes, self.scales), mode=self.mode, backend=self.backend)


def normed(x: Tensor, weight: Tensor, eps: float, layer: Dense) -> Tensor | Operand:
    """Normalise rows bf16 [T, K] to what ``layer`` reads, in one launch: bf16, or FP8."""
    if layer.mode == "bf16":
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # rows of x may be part of longer ones
        return rmsnorm(x, weight, eps, out=out, backend=layer.backend)
    y = rmsnorm_quant(x, weight, "fp8", eps=eps, swizzled=True, backend=layer.backend)
    return Operand(y.codes, y.scales)


def activations(x: Tensor | Operand, mode: str, backend: str) -> Operand:
    """Quantise bf16 [T, K] as a GEMM of this mode reads it.

    What is an operand already passes.
    """
    if isinstance(x, Operand):
        return x
    if mode == "bf16":
        return Operand(x)
    q = quantize(x, "fp8", swizzled=True, backend=backend)
    return Operand(q.codes, q.scales)


def values(weight: Tensor | FP8Tensor) -> Tensor:
    """Return a weight in bf16."""
    return fp8_block.dequantize(weight, torch.bfloat16) if isinstance(weight, FP8Tensor) else weight.bfloat16()


def spread(weight: FP8Tensor) -> Tensor:
    """E8M0 bytes [N, K / 32] of a weight with larger tiles."""
    rows, k = weight.codes.shape
    scales = weight.scales
    scales = ue8m0.encode_ceil(scales) if scales.dtype == torch.float32 else scales.view(torch.uint8)
    return fp8_block.spread_scales(scales, (weight.tile[0], weight.tile[1] // BLOCK), rows, k // BLOCK)


def _codes(weight: Tensor | FP8Tensor) -> Tensor:
    return weight.codes if isinstance(weight, FP8Tensor) else weight


def _exact(weight: FP8Tensor) -> bool:
    """Tell whether all scales are powers of two, as E8M0 has them."""
    scales = weight.scales
    return scales.dtype != torch.float32 or bool((torch.frexp(scales).mantissa == 0.5).all())
