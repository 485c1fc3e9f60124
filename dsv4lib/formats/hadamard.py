"""Rotate indexer queries and keys by the orthonormal Hadamard matrix.

DSV4 does so before FP4.

H is the Sylvester matrix in natural order, H_2n = [[H_n, H_n], [H_n, -H_n]], times n^-0.5 (128^-0.5 for the indexer).
It is symmetric and its own inverse, so q.k is unchanged when both sides are rotated: leaving it out on *both* sides
goes unnoticed without quantisation, on one side it is plainly wrong. It spreads outliers over all 128 dimensions,
which is what FP4 blocks need. Source: released DSV4 inference code.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks


def matrix(n: int = 128, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the orthonormal matrix [n, n]: n^-0.5 * (-1)^popcount(i & j). N a power of two."""
    _check_size("n", n)
    index = torch.arange(n)
    common = index[:, None] & index[None, :]
    parity = sum((common >> bit) & 1 for bit in range(n.bit_length()))
    return ((1.0 - 2.0 * (parity % 2)).to(torch.float64) * n**-0.5).to(dtype)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension, x @ matrix(n), by log2(n) butterfly steps.

    Strides are 1, 2, 4, ...; the factor n^-0.5 comes last.

    Sums are formed in fp32 (fp64 for fp64) and rounded once to the dtype of ``x``. Differentiable.

    Args:
        x: bf16, fp16, fp32 or fp64 [..., n], n a power of two.
    """
    _checks.working_copy("x", x)  # the checks alone: the detached copy is not what we transform
    n = _checks.last_dim("x", x)
    _check_size("x.shape[-1]", n)
    out = x.to(torch.promote_types(x.dtype, torch.float32))
    stride = 1
    while stride < n:
        pairs = out.reshape(*x.shape[:-1], n // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([low + high, low - high], dim=-2)
        stride *= 2
    return (out.reshape(x.shape) * n**-0.5).to(x.dtype)


def _check_size(name: str, n: int) -> None:
    if not isinstance(n, int) or n < 1 or n & (n - 1):
        raise ArgumentError(name, n, "a power of two")
