"""Rotary position embedding on the last dims of a head: interleaved pairs, forward and inverse, YaRN frequencies.

DSV4 rotates the *last* ``rope_dim`` dims of every head, in neighbouring pairs (2i, 2i + 1), by position * freq_i.
Because one vector serves as key and value, the rotation is carried into the attention output, and the output path turns
it back at the query's position (:func:`apply_inverse`). YaRN changes frequencies only: the usual amplitude factor
``0.1 ln(factor) + 1`` on cos and sin is *not* used.
"""

from __future__ import annotations

import math

import torch

from dsv4lib.config import LayerKind, ModelConfig, YarnConfig
from dsv4lib.errors import ArgumentError


def base_freqs(dim: int, theta: float) -> torch.Tensor:
    """``freq_i = theta^(-2i / dim)``, i < dim / 2: fp32 ``[dim / 2]``, radians per position.

    Every step is fp32, as in the released code: one ULP of a frequency is 0.06 rad at position 1M.
    """
    if dim < 2 or dim % 2:
        raise ArgumentError("dim", dim, "an even number >= 2")
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / theta**exponents


def yarn_freqs(freqs: torch.Tensor, theta: float, yarn: YarnConfig) -> torch.Tensor:
    """Divide slow frequencies by ``factor``, keep fast ones, blend linearly between.

    A pair that makes ``beta`` turns over the original context has index
    ``i(beta) = dim * ln(original / (2 pi beta)) / (2 ln theta)``. With low = floor(i(beta_fast)) and
    high = ceil(i(beta_slow)), pairs up to low stay, pairs from high on are divided. For theta 160000 and
    original 65536: low 15, high 25.
    """
    dim = 2 * freqs.shape[0]

    def pair_index(turns: float) -> float:
        return dim * math.log(yarn.original_positions / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_index(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_index(yarn.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32)
    # low == high would divide by 0; the ramp is then a step.
    kept = 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / yarn.factor * (1 - kept) + freqs * kept


def layer_freqs(config: ModelConfig, kind: LayerKind) -> torch.Tensor:
    """Frequencies of everything that rotates in a layer: fp32 ``[rope_dim / 2]``.

    SWA layers and the MTP block: ``rope_theta``, no YaRN. CSA and HCA layers: ``compress_rope_theta`` with YaRN, for
    queries, window keys, compressed entries, indexer and inverse rotation alike.
    """
    if kind is LayerKind.SWA:
        return base_freqs(config.rope_dim, config.rope_theta)
    freqs = base_freqs(config.rope_dim, config.compress_rope_theta)
    return freqs if config.yarn is None else yarn_freqs(freqs, config.compress_rope_theta, config.yarn)


def cos_sin(positions: torch.Tensor, freqs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles, each ``[*positions.shape, n_freqs]``.

    The angle is an fp32 product whatever the dtype, as in the released code: at position 1M rounding moves it by up to
    0.03 rad, and the reference must move with it.
    """
    angles = (positions.float()[..., None] * freqs.float()).to(dtype)
    return angles.cos(), angles.sin()


def split_pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real and imaginary parts, interleaved in the last dim: ``[..., 2n]`` -> two ``[..., n]``."""
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
    """As :func:`apply`, with cosine and sine given: ``[..., n_freqs]``, broadcast against ``x``'s leading dims."""
    return _on_last_dims(x, cos, sin)


def _on_last_dims(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise ArgumentError("freqs", cos.shape[-1], f"at most half the last dim of x ({x.shape[-1]})")
    nope, tail = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    return torch.cat((nope, rotate(tail, cos, sin)), dim=-1)
