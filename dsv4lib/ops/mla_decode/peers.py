"""Time a peer of `mla_decode` on a Hopper: FlashMLA's dense decode, as vLLM brings it."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.reference.mla_decode import LATENT

SM_SCALE = (128 + 64) ** -0.5  # of queries before absorption


def providers() -> tuple[Provider, ...]:
    """Return it. Its schedule is made once, before the time, as engines share it between layers."""
    return (Provider("FlashMLA", _flash_mla),)


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
