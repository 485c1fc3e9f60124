"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import BFloat16, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.ops.kv_append.kernel import DIM, KvAppend

WIDE = 16


def fake_args(kernel: KvAppend) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    return fake(BFloat16, "TD", WIDE), fake(BFloat16, "SWD", WIDE), fake(Int32, "BC", WIDE), cuda.CUstream(0)


def launch_args(kernel: KvAppend, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride.
    """
    return (
        wrap("kv", call.kv, BFloat16, (None, DIM), WIDE),
        wrap("ring", call.ring, BFloat16, (None, kernel.window, DIM), WIDE),
        wrap("requests", call.requests, Int32, (None, 4), WIDE),
        cuda.CUstream(stream),
    )
