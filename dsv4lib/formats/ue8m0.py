"""Convert UE8M0 (E8M0), the power-of-two scale. Value 2^(byte - 127), 255 = NaN, no sign and no zero.

Source: OCP Microscaling Formats 1.0, section 5.4.1 (torch: ``float8_e8m0fnu``). The released DSV4 inference code
rounds scales **up**: scale = 2^ceil(log2(amax / largest)), so that no element of the block ever saturates. Both casts
that lie near to hand are different: torch's cast to float8_e8m0fnu rounds to nearest, OCP's example recipe down.

The exponent is read from the bits. ``ceil(log2(x))`` in floating point is wrong where log2 rounds to an integer
(log2(1 + 2^-23) may well be 0), and it costs an ulp argument where bits cost none.
"""

from __future__ import annotations

import math

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks

BIAS = 127
NAN = 255
_MANTISSA_MASK = (1 << 52) - 1


def encode_ceil(x: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
    """Encode the smallest power of two that is not below ``x / divisor``, exactly. It is 2^ceil(log2(x / divisor)).

    ``divisor`` is the largest value of the element format (448 for E4M3, 6 for E2M1), ``x`` the block's amax; the
    quotient is never formed, so it cannot round. An fp32 division decides alike while the quotient is a normal number;
    multiplying by an fp32 reciprocal, as released kernels do, agrees for every bf16 amax above the recipes' floors.

    Args:
        x: amax, >= 0, bf16, fp16, fp32 or fp64, any shape.
        divisor: positive and finite.

    Returns:
        uint8, shape of ``x``. Below 2^-127, zero included: byte 0. Inf, NaN and what needs more than 2^127: 255.

    Raises:
        ArgumentError: a negative ``x``, a ``divisor`` that is not positive and finite, wrong dtype.
    """
    work = _checks.working_copy("x", x).to(torch.float64)
    if not (math.isfinite(divisor) and divisor > 0):
        raise ArgumentError("divisor", divisor, "a positive finite number")
    if bool((work < 0).any()):
        raise ArgumentError("x", float(work.min()), "values >= 0")
    bits = work.abs().view(torch.int64)  # abs: -0.0 counts as zero
    divisor_bits = torch.tensor(divisor, dtype=torch.float64).view(torch.int64).item()
    exponent = (bits >> 52) - (divisor_bits >> 52)
    round_up = (bits & _MANTISSA_MASK) > (divisor_bits & _MANTISSA_MASK)
    byte = (exponent + round_up + BIAS).clamp(0, NAN)
    return torch.where(work.isfinite(), byte, NAN).to(torch.uint8)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode 2^(byte - 127), NaN for 255. Exact in bf16, fp32 and fp64 (byte 0 is subnormal in the first two).

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.
        dtype: bf16, fp32 or fp64.
    """
    raw = _checks.as_bytes("codes", codes, torch.float8_e8m0fnu)
    table = torch.tensor([2.0 ** (byte - BIAS) for byte in range(NAN)] + [torch.nan], dtype=torch.float64)
    return _checks.looked_up(table.to(_checks.output_dtype(dtype)), raw)
