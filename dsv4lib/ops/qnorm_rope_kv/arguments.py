"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int64

from dsv4lib.dsl.head_rows import DIM
from dsv4lib.dsl.rope import ROPE
from dsv4lib.dsl.tensors import Fakes, divisor, wrap, wrap_if
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.qnorm_rope_kv.kernel import Pool, QnormRopeKv
from dsv4lib.ops.quantize import arguments as quantize

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16


def fake_args(kernel: QnormRopeKv) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    _, *pool, _ = quantize.fake_args(kernel.entries)
    return (
        fake(BF16, "THD", WIDE),
        fake(BF16, "TD", WIDE),
        fake(FP32, "D", WIDE) if kernel.normed else None,
        fake(Int64, "T") if kernel.gathered else None,
        fake(FP32, "PR", WIDE),
        fake(BF16, "THD", WIDE),
        Pool(*pool),
        FP32(1.0),
        divisor(1),
        cuda.CUstream(0),
    )


def launch_args(kernel: QnormRopeKv, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or stride.
    """
    q = call.q
    blocks = kernel.blocks(q.shape[1])
    if len(q) * (blocks + 1) >= 1 << 31:
        raise ArgumentError("q.shape", tuple(q.shape), "fewer than 2^31 blocks of heads")
    wrapped = wrap("q", q, BF16, (None, None, DIM), WIDE)
    wrap("kv", call.kv, BF16, (len(q), DIM), WIDE)
    x, *pool, handle = quantize.entry_args(kernel.entries, call.kv, call.slots, stream)
    return (
        wrapped,
        x,
        wrap_if(kernel.normed, "kv_norm", call.kv_norm, FP32, (DIM,), WIDE),
        wrap_if(kernel.gathered, "positions", call.positions, Int64, (len(q),)),
        wrap("cos_sin", call.cos_sin, FP32, (None, ROPE), WIDE),
        wrap("out", call.out, BF16, tuple(q.shape), WIDE),
        Pool(*pool),
        FP32(call.eps),
        divisor(blocks),
        handle,
    )
