"""Quantise vectors to turbo4, and what its variants would make of them.

`turbo4_encode` is what the op of that name computes. `variant` shows the error of fewer bits, of no rotation, of a norm
that makes up for what rounding takes, and of the older turbo4: 3 bits and a sketch of the residual (QJL), which costs
more bytes than 4 bits and has six times their error.
"""

from __future__ import annotations

import math

import torch

from dsv4lib.formats import turbo4
from dsv4lib.formats.turbo4 import Encoded


def turbo4_encode(x: torch.Tensor, seed: int) -> Encoded:
    """Rotate and quantise [..., d]; NaN and norms above 65504 are seen in the norms."""
    return turbo4.quantize_rotated(turbo4.rotate(x, seed))


def append(pages: torch.Tensor, page_size: int, indices: torch.Tensor, x: torch.Tensor, seed: int) -> None:
    """Quantise vectors and store them in pages, in place.

    Args:
        pages: uint8 [P, H, bytes of a page of `turbo4.layout`]. page_size: entries of a page.
        indices: [T], page * page_size + slot; -1 drops the row, none twice.
        x: [T, H, d]. seed: of the rotation.
    """
    where = turbo4.layout(x.shape[-1])
    packed, norms = turbo4_encode(x, seed)
    for head in range(x.shape[1]):
        of_head = packed[:, head], norms[:, head, None].contiguous().view(torch.uint8)
        where.write(pages[:, head], page_size, indices, *of_head)


def variant(
    x: torch.Tensor,
    seed: int = 0,
    *,
    bits: int = 4,
    rotated: bool = True,
    corrected: bool = False,
    legacy_qjl: bool = False,
) -> torch.Tensor:
    """Quantise and dequantise x [..., d] in fp64, norms not rounded.

    Args:
        x: fp64. seed: of signs and sketch.
        bits: of a code. rotated: False leaves the rotation out.
        corrected: the norm is that of x over that of the centroids, so that lengths stay.
        legacy_qjl: codes of ``bits`` - 1 bits, and a sign of each coordinate of a random projection of the residual.
    """
    dim = x.shape[-1]
    y = turbo4.rotate(x, seed) if rotated else x
    norm = y.norm(dim=-1, keepdim=True)
    bits = bits - 1 if legacy_qjl else bits
    codes = torch.bucketize(y / norm, turbo4.boundaries(dim, bits), right=True)
    value = turbo4.centroids(dim, bits)[codes]
    gain = norm / value.norm(dim=-1, keepdim=True) if corrected else norm
    value = value * gain
    if legacy_qjl:
        value = value + sketched(y - value, seed)
    return turbo4.unrotate(value, seed) if rotated else value


def sketched(residual: torch.Tensor, seed: int) -> torch.Tensor:
    """Estimate a residual [..., d] from its length and the signs of d random projections, unbiased.

    sqrt(pi / 2) / d * |r| * S^T sign(S r), S normal [d, d]. Source: QJL (arXiv 2406.03482).
    """
    dim = residual.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    sketch = torch.randn(dim, dim, generator=generator, dtype=residual.dtype)
    length = residual.norm(dim=-1, keepdim=True)
    return math.sqrt(math.pi / 2) / dim * length * (torch.sign(residual @ sketch.T) @ sketch)
