"""Define the angles of rotary embeddings. Frequencies by kind of layer, YaRN, cosines and sines.

DSV4 rotates the *last* ``rope_dim`` dims of every head, in neighbouring pairs (2i, 2i + 1), by position * freq_i. YaRN
changes frequencies only: the usual amplitude factor ``0.1 ln(factor) + 1`` on cos and sin is *not* used. What rotates
is in `dsv4lib.reference.rope` and the ops.
"""

from __future__ import annotations

import math

import torch

from dsv4lib.config import LayerKind, ModelConfig, YarnConfig
from dsv4lib.errors import ArgumentError


def base_freqs(dim: int, theta: float) -> torch.Tensor:
    """Return ``freq_i = theta^(-2i / dim)``, i < dim / 2. fp32 ``[dim / 2]``, radians per position.

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


def tables(config: ModelConfig, positions: int) -> dict[LayerKind, tuple[torch.Tensor, torch.Tensor]]:
    """Make the cosines and sines of all positions below ``positions``. fp32 ``[positions, rope_dim / 2]`` by kind."""
    at = torch.arange(positions)
    return {kind: cos_sin(at, layer_freqs(config, kind), torch.float32) for kind in LayerKind}
