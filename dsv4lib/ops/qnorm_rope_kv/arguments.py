"""Arguments of the kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int64

from dsv4lib.dsl.head_rows import DIM
from dsv4lib.dsl.rope import ROPE
from dsv4lib.dsl.tensors import Fakes, divisor, wrap
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


def launch_args(
    kernel: QnormRopeKv,
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    indices: torch.Tensor,
    eps: float,
    stream: int = 0,
) -> tuple:
    """Arguments of `QnormRopeKv` from torch tensors.

    Args:
        kernel: which says what is needed.
        q, out: bf16 [T, H, 512], heads on 16 bytes. kv: bf16 [T, 512], rows on 16 bytes.
        weight: fp32 [512] or None. positions: int64 [T] or None. cos_sin: fp32 [P, 64].
        pages, page_size, indices: as in `quantize.arguments.entry_args`. eps: added to means.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    for name, value, needed in (("kv_norm", weight, kernel.normed), ("positions", positions, kernel.gathered)):
        if (value is not None) != needed:
            raise ArgumentError(name, "given" if value is not None else None, "a tensor" if needed else "None")
    blocks = kernel.blocks(q.shape[1])
    if len(q) * (blocks + 1) >= 1 << 31:
        raise ArgumentError("q.shape", tuple(q.shape), "fewer than 2^31 blocks of heads")
    wrapped = wrap("q", q, BF16, (None, None, DIM), WIDE)
    wrap("kv", kv, BF16, (len(q), DIM), WIDE)
    x, *pool, handle = quantize.entry_args(kernel.entries, kv, indices, pages, page_size, stream)
    return (
        wrapped,
        x,
        None if weight is None else wrap("kv_norm", weight, FP32, (DIM,), WIDE),
        None if positions is None else wrap("positions", positions, Int64, (len(q),)),
        wrap("cos_sin", cos_sin, FP32, (None, ROPE), WIDE),
        wrap("out", out, BF16, tuple(q.shape), WIDE),
        Pool(*pool),
        FP32(eps),
        divisor(blocks),
        handle,
    )
