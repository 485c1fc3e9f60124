"""Project attention output to the hidden size. Inverse RoPE, a product per group of heads, a product over groups.

    o   = inverse_rope(o, query position)          the values carried their keys' rotation
    u_g = wo_a[g] concat(heads of group g)         H / G consecutive heads per group
    y   = wo_b concat(u_0 .. u_{G-1})

Source: DSV4 paper, grouped output projection.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rope


def group_heads(o: torch.Tensor, groups: int) -> torch.Tensor:
    """Concatenate consecutive heads. ``[..., H, D]`` -> ``[..., groups, H * D / groups]``."""
    if o.shape[-2] % groups:
        raise ArgumentError("groups", groups, f"a divisor of the {o.shape[-2]} heads")
    return o.flatten(-2).unflatten(-1, (groups, -1))


def grouped(o: torch.Tensor, wo_a: torch.Tensor) -> torch.Tensor:
    """Apply the groups' projections. o ``[..., G, I]``, wo_a ``[G, R, I]`` -> ``[..., G * R]``."""
    return torch.einsum("...gi,gri->...gr", o, wo_a).flatten(-2)


def output_proj(
    o: torch.Tensor,
    positions: torch.Tensor,
    freqs: torch.Tensor,
    wo_a: torch.Tensor,
    wo_b: torch.Tensor,
    groups: int,
) -> torch.Tensor:
    """Inverse rope, grouped projection, final projection.

    o ``[B, T, H, D]``, positions ``[T]``, wo_a ``[groups * R, H * D / groups]``, wo_b ``[d, groups * R]`` ->
    ``[B, T, d]``.
    """
    by_group = group_heads(rope.apply_inverse(o, positions[:, None], freqs), groups)
    return linear(grouped(by_group, wo_a.unflatten(0, (groups, -1))), wo_b)
