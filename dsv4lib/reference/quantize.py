"""Check the quantising kernels. The codecs of `dsv4lib.formats` run on gathered rows and deinterleaved columns."""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, fp8_block, hadamard, indexer_key, kv_entry, mxfp4, nvfp4, scale_swizzle

RECIPES = ("nvfp4", "mxfp4", "mxfp8", "fp8")
INTERLEAVE = 8  # columns of gate, then as many of up


def deinterleaved(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 I] with 8 columns of gate, 8 of up, 8 of gate ... -> [2, T, I], gate first."""
    if x.dim() != 2 or x.shape[1] % (2 * INTERLEAVE):
        raise ArgumentError("x.shape", tuple(x.shape), f"[T, multiple of {2 * INTERLEAVE}]")
    groups = x.shape[1] // (2 * INTERLEAVE)
    return x.view(len(x), groups, 2, INTERLEAVE).permute(2, 0, 1, 3).reshape(2, len(x), x.shape[1] // 2)


def quantize(
    x: torch.Tensor,
    recipe: str,
    *,
    global_scale: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    deinterleave: bool = False,
    swizzled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and global scale of ``x``.

    Args:
        x: [T, K], or with ``deinterleave`` [T, 2 I].
        recipe: one of `RECIPES`.
        global_scale: of nvfp4; None derives it from all of ``x``: a NaN or Inf anywhere makes every block NaN.
        rows: int [R]: row r of the result is row ``rows[r]`` of x, zero codes and zero scales where that is negative.
        deinterleave: gate and up apart.
        swizzled: scales as the image of `formats.scale_swizzle`; of fp8 that of 1x32, each scale four times.

    Returns:
        codes uint8 [halves, R, bytes of a row]; scales uint8 [halves, R, blocks], or [halves, bytes] if swizzled;
        global scale, fp32 scalar, or None.
    """
    if recipe not in RECIPES:
        raise ArgumentError("recipe", recipe, "one of " + ", ".join(RECIPES))
    if recipe == "nvfp4" and global_scale is None:
        global_scale = nvfp4.shared_global_scale(x)
    parts = deinterleaved(x) if deinterleave else x[None]
    pad = None
    if rows is not None:
        pad = rows < 0
        parts = parts[:, rows.clamp(min=0).long()] if len(x) else parts.new_zeros(len(parts), len(rows), parts.shape[2])
    if recipe == "nvfp4" and global_scale.isnan():  # derived from an x that holds a NaN or Inf
        codes = torch.zeros(*parts.shape[:2], parts.shape[2] // 2, dtype=torch.uint8, device=x.device)
        scales = torch.full_like(codes[..., : parts.shape[2] // nvfp4.BLOCK], e4m3.NAN)
    elif recipe == "nvfp4":
        q = nvfp4.quantize(parts, global_scale)
        codes, scales = q.packed, q.scales
    elif recipe == "mxfp4":
        q = mxfp4.quantize(parts)
        codes, scales = q.packed, q.scales
    else:
        q = fp8_block.quantize_activation(parts, 32 if recipe == "mxfp8" else fp8_block.ACTIVATION_GROUP)
        codes, scales = q.codes, q.scales
    if pad is not None:
        codes, scales = (t.masked_fill(pad[:, None], 0) for t in (codes, scales))
    if swizzled:
        if recipe == "fp8":
            scales = scales.repeat_interleave(fp8_block.ACTIVATION_GROUP // 32, -1)
        scales = scale_swizzle.swizzle(scales)
    return codes, scales, global_scale if recipe == "nvfp4" else None


def kv_entries(pages: torch.Tensor, page_size: int, indices: torch.Tensor, kv: torch.Tensor) -> None:
    """Store kv [T, 512] as 584-byte entries, in place; see `formats.kv_entry.append`."""
    kv_entry.append(pages, page_size, indices, kv)


def indexer_keys(
    pages: torch.Tensor, page_size: int, indices: torch.Tensor, keys: torch.Tensor, rotate: bool = True
) -> None:
    """Store keys [T, 128] as FP4 indexer keys in place.

    Rotated by the Hadamard matrix before where wanted.
    """
    indexer_key.append(pages, page_size, indices, hadamard.transform(keys) if rotate else keys, "fp4")
