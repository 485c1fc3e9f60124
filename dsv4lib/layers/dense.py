"""Multiply by bf16 or FP8 weights, without bias.

Layers of one input are concatenated to one GEMM.

| weight                           | Blackwell | Hopper    | activation                                            |
|----------------------------------|-----------|-----------|-------------------------------------------------------|
| bf16, fp32                       | bf16      | bf16      | bf16                                                  |
| FP8 128x128, K a multiple of 128 | mxfp8     | fp8_block | FP8, a power of two for 1 x 128 elements (`quantize`) |
| FP8 128x128, other K             | bf16      | bf16      | bf16: codes times a power of two are bf16 numbers     |

Mode mxfp8 has an image of scales for 1 x 32, so those of weights must be powers of two (else: bf16). Mode fp8_block has
scales as they are stored, of 128 x 128, and row-major ones of activations. FP8 activations are written by the launch
that makes them (mHC, `normed`) where there is one, else by `quantize`.

Source: DSV4's released code; the op is `dsv4lib.ops.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, scale_swizzle, ue8m0
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.layers.communicator import Communicator
from dsv4lib.ops.common import launching
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.output_proj.op import output_proj
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm.op import rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import rmsnorm_quant

BLOCK, STEP_N = 32, 16  # elements of an MXFP8 scale; N of a GEMM is a multiple
TILE = fp8_block.WEIGHT_TILE[0]  # rows and columns of a scale as it is stored
PRECISIONS = ("fp8", "bf16")
FP8_MODES = "mxfp8", "fp8_block"
HOPPER = "sm_90a"


def target(arch: str | None, backend: str) -> str:
    """Choose the architecture whose operands a layer has. It is ``arch``, or None: that of the back end.

    Raises:
        ArgumentError: there are no operands for it.
    """
    if arch is not None and arch not in launching.ARCHS:
        raise ArgumentError("arch", arch, "one of " + ", ".join(launching.ARCHS))
    return launching.arch(backend) if arch is None else arch


class Activations(NamedTuple):
    """What a sublayer reads, one of them or both. bf16 [T, K]; FP8 codes [T, K] and their scales."""

    bf16: Tensor | None
    fp8: Operand | None = None


class Dense(torch.nn.Module):
    """y = x W^T of one weight, or of several whose outputs come side by side. Tensors are buffers.

    Args:
        weights: [N, K] each, all of one K: bf16 or fp32 tensors, or `FP8Tensor`.
        precision: of FP8 weights: "fp8", activations are quantised; or "bf16", neither is.
        out: "bf16" or "fp32".
        backend: of every op. arch: whose operands it has; None: that of the back end.

    Attributes:
        sizes: N of each weight. mode: of the GEMM, "bf16", "mxfp8" or "fp8_block".

    Raises:
        ArgumentError: weights of different K, or an unknown precision or architecture.
    """

    def __init__(
        self,
        weights: Sequence[Tensor | FP8Tensor],
        precision: str = "fp8",
        out: str = "bf16",
        backend: str = "auto",
        arch: str | None = None,
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise ArgumentError("precision", precision, "one of " + ", ".join(PRECISIONS))
        shapes = [tuple(_codes(w).shape) for w in weights]
        if len({shape[1] for shape in shapes}) != 1:
            raise ArgumentError("weights", shapes, "[N, K] of one K")
        self.sizes, self.out, self.backend = [shape[0] for shape in shapes], out, backend
        self.mode = _mode(weights, precision, target(arch, backend))
        # rows of the operand that each weight takes: scales as they are stored begin at whole tiles
        self.widths = [-(-n // TILE) * TILE for n in self.sizes[:-1]] if self.mode == "fp8_block" else self.sizes[:-1]
        self.widths.append(self.sizes[-1])
        if self.mode == "fp8_block":
            codes = torch.cat([_padded(_bytes(w.codes), n) for w, n in zip(weights, self.widths, strict=True)])
            self.register_buffer("scales", torch.cat(_stored_scales(weights)).contiguous())
        else:
            extra = -sum(self.sizes) % STEP_N
            codes = torch.cat([_bytes(w.codes) if self.mode == "mxfp8" else values(w) for w in weights])
            codes = _padded(codes, len(codes) + extra)
            scales = None
            if self.mode == "mxfp8":
                scales = torch.cat([spread(w) for w in weights])
                scales = scale_swizzle.swizzle(_padded(scales, len(scales) + extra))
            self.register_buffer("scales", scales)
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
        columns = y[:, : sum(self.widths)].split(self.widths, 1)
        return [part[:, :n] for part, n in zip(columns, self.sizes, strict=True)]


class Columns(Dense):
    """A `Dense` of one weight whose rows are divided between ranks. Each gets all outputs.

    Args:
        weights: this rank's rows. group: the ranks. total: N of all. options: of `Dense`.
    """

    def __init__(self, weights: Sequence[Tensor | FP8Tensor], group: Communicator, total: int, **options: Any) -> None:
        super().__init__(weights, **options)
        self.group, self.total = group, total

    def forward(self, x: Tensor | Operand) -> list[Tensor]:
        """Multiply: [T, total]."""
        return [self.group.columns(super().forward(x)[0], self.total)]


class GroupedDense(torch.nn.Module):
    """u = [o_g W_g^T] of G groups of heads: the first half of the output projection.

    Args:
        weight: [G * R, width], bf16, fp32 or `FP8Tensor`, rows of a group side by side.
        groups: G. precision, backend, arch: as of `Dense`.
        out: "bf16"; or "fp32", of one group: an addend, where ranks divide the heads of the group.

    Raises:
        ArgumentError: on a Hopper, several groups of R that is no multiple of 128: a scale as it is stored would be of
            two groups.
    """

    def __init__(
        self,
        weight: Tensor | FP8Tensor,
        groups: int,
        precision: str = "fp8",
        backend: str = "auto",
        arch: str | None = None,
        out: str = "bf16",
    ) -> None:
        super().__init__()
        if out != "bf16" and groups != 1:
            raise ArgumentError("out", out, "bf16 of several groups")
        self.groups, self.backend, self.out = groups, backend, out
        self.mode, rows = _mode([weight], precision, target(arch, backend)), _codes(weight).shape[0] // groups
        scales = None
        if self.mode == "fp8_block" and groups > 1 and rows % TILE:
            allowed = f"one group, or a multiple of {TILE} rows on {HOPPER}"
            raise ArgumentError("weight", f"{groups} groups of {rows} rows", allowed)
        if self.mode == "fp8_block":
            scales = _stored_scales([weight])[0].unflatten(0, (groups, -1)).contiguous()
        elif self.mode == "mxfp8":
            scales = scale_swizzle.swizzle(spread(weight).unflatten(0, (groups, -1)))
        codes = values(weight) if self.mode == "bf16" else _bytes(weight.codes)
        self.register_buffer("scales", scales)
        self.register_buffer("codes", codes.unflatten(0, (groups, -1)).contiguous())

    def forward(self, o: Operand) -> Tensor:
        """Multiply each group of heads by its weight.

        o [T, H, D], bf16 or FP8 codes with scales as `mode` has them -> [T, G * R].
        """
        if self.out != "bf16":
            scales = (
                o.scales if self.mode == "bf16" else o.scales.flatten(1) if self.mode == "fp8_block" else o.scales[0]
            )
            w = Operand(self.codes[0], None if self.scales is None else self.scales[0])
            options = {"mode": self.mode, "out_format": self.out, "backend": self.backend}
            return linear(Operand(o.codes.flatten(1), scales), w, **options).codes
        return output_proj(o, Operand(self.codes, self.scales), mode=self.mode, backend=self.backend)


def normed(x: Tensor, weight: Tensor, eps: float, layer: Dense) -> Tensor | Operand:
    """Normalise rows bf16 [T, K] to what ``layer`` reads, in one launch: bf16, or FP8."""
    if layer.mode == "bf16":
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # rows of x may be part of longer ones
        return rmsnorm(x, weight, eps, out=out, backend=layer.backend)
    y = rmsnorm_quant(x, weight, "fp8", eps=eps, swizzled=layer.mode == "mxfp8", backend=layer.backend)
    return Operand(y.codes, y.scales)


def activations(x: Tensor | Operand, mode: str, backend: str) -> Operand:
    """Quantise bf16 [T, K] as a GEMM of this mode reads it.

    What is an operand already passes.
    """
    if isinstance(x, Operand):
        return x
    if mode == "bf16":
        return Operand(x)
    q = quantize(x, "fp8", swizzled=mode == "mxfp8", backend=backend)
    return Operand(q.codes, q.scales)


def rows_of(weight: Tensor | FP8Tensor) -> int:
    """Return N of a weight [N, K]."""
    return _codes(weight).shape[0]


def values(weight: Tensor | FP8Tensor) -> Tensor:
    """Return a weight in bf16."""
    return fp8_block.dequantize(weight, torch.bfloat16) if isinstance(weight, FP8Tensor) else weight.bfloat16()


def spread(weight: FP8Tensor) -> Tensor:
    """E8M0 bytes [N, K / 32] of a weight with larger tiles."""
    rows, k = weight.codes.shape
    scales = weight.scales
    scales = ue8m0.encode_ceil(scales) if scales.dtype == torch.float32 else scales.view(torch.uint8)
    return fp8_block.spread_scales(scales, (weight.tile[0], weight.tile[1] // BLOCK), rows, k // BLOCK)


def _mode(weights: Sequence[Tensor | FP8Tensor], precision: str, arch: str) -> str:
    """Mode of the GEMM by the weights of one input."""
    blocks = all(isinstance(w, FP8Tensor) and w.codes.shape[1] % TILE == 0 for w in weights)
    if precision != "fp8" or not blocks:
        return "bf16"
    if arch == HOPPER and all(w.tile == (TILE, TILE) for w in weights):
        return "fp8_block"
    return "mxfp8" if arch != HOPPER and all(map(_exact, weights)) else "bf16"


def _stored_scales(weights: Sequence[FP8Tensor]) -> list[Tensor]:
    """Scales [N / 128, K / 128] as they are stored: E8M0 bytes; fp32 where one has those."""
    scales = [_bytes(w.scales) for w in weights]
    if len({x.dtype for x in scales}) == 1:
        return scales
    return [ue8m0.decode(x) if x.dtype == torch.uint8 else x for x in scales]


def _padded(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros."""
    return torch.nn.functional.pad(x, (0, 0, 0, rows - len(x)))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _codes(weight: Tensor | FP8Tensor) -> Tensor:
    return weight.codes if isinstance(weight, FP8Tensor) else weight


def _exact(weight: FP8Tensor) -> bool:
    """Tell whether all scales are powers of two, as E8M0 has them."""
    scales = weight.scales
    return scales.dtype != torch.float32 or bool((torch.frexp(scales).mantissa == 0.5).all())
