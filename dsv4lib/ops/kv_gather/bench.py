"""Time `kv_gather`. Selected 584-byte entries of a paged pool become dense bf16, for attention that knows no pages.

`given`: pages uint8 [N, bytes] (`formats.kv_entry`, 64 entries a page), page_size, indices int32 [T, K], page *
page_size + slot, -1 where a list is shorter than K (one entry in eight). Output: ``kv`` bf16 [T, K, 512], zeros at -1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from dsv4lib.bench.ops.case import Given, Provider, Row
from dsv4lib.bench.ops.providers import compiled, in_place
from dsv4lib.formats import kv_entry
from dsv4lib.ops.kv_gather.op import kv_gather

PAGE = 64


def given(tokens: int, selected: int, generator: torch.Generator) -> dict[str, torch.Tensor | int]:
    """Inputs of a row; see the module docstring."""
    device, pool = generator.device, max(4096, 2 * tokens * selected) // PAGE
    kv = torch.randn(pool * PAGE, kv_entry.HEAD_DIM, generator=generator, device=device)
    kv *= torch.logspace(-2, 2, pool * PAGE, device=device)[:, None]
    pages = kv_entry.LAYOUT.allocate(pool, PAGE).to(device)
    kv_entry.append(pages, PAGE, torch.arange(pool * PAGE, device=device), kv)
    indices = torch.randint(pool * PAGE, (tokens, selected), generator=generator, device=device, dtype=torch.int32)
    indices[:, 5::8] = -1
    return {"pages": pages, "page_size": PAGE, "indices": indices}


def check(given: Given, outputs: Mapping[str, torch.Tensor]) -> None:
    """The bits of `formats.kv_entry.gather`."""
    want, _ = kv_entry.gather(given["pages"], given["page_size"], given["indices"])
    assert torch.equal(outputs["kv"], want), f"{int((outputs['kv'] != want).sum())} elements differ"


def _plain(pages: torch.Tensor, indices: torch.Tensor) -> dict[str, torch.Tensor]:
    """In torch, with the types it has for E4M3 and E8M0."""
    flat = indices.long().clamp_min(0)
    split = PAGE * kv_entry.LAYOUT.data_bytes
    data = pages[:, :split].unflatten(1, (PAGE, -1))[flat // PAGE, flat % PAGE]
    scales = pages[:, split : PAGE * kv_entry.LAYOUT.entry_bytes].unflatten(1, (PAGE, -1))[flat // PAGE, flat % PAGE]
    codes = data[..., : kv_entry.NOPE].view(torch.float8_e4m3fn).float().unflatten(-1, (kv_entry.GROUPS, -1))
    nope = codes * scales[..., : kv_entry.GROUPS, None].view(torch.float8_e8m0fnu).float()
    rope = data[..., kv_entry.NOPE :].contiguous().view(torch.bfloat16)
    kv = torch.cat((nope.flatten(-2).bfloat16(), rope), -1)
    return {"kv": torch.where(indices[..., None] >= 0, kv, 0.0)}


def _outputs(given: Given) -> dict[str, torch.Tensor]:
    indices = given["indices"]
    return {"kv": torch.empty(*indices.shape, kv_entry.HEAD_DIM, dtype=torch.bfloat16, device=indices.device)}


def _ours(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    kv_gather(given["pages"], given["page_size"], given["indices"], out=out["kv"])


def providers() -> tuple[Provider, ...]:
    """List ours and what torch.compile makes of it.

    No public kernel gathers this layout to dense rows.
    """
    return in_place("ours", _outputs, _ours), compiled(_plain, "pages", "indices")


def rows() -> list[Row]:
    """K 512 (Flash) and 1024 (Pro)."""
    out = []
    for name, selected in (("Flash", 512), ("Pro", 1024)):
        for tokens in (1, 8, 32, 128):
            count = tokens * selected
            read = (count - count // 8) * kv_entry.LAYOUT.entry_bytes
            make = functools.partial(given, tokens, selected)
            size = read + 4 * count + 1024 * count
            out.append(Row("kv_gather", f"{name} K {selected} T {tokens}", size, 0, make, check, providers()))
    return out
