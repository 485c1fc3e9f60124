"""FlashMLA's kernels: sparse decode over pages of FP8 entries, its schedule and combine, sparse prefill over bf16 rows.

The calls are those of its own torch bindings: the schedule is made by its kernel, then decode, then combine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.bench.cpp_peers.build import Checkout, Entry
from dsv4lib.bench.cpp_peers.cases import Case, Output, library
from dsv4lib.formats import kv_entry
from dsv4lib.reference import fmha as oracle

CHECKOUT = Checkout("FlashMLA", "DSV4_FLASHMLA", ("csrc", "csrc/kerutils/include"))
DIM, OVERHEAD_BLOCKS, BLOCK = 512, 5, 64
META_WORDS = 8  # int32 of a record of the schedule
P_BF16 = "P rounded to bf16 beside an fp32 sum, the output once more: 2 * 2^-9, and sums of other order"

LSE = "exp2 and log2 by approximation, sums in fp32; +inf where there is no key"

_META = (
    "b s_q block_size_n fixed_overhead_num_blocks topk extra_topk topk_length extra_topk_length seqlens_k_ptr "
    "tile_scheduler_metadata_ptr num_splits_ptr num_sm_parts stream"
)
_SPLITS = (
    "lse_accum o_accum stride_lse_accum_split stride_lse_accum_s_q stride_o_accum_split stride_o_accum_s_q "
    "stride_o_accum_h_q tile_scheduler_metadata_ptr num_splits_ptr num_sm_parts stream"
)
_RESULT = "b s_q h_q d_v lse out stride_lse_b stride_lse_s_q stride_o_b stride_o_s_q stride_o_h_q"
_DECODE = (
    f"{_RESULT} {_SPLITS} h_kv d_qk sm_scale sm_scale_div_log2 num_blocks page_block_size topk model_type q kv indices "
    "topk_length attn_sink extra_num_blocks extra_page_block_size extra_topk extra_kv extra_indices extra_topk_length "
    "stride_q_b stride_q_s_q stride_q_h_q stride_kv_block stride_kv_row stride_indices_b stride_indices_s_q "
    "stride_extra_kv_block stride_extra_kv_row stride_extra_indices_b stride_extra_indices_s_q"
)
_PREFILL = (
    "s_q s_kv h_q h_kv d_qk d_v topk sm_scale sm_scale_div_log2 q kv indices attn_sink topk_length stride_q_s_q "
    "stride_q_h_q stride_kv_s_kv stride_kv_h_kv stride_indices_s_q stride_indices_h_kv out max_logits lse num_sm stream"
)


def _entry(arch: str, include: str, record: str, fields: str, call: str) -> Entry:
    return Entry(CHECKOUT, arch, (include,), record, tuple(fields.split()), call)


def schedule_entry(arch: str) -> Entry:
    """The kernel that distributes blocks of keys over CTAs."""
    where = "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu"
    call = "smxx::decode::run_get_decoding_sched_meta_kernel(p)"
    return _entry(arch, where, "GetDecodeSchedMetaParams", _META, call)


def combine_entry(arch: str) -> Entry:
    """The kernel that adds up splits."""
    call = "smxx::decode::run_flash_mla_combine_kernel<cutlass::bfloat16_t>(p)"
    fields = f"{_RESULT} {_SPLITS} attn_sink"
    return _entry(arch, "smxx/decode/combine/combine.cu", "CombineParams", fields, call)


SM90 = {
    heads: _entry(
        "sm_90a",
        "sm90/decode/sparse_fp8/splitkv_mla.cuh",
        "SparseAttnDecodeParams",
        _DECODE,
        f"sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1, {heads}>(p)",
    )
    for heads in (64, 128)
}
SM100 = _entry(
    "sm_100a",
    "sm100/decode/head64/kernel.cuh",
    "SparseAttnDecodeParams",
    _DECODE,
    "sm100::decode::head64::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1>(p)",
)
PREFILL = _entry(
    "sm_90a",
    "sm90/prefill/sparse/phase1.cuh",
    "SparseAttnFwdParams",
    _PREFILL,
    "sm90::fwd::run_fwd_phase1_kernel<512, false>(p)",
)


@dataclass(frozen=True)
class Sizes:
    """Of a decode call.

    Attributes:
        heads: query heads. lengths: valid entries of each request's list of ``topk``.
        extra: entries of the second cache that each query sees, 0: there is none. page, extra_page: entries a page.
        parts: CTAs (pairs) over which the schedule distributes.
    """

    heads: int
    lengths: tuple[int, ...]
    topk: int = 192
    extra: int = 0
    page: int = 48
    extra_page: int = 2
    parts: int = 2


def _pages(entries: int, page: int) -> torch.Tensor:
    """Pages of random entries with scales that differ by row."""
    count = -(-entries // page)
    pages = kv_entry.LAYOUT.allocate(count, page)
    rows = torch.randn(count * page, DIM) * torch.exp2(torch.randint(-2, 3, (count * page, 1)).float())
    kv_entry.append(pages, page, torch.arange(count * page), rows)
    return pages


def _cache(prefix: str, pages: torch.Tensor | None, page: int, indices: torch.Tensor | None) -> dict:
    """Fields of one of the two caches."""
    if pages is None or indices is None:
        names = "num_blocks page_block_size topk kv indices topk_length".split()
        return {f"{prefix}{n}": 0 for n in names} | {f"stride_{prefix}{n}": 0 for n in _CACHE_STRIDES}
    return {
        f"{prefix}num_blocks": len(pages),
        f"{prefix}page_block_size": page,
        f"{prefix}topk": indices.shape[-1],
        f"{prefix}kv": pages,
        f"{prefix}indices": indices,
        f"{prefix}topk_length": None,
        f"stride_{prefix}kv_block": pages.stride(0),
        f"stride_{prefix}kv_row": kv_entry.LAYOUT.entry_bytes,
        f"stride_{prefix}indices_b": indices.stride(0),
        f"stride_{prefix}indices_s_q": indices.stride(1),
    }


_CACHE_STRIDES = ("kv_block", "kv_row", "indices_b", "indices_s_q")


class Given(NamedTuple):
    """Operands of a decode call; the second cache and its list are None without one."""

    q: torch.Tensor
    sink: torch.Tensor
    pages: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    extra_pages: torch.Tensor | None
    extra: torch.Tensor | None


def operands(sizes: Sizes) -> Given:
    """Random ones: one query a request, lists without order, of the first request with -1 in its midst."""
    batch, total = len(sizes.lengths), 5 * sizes.topk // 2
    pages = _pages(total, sizes.page)
    q, sink = torch.randn(batch, 1, sizes.heads, DIM).bfloat16(), torch.randn(sizes.heads)
    indices = torch.stack([torch.randperm(total)[: sizes.topk] for _ in range(batch)])[:, None].int()
    indices[0, 0, 1::7] = -1
    lengths = torch.tensor(sizes.lengths, dtype=torch.int32)
    if not sizes.extra:
        return Given(q, sink, pages, indices, lengths, None, None)
    extra = torch.stack([torch.randperm(sizes.extra + 5)[: sizes.extra] for _ in range(batch)])[:, None].int()
    return Given(q, sink, pages, indices, lengths, _pages(sizes.extra + 5, sizes.extra_page), extra)


def ours(sizes: Sizes, arch: str) -> list[Output]:
    """Our `fmha` on the operands of `decode`."""
    from dsv4lib.ops.fmha.op import fmha
    from dsv4lib.ops.fmha.sources import Fp8Pages, Selected

    given = operands(sizes)
    entries = Selected(Fp8Pages(given.pages, sizes.page), given.indices[:, 0], given.lengths)
    with backends.emulating(arch):
        o, _ = fmha(given.q[:, 0], entries, sink=given.sink, backend="emulator")
    return [Output("out", o[:, None], _want(given, sizes)[0], 2**-8, P_BF16)]


def decode(sizes: Sizes, entry: Entry) -> list[Output]:
    """Schedule, decode and combine for as many requests as there are lengths, one query each."""
    batch, heads, arch = len(sizes.lengths), sizes.heads, entry.arch
    given = operands(sizes)
    q, sink, pages, indices, lengths, extra_pages, extra = given
    out, lse = torch.full((batch, 1, heads, DIM), torch.nan).bfloat16(), torch.full((batch, 1, heads), torch.nan)
    splits = batch + sizes.parts
    lse_accum, o_accum = torch.full((splits, 1, heads), torch.nan), torch.full((splits, 1, heads, DIM), torch.nan)
    meta = torch.full((sizes.parts, META_WORDS), -1, dtype=torch.int32)
    num_splits = torch.full((batch + 1,), -1, dtype=torch.int32)
    scheduled = {
        "tile_scheduler_metadata_ptr": meta,
        "num_splits_ptr": num_splits,
        "num_sm_parts": sizes.parts,
        "stream": 0,
    }
    library(schedule_entry(arch))(
        {
            "b": batch,
            "s_q": 1,
            "block_size_n": BLOCK,
            "fixed_overhead_num_blocks": OVERHEAD_BLOCKS,
            "topk": sizes.topk,
            "extra_topk": sizes.extra,
            "topk_length": lengths,
            "extra_topk_length": None,
            "seqlens_k_ptr": None,
            **scheduled,
        }
    )
    result = {
        "b": batch,
        "s_q": 1,
        "h_q": heads,
        "d_v": DIM,
        "lse": lse,
        "out": out,
        **strides("lse", lse, "b s_q"),
        **strides("o", out, "b s_q h_q"),
        "lse_accum": lse_accum,
        "o_accum": o_accum,
        **strides("lse_accum", lse_accum, "split s_q"),
        **strides("o_accum", o_accum, "split s_q h_q"),
        **scheduled,
        "attn_sink": sink,
    }
    scale = DIM**-0.5
    caches = _cache("", pages, sizes.page, indices) | _cache("extra_", extra_pages, sizes.extra_page, extra)
    call = {
        **result,
        "h_kv": 1,
        "d_qk": DIM,
        "sm_scale": float(scale),
        "sm_scale_div_log2": scale * math.log2(math.e),
        "model_type": 1,
        "q": q,
        **strides("q", q, "b s_q h_q"),
        **caches,
        "topk_length": lengths,
    }
    library(entry)(call)
    library(combine_entry(arch))(result)
    want, want_lse = _want(given, sizes)
    return [
        Output("out", out, want, 2**-8, P_BF16),
        Output("lse", lse, want_lse.masked_fill(want_lse == -torch.inf, torch.inf), 2**-20, LSE),
    ]


def strides(name: str, tensor: torch.Tensor, dims: str) -> dict[str, int]:
    """Fields of the strides of a tensor, in elements, for its first dimensions."""
    return {f"stride_{name}_{dim}": tensor.stride(i) for i, dim in enumerate(dims.split())}


def _want(given: Given, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 over the dequantised entries of both caches; entries past a request's length are not there."""
    every = torch.arange(len(given.pages) * sizes.page)
    rows, _ = kv_entry.gather(given.pages, sizes.page, every, torch.float64)
    seen = torch.where(torch.arange(sizes.topk) < given.lengths[:, None, None], given.indices, -1).long()
    if given.extra_pages is not None and given.extra is not None:
        every = torch.arange(len(given.extra_pages) * sizes.extra_page)
        extra_rows, _ = kv_entry.gather(given.extra_pages, sizes.extra_page, every, torch.float64)
        seen, rows = torch.cat((seen, given.extra.long() + len(rows)), -1), torch.cat((rows, extra_rows))
    kv = rows.expand(len(given.q), *rows.shape)
    return oracle.sparse(given.q.double(), kv, seen, given.sink.double(), DIM**-0.5)


