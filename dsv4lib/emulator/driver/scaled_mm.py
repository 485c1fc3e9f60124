"""Compute ``torch._scaled_mm`` with block scales on the CPU.

torch has no CPU kernel for it.

Scripts use it as their reference: cuBLAS on a GPU. Operands are dequantised exactly and multiplied in double precision,
so the only rounding is that of the result. Scale factors lie in cuBLAS's blocked order: tiles of 128 rows by 4 columns,
inside a tile row r, column c at byte 16 (r % 32) + 4 (r / 32) + c (cuBLAS documentation, "1D block scaling factors
layout").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = torch.float4_e2m1fn_x2
_BLOCK = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}  # values that share a scale, by the scale's type


def unblocked(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale factors in matrix order: float64[rows, columns] from the blocked order."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    flat = scales.reshape(-1)[: row_tiles * column_tiles * 512]
    tiles = flat.view(torch.uint8).view(row_tiles, column_tiles, 32, 4, 4)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns]
    return matrix.contiguous().view(scales.dtype).float().double()


def values(operand: torch.Tensor) -> torch.Tensor:
    """Decode a row-major fp8 or packed fp4 matrix to float64[rows, K].

    The low nibble of a packed byte comes first.
    """
    if operand.dtype != _FP4:
        return operand.float().double()
    codes = operand.contiguous().view(torch.uint8)
    pair = torch.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1).long()
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64)
    return table[pair]


def scaled_mm(
    original: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute ``_scaled_mm``, [M, K] x [K, N]. Torch's own for anything but block scales."""
    block = _BLOCK.get(getattr(scale_a, "dtype", None))
    if block is None or scale_b is None or scale_b.dtype != scale_a.dtype or scale_result is not None:
        return original(a, b, scale_a, scale_b, bias, scale_result, out_dtype, **kwargs)
    left, right = values(a), values(b.t())
    columns = -(-left.shape[1] // block)
    for matrix, scales in ((left, scale_a), (right, scale_b)):
        factors = unblocked(scales, matrix.shape[0], columns)
        matrix *= factors.repeat_interleave(block, 1)[:, : matrix.shape[1]]
    out = left @ right.t()
    if bias is not None:
        out += bias.double()
    return out.to(out_dtype or torch.bfloat16)
