"""Arguments of the encoder: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import torch
from cutlass import Float16, Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.turbo4_encode.kernel import Turbo4Encode

WIDE = 16  # bytes of a load and of a store


def fake_args(kernel: Turbo4Encode) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    pages = fake(Int32, "PHW", WIDE), fake(Float16, "PHN", WIDE)
    return (
        fake(kernel.element, "THD", WIDE),
        fake(Int32, "T"),
        *pages,
        divisor(64),
        divisor(8),
        Int32(0),
        cuda.CUstream(0),
    )


def view_pages(name: str, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View pages as elements of 2 or 4 bytes.

    Raises:
        ArgumentError: they do not start on 16 bytes.
    """
    if pages.data_ptr() % WIDE or pages.storage_offset() % dtype.itemsize:
        raise ArgumentError(name, f"at byte {pages.storage_offset()} of its storage", f"a start on {WIDE} bytes")
    return pages.view(dtype)


def launch_args(kernel: Turbo4Encode, call: Any, stream: int = 0) -> tuple:
    """Wrap a call's tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape, stride or address.
    """
    heads, pages = call.x.shape[1], call.pages
    size = (None, heads, None)
    return (
        wrap("x", call.x, kernel.element, (None, heads, kernel.head_dim), WIDE),
        wrap("indices", call.indices, Int32, (len(call.x),)),
        wrap("pages", view_pages("pages", pages, torch.int32), Int32, size, WIDE),
        wrap("pages", view_pages("pages", pages, torch.float16), Float16, size, WIDE),
        divisor(call.page_size),
        divisor(heads),
        Int32(call.seed),
        cuda.CUstream(stream),
    )