def prefill(tokens: int = 3, rows: int = 300, topk: int = 128, heads: int = 64) -> list[Output]:
    """Sparse prefill: each token attends to rows of its own list, in bf16."""
    q, kv = torch.randn(tokens, heads, DIM).bfloat16(), torch.randn(rows, 1, DIM).bfloat16()
    indices = torch.stack([torch.randperm(rows)[:topk] for _ in range(tokens)])[:, None].int()
    indices[1, 0, 70:] = -1
    sink = torch.randn(heads)
    out = torch.full((tokens, heads, DIM), torch.nan).bfloat16()
    largest, lse = torch.full((tokens, heads), torch.nan), torch.full((tokens, heads), torch.nan)
    scale = DIM**-0.5
    library(PREFILL)(
        {
            "s_q": tokens,
            "s_kv": rows,
            "h_q": heads,
            "h_kv": 1,
            "d_qk": DIM,
            "d_v": DIM,
            "topk": topk,
            "sm_scale": float(scale),
            "sm_scale_div_log2": scale * math.log2(math.e),
            "q": q,
            "kv": kv,
            "indices": indices,
            "attn_sink": sink,
            "topk_length": None,
            **strides("q", q, "s_q h_q"),
            **strides("kv", kv, "s_kv h_kv"),
            **strides("indices", indices, "s_q h_kv"),
            "out": out,
            "max_logits": largest,
            "lse": lse,
            "num_sm": 2,
            "stream": 0,
        }
    )
    seen = indices.permute(1, 0, 2).long()
    want, want_lse = oracle.sparse(q[None].double(), kv[None, :, 0].double(), seen, sink.double(), scale)
    return [
        Output("out", out, want[0], 2**-8, P_BF16),
        Output("lse", lse, want_lse[0], 2**-20, LSE),
    ]


