"""Time peers of `fmha` on a Hopper. FlashMLA's sparse decode reads the same pages, as vLLM brings it.

Its sparse prefill reads keys in bf16, which engines make of pages before; making them is not in its time.
"""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.formats import kv_entry


def providers() -> tuple[Provider, ...]:
    """Return FlashMLA. Its schedule is made once, before the time, as engines share it between layers."""
    return (Provider("FlashMLA", _flash_mla),)


def prefill_providers() -> tuple[Provider, ...]:
    """Return FlashMLA's prefill."""
    return (Provider("FlashMLA prefill, keys in bf16", _flash_mla_prefill),)


def _flash_mla_prefill(given: Given) -> peers.Bound:
    module = peers.load("vllm.third_party.flashmla.flash_mla_interface")
    if peers.capability() != 90:
        raise Absent("it is compared on sm_90")
    if not hasattr(module, "flash_mla_sparse_fwd"):
        raise Absent("this vllm has no flash_mla_sparse_fwd")
    pages = given["pages"]
    page = pages.shape[1] // kv_entry.LAYOUT.entry_bytes
    rows = torch.arange(len(pages) * page, device=pages.device)
    keys = kv_entry.gather(pages, page, rows)[0][:, None].contiguous()
    index = torch.cat((given["window"], given["index"]), 1)[:, None].contiguous()

    def run() -> torch.Tensor:
        return module.flash_mla_sparse_fwd(
            given["q"], keys, index, kv_entry.HEAD_DIM**-0.5, kv_entry.HEAD_DIM, attn_sink=given["sink"]
        )

    return peers.bound(run, o=lambda out: out[0])


def _flash_mla(given: Given) -> peers.Bound:
    module = peers.load("vllm.third_party.flashmla.flash_mla_interface")
    if peers.capability() != 90:
        raise Absent("it is compared on sm_90")
    q, index = given["q"][:, None], given["index"]
    pages = given["pages"]
    bytes_of = kv_entry.LAYOUT.entry_bytes
    page = pages.shape[1] // bytes_of
    cache = torch.as_strided(pages, (len(pages), page, 1, bytes_of), (pages.stride(0), bytes_of, bytes_of, 1))
    extra = {}
    if index is not None:
        extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": index[:, None]}
    schedule, _ = module.get_mla_metadata()
    window = given["window"][:, None]

    def run() -> torch.Tensor:
        return module.flash_mla_with_kvcache(
            q, cache, None, None, kv_entry.HEAD_DIM, schedule, softmax_scale=kv_entry.HEAD_DIM**-0.5,
            is_fp8_kvcache=True, indices=window, attn_sink=given["sink"], **extra,
        )  # fmt: skip

    return peers.bound(run, o=lambda out: out[0][:, 0])
