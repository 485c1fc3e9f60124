"""Arguments of the kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32, Int64

from dsv4lib.errors import ArgumentError
from dsv4lib.kernels.common.head_rows import DIM
from dsv4lib.kernels.common.rope import ROPE
from dsv4lib.kernels.common.tensors import Fakes, divisor, wrap
from dsv4lib.kernels.inv_rope_quant.simt import FORMAT, InvRopeQuant

BF16, FP32, WIDE = cutlass.BFloat16, cutlass.Float32, 16
SCALES = DIM // FORMAT.block


def fake_args(kernel: InvRopeQuant) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    positions = fake(Int64, "T") if kernel.gathered else None
    outputs = fake(Int32, "THW", 8), fake(Int32, "TH")
    return fake(BF16, "THD", WIDE), positions, fake(FP32, "PR", WIDE), *outputs, divisor(1), cuda.CUstream(0)


def launch_args(
    kernel: InvRopeQuant,
    o: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    stream: int = 0,
) -> tuple:
    """Arguments of `InvRopeQuant` from torch tensors.

    Args:
        kernel: which says what is needed.
        o: bf16 [T, H, 512], heads on 16 bytes. positions: int64 [T] or None. cos_sin: fp32 [P, 64].
        codes: uint8 [T, H, 512], heads on 8 bytes. scales: uint8 [T, H, 4], heads side by side.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride.
    """
    blocks = kernel.blocks(o.shape[1])
    if len(o) * blocks >= 1 << 31:
        raise ArgumentError("o.shape", tuple(o.shape), "fewer than 2^31 blocks of heads")
    wrap("scales", scales, cutlass.Uint8, (*o.shape[:2], SCALES), SCALES)
    return (
        wrap("o", o, BF16, (None, None, DIM), WIDE),
        wrap("positions", positions, Int64, (len(o),)) if kernel.gathered else None,
        wrap("cos_sin", cos_sin, FP32, (None, ROPE), WIDE),
        wrap("codes", codes.view(torch.int32), Int32, (*o.shape[:2], DIM // 4), 8),
        wrap("scales", scales.view(torch.int32)[..., 0], Int32, tuple(o.shape[:2])),
        divisor(blocks),
        cuda.CUstream(stream),
    )
