"""Encode and decode E4M3, an 8-bit float.

It holds weights, activations, KV entries and the block scales of NVFP4.

Source: OCP 8-bit Floating Point Specification 1.0, the variant torch calls ``float8_e4m3fn``: largest value 448,
no Inf, NaN = 0x7F (and 0xFF on input), subnormals down to 2^-9.
"""

from __future__ import annotations

import torch

from dsv4lib.formats.floatcodec import E4M3

FORMAT = E4M3
MAX = 448.0
NAN = 0x7F


def encode(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """Encode to codes (uint8, shape of ``x``), nearest, ties to even. NaN becomes 0x7F.

    With ``saturate`` (``satfinite``, what every kernel uses) Inf and large values become +-448; without, what rounds
    beyond 448 becomes NaN.
    """
    return E4M3.encode(x, saturate=saturate)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode codes (uint8 or float8_e4m3fn); exact in bf16, fp32 and fp64."""
    return E4M3.decode(codes, dtype)
