"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.formats.kv_entry import HEAD_DIM, LAYOUT
from dsv4lib.ops.kv_gather.kernel import KvGather

WIDE = 16


def fake_args(kernel: KvGather) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    pages = fake(Int32, "PW", WIDE), fake(cutlass.Uint8, "PS")
    return *pages, fake(Int32, "N"), fake(Int32, "ND", WIDE), divisor(1), cuda.CUstream(0)


def launch_args(kernel: KvGather, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride, or too many entries.
    """
    pages, indices, out = call.pages, call.indices.view(-1), call.out.view(-1, HEAD_DIM)
    needed = call.page_size * LAYOUT.entry_bytes
    if pages.dim() != 2 or pages.shape[1] < needed or len(pages) * call.page_size >= 1 << 31:
        raise ArgumentError("pages.shape", tuple(pages.shape), f"[P, at least {needed}], fewer than 2^31 entries")
    wrap("out", out, cutlass.BFloat16, (len(indices), HEAD_DIM), WIDE)
    used = pages[:, :needed]
    wrap("pages", used, cutlass.Uint8, (None, None), WIDE)
    return (
        wrap("pages", used.view(torch.int32), Int32, (None, None), WIDE),
        wrap("pages", used, cutlass.Uint8, (None, None)),
        wrap("indices", indices, Int32, (None,)),
        wrap("out", out.view(torch.int32), Int32, (None, HEAD_DIM // 2), WIDE),
        divisor(call.page_size),
        cuda.CUstream(stream),
    )
