"""Gate rows and quantise them to FP8, in fp64 up to the cast. Source: DSV4's released code."""

from __future__ import annotations

import torch

from dsv4lib.reference.moe_gemm import swiglu
from dsv4lib.reference.quantize import quantize


def gated(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Gate [T, 2 I], gate then up: fp64 [T, I]."""
    return swiglu(*x.double().chunk(2, 1), limit)


def swiglu_quant(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 codes [T, I] and E8M0 scales [T, I / 128] of `gated`. It is rounded to fp32 before."""
    codes, scales, _ = quantize(gated(x, limit).float(), "fp8")
    return codes[0], scales[0]
