"""Tensors of a kernel's call: fake ones to compile with, torch tensors checked by name and wrapped to launch with.

Kernels trust what they are given; everything that can be wrong with a tensor is caught here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.kernels.common.kv_entry import page_divisor

TORCH = {
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Float16: torch.float16,
    cutlass.Float32: torch.float32,
    cutlass.Int64: torch.int64,
    cutlass.Int32: torch.int32,
    cutlass.Uint8: torch.uint8,
}


class Fakes:
    """Fake row-major tensors whose extents are symbols: equal names are equal extents."""

    def __init__(self) -> None:
        self.symbols: dict[str, Any] = {}

    def __call__(self, dtype: Any, extents: str, align: int = 0) -> Any:
        """A tensor with one letter a mode; ``align``: bytes on which its rows start, 0: those of an element."""
        align = align or dtype.width // 8
        shape = tuple(self.symbols.setdefault(e, cute.sym_int32(symbol=e)) for e in extents)
        units = 8 * align // dtype.width
        stride = (*(cute.sym_int64(divisibility=units) for _ in extents[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)


def divisor(number: int) -> tuple:
    """What a kernel needs to divide a 31-bit count by ``number`` (1 to 2^24): (number, multiplier, shift)."""
    multiplier, shift = page_divisor(number)
    return cutlass.Int32(number), cutlass.Uint32(multiplier), cutlass.Int32(shift)


def wrap(name: str, x: Any, dtype: Any, shape: tuple, align: int = 0) -> Any:
    """A CuTe tensor over ``x``, which must have this type and shape (None: any extent) and rows on ``align`` bytes.

    Raises:
        ArgumentError: it does not.
    """
    if not isinstance(x, torch.Tensor) or x.dtype != TORCH[dtype]:
        raise ArgumentError(name, getattr(x, "dtype", type(x).__name__), f"a tensor of {TORCH[dtype]}")
    if x.dim() != len(shape) or any(want not in (None, have) for have, want in zip(x.shape, shape, strict=True)):
        raise ArgumentError(f"{name}.shape", tuple(x.shape), str(shape).replace("None", "any"))
    if 0 in x.shape:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), "no extent 0")
    if x.stride(-1) != 1:
        if x.shape[-1] > 1:
            raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))  # of one element any stride says the same
    size = x.element_size()
    align = align or size
    if 0 in x.stride():  # CuTe takes it for a static one, and the kernel was compiled with dynamic ones
        if any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True)):
            raise ArgumentError(f"{name}.stride()", x.stride(), "no stride 0: an expanded tensor must be copied")
        x = x.as_strided(x.shape, [stride or align // size for stride in x.stride()])
    if x.data_ptr() % align or any(
        stride * size % align for stride, extent in zip(x.stride()[:-1], x.shape, strict=False) if extent > 1
    ):
        raise ArgumentError(f"{name}.stride()", x.stride(), f"rows that start on {align} bytes")
    x = x.detach()  # a parameter's memory is its numbers
    return cute.runtime.from_dlpack(x, assumed_align=align).mark_layout_dynamic(leading_dim=x.dim() - 1)
