"""Convert to NVFP4 and back. E2M1 codes in blocks of 16, one E4M3 scale per block, one fp32 scale per tensor.

Source: NVIDIA's NVFP4 recipe as published with the DSV4 NVFP4 checkpoints. value = e2m1 * block scale * global scale.
Stored per expert projection as ``weight`` uint8 [N, K/2] (even k in the low nibble), ``weight_scale`` E4M3 [N, K/16]
(row-major; the 128x4 swizzle is applied at load time, see ``scale_swizzle``), ``weight_scale_2`` fp32 scalar.

    global scale = amax(tensor) / (6 * 448)        so that the largest block scale is 448
    block scale  = E4M3(amax(block) / (6 * global))
    code         = E2M1(x / (block scale * global))

Activations use a calibrated global (``input_scale``); w1 and w3 share one, because their outputs meet in one epilogue.
Both quotients are formed in fp64 from exact operands, which decides every tie of bf16, fp16 and fp32 inputs as the
exact quotient would; a kernel that multiplies by fp32 reciprocals may differ next to a tie.

Edges: a block scale that rounds to zero (an all-zero block, or one below 2^-10 of the top) makes the codes signed
zeros. A block above the calibrated range saturates at 6 * 448 * global. A NaN or Inf makes everything that shares its
scale NaN: its block when the global scale is given (block scale NaN, codes 0), the whole tensor when it is derived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, e2m1, e4m3

BLOCK = 16
RANGE = e2m1.MAX * e4m3.MAX  # 2688: largest value at a global scale of 1
MIN_GLOBAL_SCALE = 2.0**-126  # keeps the derived scale of an all-zero tensor a positive, normal fp32


@dataclass(frozen=True)
class NVFP4Tensor:
    """NVFP4 codes and scales.

    Attributes:
        packed: two E2M1 codes per byte, uint8 (or float4_e2m1fn_x2) [..., K/2].
        scales: E4M3 block scales, uint8 (or float8_e4m3fn) [..., K/16], row-major.
        global_scale: float32 scalar (``weight_scale_2`` or ``input_scale``).
    """

    packed: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor


def shared_global_scale(*tensors: torch.Tensor) -> torch.Tensor:
    """max over all tensors of amax / (6 * 448), float32 scalar, at least 2^-126. NaN if any holds a NaN or Inf."""
    if not tensors:
        raise ArgumentError("tensors", tensors, "at least one tensor")
    amax = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(tensors):
        work = _checks.working_copy(f"tensors[{i}]", t)
        _checks.same_device(f"tensors[{i}]", t, "tensors[0]", tensors[0])
        if work.numel():
            amax = torch.maximum(amax.to(work.device), work.abs().amax().to(torch.float64))
    scale = torch.where(amax.isfinite(), amax / RANGE, torch.nan)
    return scale.clamp(min=MIN_GLOBAL_SCALE).to(torch.float32)


def _global_scale(given: torch.Tensor | float) -> torch.Tensor:
    """A caller's global scale as a float32 scalar tensor, checked."""
    scale = torch.as_tensor(given)
    if scale.numel() != 1 or not scale.is_floating_point():
        raise ArgumentError("global_scale", given, "a float or a floating-point tensor with one element")
    scale = scale.detach().to(torch.float32).reshape(())
    if not (math.isfinite(scale.item()) and scale.item() > 0):
        raise ArgumentError("global_scale", given, "positive and finite in float32")
    return scale


def quantize(x: torch.Tensor, global_scale: torch.Tensor | float | None = None) -> NVFP4Tensor:
    """Quantise [..., K], K a multiple of 16.

    Args:
        x: bf16, fp16, fp32 or fp64.
        global_scale: a calibrated or shared scale (float32 scalar); None derives amax / (6 * 448) from ``x``.

    Raises:
        ArgumentError: K no multiple of 16, wrong dtype, a global scale that is not positive and finite.
    """
    work = _checks.working_copy("x", x)
    _checks.last_dim("x", work, multiple_of=BLOCK)
    scale = shared_global_scale(work) if global_scale is None else _global_scale(global_scale).to(work.device)
    blocks = work.to(torch.float64).reshape(*work.shape[:-1], work.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    # 6 * global in fp64: 2 + 24 significant bits, exact. amax Inf or NaN must not saturate but become a NaN scale.
    block_scales = e4m3.encode(torch.where(amax.isfinite(), amax / (e2m1.MAX * scale.to(torch.float64)), torch.nan))
    step = (e4m3.decode(block_scales, torch.float64) * scale.to(torch.float64))[..., None]
    usable = step > 0  # neither zero nor NaN
    # A zero scale keeps the signs (x * 0); a NaN scale gets zeros, because E2M1 has no NaN of its own.
    fallback = torch.where(step.isnan(), 0.0, torch.copysign(torch.zeros_like(blocks), blocks))
    codes = e2m1.encode(torch.where(usable, blocks / torch.where(usable, step, 1.0), fallback))
    return NVFP4Tensor(e2m1.pack(codes.reshape(work.shape)), block_scales, scale)


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode to (e2m1 * block scale) * global scale, [..., K].

    The inner product has at most 6 significant bits and is exact; the outer one is formed in fp64, where 6 + 24 bits
    are exact too, and rounded once to ``dtype``.

    Raises:
        ArgumentError: dtypes, shapes or devices of ``q`` that do not fit together.
    """
    codes = e2m1.unpack(q.packed)
    _checks.last_dim("packed", q.packed, multiple_of=BLOCK // 2)
    scales = _checks.as_bytes("scales", q.scales, torch.float8_e4m3fn)
    _checks.same_device("scales", scales, "packed", codes)
    _checks.shape("scales", scales, (*codes.shape[:-1], codes.shape[-1] // BLOCK))
    if q.global_scale.dtype != torch.float32 or q.global_scale.numel() != 1:
        described = (q.global_scale.dtype, tuple(q.global_scale.shape))
        raise ArgumentError("global_scale", described, "a float32 tensor with one element")
    step = e4m3.decode(scales, torch.float64) * q.global_scale.to(torch.float64)
    values = e2m1.decode(codes, torch.float64) * step.repeat_interleave(BLOCK, -1)
    return values.to(_checks.output_dtype(dtype))


def fake_quantize(x: torch.Tensor, global_scale: torch.Tensor | float | None = None) -> torch.Tensor:
    """Quantise and dequantise [..., K]. The result has the dtype of ``x`` (bf16, fp32 or fp64)."""
    return dequantize(quantize(x, global_scale), x.dtype)
