"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl import umma
from dsv4lib.dsl.tensors import DeviceTensor, Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.moe_gemm.schedule import Ranges
from dsv4lib.ops.moe_gemm.sm90.config import MAX_EXPERTS
from dsv4lib.ops.moe_gemm.sm90.epilogue import Outputs
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import tiled_shape
from dsv4lib.ops.moe_gemm.sm90.load import Tokens

_OUT = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "mxfp8": cutlass.Uint8}


def fake_args(kernel: TiledMoeGemm) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    u8, fp32, i32 = cutlass.Uint8, cutlass.Float32, cutlass.Int32
    return (
        Tokens(
            fake(u8, "TK" if kernel.gather else "RK", 16),
            fake(u8, "AS", 16) if kernel.scaled else None,
            fake(i32, "R") if kernel.gather else None,
        ),
        fake(u8, "EMPB", 16),
        Ranges(fake(i32, "E"), fake(i32, "E")),
        fake(fp32, "E") if kernel.alpha else None,
        fake(fp32, "E") if kernel.alpha and kernel.swiglu else None,
        fake(fp32, "R") if kernel.routed else None,
        Outputs(fake(_OUT[kernel.out], "RF", 16), fake(u8, "CS", 16) if kernel.quantised else None),
        fp32(1.0),
        i32(1),
        cuda.CUstream(0),
    )


def _blocks(name: str, x: Any, rows: int, columns: int) -> Any:
    """Swizzled scales of [rows, 4 columns] as [blocks, 512]."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8:
        raise ArgumentError(name, getattr(x, "dtype", type(x).__name__), "a tensor of torch.uint8")
    wanted = (-(-rows // 128) * columns * umma.SCALE_BLOCK,)
    if tuple(x.shape) != wanted or not x.is_contiguous() or x.data_ptr() % 16:
        raise ArgumentError(name, (tuple(x.shape), x.stride()), f"contiguous {wanted} on 16 bytes")
    return DeviceTensor(x.view(-1, umma.SCALE_BLOCK), cutlass.Uint8)


def launch_args(kernel: TiledMoeGemm, call: Any, grid: int, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors by name, as `moe_gemm.arguments.Call` and `op.Call` have them;
            those that its options do not use must be None.
        grid: CTAs to launch, at least 1. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of a wrong type, shape or alignment.
    """
    u8, fp32 = cutlass.Uint8, cutlass.Float32
    if kernel.swiglu and not call.limit > 0:
        raise ArgumentError("limit", call.limit, "above 0")
    if grid < 1:
        raise ArgumentError("grid", grid, "at least 1")
    features, k, step = tiled_shape(tuple(call.w.shape), kernel.mode_name)
    if step != kernel.step_k or not call.w.is_contiguous():
        raise ArgumentError("w", (tuple(call.w.shape), call.w.stride()), f"contiguous tiles of K {kernel.step_k}")
    experts = len(call.w)
    if experts > MAX_EXPERTS:
        raise ArgumentError("w.shape", tuple(call.w.shape), f"{MAX_EXPERTS} experts or fewer")
    x, dtype = call.x, torch.uint8 if kernel.scaled else torch.bfloat16
    if x.dtype != dtype or x.dim() != 2 or x.shape[1] != k:
        raise ArgumentError("x", f"{x.dtype}{list(x.shape)}", f"{dtype}[R, {k}]")
    tokens, rows = x.shape[0], x.shape[0]
    if kernel.gather:
        wrap("rows", call.rows, cutlass.Int32, (None,))
        rows = call.rows.shape[0]
    if not kernel.scaled:
        if x.stride(-1) != 1:
            raise ArgumentError("x.stride()", x.stride(), "stride 1 in the last dimension")
        x = x.view(torch.uint8)
    width = features // 2 if kernel.swiglu else features

    def optional(name: str, wanted: bool, wrapped: Any) -> Any:
        value = getattr(call, name, None)
        if not wanted and value is not None:
            raise ArgumentError(name, "given", f"None for {kernel!r}")
        return wrapped(name, value) if wanted else None

    def vector(extent: int) -> Any:
        return lambda name, value: wrap(name, value, fp32, (extent,))

    optional("w_scales", False, None)
    optional("out_global", False, None)
    return (
        Tokens(
            wrap("x", x, u8, (None, None), 16),
            optional("x_scales", kernel.scaled, lambda n, v: _blocks(n, v, tokens, k // 128)),
            wrap("rows", call.rows, cutlass.Int32, (rows,)) if kernel.gather else None,
        ),
        wrap("w", call.w, u8, (None,) * 4, 16),
        Ranges(*(wrap(name, getattr(call, name), cutlass.Int32, (experts,)) for name in ("offsets", "counts"))),
        optional("alpha", kernel.alpha, vector(experts)),
        optional("alpha_up", kernel.alpha and kernel.swiglu, vector(experts)),
        optional("routing", kernel.routed, vector(rows)),
        Outputs(
            wrap("out", call.out, _OUT[kernel.out], (rows, width), 16),
            optional("out_scales", kernel.quantised, lambda n, v: _blocks(n, v, rows, -(-width // 128))),
        ),
        fp32(call.limit),
        cutlass.Int32(grid),
        cuda.CUstream(stream),
    )
