"""Time peers of `fmha` on a Hopper. FlashMLA's sparse decode reads the same pages, as vLLM brings it.

Its sparse prefill reads keys in bf16, which engines make of pages before; making them is not in its time.
"""

from __future__ import annotations

from types import ModuleType

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.formats import kv_entry

Slots = tuple[torch.Tensor, torch.Tensor]


def providers() -> tuple[Provider, ...]:
    """Return FlashMLA. Its schedule is made once, before the time, as engines share it between layers."""
    return (Provider("FlashMLA", _flash_mla),)


def prefill_providers() -> tuple[Provider, ...]:
    """Return FlashMLA's prefill."""
    return (Provider("FlashMLA prefill, keys in bf16", _flash_mla_prefill),)


def _flash_mla_prefill(given: Given) -> peers.Bound:
    module = flash_mla()
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
    module, index = flash_mla(), given["index"]
    entries = None if index is None else (given["pages"], index)
    return sparse_decode(module, given["q"], (given["pages"], given["window"]), entries, given["sink"])


def flash_mla() -> ModuleType:
    """Return its interface.

    Raises:
        Absent: FlashMLA is not installed, or the GPU is no Hopper.
    """
    module = peers.load("vllm.third_party.flashmla.flash_mla_interface")
    if peers.capability() != 90:
        raise Absent("it is compared on sm_90")
    return module


def sparse_decode(
    module: ModuleType, q: torch.Tensor, window: Slots, entries: Slots | None, sink: torch.Tensor
) -> peers.Bound:
    """Bind FlashMLA's sparse decode. Its schedule is made here, before the time.

    Args:
        module: `flash_mla`. q: bf16 [T, h, 512]. window, entries: (pages uint8 [P, bytes], slots int32 [T, n], -1 for
            none), n a multiple of 64. sink: fp32 [h].
    """
    extra = {}
    if entries is not None:
        extra = {"extra_k_cache": _paged(entries[0]), "extra_indices_in_kvcache": entries[1][:, None]}
    schedule, _ = module.get_mla_metadata()
    tokens, cache, index = q[:, None], _paged(window[0]), window[1][:, None]

    def run() -> torch.Tensor:
        return module.flash_mla_with_kvcache(
            tokens, cache, None, None, kv_entry.HEAD_DIM, schedule, softmax_scale=kv_entry.HEAD_DIM**-0.5,
            is_fp8_kvcache=True, indices=index, attn_sink=sink, **extra,
        )  # fmt: skip

    return peers.bound(run, o=lambda out: out[0][:, 0])


def _paged(pages: torch.Tensor) -> torch.Tensor:
    """View pages as FlashMLA reads them: [P, page, 1, bytes of an entry]."""
    size = kv_entry.LAYOUT.entry_bytes
    page = pages.shape[1] // size
    return torch.as_strided(pages, (len(pages), page, 1, size), (pages.stride(0), size, size, 1))
