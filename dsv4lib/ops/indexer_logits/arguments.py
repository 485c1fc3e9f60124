"""Arguments of the kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.indexer_logits.config import DIM, SCALE_WORD
from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits, Tables

WIDE = 16


def fake_args(kernel: IndexerLogits) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, u8 = Fakes(), cutlass.Uint8
    return (
        fake(u8, "THD", WIDE),
        fake(Int32, "TH") if kernel.variant.scaled else None,
        fake(Float32, "TH"),
        fake(u8, "PS", WIDE),
        Tables(fake(Int32, "BW"), fake(Int32, "T"), fake(Int32, "T")),
        fake(Float32, "TL"),
        Int32(1),
        cuda.CUstream(0),
    )


def launch_args(
    kernel: IndexerLogits,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    splits: int,
    stream: int = 0,
) -> tuple:
    """Arguments of `IndexerLogits` from torch tensors.

    Args:
        kernel: which says what is needed.
        codes: uint8 [T, H, row bytes]. scales: uint8 [T, H, 4] (fp4), words on 4 bytes. weights: fp32 [T, H].
        pages: uint8 [P, S], S at least the page's bytes, pages on 16 bytes.
        table: int32 [B, W]. requests, lengths: int32 [T].
        out: fp32 [T, L].
        splits: CTAs for the keys of a tile's tokens.
        stream: handle of a CUDA stream; 0: the default one.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride.
    """
    tokens, heads = codes.shape[0], kernel.heads
    needed = kernel.page_size * (kernel.variant.row_bytes + SCALE_WORD)
    if pages.dim() != 2 or pages.shape[1] < needed:
        raise ArgumentError("pages.shape", tuple(pages.shape), f"[P, at least {needed}]")
    if not 1 <= splits < 1 << 16:
        raise ArgumentError("splits", splits, "1 to 65535")
    words = None
    if kernel.variant.scaled:
        wrap("scales", scales, cutlass.Uint8, (tokens, heads, DIM // 32), SCALE_WORD)
        words = wrap("scales", scales.view(torch.int32)[..., 0], Int32, (tokens, heads))
    return (
        wrap("codes", codes, cutlass.Uint8, (tokens, heads, kernel.variant.row_bytes), WIDE),
        words,
        wrap("weights", weights, Float32, (tokens, heads)),
        wrap("pages", pages[:, :needed], cutlass.Uint8, (None, needed), WIDE),
        Tables(
            wrap("table", table, Int32, (None, None)),
            wrap("requests", requests, Int32, (tokens,)),
            wrap("lengths", lengths, Int32, (tokens,)),
        ),
        wrap("out", out, Float32, (tokens, None)),
        Int32(splits),
        cuda.CUstream(stream),
    )
