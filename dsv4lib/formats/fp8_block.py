"""Quantise to FP8 with one scale per tile. Weights in 128x128 tiles, activations in groups along the last dimension.

| what                          | tile      | scale                                  |
|-------------------------------|-----------|----------------------------------------|
| weight, official checkpoint   | 128 x 128 | E8M0 byte                              |
| weight, ``-Base`` checkpoint  | 128 x 128 | fp32                                   |
| activation of an FP8/FP4 linear | 1 x 128 | E8M0 byte                              |
| KV entry, nope part           | 1 x 64    | E8M0 byte                              |
| MXFP8                         | 1 x 32    | E8M0 byte                              |

Source: released DSV4 inference code. value = E4M3(code) * scale. E8M0 scale = 2^ceil(log2(max(amax, 1e-4) / 448)),
so nothing saturates; fp32 scale = max(amax, 1e-4) / 448. The floor on amax keeps an all-zero tile finite; for fp32
weight scales it is this lab's convention (the released code only reads those).

NaN and Inf: a tile that holds one gets a NaN scale and NaN codes, so the whole tile dequantises to NaN. A broken
element cannot turn into a plausible one. Quantised tensors carry no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, e4m3, ue8m0

WEIGHT_TILE = (128, 128)
ACTIVATION_GROUP = 128
AMAX_FLOOR = 1e-4

ScaleFormat = Literal["e8m0", "fp32"]


@dataclass(frozen=True)
class FP8Tensor:
    """E4M3 codes with one scale per tile.

    Attributes:
        codes: uint8 or float8_e4m3fn [..., N, K].
        scales: [..., ceil(N / tile[0]), ceil(K / tile[1])]; uint8 or float8_e8m0fnu (E8M0 bytes), or float32.
        tile: rows and columns that share a scale. Tiles at the right and lower edge may be partial.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tile: tuple[int, int]


def split_tiles(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Split [..., N, K] to [..., N tiles, tile rows, K tiles, tile columns]. Edges are padded with zeros."""
    *lead, rows, cols = x.shape
    padded = F.pad(x, (0, -cols % tile[1], 0, -rows % tile[0]))
    return padded.reshape(*lead, -(-rows // tile[0]), tile[0], -(-cols // tile[1]), tile[1])


def spread_scales(scales: torch.Tensor, tile: tuple[int, int], rows: int, cols: int) -> torch.Tensor:
    """Spread one scale per tile to one per element, cut to [..., rows, cols]."""
    return scales.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)[..., :rows, :cols]


def _check_tile(tile: tuple[int, int]) -> None:
    if len(tile) != 2 or not all(isinstance(t, int) and t > 0 for t in tile):
        raise ArgumentError("tile", tile, "two positive integers (rows, columns)")


def quantize(x: torch.Tensor, tile: tuple[int, int] = WEIGHT_TILE, scale_format: ScaleFormat = "e8m0") -> FP8Tensor:
    """Quantise [..., N, K] with one scale per ``tile``.

    Args:
        x: bf16, fp16, fp32 or fp64, at least 2-D; N and K need not be multiples of the tile.
        tile: rows and columns that share a scale.
        scale_format: "e8m0" (power of two, rounded up) or "fp32" (``max(amax, 1e-4) / 448``, correctly rounded; the
            codes are those of ``x / scale`` in fp32).

    Returns:
        FP8Tensor with uint8 codes [..., N, K] and uint8 or float32 scales.
    """
    _check_tile(tile)
    if scale_format not in ("e8m0", "fp32"):
        raise ArgumentError("scale_format", scale_format, '"e8m0" or "fp32"')
    work = _checks.working_copy("x", x)
    if work.dim() < 2:
        raise ArgumentError("x.shape", tuple(x.shape), "at least two dimensions [..., N, K]")
    amax = split_tiles(work.abs(), tile).amax(dim=(-3, -1)).clamp(min=AMAX_FLOOR)  # a NaN passes through all three
    if scale_format == "e8m0":
        scales = ue8m0.encode_ceil(amax, e4m3.MAX)
        values = ue8m0.decode(scales, work.dtype)
    else:
        scales = torch.where(amax.isfinite(), amax / e4m3.MAX, torch.nan).to(torch.float32)
        values = scales.to(work.dtype)
    return FP8Tensor(e4m3.encode(work / spread_scales(values, tile, *work.shape[-2:])), scales, tile)


def quantize_activation(x: torch.Tensor, group: int = ACTIVATION_GROUP) -> FP8Tensor:
    """Quantise [..., K] with one E8M0 scale per ``group`` elements.

    Groups lie along the last dimension.

    Args:
        x: bf16, fp16, fp32 or fp64, at least 1-D. A last group that is cut short by K has a scale of its own.
        group: 128 for linears, 64 for the KV entry's nope part, 32 for MXFP8.

    Returns:
        FP8Tensor: codes uint8 [..., K], scales uint8 [..., ceil(K / group)], tile (1, group).
    """
    work = _checks.working_copy("x", x)
    cols = _checks.last_dim("x", work)
    rows = work.reshape(math.prod(work.shape[:-1]), cols)  # not -1: that is ambiguous when there is nothing in x
    q = quantize(rows, (1, group))
    return FP8Tensor(q.codes.reshape(x.shape), q.scales.reshape(*x.shape[:-1], q.scales.shape[-1]), q.tile)


def dequantize(q: FP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiply code values by scales, rounded once to ``dtype``.

    The product is fp32 (fp64 for fp64).

    With E8M0 scales the product is exact in bf16 too, unless it leaves bf16's exponent range (amax above 2^127).

    Returns:
        Values, shape of ``q.codes``.

    Raises:
        ArgumentError: dtypes, shapes or devices of ``q`` that do not fit together.
    """
    _check_tile(q.tile)
    work = torch.promote_types(_checks.output_dtype(dtype), torch.float32)
    codes = _checks.as_bytes("codes", q.codes, torch.float8_e4m3fn)
    cols = _checks.last_dim("codes", codes)
    _checks.same_device("scales", q.scales, "codes", codes)
    if q.scales.dtype not in (torch.uint8, torch.float8_e8m0fnu, torch.float32):
        raise ArgumentError("scales.dtype", q.scales.dtype, "uint8 or float8_e8m0fnu (E8M0 bytes), or float32")
    scales = q.scales if q.scales.dtype == torch.float32 else ue8m0.decode(q.scales)
    if codes.dim() == 1:  # one activation row: its scales have one dimension too
        return dequantize(FP8Tensor(codes[None], scales[None], q.tile), dtype)[0]
    rows = codes.shape[-2]
    _checks.shape("scales", scales, (*codes.shape[:-2], -(-rows // q.tile[0]), -(-cols // q.tile[1])))
    return (e4m3.decode(codes, work) * spread_scales(scales.to(work), q.tile, rows, cols)).to(dtype)


def fake_quantize(x: torch.Tensor, group: int = ACTIVATION_GROUP) -> torch.Tensor:
    """Quantise and dequantise [..., K] in groups. The result has the dtype of ``x`` (bf16, fp32 or fp64)."""
    return dequantize(quantize_activation(x, group), x.dtype)
