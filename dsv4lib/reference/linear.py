"""Apply a linear layer, alone or in groups of equal size. y = alpha * x W^T, and the FP8 one of DSV4's checkpoints."""

from __future__ import annotations

import torch

from dsv4lib.formats import fp8_block


def linear(x: torch.Tensor, w: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x by w^T and scale by alpha.

    x ``[..., T, K]``, w ``[..., N, K]`` with the same leading dimensions, alpha ``[...]`` -> ``[..., T, N]``.
    """
    y = x @ w.mT
    return y if alpha is None else y * alpha[..., None, None]


def linear_fp8(x: fp8_block.FP8Tensor, w: fp8_block.FP8Tensor) -> torch.Tensor:
    """Multiply E4M3 operands with their scales, in fp64.

    They are of 128 of K of a token and of 128 x 128 of the weights.

    Args:
        x: codes [..., T, K], tile (1, 128). w: codes [..., N, K], tile (128, 128), the same leading dimensions.

    Returns:
        fp64 [..., T, N].
    """
    return linear(*(fp8_block.dequantize(q, torch.float64) for q in (x, w)))
