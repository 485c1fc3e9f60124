"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap, wrap_if
from dsv4lib.dsl.words import WORD, as_words
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.mhc.config import N
from dsv4lib.ops.mhc.kernel import Gmem, Mhc

BF16, FP32, I32, WIDE = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, 16
CODE_BYTES = 8  # of a lane's columns


def fake_args(kernel: Mhc) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    before = (fake(BF16, "TD", WIDE), fake(FP32, "TN", WIDE), fake(FP32, "TC", WIDE)) if kernel.post else (None,) * 3
    after = (None, None) if kernel.head else (fake(FP32, "TN"), fake(FP32, "TC", WIDE))
    words = kernel.recipe == "fp8" and kernel.swizzled
    scales = fake(I32 if words else cutlass.Uint8, "B" if kernel.swizzled else "TB") if kernel.recipe else None
    fp8 = fake(I32, "TW", CODE_BYTES) if kernel.recipe else None, scales
    gmem = Gmem(
        fake(BF16, "TZ", WIDE),
        *before,
        fake(FP32, "VZ", WIDE),
        fake(FP32, "S"),
        fake(FP32, "V"),
        fake(FP32, "D", WIDE),
        fake(BF16, "TZ", WIDE) if kernel.keep else None,
        fake(BF16, "TD", WIDE) if kernel.keep_y else None,
        *fp8,
        *after,
        fake(FP32, "W", WIDE) if kernel.space(1) else None,
    )
    return gmem, I32(1), I32(1), FP32(1.0), FP32(1.0), cuda.CUstream(0)


def launch_args(kernel: Mhc, call: Any, rows: int, clusters: int, stream: int = 0) -> tuple:
    """Arguments of `Mhc` from torch tensors.

    Args:
        kernel: which says what is needed.
        call: an `op.Call`. ``space``: zeros, `kernel.space` of ``clusters`` or more, where that is not 0.
        rows, clusters: as in `Mhc.__call__`.
        stream: a handle.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    out, (codes, scales) = call.out, (None, None) if call.fp8 is None else call.fp8[:2]
    if not 1 <= rows <= kernel.tile:
        raise ArgumentError("rows", rows, f"1 to {kernel.tile}")
    tokens, space = call.streams.shape[0], call.space
    if not 1 <= clusters <= -(-tokens // rows):
        raise ArgumentError("clusters", clusters, f"1 to {-(-tokens // rows)}, the tiles of {rows} tokens")
    if kernel.once and rows * clusters < tokens:
        raise ArgumentError("clusters", clusters, f"{-(-tokens // rows)}: a cluster has one tile")
    values, wide = kernel.values, N * kernel.d
    if kernel.space(clusters) and (space is None or space.numel() < kernel.space(clusters)):
        given = None if space is None else f"{space.numel()} floats"
        raise ArgumentError("space", given, f"at least {kernel.space(clusters)} floats, zeros")

    post, after = kernel.post, not kernel.head
    streams, comb = flat("out: streams", out.streams), flat("out: comb", out.comb)
    gmem = Gmem(
        wrap("streams", flat("streams", call.streams), BF16, (None, wide), WIDE),
        wrap_if(post, "f", call.f, BF16, (tokens, kernel.d), WIDE),
        wrap_if(post, "post", call.post, FP32, (tokens, N), WIDE),
        wrap_if(post, "comb", flat("comb", call.comb), FP32, (tokens, N * N), WIDE),
        wrap("site.fn", call.site.fn, FP32, (values, wide), WIDE),
        wrap("site.scale", call.site.scale, FP32, (1 if kernel.head else 3,)),
        wrap("site.base", call.site.base, FP32, (values,)),
        wrap("site.weight", call.site.weight, FP32, (kernel.d,), WIDE),
        wrap_if(kernel.keep, "out: streams", streams, BF16, (tokens, wide), WIDE),
        wrap_if(kernel.keep_y, "out: y", out.y, BF16, (tokens, kernel.d), WIDE),
        *fp8_args(kernel, codes, scales, tokens),
        wrap_if(after, "out: post", out.post, FP32, (tokens, N)),
        wrap_if(after, "out: comb", comb, FP32, (tokens, N * N), WIDE),
        wrap("space", space, FP32, (None,), WIDE) if kernel.space(clusters) else None,
    )
    return gmem, I32(rows), I32(clusters), FP32(call.eps.hc), FP32(call.eps.rms), cuda.CUstream(stream)


def fp8_args(kernel: Mhc, codes: torch.Tensor | None, scales: torch.Tensor | None, tokens: int) -> tuple[Any, Any]:
    """Wrap codes and scales as the kernel takes them. Errors as in `launch_args`."""
    needed = kernel.recipe is not None
    words = None if codes is None else as_words("fp8.codes", codes)
    words = wrap_if(needed, "fp8.codes", words, I32, (tokens, kernel.d // WORD), CODE_BYTES)
    if not needed or scales is None:
        return words, wrap_if(needed, "fp8.scales", scales, cutlass.Uint8, ())
    blocks = kernel.d // kernel.format.block
    if not kernel.swizzled:
        return words, wrap("fp8.scales", scales, cutlass.Uint8, (tokens, blocks))
    size = scale_swizzle.swizzled_bytes(tokens, blocks * kernel.format.repeats)
    if kernel.recipe == "mxfp8":
        return words, wrap("fp8.scales", scales, cutlass.Uint8, (size,))
    return words, wrap("fp8.scales", as_words("fp8.scales", scales), I32, (size // WORD,))


def flat(name: str, x: torch.Tensor | None) -> torch.Tensor | None:
    """View [T, a, b] as [T, a b]; None, and what has other extents, is left to `wrap`.

    Raises:
        ArgumentError: the last two dimensions are not one piece of memory.
    """
    if x is None or x.dim() != 3:
        return x
    if x.stride()[1:] != (x.shape[2], 1):
        raise ArgumentError(f"{name}.stride()", x.stride(), f"(any, {x.shape[2]}, 1)")
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
