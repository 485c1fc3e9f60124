"""Arguments of the top-k kernel: fake tensors to compile with, torch tensors checked and wrapped to launch with."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import torch

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.ops.topk.paged import Pages
from dsv4lib.ops.topk.take_all import TakeAll

FP32, I32, WIDE = cutlass.Float32, cutlass.Int32, 16


def fake_args(kernel: TopK) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake = Fakes()
    scores, lengths = fake(FP32, "BL", WIDE if kernel.wide else 0), fake(I32, "B") if kernel.ragged else None
    return scores, lengths, fake(I32, "BK"), _fake_pages(fake, kernel.page), cuda.CUstream(0)


def launch_args(
    kernel: TopK,
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    picks: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor] | None = None,
    stream: int = 0,
) -> tuple:
    """Arguments of `TopK` from torch tensors: shapes as in `TopK.__call__`, ``stream`` a handle.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride, or rows that the kernel was not made for.
    """
    wrapped = wrap("scores", scores, FP32, (None, None), WIDE if kernel.wide else 0)
    rows, size = scores.shape
    if size > kernel.ctas * kernel.capacity or (kernel.wide and size % 4):
        allowed = f"[B, L] with L at most {kernel.ctas * kernel.capacity}"
        raise ArgumentError("scores.shape", tuple(scores.shape), allowed + (", a multiple of 4" if kernel.wide else ""))
    if (lengths is not None) != kernel.ragged:
        raise ArgumentError("lengths", lengths, "a tensor" if kernel.ragged else "None")
    wrapped_picks = wrap("picks", picks, I32, (rows, None))
    if picks.shape[1] > kernel.most_picks:
        raise ArgumentError("picks.shape", tuple(picks.shape), f"[B, k] with k at most {kernel.most_picks}")
    return (
        wrapped,
        None if lengths is None else wrap("lengths", lengths, I32, (rows,)),
        wrapped_picks,
        _wrap_pages(kernel.page, pages, rows),
        cuda.CUstream(stream),
    )


def fake_all_args(kernel: TakeAll) -> tuple:
    """Arguments of `TakeAll` for `compile_for`."""
    fake = Fakes()
    lengths = fake(I32, "B") if kernel.ragged else None
    picks = fake(I32, "BK", WIDE if kernel.wide else 0)
    return I32(1), lengths, picks, _fake_pages(fake, kernel.page), cuda.CUstream(0)


def all_args(
    kernel: TakeAll,
    scores: torch.Tensor,
    lengths: torch.Tensor | None,
    picks: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor] | None = None,
    stream: int = 0,
) -> tuple:
    """Make arguments of `TakeAll` from torch tensors.

    ``scores`` [B, L] only has an extent, at most k.

    Raises:
        ArgumentError: a tensor of the wrong type, shape or stride, or rows with more than k scores.
    """
    (rows, size), wide = scores.shape, kernel.wide
    wrapped = wrap("picks", picks, I32, (rows, None), WIDE if wide else 0)
    if wide and picks.shape[1] % 4:
        raise ArgumentError("picks.shape", tuple(picks.shape), "[B, k] with k a multiple of 4")
    if size > picks.shape[1]:
        raise ArgumentError("scores.shape", tuple(scores.shape), f"[B, L] with L at most k = {picks.shape[1]}")
    if (lengths is not None) != kernel.ragged:
        raise ArgumentError("lengths", lengths, "a tensor" if kernel.ragged else "None")
    counts = None if lengths is None else wrap("lengths", lengths, I32, (rows,))
    return I32(size), counts, wrapped, _wrap_pages(kernel.page, pages, rows), cuda.CUstream(stream)


def _fake_pages(fake: Fakes, page: int) -> Pages | None:
    return Pages(fake(I32, "RW"), fake(I32, "B")) if page else None


def _wrap_pages(page: int, pages: tuple[torch.Tensor, torch.Tensor] | None, rows: int) -> Pages | None:
    """Wrap (table, requests) of a kernel with pages."""
    if (pages is not None) != (page > 0):
        raise ArgumentError("pages", "given" if pages else None, "(table, requests)" if page else "None")
    if pages is None:
        return None
    table, requests = pages
    return Pages(wrap("table", table, I32, (None, None)), wrap("requests", requests, I32, (rows,)))
