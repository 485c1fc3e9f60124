"""Draw random numbers from (seed, position, purpose, index). They are the same on every device and in every batch.

A generator with a state would tie a request's tokens to its neighbours in the batch. Here each number is a hash, the
finaliser of SplitMix64 (Steele, Lea, Flood 2014) over counters, in int64 arithmetic that wraps.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError

PURPOSES = {"token": 1, "accept": 2}  # one stream each
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 53  # of a float64's significand


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def bits(seed: torch.Tensor, position: torch.Tensor, purpose: str, count: int) -> torch.Tensor:
    """Draw 53 random bits per number.

    Args:
        seed, position: int64 [...]. purpose: one of `PURPOSES`. count: numbers for each of them.

    Returns:
        int64 [..., count], each from 0 to 2^53 - 1.

    Raises:
        ArgumentError: another purpose or dtype.
    """
    if purpose not in PURPOSES:
        raise ArgumentError("purpose", purpose, "one of " + ", ".join(PURPOSES))
    for name, x in (("seed", seed), ("position", position)):
        if x.dtype != torch.int64:
            raise ArgumentError(f"{name}.dtype", x.dtype, "torch.int64")
    key = _mix(seed + _signed(_GOLDEN * PURPOSES[purpose]))
    key = _mix(key + (position + 1) * _signed(_GOLDEN))
    index = torch.arange(1, count + 1, device=seed.device) * _signed(_GOLDEN)
    return _shift(_mix(key[..., None] + index), 64 - _BITS)


def uniform(seed: torch.Tensor, position: torch.Tensor, purpose: str) -> torch.Tensor:
    """Draw from [0, 1): float64, shape of ``seed``."""
    return bits(seed, position, purpose, 1)[..., 0].to(torch.float64) * 2.0**-_BITS


def exponential(seed: torch.Tensor, position: torch.Tensor, purpose: str, count: int) -> torch.Tensor:
    """Draw from Exp(1), never 0: float64 [..., count]."""
    u = (bits(seed, position, purpose, count).to(torch.float64) + 0.5) * 2.0**-_BITS
    return -torch.log(u)