def _decode_case(name: str, entry: Entry, sizes: Sizes, what: str, **more: object) -> Case:
    entries = (schedule_entry(entry.arch), entry, combine_entry(entry.arch))
    beside = None if sizes.extra else partial(ours, sizes, entry.arch)
    return Case(name, CHECKOUT, entry.arch, what, partial(decode, sizes, entry), entries, ours=beside, **more)


# What the kernels are known to show; see data/emulator/findings.md.
CROSSOVER = frozenset({"missing_proxy_fence", "peer_memory_after_exit"})
EXCHANGE = frozenset({"race_shared"})
LATE_STORE = frozenset({"async_read_after_exit"})

CASES = [
    _decode_case(
        "flash_mla_decode",
        SM90[64],
        Sizes(64, (192, 101, 0)),
        "3 requests of 192, 101 and 0 entries, 64 heads, pages of 48 FP8 entries",
    ),
    _decode_case(
        "flash_mla_decode_two_caches",
        SM90[64],
        Sizes(64, (128, 100), 128, 128),
        "2 requests of 128 and 100 entries, and 128 of a second cache with 2 a page, 64 heads",
    ),
    _decode_case(
        "flash_mla_decode_128_heads",
        SM90[128],
        Sizes(128, (192, 101)),
        "2 requests of 192 and 101 entries, 128 heads on pairs of CTAs",
        errors=CROSSOVER,
    ),
    _decode_case(
        "flash_mla_decode_sm100",
        SM100,
        Sizes(64, (192, 101, 0)),
        "3 requests of 192, 101 and 0 entries, 64 heads, pages of 48 FP8 entries",
        errors=EXCHANGE,
        lints=LATE_STORE | {"tmem_lane_quarter"},
        right="adversarial",
        unstable=True,
    ),
    Case(
        "flash_mla_prefill",
        CHECKOUT,
        "sm_90a",
        "3 tokens, 300 rows, top-128, 64 heads",
        prefill,
        (PREFILL,),
        lints=LATE_STORE | {"missing_proxy_fence_cp_async"},
    ),
]
