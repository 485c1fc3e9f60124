"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass

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


def launch_args(kernel: TopK, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride, or rows that the kernel was not made for.
    """
    wrapped = wrap("scores", call.scores, FP32, (None, None), WIDE if kernel.wide else 0)
    rows, size = call.scores.shape
    if size > kernel.ctas * kernel.capacity or (kernel.wide and size % 4):
        allowed = f"[B, L] with L at most {kernel.ctas * kernel.capacity}"
        raise ArgumentError("scores.shape", (rows, size), allowed + (", a multiple of 4" if kernel.wide else ""))
    lengths, picks = _wrap_lengths(kernel, call), wrap("picks", call.out, I32, (rows, None))
    if call.out.shape[1] > kernel.most_picks:
        raise ArgumentError("picks.shape", tuple(call.out.shape), f"[B, k] with k at most {kernel.most_picks}")
    return wrapped, lengths, picks, _wrap_pages(kernel.page, call), cuda.CUstream(stream)


def fake_all_args(kernel: TakeAll) -> tuple:
    """Arguments of `TakeAll` for `compile_for`."""
    fake = Fakes()
    lengths = fake(I32, "B") if kernel.ragged else None
    picks = fake(I32, "BK", WIDE if kernel.wide else 0)
    return I32(1), lengths, picks, _fake_pages(fake, kernel.page), cuda.CUstream(0)


def all_args(kernel: TakeAll, call: Any, stream: int = 0) -> tuple:
    """Check a call and wrap its tensors for a compiled `TakeAll`. Of scores [B, L] only L, at most k, counts.

    Args:
        kernel, call, stream: as in `launch_args`.

    Raises:
        ArgumentError: a tensor of a wrong type, shape or stride, or rows with more than k scores.
    """
    (rows, size), k = call.scores.shape, call.out.shape[1]
    picks = wrap("picks", call.out, I32, (rows, None), WIDE if kernel.wide else 0)
    if kernel.wide and k % 4:
        raise ArgumentError("picks.shape", (rows, k), "[B, k] with k a multiple of 4")
    if size > k:
        raise ArgumentError("scores.shape", (rows, size), f"[B, L] with L at most k = {k}")
    return I32(size), _wrap_lengths(kernel, call), picks, _wrap_pages(kernel.page, call), cuda.CUstream(stream)


def _fake_pages(fake: Fakes, page: int) -> Pages | None:
    return Pages(fake(I32, "RW"), fake(I32, "B")) if page else None


def _wrap_lengths(kernel: TopK | TakeAll, call: Any) -> Any:
    """Wrap the lengths of rows that differ in length."""
    if (call.lengths is not None) != kernel.ragged:
        raise ArgumentError("lengths", call.lengths, "a tensor" if kernel.ragged else "None")
    return wrap("lengths", call.lengths, I32, (len(call.scores),)) if kernel.ragged else None


def _wrap_pages(page: int, call: Any) -> Pages | None:
    """Wrap table and requests of a kernel with pages."""
    if (call.table is not None) != (page > 0):
        raise ArgumentError("pages", None if call.table is None else "given", "(table, requests)" if page else "None")
    if not page:
        return None
    requests = wrap("requests", call.requests, I32, (len(call.scores),))
    return Pages(wrap("table", call.table, I32, (None, None)), requests)
