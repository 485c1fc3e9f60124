"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Int32

from dsv4lib.dsl.tensors import Fakes, divisor, wrap, wrap_if
from dsv4lib.ops.mla_page_table.kernel import MlaPageTable


def fake_args(kernel: MlaPageTable) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    starts, misaligned = (fake(Int32, "B") if kernel.started else None), (fake(Int32, "BC") if kernel.checked else None)
    batch = fake(Int32, "RW"), fake(Int32, "B"), fake(Int32, "B"), starts
    return *batch, fake(Int32, "BN"), misaligned, divisor(128), cuda.CUstream(0)


def launch_args(kernel: MlaPageTable, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    batch = call.requests.shape[0]
    return (
        wrap("req_to_token", call.req_to_token, Int32, (None, None)),
        wrap("requests", call.requests, Int32, (batch,)),
        wrap("lengths", call.lengths, Int32, (batch,)),
        wrap_if(kernel.started, "starts", call.starts, Int32, (batch,)),
        wrap("out", call.out, Int32, (batch, None)),
        wrap_if(kernel.checked, "misaligned", call.misaligned, Int32, (batch, 2)),
        divisor(call.page_size),
        cuda.CUstream(stream),
    )
