"""Time torch's attention beside `mla_decode`."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops.case import Absent, Call, Given, Provider
from dsv4lib.ops.mla_decode.peers import SM_SCALE
from dsv4lib.reference.mla_decode import LATENT

MOST_BYTES = 4 << 30  # of a gathered copy of the cache


def providers() -> tuple[Provider, ...]:
    """Return it."""
    return (Provider("torch SDPA", _torch),)


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
