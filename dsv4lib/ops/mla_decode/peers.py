"""Time peers of `mla_decode` on a Hopper. FlashMLA's dense decode, as vLLM brings it, and torch's attention."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider
from dsv4lib.ops.mla_decode.op import LATENT, SM_SCALE

MOST_BYTES = 4 << 30  # of a gathered copy of the cache


def providers() -> tuple[Provider, ...]:
    """Return both. FlashMLA's schedule is made once, before the time, as engines share it between layers."""
    return Provider("FlashMLA", _flash_mla), Provider("torch SDPA", _torch)


def _flash_mla(given: Given) -> peers.Bound:
    module = peers.load("vllm.third_party.flashmla.flash_mla_interface")
    if peers.capability() != 90:
        raise Absent("it is compared on sm_90")
    q, cache = given["q"][:, None], given["cache"][:, :, None]
    if cache.shape[1] != 64:
        raise Absent("it has pages of 64 tokens")
    schedule, _ = module.get_mla_metadata()

    def run() -> torch.Tensor:
        return module.flash_mla_with_kvcache(
            q, cache, given["table"], given["lengths"], LATENT, schedule, softmax_scale=SM_SCALE
        )

    return peers.bound(run, o=lambda out: out[0][:, 0])


def _torch(given: Given) -> tuple[Call, dict[str, torch.Tensor]]:
    """Attend to a cache that is gathered before the time. Its requests have one length."""
    q, cache, table = given["q"], given["cache"], given["table"]
    length, size = int(given["lengths"][0]), cache.element_size()
    if len(q) * length * cache.shape[2] * size > MOST_BYTES:
        raise Absent("a gathered copy of the cache takes too much memory")
    kv = cache[table.long()].flatten(1, 2)[:, None, :length]
    attention, out = torch.nn.functional.scaled_dot_product_attention, {}

    def call() -> None:
        out["o"] = attention(q[:, None], kv, kv[..., :LATENT], scale=SM_SCALE)[:, 0]

    return call, out
