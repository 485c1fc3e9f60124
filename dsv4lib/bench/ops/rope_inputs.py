"""Make inputs of ops with a rotary embedding. The table of angles, positions, a rotation, codes as numbers."""

from __future__ import annotations

import torch

from dsv4lib import backends
from dsv4lib.config import FLASH, LayerKind

POSITIONS = 1 << 17  # rows of the table
PAIRS = 32


def table(device: torch.device, positions: int = POSITIONS) -> torch.Tensor:
    """Make cos, then sin, of a CSA layer's angles. Theta 160000 with YaRN, fp32 [positions, 64], as engines keep it."""
    oracle = backends.oracle("rope")
    freqs = oracle.layer_freqs(FLASH, LayerKind.CSA).to(device)
    return torch.cat(oracle.cos_sin(torch.arange(positions, device=device), freqs, torch.float32), -1)


def positions(generator: torch.Generator, tokens: int) -> torch.Tensor:
    """Draw positions int64 [tokens], anywhere in the table."""
    return torch.randint(POSITIONS, (tokens,), generator=generator, device=generator.device)


def rotate(x: torch.Tensor, rows: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last 64 dims of x [T, H, D] by rows [T, 64] of a table. It stays in the type of x."""
    cos, sin = rows[:, None, :PAIRS].to(x.dtype), rows[:, None, PAIRS:].to(x.dtype)
    sin = -sin if inverse else sin
    a, b = x[..., -2 * PAIRS :: 2], x[..., 1 - 2 * PAIRS :: 2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., : -2 * PAIRS], turned), -1)


def power_scale(amax: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """Return 2^ceil(log2(max(amax, floor) / largest)) in torch's own operations, fp32."""
    return torch.exp2(torch.ceil(torch.log2(amax.clamp_min(floor) / largest)))


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as fp32, whether a provider keeps bytes of UE8M0 or fp32."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def e4m3_values(codes: torch.Tensor) -> torch.Tensor:
    """Return E4M3 codes, uint8 or torch's type, as fp32."""
    return (codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes).float()
