"""Make the kernel's arguments: fake tensors to compile, checked ones to launch.

The kernel trusts what it is given; everything that can be wrong with a tensor is caught here, by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl import umma
from dsv4lib.dsl.tensors import DeviceTensor, Fakes, starts_on, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.moe_gemm.config import TILE_M
from dsv4lib.ops.moe_gemm.epilogue import Outputs
from dsv4lib.ops.moe_gemm.schedule import Ranges
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm, Operand

_OUT = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8, "mxfp8": cutlass.Uint8}
PADDED_ALIGN = 32  # bytes, of a tensor map that unpacks 4 bits to a byte
BLOCK_ROWS = 128  # a group starts at a multiple: the scales of its rows do too


def fake_args(kernel: MoeGemm) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, group = Fakes(), "E" * kernel.batched
    u8, fp32, i32 = cutlass.Uint8, cutlass.Float32, cutlass.Int32
    scaled, quantised = bool(kernel.mode.block), kernel.quantised
    return (
        Operand(fake(u8, group + "RK", 16), fake(u8, group + "AS", 16) if scaled else None),
        Operand(fake(u8, "ENL", 16), fake(u8, "EBS", 16) if scaled else None),
        None if kernel.batched else Ranges(fake(i32, "E"), fake(i32, "E")),
        fake(fp32, "E") if kernel.alpha else None,
        fake(fp32, "E") if kernel.alpha and kernel.swiglu else None,
        fake(fp32, "R") if kernel.routed else None,
        Outputs(
            fake(_OUT[kernel.out], group + "RF", 16),
            fake(u8, group + "CS", 16) if quantised else None,
            fake(fp32, "E") if kernel.out == "nvfp4" else None,
        ),
        fp32(1.0),
        i32(1),
        cuda.CUstream(0),
    )


@dataclass
class Gemm:
    """Hold tensors of a call of `Linear`.

    x, x_scales, out and out_scales begin with a dimension [E].

    Attributes:
        x: codes [R, bytes of K] uint8 (bf16 mode: bf16 [R, K]); x_scales: their swizzled scales, uint8 bytes.
        w: codes [E, N, bytes of K] uint8 (bf16 mode: bf16 [E, N, K]); w_scales: [E, bytes].
        out: [R, F] bf16 or fp32, or codes uint8.
        alpha, alpha_up: fp32 [E].
        out_scales: uint8 bytes, swizzled. out_global: fp32 [E].
        limit: of the SwiGLU clamp.
    """

    x: torch.Tensor
    w: torch.Tensor
    out: torch.Tensor
    x_scales: torch.Tensor | None = None
    w_scales: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    alpha_up: torch.Tensor | None = None
    out_scales: torch.Tensor | None = None
    out_global: torch.Tensor | None = None
    limit: float = 10.0


@dataclass
class Call(Gemm):
    """Tensors of a call of `MoeGemm`, without a dimension [E] in front.

    Attributes:
        offsets, counts: int32 [E]. routing: fp32 [R].
    """

    offsets: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    routing: torch.Tensor | None = None


def _blocks(name: str, x: torch.Tensor | None, lead: tuple[int, ...], blocks: int) -> Any:
    """View swizzled scales as [.., blocks, 512]."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8:
        raise ArgumentError(name, getattr(x, "dtype", type(x).__name__), "a tensor of torch.uint8")
    wanted = (*lead, blocks * umma.SCALE_BLOCK)
    if tuple(x.shape) != wanted or not x.is_contiguous() or x.data_ptr() % 16:
        raise ArgumentError(name, (tuple(x.shape), x.stride()), f"contiguous {wanted} on 16 bytes")
    return DeviceTensor(x.view(*lead, blocks, umma.SCALE_BLOCK), cutlass.Uint8)


