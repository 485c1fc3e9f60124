"""Score compressed entries for the lightning indexer: `dsv4::indexer_logits`.

    out[t, s] = sum_h weights[t, h] * ReLU(q[t, h] . k[s])         s < lengths[t], k of the request of token t

    queries = indexer_q(q, weights, positions, cos_sin, variant="fp8")
    scores = indexer_logits(queries, KeyPages(pages, 64), Visible(table, requests, lengths))
    picks = topk(scores, 512, lengths)

One launch serves prefill, decode and any mixture; the host reads nothing, so a CUDA graph can capture it after one call
of its size has compiled it. A score depends on its token, its key and nothing else of the batch, to the last bit.
FP8 and FP4 on Blackwell and Hopper. Of FP8, a Hopper's tensor cores keep 13 bits below the largest product of a step;
its FP4 is multiplied as bf16 (`sm90/fp4.py`).
The oracle is `dsv4lib.reference.indexer.scores`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, indexer_key, mxfp4
from dsv4lib.formats.indexer_key import DIM
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import HOPPER_SM_COUNT, SM_COUNT
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.indexer_logits import arguments
from dsv4lib.ops.indexer_logits.config import TILE_KEYS, VARIANTS, most_tokens
from dsv4lib.ops.indexer_logits.sm90 import arguments as hopper_arguments
from dsv4lib.ops.indexer_logits.sm90 import config as hopper
from dsv4lib.ops.indexer_logits.sm90.fp4 import HopperLogitsFp4
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits
from dsv4lib.ops.indexer_logits.sm100 import IndexerLogits
from dsv4lib.ops.indexer_q.op import IndexerQueries

ARCHS = ("sm_100a", "sm_103a", "sm_90a")
HOPPER = "sm_90a"
LAYOUTS = {"fp8": indexer_key.FP8_LAYOUT, "fp4": indexer_key.FP4_LAYOUT}
HEADS = (64, 128)


class KeyPages(NamedTuple):
    """Cached keys of all requests.

    Attributes:
        pages: uint8 [P, page bytes] of `formats.indexer_key`, in the format of the queries; pages on 16 bytes, any
            distance apart.
        page_size: keys of a page: 32, 64 or a multiple of 128.
    """

    pages: Tensor
    page_size: int


class Visible(NamedTuple):
    """Which keys each token is scored against.

    Attributes:
        table: int32 [B, W]: page i of request b has its entries i * page_size and on. Pages past a request's longest
            length may be anything.
        requests: int32 [T]: row of `table` of a token; negative: padding, without keys.
        lengths: int32 [T]: entries that a token sees; 0 or less: none.
    """

    table: Tensor
    requests: Tensor
    lengths: Tensor


@typed
def indexer_logits(
    queries: IndexerQueries,
    keys: KeyPages,
    visible: Visible,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Score the entries that each token sees.

    Args:
        queries: of `indexer_q`: codes [T, H, 128] (fp8) or [T, H, 64] (fp4, with scales), weights [T, H];
            H 64 or 128.
        keys: of the same format, RoPE and Hadamard rotation as the queries; scales of FP8 keys are not negative.
        visible: see there.
        out: fp32 [T, L] to write into, L at least every length; None: a new tensor with L = W * page_size.
            Scores from a token's length on are not written.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if out is None:
        if visible.table.dim() != 2:
            raise ArgumentError("visible.table.shape", tuple(visible.table.shape), "[B, W]")
        shape = len(queries.codes), visible.table.shape[1] * keys.page_size
        out = torch.empty(shape, dtype=torch.float32, device=queries.codes.device)
    Call.op(queries, keys, visible, out, backend)
    return out


@op("indexer_logits", mutates=("out",), archs=ARCHS)
class Call(NamedTuple):
    """A call of `indexer_logits`."""

    queries: IndexerQueries
    keys: KeyPages
    visible: Visible
    out: Tensor
    backend: str

    @property
    def variant(self) -> str:
        """Format of queries and keys."""
        return "fp8" if self.queries.scales is None else "fp4"

    def check(self) -> None:
        """Check types, shapes and devices."""
        (codes, scales, weights), (pages, page_size) = self.queries, self.keys
        table, requests, lengths = self.visible
        if codes.dim() != 3 or codes.shape[1] not in HEADS:
            raise ArgumentError("queries.codes.shape", tuple(codes.shape), f"[T, H, bytes] with H one of {HEADS}")
        if page_size not in (32, 64) and (page_size < 1 or page_size % TILE_KEYS):
            raise ArgumentError("keys.page_size", page_size, f"32, 64 or a multiple of {TILE_KEYS}")
        lead, u8, i32 = tuple(codes.shape[:2]), torch.uint8, torch.int32
        launching.check(
            {
                "queries.codes": (codes, u8, (*lead, VARIANTS[self.variant].row_bytes)),
                "queries.scales": (scales, u8, (*lead, DIM // mxfp4.BLOCK)),
                "queries.weights": (weights, torch.float32, lead),
                "keys.pages": (pages, u8, (None, LAYOUTS[self.variant].page_bytes(page_size))),
                "visible.table": (table, i32, (None, None)),
                "visible.requests": (requests, i32, lead[:1]),
                "visible.lengths": (lengths, i32, lead[:1]),
                "out": (self.out, torch.float32, (lead[0], None)),
            }
        )

    def check_values(self) -> None:
        """Check requests, lengths and the pages that they name."""
        (pages, page_size), (table, requests, lengths) = self.keys, self.visible
        wrong = requests[requests >= len(table)]
        if len(wrong):
            raise ArgumentError("visible.requests", wrong.tolist()[:8], f"negative or 0..{len(table) - 1}")
        seen = lengths.clamp(min=0).masked_fill(requests < 0, 0)
        most = min(self.out.shape[1], table.shape[1] * page_size)
        if bool((seen > most).any()):
            raise ArgumentError("visible.lengths", int(seen.max()), f"at most {most}: columns of out, entries of table")
        longest = torch.zeros(len(table), dtype=torch.int32)
        longest.scatter_reduce_(0, requests.clamp(min=0).long(), seen, "amax")
        used = torch.arange(table.shape[1]) * page_size < longest[:, None]
        named = table[used]
        if bool(((named < 0) | (named >= len(pages))).any()):
            raise ArgumentError("visible.table", named.tolist()[:8], f"0..{len(pages) - 1} where a length reaches")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        codes, (pages, page_size) = self.queries.codes, self.keys
        tokens, heads = codes.shape[:2]
        if 0 in (tokens, self.out.shape[1], *self.visible.table.shape, len(pages)):
            return
        if backend == "reference":
            return _reference(self)
        arch = launching.arch(backend, ARCHS)
        if arch == HOPPER:
            return _on_a_hopper(self, backend)
        tokens_of_tile = min(most_tokens(self.variant, heads), -(-tokens // len(self.visible.table)))
        settings = {"variant": self.variant, "heads": heads, "tokens": tokens_of_tile, "page_size": page_size}
        count = launching.sm_count(codes.device) if backend == "native" else SM_COUNT
        splits = splits_of(-(-tokens // tokens_of_tile), self.out.shape[1], count)
        kernel, code = compile_cache.default().get(IndexerLogits, settings, arguments.fake_args, arch)
        given = arguments.launch_args(kernel, self, splits, launching.stream(backend, codes))
        launching.enqueue(backend, code, given)
        return None


def _on_a_hopper(call: Call, backend: str) -> None:
    """Launch the Hopper's kernel."""
    codes = call.queries.codes
    kernel_type = HopperLogits if call.variant == "fp8" else HopperLogitsFp4
    settings = {"heads": codes.shape[1], "page_size": call.keys.page_size}
    count = launching.sm_count(codes.device) if backend == "native" else HOPPER_SM_COUNT
    splits = hopper.splits_of(len(codes), call.out.shape[1], count, codes.shape[1], call.variant)
    kernel, code = compile_cache.default().get(kernel_type, settings, hopper_arguments.fake_args, HOPPER)
    given = hopper_arguments.launch_args(kernel, call, splits, launching.stream(backend, codes))
    launching.enqueue(backend, code, given)


def splits_of(groups: int, length: int, sm_count: int) -> int:
    """Choose how many CTAs share the keys of a group of tokens. No more than fill the GPU, or than there are tiles."""
    return max(1, min(sm_count // groups, -(-length // TILE_KEYS)))


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, token by token."""
    (codes, scales, weights), (pages, page_size), (table, requests, lengths) = call.queries, call.keys, call.visible
    if scales is None:
        q = e4m3.decode(codes, torch.float64)
    else:
        q = mxfp4.dequantize(mxfp4.MXFP4Tensor(codes, scales), torch.float64)
    for t, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        if request < 0 or length <= 0:
            continue
        entries = torch.arange(min(length, call.out.shape[1]), device=table.device)
        at = table[request].long()[entries // page_size] * page_size + entries % page_size
        k, _ = indexer_key.gather(pages, page_size, at, call.variant, torch.float64)
        found = backends.oracle("indexer").scores(q[None, t : t + 1], k[None], weights[None, t : t + 1].double())
        call.out[t, : len(entries)] = found[0, 0]
