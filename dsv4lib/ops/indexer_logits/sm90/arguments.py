"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.indexer_logits.sm90.config import BLOCK, DIM, PIECE, SCALE_BYTES
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits, Tables


def fake_args(kernel: HopperLogits) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, u8 = Fakes(), cutlass.Uint8
    return (
        fake(u8, "THD", PIECE),
        fake(Int32, "TH") if kernel.variant == "fp4" else None,
        fake(Float32, "TH"),
        fake(u8, "PS", PIECE),
        Tables(fake(Int32, "BW"), fake(Int32, "T"), fake(Int32, "T")),
        fake(Float32, "TL"),
        Int32(1),
        cuda.CUstream(0),
    )


def launch_args(kernel: HopperLogits, call: Any, splits: int, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: queries, keys, visible and out, as `op.Call` has them.
        splits: CTAs that share the keys of a token. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride.
    """
    (codes, scales, weights), (pages, page_size) = call.queries, call.keys
    tokens, needed = codes.shape[0], kernel.page_size * (kernel.key_bytes + SCALE_BYTES)
    if page_size != kernel.page_size or pages.dim() != 2 or pages.shape[1] < needed:
        raise ArgumentError("pages.shape", tuple(pages.shape), f"[P, at least {needed}]")
    if not 1 <= splits < 1 << 31:
        raise ArgumentError("splits", splits, "1 to 2^31 - 1")
    words = None
    if kernel.variant == "fp4":
        wrap("scales", scales, cutlass.Uint8, (tokens, kernel.heads, DIM // BLOCK), SCALE_BYTES)
        words = wrap("scales", scales.view(torch.int32)[..., 0], Int32, (tokens, kernel.heads))
    table, requests, lengths = call.visible
    return (
        wrap("codes", codes, cutlass.Uint8, (tokens, kernel.heads, kernel.query_row), PIECE),
        words,
        wrap("weights", weights, Float32, (tokens, kernel.heads)),
        wrap("pages", pages[:, :needed], cutlass.Uint8, (None, needed), PIECE),
        Tables(
            wrap("table", table, Int32, (None, None)),
            wrap("requests", requests, Int32, (tokens,)),
            wrap("lengths", lengths, Int32, (tokens,)),
        ),
        wrap("out", call.out, Float32, (tokens, None)),
        Int32(splits),
        cuda.CUstream(stream),
    )
