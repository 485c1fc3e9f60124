"""Apply linear layers over NVFP4, MXFP8, W4A8, bf16 or FP8 weights. FP8 is DSV4's, in 128 x 128 tiles.

    y = alpha * (x @ W^T)                                          [T, N]; or of G groups side by side, [G, T, N]
    h = silu(min(g, limit)) * clip(u, -limit, limit)               swiglu: the shared expert's first GEMM

`linear` makes outputs and calls `torch.ops.dsv4.linear`, one launch that writes them in place. It reads no value of a
tensor and waits for nothing: it can be captured in a CUDA graph after a first call (or `warm_up`).

Mode "fp8_block" is a Hopper's (`sm90`), "bf16" is both's, the others are Blackwell's. FP8 weights of a checkpoint:
there mode "fp8_block" with scales as they are stored, here mode "mxfp8" with those of `mxfp8_of`.

Source: DSV4's released code; the oracle is `dsv4lib.reference.linear`, the kernels `dsv4lib.ops.linear.sm100` and
`dsv4lib.ops.linear.sm90.kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, scale_swizzle
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import SM_COUNT
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.linear.sm90 import op as hopper
from dsv4lib.ops.linear.sm100 import Linear
from dsv4lib.ops.moe_gemm import arguments
from dsv4lib.ops.moe_gemm import op as moe_gemm
from dsv4lib.ops.moe_gemm.config import MODES
from dsv4lib.ops.moe_gemm.op import ARCHS, TILES, Operand, Pair, tile_of


@typed
def linear(
    x: Operand | Pair,
    w: Operand | Pair,
    *,
    mode: str = "nvfp4",
    alpha: Tensor | None = None,
    alpha_up: Tensor | None = None,
    swiglu: bool = False,
    out_format: str = "bf16",
    out_global: Tensor | None = None,
    limit: float = 10.0,
    out: Operand | Pair | None = None,
    backend: str = "auto",
) -> Operand:
    """Apply a linear layer, or G of them on G inputs.

    Args:
        x: [T, K] or [G, T, K], rows on 16 bytes and at any distance. Scales: one image, or [G, bytes].
        w: [N, K] or [G, N, K]; with ``swiglu`` rows of gate and up, 8 of each alternating.
        mode: formats of w and x: "nvfp4", "w4a8", "mxfp8", "bf16"; or "fp8_block": E4M3 with scales of 128 of K, E8M0
            bytes or fp32: of x [.., T, K / 128], of w [.., N / 128, K / 128], rounded up, not swizzled. K is a multiple
            of 16, N is any. It takes no alpha and no swiglu, nor does "bf16" on a Hopper (there K is a multiple of 8,
            N is any). See `mxfp8_of` for such operands in mode "mxfp8".
        alpha: fp32 [G] (G = 1 for one), product of the global scales of x and w; with ``swiglu`` of gate. alpha_up: of
            up.
        out_format: "bf16", "fp32" (all of "fp8_block"), or with ``swiglu`` "nvfp4" or "mxfp8".
        out_global: fp32 [G], of an NVFP4 output.
        limit: of the SwiGLU clamp.
        out: written; None: new.
        backend: "auto", "native", "emulator" or "reference".

    Returns:
        [T, N] or [G, T, N], or half as many features with ``swiglu``, in ``out_format``.

    Raises:
        ArgumentError: an argument that is missing, not wanted, or of a wrong type, shape or value.
        BackendUnavailable: see `backends.resolve`; also where the GPU is of an architecture that lacks the mode.
    """
    x, w, out = Operand(*x), Operand(*w), None if out is None else Operand(*out)
    if hopper.here(mode, backend):
        unwanted = {"alpha": alpha, "alpha_up": alpha_up, "swiglu": swiglu, "out_global": out_global}
        return hopper.linear_hopper(x, w, mode, unwanted, out_format, out, backend)
    if mode not in MODES:
        raise ArgumentError("mode", mode, f"one of {', '.join(MODES)}, {hopper.MODE}")
    moe_gemm.check_formats(mode, out_format)
    if x.codes.dim() != w.codes.dim() or x.codes.dim() not in (2, 3):
        raise ArgumentError("x, w", (tuple(x.codes.shape), tuple(w.codes.shape)), "[T, K], [N, K] or both with [G, ..]")
    if out is None:
        out = moe_gemm.new_output(x.codes, w.codes.shape[-2] // (2 if swiglu else 1), out_format)
    tensors = x.codes, w.codes, out.codes, x.scales, w.scales, alpha, alpha_up, out.scales, out_global, limit
    Call.op(*tensors, mode, out_format, swiglu, backend)
    return out


def mxfp8_of(codes: Tensor, scales: Tensor) -> Operand:
    """Make FP8 with E8M0 scales of larger tiles an operand of mode "mxfp8".

    Each scale is repeated.

    Args:
        codes: E4M3 bytes [.., R, K], K a multiple of 128.
        scales: E8M0 bytes: [.., R, K / 128] of activations, or [.., ceil(R / 128), K / 128] of weights.

    Raises:
        ArgumentError: another shape or type.
    """
    *lead, rows, k = codes.shape
    tile = 1 if scales.shape[-2] == rows else 128
    if k % 128 or tuple(scales.shape) != (*lead, -(-rows // tile), k // 128):
        raise ArgumentError("scales.shape", tuple(scales.shape), f"a scale for 128 of K={k}, and for 1 or 128 rows")
    each = fp8_block.spread_scales(scales.view(torch.uint8), (tile, 4), rows, k // 32)
    return Operand(codes.view(torch.uint8), scale_swizzle.swizzle(each))


def warm_up(wanted: Iterable[dict[str, Any]], tokens: Iterable[int] = TILES) -> dict[str, float]:
    """Do `moe_gemm.warm_up` for calls of `linear` with about so many ``tokens``."""
    return moe_gemm.warm_up(wanted, tokens, Linear)


# ------------------------------------------------------------------- the op


@op("linear", mutates=("out", "out_scales"), names={"formats": "mode"}, archs=ARCHS)
@dataclass(kw_only=True)
class Call(arguments.Gemm):
    """A call of `linear`, with or without a dimension of groups."""

    formats: str  # `mode`: torch.compile has an argument of that name
    out_format: str
    swiglu: bool
    backend: str

    def check(self) -> None:
        """Check devices; `arguments.launch_args` checks the rest."""
        moe_gemm.check_devices(vars(self))

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        names = ("x", "x_scales", "w", "w_scales", "out", "out_scales") if self.x.dim() == 2 else ()
        launch(replace(self, **{n: x[None] for n in names if (x := getattr(self, n)) is not None}), backend)


def launch(call: Call, backend: str) -> None:
    """Check and launch a call with a dimension of groups."""
    (groups, tokens, _), features = call.x.shape, call.w.shape[1]
    tile_n, ctas = tile_of(tokens, features)
    flags = {"swiglu": call.swiglu, "alpha": call.alpha is not None}
    settings = {"mode": call.formats, "tile_n": tile_n, "ctas": ctas, "out": call.out_format, **flags}
    plan = Linear(**settings)
    if not tokens:
        return
    if launching.on_host(call.x):
        moe_gemm.check_global(call.out_global)
    if backend == "reference":
        arguments.launch_args(plan, call, 1)  # checks: what one back end takes all take
        _reference(call)
        return
    count = launching.sm_count(call.x.device) if backend == "native" else SM_COUNT
    tiles = groups * math.ceil(tokens / tile_n) * math.ceil(features / plan.pair_m)
    grid = max(1, min(tiles, count // ctas))
    given = arguments.launch_args(plan, call, grid, launching.stream(backend, call.x))  # refused: not compiled
    _, code = compile_cache.default().get(Linear, settings, arguments.fake_args, launching.arch(backend, ARCHS))
    launching.enqueue(backend, code, given)


def _reference(call: Call) -> None:
    """Ask the oracle in fp64."""
    x = moe_gemm.numbers(call.x, call.x_scales, call.formats, False)
    w = moe_gemm.numbers(call.w, call.w_scales, call.formats, True)
    for g, y in enumerate(backends.oracle("linear").linear(x, w)):
        call.out[g], scales = moe_gemm.finished(y, call, g)
        if scales is not None:
            call.out_scales[g] = scale_swizzle.swizzle(scales)
