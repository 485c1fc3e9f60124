"""Time `kv_append`. KV rows of new tokens go into the bf16 rings of the window, in place.

`given`: kv bf16 [T, 512]; ring bf16 [S, 128, 512], as it was before; requests int32 [B, 4], as
`ops.common.requests.plan` has them, in rings of any order; kept int64 [N], the rows that stay, which ours finds out
itself. Output: ``ring`` afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.ops.kv_append.op import kv_append
from dsv4lib.reference.cache import append_window

DIM, WINDOW = 512, 128
BATCHES = {  # (requests, rows of each)
    **{f"decode T {tokens}": (tokens, 1) for tokens in inputs.DECODE},
    "chunks of 64 T 4096": (64, 64),
    "chunks of 512 T 4096": (8, 512),
    "prefill T 4096": (1, inputs.PREFILL),
}


def rows() -> list[Row]:
    """Return rows of one shape, that of both models. Decode, chunks that fit into their rings, and longer ones."""
    return [_row(shape, *batch) for shape, batch in BATCHES.items()]


def _row(shape: str, requests: int, count: int) -> Row:
    stay = min(count, WINDOW)

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        starts = torch.randint(1 << 20, (requests,), generator=generator, device=device)
        first = torch.arange(requests, device=device) * count
        places = torch.randperm(requests + 1, generator=generator, device=device)[:requests]
        table = torch.stack((first, torch.full_like(first, count), starts, places), 1).int()
        return {
            "kv": inputs.normals(generator, requests * count, DIM),
            "ring": inputs.normals(generator, requests + 1, WINDOW, DIM),
            "requests": table.contiguous(),
            "kept": (first[:, None] + torch.arange(count - stay, count, device=device)).flatten(),
        }

    size = requests * (stay * 2 * 2 * DIM + 16)
    return Row(
        "kv_append", shape, size, 0, given, _check, (Provider("ours", _ours), Provider("torch.compile", _compiled))
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    ring = given["ring"].clone()
    for row, count, start, place in given["requests"].tolist():
        own = slice(place, place + 1)
        ring[own] = append_window(ring[own], given["kv"][None, row : row + count], start)[2]
    inputs.same_bytes(outputs, {"ring": ring})


def _ours(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    ring = given["ring"].clone()
    return lambda: kv_append(given["kv"], ring, given["requests"]), {"ring": ring}


def _put(kv: Tensor, ring: Tensor, requests: Tensor, kept: Tensor) -> None:
    """Write in place with torch, given which rows stay."""
    row, _, start, place = requests[torch.searchsorted(requests[:, 0].contiguous(), kept, right=True) - 1].unbind(1)
    ring[place, (start + kept - row) % WINDOW] = kv[kept]


def _plain(kv: Tensor, ring: Tensor, requests: Tensor, kept: Tensor) -> dict[str, Tensor]:
    after = ring.clone()
    _put(kv, after, requests, kept)
    return {"ring": after}


def _compiled(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    ring = given["ring"].clone()

    def put(kv: Tensor, requests: Tensor, kept: Tensor) -> dict[str, Tensor]:
        _put(kv, ring, requests, kept)
        return {}

    call, _ = providers.compiled(put, "kv", "requests", "kept").bind(given)
    return call, {"ring": ring}
