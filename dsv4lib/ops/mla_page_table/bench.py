"""Time `mla_page_table`: page tables of a decode step's requests from the map of a serving engine.

`given`: req_to_token int32 [B + 8, W], of pages of 128 tokens in any order; requests int32 [B], in any order; lengths
int32 [B], from S / 2 to S. Output: ``table`` int32 [B, ceil(W / 128)], -1 past a row's pages.

Bytes: 4 of the map and 4 of the table a page, ids and lengths. Of the map whole sectors come, 32 bytes a page.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops.case import Given, Provider, Row
from dsv4lib.bench.ops.inputs import same_bytes
from dsv4lib.bench.ops.providers import compiled, in_place
from dsv4lib.ops.mla_page_table.op import mla_page_table
from dsv4lib.reference.mla_page_table import mla_page_table as oracle

PAGE = 128
SPARE = 8  # requests of the map that are not in the batch


def given(batch: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs of a row; see the module docstring."""
    device, count, per_request = generator.device, batch + SPARE, -(-tokens // PAGE)
    pages = torch.randperm(count * per_request, generator=generator, device=device).view(count, per_request)
    slots = pages[..., None] * PAGE + torch.arange(PAGE, device=device)
    lengths = torch.randint(tokens // 2, tokens + 1, (batch,), generator=generator, device=device)
    return {
        "req_to_token": slots.flatten(1)[:, :tokens].int().contiguous(),
        "requests": torch.randperm(count, generator=generator, device=device)[:batch].int(),
        "lengths": lengths.int(),
    }


def check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    """The oracle's table."""
    want = {name: x.cpu() for name, x in _outputs(given).items()}
    oracle(*(given[name].cpu() for name in ("req_to_token", "requests", "lengths")), PAGE, None, want["table"])
    same_bytes({name: x.cpu() for name, x in outputs.items()}, want)


def _outputs(given: Given) -> dict[str, Tensor]:
    slots, batch = given["req_to_token"], len(given["requests"])
    return {"table": torch.full((batch, -(-slots.shape[1] // PAGE)), -1, dtype=torch.int32, device=slots.device)}


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    mla_page_table(given["req_to_token"], given["requests"], given["lengths"], PAGE, out=out["table"])


def _plain(req_to_token: Tensor, requests: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """With torch: every page of the map, then a mask."""
    firsts = req_to_token[:, ::PAGE][requests.long()]
    there = torch.arange(firsts.shape[1], device=firsts.device) * PAGE < lengths[:, None]
    return {"table": torch.where(there, firsts // PAGE, -1).int()}


def providers() -> tuple[Provider, ...]:
    """List ours and what torch.compile makes of it."""
    return in_place("ours", _outputs, _ours), compiled(_plain, "req_to_token", "requests", "lengths")


def rows() -> list[Row]:
    """Decode steps of 1 to 128 requests with up to 4K and 128K tokens."""
    out = []
    for batch, tokens in ((1, 4096), (32, 4096), (128, 4096), (1, 131072), (32, 131072)):
        size = batch * (8 * (tokens * 3 // 4) // PAGE + 8)
        name = f"S {tokens // 1024}K T {batch}"
        made = functools.partial(given, batch, tokens)
        out.append(Row("mla_page_table", name, size, 0, made, check, providers()))
    return out
