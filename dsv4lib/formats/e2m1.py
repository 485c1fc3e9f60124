"""Encode E2M1, the 4-bit float of MXFP4 and NVFP4. +-{0, .5, 1, 1.5, 2, 3, 4, 6}, two codes per byte, low nibble first.

Source: OCP Microscaling Formats 1.0, section 5.3.3; the nibble order is that of the released checkpoints (even k in
the low nibble), which is also the order of ``cvt.rn.satfinite.e2m1x2`` operands in memory.

There is neither Inf nor NaN. Inf saturates to 6. NaN has no code: ``encode`` refuses it, because any choice would
turn a broken tensor into a plausible one (PTX picks +6). The block formats mark such a block with a NaN scale.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks
from dsv4lib.formats.floatcodec import E2M1

FORMAT = E2M1
MAX = 6.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """Encode to codes 0..15, one per uint8, nearest, ties to even, saturating. NaN raises ArgumentError."""
    return E2M1.encode(x)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode codes 0..15 (uint8, one per element); exact in bf16, fp32 and fp64."""
    return E2M1.decode(codes, dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack pairs of codes. Byte j of the last dimension holds code 2j in its low and 2j+1 in its high nibble.

    Args:
        codes: uint8 [..., K], values 0..15, K even.

    Returns:
        uint8 [..., K/2].
    """
    raw = _checks.as_bytes("codes", codes)
    _checks.last_dim("codes", raw, multiple_of=2)
    if bool((raw > 0xF).any()):
        raise ArgumentError("codes", int(raw.max()), "codes of E2M1, 0..15")
    return raw[..., 0::2] | (raw[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Invert ``pack``.

    Args:
        packed: uint8, int8 (the dtype of the official checkpoint) or float4_e2m1fn_x2, [..., K/2].

    Returns:
        Codes, uint8 [..., K].
    """
    raw = _checks.as_bytes("packed", packed, torch.int8, torch.float4_e2m1fn_x2)
    _checks.last_dim("packed", raw)
    return torch.stack([raw & 0xF, raw >> 4], dim=-1).flatten(-2)
