"""Pick the exact top-k of fp32 scores: the torch op `dsv4::topk`.

    picks[b] = indices of the k best of scores[b, :lengths[b]], ascending or the best first, then -1
    rows[b]  = the same, looked up in the pages of request requests[b]: what sparse attention reads

Higher scores first, of equal ones the lower index: what is picked is defined to the last tie, so prefill and decode
agree. NaN ranks after -inf; the reference back end refuses it. One launch, no workspace, nothing read by the host.
Rows of at most k scores, ascending, are all picked: `TakeAll` reads none of them.

Source: DSV4 paper, lightning indexer; the oracle is `dsv4lib.reference.topk`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.topk import arguments
from dsv4lib.ops.topk.cluster import ClusterTopK
from dsv4lib.ops.topk.kernel import MAX_K, TopK
from dsv4lib.ops.topk.plan import plan
from dsv4lib.ops.topk.take_all import TakeAll

MAX_LENGTH = 1 << 20


class Paged(NamedTuple):
    """Pages that picks are looked up in. Pick i becomes table[r, i // page_size] * page_size + i % page_size.

    Attributes:
        table: int32 [R, W]; what lies past its end, or in a negative page, becomes -1.
        requests: int32 [B], row r of ``table`` of each row of scores; negative: none, all its picks are -1.
        page_size: entries of a page.
    """

    table: Tensor
    requests: Tensor
    page_size: int


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
    """Pick the indices of the best scores of each row.

    Args:
        scores: fp32 [B, L], L up to 1,048,576; rows may lie apart.
        k: picks a row, 1 to 2048; may exceed L.
        lengths: int32 [B], how many scores of a row count, from its first; more than L means L, less than 0 none.
            None: all L.
        by_score: picks in the order of their scores, the best first, instead of that of their indices.
        pages: look picks up there, not with ``by_score``. None: picks are indices.
        out: int32 [B, k] to write into; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or size.
        BackendUnavailable: the back end cannot run here.
    """
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
    Call.op(scores, lengths, out, table, requests, page_size, by_score, backend)
    return out


@op("topk", mutates=("out",))
class Call(NamedTuple):
    """A call of `topk`."""

    scores: Tensor
    lengths: Tensor | None
    out: Tensor
    table: Tensor | None
    requests: Tensor | None
    page_size: int
    by_score: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        scores, out = self.scores, self.out
        if scores.dim() != 2 or not 1 <= scores.shape[1] <= MAX_LENGTH:
            raise ArgumentError("scores.shape", tuple(scores.shape), f"[B, L] with L from 1 to {MAX_LENGTH}")
        rows = scores.shape[0]
        launching.check(
            {
                "scores": (scores, torch.float32, (rows, None)),
                "lengths": (self.lengths, torch.int32, (rows,)),
                "out": (out, torch.int32, (rows, None)),
                "pages.table": (self.table, torch.int32, (None, None)),
                "pages.requests": (self.requests, torch.int32, (rows,)),
            }
        )
        if (self.table is None) != (self.requests is None) or (self.table is None) != (self.page_size == 0):
            raise ArgumentError("pages", "a part of them", "table, requests and page_size, or none")
        if self.table is not None:
            self._check_pages()
        if not 1 <= out.shape[1] <= MAX_K:
            raise ArgumentError("out.shape", tuple(out.shape), f"[B, k] with k from 1 to {MAX_K}")
        if out.stride(1) != 1 and out.shape[1] > 1:
            raise ArgumentError("out.stride()", out.stride(), "stride 1 in the last dimension")

    def _check_pages(self) -> None:
        """Check that there are pages, and picks in the order of indices."""
        if 0 in self.table.shape:
            raise ArgumentError("pages.table.shape", tuple(self.table.shape), "[R, W], both 1 or more")
        if self.by_score:
            raise ArgumentError("by_score", True, "False with pages")

    def check_values(self) -> None:
        """Check that requests are rows of the table."""
        if self.table is not None and bool((self.requests >= len(self.table)).any()):
            wrong = self.requests[self.requests >= len(self.table)].tolist()[:8]
            raise ArgumentError("pages.requests", wrong, f"negative or 0..{len(self.table) - 1}")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        scores, lengths, out = self[:3]
        (rows, size), k = scores.shape, out.shape[1]
        if rows == 0:
            return None
        if backend == "reference":
            return _reference(self)
        settings: dict[str, Any] = {"wide": _aligned(scores), "ragged": lengths is not None, "page": self.page_size}
        if size <= k and not self.by_score:
            settings["wide"] = _aligned(out)
            return launching.launch(backend, TakeAll, settings, arguments.fake_all_args, arguments.all_args, self)
        settings = {**plan(rows, size, k), **settings, "by_score": self.by_score}
        kernel = ClusterTopK if settings.get("ctas", 1) > 1 else TopK
        return launching.launch(backend, kernel, settings, arguments.fake_args, arguments.launch_args, self)


def _aligned(x: Tensor) -> bool:
    """Tell whether rows are made of 16-byte pieces."""
    return x.shape[1] % 4 == 0 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % 4 == 0)


def _reference(call: Call) -> None:
    """Ask the oracle, in the order that is wanted."""
    (scores, lengths, out), size = call[:3], call.scores.shape[1]
    limit = None if lengths is None else lengths.long().clamp(0, size)
    if limit is not None:  # what does not count may be NaN
        scores = scores.masked_fill(torch.arange(size, device=scores.device) >= limit[:, None], 0.0)
    best = backends.oracle("topk").topk(scores, out.shape[1], limit)
    if not call.by_score:
        ranked = torch.where(best < 0, size, best).sort(-1).values
        best = torch.where(ranked == size, -1, ranked)
    if call.table is not None:
        column, last = best.clamp_min(0) // call.page_size, call.table.shape[1] - 1
        pages = call.table[call.requests.clamp_min(0)[:, None].long(), column.clamp(max=last).long()]
        there = (best >= 0) & (pages >= 0) & (call.requests >= 0)[:, None] & (column <= last)
        best = torch.where(there, pages * call.page_size + best % call.page_size, -1)
    out.copy_(best)
