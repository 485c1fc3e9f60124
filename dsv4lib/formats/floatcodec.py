"""Encode and decode any small float. One exact algorithm serves E2M1, E2M3, E3M2, E4M3 and E5M2.

A minifloat is sign, exponent, mantissa with gradual underflow (OCP 8-bit Floating Point Specification 1.0 and
OCP Microscaling Formats 1.0). Its non-negative codes, read as integers, are in the order of their values, so

    code = (e - e_min) * 2^m + round_half_even(|x| / 2^(e - m)),     e = max(floor(log2 |x|), e_min)

holds for normals, subnormals and for a mantissa that rounds up into the next binade alike. ``e`` comes from the
exponent bits of ``x`` and the division is by a power of two, so nothing but the one wanted rounding ever happens.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks

# dtype: (integer view, mantissa bits, bias)
_LAYOUT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@dataclass(frozen=True)
class MiniFloat:
    """A small float format with the usual bias 2^(exponent_bits - 1) - 1.

    Attributes:
        name: as in the OCP documents, for error messages.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        max_code: code of the largest finite value; larger codes without sign are Inf (``inf_code``) or NaN.
        inf_code: code of +Inf, or None.
        nan_code: code that encoding gives a NaN (always positive, as ``cvt.satfinite`` of PTX does), or None.
        torch_dtype: torch's dtype with the same bits, accepted in place of uint8; or None.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    inf_code: int | None = None
    nan_code: int | None = None
    torch_dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Return the width of a code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal, shared by the subnormals."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max(self) -> float:
        """Return the largest finite value."""
        return self._magnitude(self.max_code)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest value above zero."""
        return self._magnitude(1)

    def _magnitude(self, code: int) -> float:
        field, mantissa = code >> self.mantissa_bits, code & (2**self.mantissa_bits - 1)
        hidden = 2**self.mantissa_bits if field else 0
        return (hidden + mantissa) * 2.0 ** (self.min_exponent + max(field, 1) - 1 - self.mantissa_bits)

    def values(self) -> torch.Tensor:
        """Return the value of every code, float64 [2^bits]. Negative zero, Inf and NaN included."""
        return torch.tensor(self._values(), dtype=torch.float64)

    @functools.cache  # noqa: B019  formats are few and live as long as the process
    def _values(self) -> tuple[float, ...]:
        positive = [self._magnitude(code) for code in range(self.max_code + 1)]
        positive += [math.nan] * (2 ** (self.bits - 1) - len(positive))
        if self.inf_code is not None:
            positive[self.inf_code] = math.inf
        return (*positive, *(-value for value in positive))

    def encode(self, x: torch.Tensor, *, saturate: bool = True) -> torch.Tensor:
        """Round to the nearest code, ties to the even code.

        Args:
            x: bf16, fp16, fp32 or fp64, any shape and strides. fp64 is rounded once, not through fp32.
            saturate: True: what is too large, Inf included, becomes the largest finite value of its sign
                (``satfinite``). False: what rounds beyond it becomes Inf, or NaN in a format without Inf.

        Returns:
            Codes, uint8, shape of ``x``. Signed zeros keep their sign; NaN becomes ``nan_code``.

        Raises:
            ArgumentError: wrong dtype; a NaN in a format that has none; ``saturate=False`` in a format with
                neither Inf nor NaN.
        """
        work = _checks.working_copy("x", x)
        overflow = self.max_code if saturate else (self.nan_code if self.inf_code is None else self.inf_code)
        if overflow is None:
            raise ArgumentError("saturate", saturate, f"True ({self.name} has neither Inf nor NaN)")
        nan = work.isnan()
        if self.nan_code is None and bool(nan.any()):
            raise ArgumentError("x", "NaN", f"finite or infinite values ({self.name} has no NaN)")

        int_dtype, mantissa_bits, bias = _LAYOUT[work.dtype]
        max_field = self.max_code >> self.mantissa_bits
        beyond = 2.0 ** (self.min_exponent + max_field)  # the binade past the last one: certainly an overflow
        magnitude = torch.where(nan, 0.0, work.abs()).clamp(max=beyond)
        exponent = ((magnitude.view(int_dtype) >> mantissa_bits) - bias).clamp(min=self.min_exponent)
        inverse_step = ((self.mantissa_bits - exponent + bias) << mantissa_bits).view(work.dtype)
        steps = torch.round(magnitude * inverse_step).to(int_dtype)
        code = ((exponent - self.min_exponent) << self.mantissa_bits) + steps
        code = torch.where(code > self.max_code, overflow, code)
        code = code + (torch.signbit(work).to(int_dtype) << (self.bits - 1))
        if self.nan_code is not None:
            code = torch.where(nan | (code & (2 ** (self.bits - 1) - 1) == self.nan_code), self.nan_code, code)
        return code.to(torch.uint8)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode each code; exact in every accepted dtype.

        Args:
            codes: uint8 (or ``torch_dtype``), any shape. Bits above ``bits`` must be zero.
            dtype: bf16, fp32 or fp64.

        Returns:
            Values, shape of ``codes``.

        Raises:
            ArgumentError: wrong dtype, or a code that does not exist.
        """
        raw = _checks.as_bytes("codes", codes, *([self.torch_dtype] if self.torch_dtype else []))
        if self.bits < 8 and bool((raw >= 2**self.bits).any()):
            raise ArgumentError("codes", int(raw.max()), f"codes of {self.name}, 0..{2**self.bits - 1}")
        return _checks.looked_up(self.values().to(_checks.output_dtype(dtype)), raw)


E2M1 = MiniFloat("E2M1", 2, 1, max_code=0x7)
E2M3 = MiniFloat("E2M3", 2, 3, max_code=0x1F)
E3M2 = MiniFloat("E3M2", 3, 2, max_code=0x1F)
E4M3 = MiniFloat("E4M3", 4, 3, max_code=0x7E, nan_code=0x7F, torch_dtype=torch.float8_e4m3fn)
E5M2 = MiniFloat("E5M2", 5, 2, max_code=0x7B, inf_code=0x7C, nan_code=0x7F, torch_dtype=torch.float8_e5m2)