def launch_args(kernel: MoeGemm, call: Gemm, grid: int, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors; those that its options do not use must be None.
        grid: clusters to launch, at least 1. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or alignment.
    """
    m, u8, fp32 = kernel.mode, cutlass.Uint8, cutlass.Float32
    if kernel.swiglu and not call.limit > 0:
        raise ArgumentError("limit", call.limit, "above 0")
    if grid < 1:
        raise ArgumentError("grid", grid, "at least 1")
    x, w = call.x, call.w
    if m.x_bits == 16:
        for name, t in (("x", x), ("w", w)):
            if t.dtype != torch.bfloat16:
                raise ArgumentError(name, t.dtype, "torch.bfloat16")
            if t.dim() == 0 or t.stride(-1) != 1:  # before torch says it of the bytes
                raise ArgumentError(f"{name}.stride()", t.stride(), "stride 1 in the last dimension")
        x, w = x.view(torch.uint8), w.view(torch.uint8)
    dims = 2 + kernel.batched
    if x.dim() != dims or w.dim() != 3:
        allowed = "[E, R, K], [E, N, K]" if kernel.batched else "[R, K], [E, N, K]"
        raise ArgumentError("x, w", (tuple(x.shape), tuple(w.shape)), allowed)
    rows, (experts, features, _) = x.shape[-2], w.shape
    lead = (experts,) * kernel.batched
    k = x.shape[-1] * 8 // m.x_bits
    if k % kernel.k_multiple or w.shape[2] * 8 // m.w_bits != k:
        allowed = f"the same K, a multiple of {kernel.k_multiple}"
        raise ArgumentError("x, w", (tuple(call.x.shape), tuple(call.w.shape)), allowed)
    if m.w_bits != m.x_bits and not starts_on(w, PADDED_ALIGN):
        raise ArgumentError("w.stride()", w.stride(), f"rows that start on {PADDED_ALIGN} bytes: TMA unpacks E2M1")
    step = 32 if kernel.swiglu else 16
    if kernel.quantised:
        step = 64  # rows of codes that start on 16 bytes, and whole blocks of 32
    if features % step:
        raise ArgumentError("w.shape", tuple(call.w.shape), f"N a multiple of {step}")
    width = features // 2 if kernel.swiglu else features
    row_blocks, scaled, quantised = -(-rows // BLOCK_ROWS), bool(m.block), kernel.quantised
    blocks = -(-k // (4 * m.block)) if scaled else 0
    out_blocks = -(-width // (4 * (16 if kernel.out == "nvfp4" else 32)))

    def optional(name: str, wanted: bool, wrapped: Any) -> Any:
        value = getattr(call, name, None)
        if not wanted and value is not None:
            raise ArgumentError(name, "given", f"None for {kernel!r}")
        return wrapped(name, value) if wanted else None

    def vector(extent: int) -> Any:
        return lambda name, value: wrap(name, value, fp32, (extent,))

    def index(name: str, value: Any) -> Any:
        return wrap(name, value, cutlass.Int32, (experts,))

    groups = Ranges(*(optional(name, not kernel.batched, index) for name in ("offsets", "counts")))
    out_width = width // 2 if kernel.out == "nvfp4" else width
    return (
        Operand(
            wrap("x", x, u8, (*lead, None, None), 16),
            optional("x_scales", scaled, lambda n, v: _blocks(n, v, lead, row_blocks * blocks)),
        ),
        Operand(
            wrap("w", w, u8, (None, None, None), 16),
            optional("w_scales", scaled, lambda n, v: _blocks(n, v, (experts,), -(-features // TILE_M) * blocks)),
        ),
        None if kernel.batched else groups,
        optional("alpha", kernel.alpha, vector(experts)),
        optional("alpha_up", kernel.alpha and kernel.swiglu, vector(experts)),
        optional("routing", kernel.routed, vector(rows)),
        Outputs(
            wrap("out", call.out, _OUT[kernel.out], (*lead, rows, out_width), 16),
            optional("out_scales", quantised, lambda n, v: _blocks(n, v, lead, row_blocks * out_blocks)),
            optional("out_global", kernel.out == "nvfp4", vector(experts)),
        ),
        cutlass.Float32(call.limit),
        cutlass.Int32(grid),
        cuda.CUstream(stream),
    )
