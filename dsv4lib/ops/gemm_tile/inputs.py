"""Make operands that show a wrong GEMM. Rows of different scale, poisoned padding, a sentinel around the output."""

from __future__ import annotations

import torch

SENTINEL = -777.0  # exact in fp16, bf16 and fp32
_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}


def operands(
    m: int, n: int, k: int, in_dtype: str, out_dtype: str, seed: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make A [m, k], B [n, k] and an output [m, n] of a `GemmTile`.

    They are views of padded buffers.

    Values are normal; row i of A is scaled by a factor that grows from 1/16 to 16 with i, so rows cannot stand in for
    each other. What lies between two rows is NaN in A and B (reading it poisons the result) and `SENTINEL` in the
    output (see `padding_untouched`). Row strides are whole 16-byte units, with at least one unit of padding.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-4, 4, m, base=2.0)[:, None]
    a = _padded(torch.randn(m, k, generator=generator) * scale, _TYPES[in_dtype], float("nan"), device)
    b = _padded(torch.randn(n, k, generator=generator), _TYPES[in_dtype], float("nan"), device)
    c = _padded(torch.full((m, n), SENTINEL), _TYPES[out_dtype], SENTINEL, device)
    return a, b, c


def padding_untouched(c: torch.Tensor) -> bool:
    """Return whether the buffer of ``c`` past its columns still holds `SENTINEL`."""
    whole = c.as_strided((c.shape[0], c.stride(0)), (c.stride(0), 1))
    return bool((whole[:, c.shape[1] :] == SENTINEL).all())


def _padded(values: torch.Tensor, dtype: torch.dtype, fill: float, device: str) -> torch.Tensor:
    rows, columns = values.shape
    unit = 16 // dtype.itemsize
    buffer = torch.full((rows, (columns // unit + 1) * unit), fill, dtype=dtype, device=device)
    view = buffer[:, :columns]
    view.copy_(values)
    return view
