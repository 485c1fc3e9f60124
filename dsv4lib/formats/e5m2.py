"""E5M2, the wide 8-bit float: an IEEE half with two mantissa bits. DSV4 stores nothing in it; neighbours' caches do.

Source: OCP 8-bit Floating Point Specification 1.0 (torch: ``float8_e5m2``): largest value 57344, Inf = 0x7C,
NaN = 0x7D..0x7F (0x7F when encoded), subnormals down to 2^-16.
"""

from __future__ import annotations

import torch

from dsv4lib.formats.floatcodec import E5M2

FORMAT = E5M2
MAX = 57344.0
INF = 0x7C
NAN = 0x7F


def encode(x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
    """Encode to codes (uint8, shape of ``x``), nearest, ties to even. NaN becomes 0x7F.

    With ``saturate`` (``satfinite``) Inf and large values become +-57344; without, what rounds beyond becomes +-Inf.
    """
    return E5M2.encode(x, saturate=saturate)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode codes (uint8 or float8_e5m2); exact in bf16, fp32 and fp64."""
    return E5M2.decode(codes, dtype)
