"""Score pages of stored keys by `dsv4::indexer_logits` and judge the result. For the notebook of the indexer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import indexer_key
from dsv4lib.ops.common import launching
from dsv4lib.ops.indexer_logits import op as logits_op
from dsv4lib.ops.indexer_logits.op import KeyPages, Visible
from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits
from dsv4lib.ops.indexer_q.op import IndexerQueries
from dsv4lib.ops.quantize import op as key_op
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import indexer

PAGE = 64
SPARE = 3  # pages of the pool that no request has
UNWRITTEN = -1e30  # what a score holds that no kernel has written


class Stored(NamedTuple):
    """Keys of one request in FP4 pages, which lie in any order in their pool.

    Attributes:
        pages: uint8 [P, page bytes]. table: int32 [1, W]. values: fp64 [S, 128], read from there.
    """

    pages: torch.Tensor
    table: torch.Tensor
    values: torch.Tensor


class Scored(NamedTuple):
    """Scores of all queries.

    Attributes:
        scores: fp32 [T, S]; `UNWRITTEN` where a query sees no entry.
        over_torch: largest error of a score over that of the same sums in fp32 by PyTorch.
        stray: scores written that belong to no entry that the query sees, or not written that do.
        hazards: of the launch; only the emulator sees them.
    """

    scores: torch.Tensor
    over_torch: float
    stray: int
    hazards: int


def stored(keys: torch.Tensor, backend: str, rotate: bool = True) -> Stored:
    """Store bf16 keys [S, 128] through `dsv4::quantize_indexer_keys`."""
    count, where = len(keys), backends.device(backend)
    width = -(-count // PAGE)
    table = torch.randperm(width + SPARE, generator=torch.Generator().manual_seed(count))[:width].int()
    pages = indexer_key.FP4_LAYOUT.allocate(width + SPARE, PAGE).to(where)
    entry = torch.arange(count)
    index = table[entry // PAGE] * PAGE + (entry % PAGE).int()
    given = pages, PAGE, index.to(where), rotate, backend
    injected.run(backend, lambda: key_op.quantize_indexer_keys(keys.to(where), *given))
    values = indexer_key.gather(pages.cpu(), PAGE, index, "fp4", torch.float64)[0]
    return Stored(pages, table[None], values)


def scored(
    queries: IndexerQueries,
    values: torch.Tensor,
    keys: Stored,
    visible: torch.Tensor,
    backend: str,
    kernel: type = IndexerLogits,
) -> Scored:
    """Score the entries that queries see.

    Args:
        queries: of FP4. values: fp64 [T, H, 128], what their codes say. keys: of the request.
        visible: int64 [T], entries of each query.
        backend, kernel: what computes them.

    Raises:
        ArgumentError: a faulty ``kernel`` where the op launches a Hopper's, which it cannot replace.
    """
    if kernel is not IndexerLogits and launching.arch(backend, logits_op.ARCHS) == logits_op.HOPPER:
        allowed = "a fault of another kernel: a Hopper has a kernel of its own for scores; or back end emulator"
        raise ArgumentError("fault", kernel.__name__, allowed)
    where, tokens = backends.device(backend), len(values)
    out = torch.full((tokens, len(keys.values)), UNWRITTEN, device=where)
    seen = Visible(keys.table.to(where), torch.zeros(tokens, dtype=torch.int32, device=where), visible.int().to(where))
    given = IndexerQueries(*(None if x is None else x.to(where) for x in queries)), KeyPages(keys.pages, PAGE), seen
    hazards = injected.run(
        backend,
        lambda: logits_op.indexer_logits(*given, out=out, backend=backend),
        (logits_op, "IndexerLogits", kernel),
    )
    found, written = out.cpu(), torch.arange(out.shape[1]) < visible[:, None]
    stray = int(((found != UNWRITTEN) != written).sum())
    ours, torchs = (_error(x, queries, values, keys.values)[written].max() for x in (found, None))
    return Scored(found, float(ours / torchs), stray, hazards)


def _error(
    found: torch.Tensor | None, queries: IndexerQueries, values: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Error of scores, None: of PyTorch's in fp32, over the sum of their terms' magnitudes."""
    weights = queries.weights[None].double()
    want, size = (indexer.scores(values[None], keys[None], w)[0] for w in (weights, weights.abs()))
    if found is None:
        found = indexer.scores(values[None].float(), keys[None].float(), weights.float())[0]
    return (found.double() - want).abs() / size.clamp_min(1e-300)
