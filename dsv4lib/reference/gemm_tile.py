"""Check the `gemm_tile` kernels. C = A @ B^T in fp64, where sums of narrow products show no error."""

from __future__ import annotations

import torch


def gemm_tile(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A [M, K] times B [N, K] transposed, as fp64 [M, N] on the device of ``a``."""
    return a.double() @ b.double().T
