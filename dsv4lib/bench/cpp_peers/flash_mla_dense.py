"""FlashMLA's dense decode: each request attends to all rows of its pages, in bf16 (SM90), then combine.

Keys have 576 dimensions (512 of the latent, 64 of RoPE), values are the first 512 of the same rows. The calls are those
of its own torch bindings, with one key head; rows past a request's length are NaN, so none of them may have a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from dsv4lib.bench.cpp_peers.build import Entry
from dsv4lib.bench.cpp_peers.cases import Case, Output, library
from dsv4lib.bench.cpp_peers.flash_mla import (
    BLOCK,
    CHECKOUT,
    LSE,
    META_WORDS,
    OVERHEAD_BLOCKS,
    P_BF16,
    combine_entry,
    schedule_entry,
    strides,
)

DIM, VALUES, PAGE = 576, 512, 64
_FIELDS = (
    "b s_q q_seq_per_hk d d_v h_q h_k num_blocks q_head_per_hk is_causal scale_softmax scale_softmax_log2 q_ptr k_ptr "
    "o_ptr softmax_lse_ptr q_batch_stride k_batch_stride o_batch_stride q_row_stride k_row_stride o_row_stride "
    "q_head_stride k_head_stride o_head_stride block_table block_table_batch_stride page_block_size seqlens_k_ptr "
    "tile_scheduler_metadata_ptr num_sm_parts num_splits_ptr total_num_splits softmax_lseaccum_ptr oaccum_ptr stream"
)
DENSE = Entry(
    CHECKOUT,
    "sm_90a",
    ("sm90/decode/dense/splitkv_mla.cuh",),
    "DenseAttnDecodeParams",
    tuple(_FIELDS.split()),
    "sm90::run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(p)",
)


@dataclass(frozen=True)
class Sizes:
    """Of a dense decode call.

    Attributes:
        heads: query heads. queries: tokens a request; the last one sees all keys, the one before it one less.
        lengths: keys of each request. parts: CTAs over which the schedule distributes, for each 64 rows of queries.
    """

    heads: int
    queries: int
    lengths: tuple[int, ...]
    parts: int = 2


def dense_decode(sizes: Sizes) -> list[Output]:
    """Schedule, dense decode and combine."""
    batch, rows = len(sizes.lengths), sizes.queries * sizes.heads
    each = -(-max(sizes.lengths) // PAGE)
    pages = torch.full((batch * each + 1, PAGE, 1, DIM), torch.nan)
    table = torch.full((batch, each), len(pages) - 1, dtype=torch.int32)  # the last page is of NaN alone
    order = torch.randperm(batch * each).reshape(batch, each).int()
    keys = []
    for b, length in enumerate(sizes.lengths):
        used = -(-length // PAGE)
        table[b, :used] = order[b, :used]
        one = torch.randn(length, DIM) * torch.exp2(torch.randint(-2, 2, (length, 1)).float())
        flat = torch.full((used * PAGE, DIM), torch.nan)
        flat[:length] = one
        pages[table[b, :used].long()] = flat.reshape(used, PAGE, 1, DIM)
        keys.append(one.bfloat16().double())
    pages = pages.bfloat16()
    q = torch.randn(batch, sizes.queries, sizes.heads, DIM).bfloat16()
    out = torch.full((batch, sizes.queries, sizes.heads, VALUES), torch.nan).bfloat16()
    lse = torch.full((batch, sizes.queries, sizes.heads), torch.nan)
    splits = batch + sizes.parts
    lse_accum = torch.full((splits, *lse.shape[1:]), torch.nan)
    o_accum = torch.full((splits, *out.shape[1:]), torch.nan)
    lengths = torch.tensor(sizes.lengths, dtype=torch.int32)
    scheduled = {
        "tile_scheduler_metadata_ptr": torch.full((sizes.parts, META_WORDS), -1, dtype=torch.int32),
        "num_splits_ptr": torch.full((batch + 1,), -1, dtype=torch.int32),
        "num_sm_parts": sizes.parts,
        "stream": 0,
    }
    library(schedule_entry(DENSE.arch))(
        {
            "b": batch,
            "s_q": sizes.queries,
            "block_size_n": BLOCK,
            "fixed_overhead_num_blocks": OVERHEAD_BLOCKS,
            "topk": -1,
            "extra_topk": -1,
            "topk_length": None,
            "extra_topk_length": None,
            "seqlens_k_ptr": lengths,
            **scheduled,
        }
    )
    scale = 192**-0.5  # of the heads before their projection into the latent
    library(DENSE)(
        {
            "b": batch,
            "s_q": sizes.queries,
            "q_seq_per_hk": rows,
            "d": DIM,
            "d_v": VALUES,
            "h_q": sizes.heads,
            "h_k": 1,
            "num_blocks": len(pages),
            "q_head_per_hk": sizes.heads,
            "is_causal": int(sizes.queries > 1),
            "scale_softmax": float(scale),
            "scale_softmax_log2": scale * math.log2(math.e),
            "q_ptr": q,
            "k_ptr": pages,
            "o_ptr": out,
            "softmax_lse_ptr": lse,
            "q_batch_stride": rows * DIM,
            "k_batch_stride": pages.stride(0),
            "o_batch_stride": rows * VALUES,
            "q_row_stride": DIM,
            "k_row_stride": pages.stride(1),
            "o_row_stride": VALUES,
            "q_head_stride": DIM,
            "k_head_stride": pages.stride(2),
            "o_head_stride": rows * VALUES,
            "block_table": table,
            "block_table_batch_stride": table.stride(0),
            "page_block_size": PAGE,
            "seqlens_k_ptr": lengths,
            "total_num_splits": splits,
            "softmax_lseaccum_ptr": lse_accum,
            "oaccum_ptr": o_accum,
            **scheduled,
        }
    )
    library(combine_entry(DENSE.arch))(
        {
            "b": batch,
            "s_q": sizes.queries,
            "h_q": sizes.heads,
            "d_v": VALUES,
            "lse": lse,
            "out": out,
            **strides("lse", lse, "b s_q"),
            **strides("o", out, "b s_q h_q"),
            "lse_accum": lse_accum,
            "o_accum": o_accum,
            **strides("lse_accum", lse_accum, "split s_q"),
            **strides("o_accum", o_accum, "split s_q h_q"),
            **scheduled,
            "attn_sink": None,
        }
    )
    want, want_lse = _want(q, keys, scale)
    return [Output("out", out, want, 2**-8, P_BF16), Output("lse", lse, want_lse, 2**-20, LSE)]


def _want(q: torch.Tensor, keys: list[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64: the output and its log-sum-exp; 0 and +inf for a query without a key."""
    out, lse = torch.zeros(*q.shape[:3], VALUES, dtype=torch.float64), torch.full(q.shape[:3], torch.inf).double()
    for b, rows in enumerate(keys):
        for token in range(q.shape[1]):
            seen = rows[: max(len(rows) - q.shape[1] + 1 + token, 0)]
            if len(seen):
                logits = q[b, token].double() @ seen.T * scale
                lse[b, token] = logits.logsumexp(-1)
                out[b, token] = logits.softmax(-1) @ seen[:, :VALUES]
    return out, lse


def _case(name: str, sizes: Sizes, operands: str) -> Case:
    entries = (schedule_entry(DENSE.arch), DENSE, combine_entry(DENSE.arch))
    return Case(
        name,
        CHECKOUT,
        DENSE.arch,
        operands,
        partial(dense_decode, sizes),
        entries,
        errors=frozenset({"race_shared"}),  # see data/emulator/findings.md
        lints=frozenset({"dependent_launch_early"}),
    )


CASES = [
    _case(
        "flash_mla_dense_decode",
        Sizes(40, 1, (300, 101, 0)),
        "3 requests of 300, 101 and 0 keys of 576 dimensions, 40 heads, pages of 64 bf16 rows",
    ),
    _case(
        "flash_mla_dense_decode_causal",
        Sizes(40, 2, (200, 65)),
        "2 requests of 200 and 65 keys, 2 queries each with a causal mask, 40 heads: 80 rows in tiles of 64",
    ),
]
