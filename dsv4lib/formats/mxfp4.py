"""Convert to MXFP4 and back. E2M1 codes in blocks of 32 of the last dimension, an E8M0 scale each, no global scale.

Source: OCP Microscaling Formats 1.0 for the format; the released DSV4 inference code for the recipe
(scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))), which quantises the indexer's queries and keys and fits the routed
experts of the official checkpoint: ``weight`` int8 [N, K/2] with the even k in the low nibble, ``scale`` E8M0
[N, K/32]. NVFP4 shares the packing and the tensor name but not the scales (see ``nvfp4``).

NaN and Inf: such a block gets scale 255 (NaN) and zero codes and dequantises to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, e2m1, e4m3, ue8m0
from dsv4lib.formats.fp8_block import WEIGHT_TILE, FP8Tensor, split_tiles, spread_scales

BLOCK = 32
AMAX_FLOOR = 6.0 * 2.0**-126  # the scale of an all-zero block is then 2^-126, the smallest normal fp32


@dataclass(frozen=True)
class MXFP4Tensor:
    """MXFP4 codes and scales.

    Attributes:
        packed: two E2M1 codes per byte, uint8 (or int8, float4_e2m1fn_x2) [..., K/2].
        scales: E8M0 bytes, uint8 (or float8_e8m0fnu) [..., K/32].
    """

    packed: torch.Tensor
    scales: torch.Tensor


def quantize(x: torch.Tensor) -> MXFP4Tensor:
    """Quantise [..., K], K a multiple of 32 (bf16, fp16, fp32 or fp64). Nothing saturates, ties go to the even code."""
    work = _checks.working_copy("x", x)
    _checks.last_dim("x", work, multiple_of=BLOCK)
    blocks = work.reshape(*work.shape[:-1], work.shape[-1] // BLOCK, BLOCK)
    scales = ue8m0.encode_ceil(blocks.abs().amax(-1).clamp(min=AMAX_FLOOR), e2m1.MAX)
    broken = (scales == ue8m0.NAN)[..., None]
    scaled = torch.where(broken, 0.0, blocks) / torch.where(broken, 1.0, ue8m0.decode(scales, work.dtype)[..., None])
    return MXFP4Tensor(e2m1.pack(e2m1.encode(scaled).reshape(work.shape)), scales)


def checked(q: MXFP4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Check codes uint8 [..., K] and scale bytes uint8 [..., K/32] against each other. ArgumentError."""
    codes = e2m1.unpack(q.packed)
    _checks.last_dim("packed", q.packed, multiple_of=BLOCK // 2)
    scales = _checks.as_bytes("scales", q.scales, torch.float8_e8m0fnu)
    _checks.same_device("scales", scales, "packed", codes)
    _checks.shape("scales", scales, (*codes.shape[:-1], codes.shape[-1] // BLOCK))
    return codes, scales


def dequantize(q: MXFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to E2M1 value * 2^(scale - 127), [..., K]. Exact in bf16, fp32, fp64 while inside their exponent range."""
    codes, scales = checked(q)
    work = torch.promote_types(_checks.output_dtype(dtype), torch.float32)
    return (e2m1.decode(codes, work) * ue8m0.decode(scales, work).repeat_interleave(BLOCK, -1)).to(dtype)


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    """Quantise and dequantise [..., K]. The result has the dtype of ``x`` (bf16, fp32 or fp64)."""
    return dequantize(quantize(x), x.dtype)


def to_fp8_tiles(q: MXFP4Tensor) -> tuple[FP8Tensor, torch.Tensor]:
    """Convert an MXFP4 weight to FP8, as the released converter does.

    One E8M0 scale serves a 128x128 tile.

    Tile scale = largest block scale of the tile / 2^6, so the largest element becomes at most 6 * 2^6 = 384 <= 448.
    A block whose scale is 2^-d of the largest maps its values v to v * 2^(6-d). The smallest, 0.5, stays on E4M3's
    grid of 2^-9 while d <= 14: up to there every element is exact, beyond it some are.

    A block with a NaN scale becomes NaN codes and does not take part in the maximum.

    Args:
        q: packed [N, K/2], scales [N, K/32]; N and K/32 need not be multiples of the tile.

    Returns:
        The FP8 tensor [N, K], and a bool [N, K]: True where the value changed (a NaN kept as NaN has not changed).
    """
    codes, scales = checked(q)
    if codes.dim() != 2:
        raise ArgumentError("packed.shape", tuple(q.packed.shape), "two dimensions [N, K/2]")
    rows, cols = codes.shape
    exponents = scales.to(torch.int32).repeat_interleave(BLOCK, -1)
    valid = torch.where(exponents == ue8m0.NAN, -1, exponents)
    # split_tiles pads with zeros: shifted by one, padding (0) and NaN (0) both lose against a real exponent (>= 1).
    largest = split_tiles(valid + 1, WEIGHT_TILE).amax(dim=(-3, -1)) - 1
    tile_bytes = torch.where(largest < 0, ue8m0.NAN, (largest - 6).clamp(min=0)).to(torch.uint8)
    spread = spread_scales(tile_bytes, WEIGHT_TILE, rows, cols)

    # Ratios of powers of two in fp64 never leave the range; a NaN on either side gives NaN, as wanted.
    ratio = ue8m0.decode(scales, torch.float64).repeat_interleave(BLOCK, -1) / ue8m0.decode(spread, torch.float64)
    wanted = e2m1.decode(codes, torch.float64) * ratio
    fp8 = e4m3.encode(wanted)
    inexact = (e4m3.decode(fp8, torch.float64) != wanted) & ~wanted.isnan()
    return FP8Tensor(fp8, tile_bytes, WEIGHT_TILE), inexact
