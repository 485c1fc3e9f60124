"""Rotate the last dims of a head by position. Interleaved pairs, forward and inverse.

Angles are those of `dsv4lib.formats.rotary`. Because one vector serves as key and value, the rotation is carried into
the attention output, and the output path rotates it back at the query's position (:func:`apply_inverse`).
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.rotary import base_freqs, cos_sin, layer_freqs, yarn_freqs

__all__ = [
    "apply",
    "apply_inverse",
    "apply_tables",
    "base_freqs",
    "cos_sin",
    "join_pairs",
    "layer_freqs",
    "rotate",
    "split_pairs",
    "yarn_freqs",
]


def split_pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return real and imaginary parts, interleaved in the last dim. ``[..., 2n]`` -> two ``[..., n]``."""
    return x[..., 0::2], x[..., 1::2]


def join_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Undo :func:`split_pairs`."""
    return torch.stack((a, b), dim=-1).flatten(-2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``(a, b) -> (a cos - b sin, a sin + b cos)`` for every pair of the last dim."""
    a, b = split_pairs(x)
    return join_pairs(a * cos - b * sin, a * sin + b * cos)


def apply(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate the last ``2 * n_freqs`` dims of x by its positions.

    Args:
        x: ``[..., D]``, D >= 2 * n_freqs.
        positions: int64, broadcast against ``x.shape[:-1]``: ``[T]`` for x ``[B, T, D]``, ``[T, 1]`` for
            ``[B, T, H, D]``.
        freqs: ``[n_freqs]``.
    """
    cos, sin = cos_sin(positions, freqs, x.dtype)
    return _on_last_dims(x, cos, sin)


def apply_inverse(x: torch.Tensor, positions: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate back (the conjugate); arguments as :func:`apply`."""
    cos, sin = cos_sin(positions, freqs, x.dtype)
    return _on_last_dims(x, cos, -sin)


def apply_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate as :func:`apply`, with cosine and sine given.

    ``[..., n_freqs]``, broadcast against ``x``'s leading dims.
    """
    return _on_last_dims(x, cos, sin)


def _on_last_dims(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise ArgumentError("freqs", cos.shape[-1], f"at most half the last dim of x ({x.shape[-1]})")
    nope, tail = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    return torch.cat((nope, rotate(tail, cos, sin)), dim=-1)
