"""Pick the top-k by the kernel in CUDA C++ (`kernel.cu`). Arguments, results and errors are those of `op`.

`FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Int32, Int64
from dsv4lib.dsl.tensors import wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import cpp
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.topk.arguments import FP32, I32
from dsv4lib.ops.topk.kernel import MAX_K
from dsv4lib.ops.topk.op import Call, Paged

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = (128, 1024)  # of a CTA, at least and at most
FAULTS = {
    "no_barrier": Edit("  __syncthreads();  // counts of all warps are there\n", ""),
    "nan_is_best": Edit("i < length ? sort_key(scores[i]) : 0u", "isnan(scores[i]) ? ~0u : sort_key(scores[i])"),
    "zeros_differ": Edit(
        "i < length ? sort_key(scores[i]) : 0u",
        "i < length ? sort_key(scores[i]) - (signbit(scores[i]) && !scores[i]) : 0u",
    ),
    "ties_anyhow": Edit("ties < missing)", "done.equal + total.equal - ties <= missing)"),
    "one_entry_too_many": Edit("min(lengths[row], size)", "min(lengths[row] + 1, size)"),
    "padded_with_zero": Edit("picks[place] = -1;", "picks[place] = 0;"),
}


class Arguments(NamedTuple):
    """Parameters of the kernel; strides in elements."""

    scores: Tensor
    lengths: Tensor | None
    picks: Tensor
    table: Tensor | None
    requests: Tensor | None
    scores_stride: Int64
    picks_stride: Int64
    table_stride: Int64
    size: Int32
    k: Int32
    table_width: Int32


def kernel(size: int, by_score: bool = False, page: int = 0, edits: tuple[Edit, ...] = ()) -> CppKernel:
    """Return the kernel for rows of ``size`` scores.

    Args:
        page: picks are rows of pages of so many; 0: indices.
    """
    threads = min(max(THREADS[0], 1 << (size - 1).bit_length() - 2), THREADS[1]) if size > 1 else THREADS[0]
    defines = (("BY_SCORE", int(by_score)), ("PAGE", page), ("MAX_K", MAX_K))
    return CppKernel(SOURCE, "topk", Arguments, threads, defines=defines, edits=edits)


@typed
def topk(
    scores: Tensor,
    k: int,
    lengths: Tensor | None = None,
    *,
    by_score: bool = False,
    pages: Paged | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Pick the best of each row, as `op.topk` says; ``backend`` is "auto", "native" or "emulator"."""
    if scores.dim() != 2:
        raise ArgumentError("scores", tuple(scores.shape), "a tensor [B, L]")
    if not 1 <= k <= MAX_K:
        raise ArgumentError("k", k, f"an integer from 1 to {MAX_K}")
    if out is None:
        out = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    if tuple(out.shape) != (scores.shape[0], k):
        raise ArgumentError("out.shape", tuple(out.shape), f"[{scores.shape[0]}, {k}]")
    table, requests, page_size = (None, None, 0) if pages is None else pages
    if pages is not None and page_size < 1:
        raise ArgumentError("pages.page_size", page_size, "1 or more")
    call = Call(scores, lengths, out, table, requests, page_size, by_score, backend)
    Call.op.checked(*call)
    if scores.device.type == "cpu":
        call.check_values()
    run(call)
    return out


def run(call: Call, *edits: Edit) -> None:
    """Launch the kernel, with faults perhaps.

    Raises:
        ArgumentError: a tensor that the kernel cannot take.
    """
    backend = cpp.resolve(call.backend, "scores", call.scores)
    (rows, size), k = call.scores.shape, call.out.shape[1]
    if not rows:
        return
    scores, picks = wrap("scores", call.scores, FP32, (None, None)), wrap("out", call.out, I32, (rows, None))
    table = None if call.table is None else wrap("pages.table", call.table, I32, (None, None))
    for name, one in (("lengths", call.lengths), ("pages.requests", call.requests)):
        if one is not None:
            wrap(name, one, I32, (rows,))
    strides = scores.stride[0], picks.stride[0], 0 if table is None else table.stride[0]
    width = 0 if table is None else table.shape[1]
    given = Arguments(call.scores, call.lengths, call.out, call.table, call.requests, *strides, size, k, width)
    cpp.launch(backend, kernel(size, call.by_score, call.page_size, edits), cpp.Grid(rows), given)
