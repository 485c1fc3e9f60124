"""Time `qnorm_rope_kv`. It norms and rotates query heads, and rotates, quantises and appends the KV vector.

Given: q bf16 [T, H, 512]; kv bf16 [T, 512], normed already; positions int64 [T]; cos_sin fp32 [131072, 64];
pages uint8 [P, bytes of 64 entries (37440 padded)]; page_size 64; indices int32 [T], page * 64 + slot; eps.
Outputs: q bf16 [T, H, 512]; pages uint8 as given (a provider may work on a copy).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

import torch

from dsv4lib.bench.ops import inputs, providers, rope_inputs
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.formats import kv_entry
from dsv4lib.ops.qnorm_rope_kv import peers
from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv

DIM, PAGE, EPS = 512, 64, 1e-6
MODELS = {"Flash": 64, "Pro": 128}
TOKENS = (*inputs.DECODE, inputs.PREFILL)
GOAL = 0.95  # at 4096 tokens


def _given(generator: torch.Generator, tokens: int, heads: int) -> Given:
    device, pages = generator.device, 2 * (-(-tokens // PAGE))
    return {
        "q": inputs.normals(generator, tokens, heads, DIM),
        "kv": inputs.normals(generator, tokens, DIM),
        "positions": rope_inputs.positions(generator, tokens),
        "cos_sin": rope_inputs.table(device),
        "pages": kv_entry.LAYOUT.allocate(pages, PAGE).to(device),
        "page_size": PAGE,
        "indices": torch.randperm(pages * PAGE, generator=generator, device=device)[:tokens].int(),
        "eps": EPS,
    }


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    rows = given["cos_sin"][given["positions"]]
    q = given["q"].float()
    want = rope_inputs.rotate(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + given["eps"]), rows)
    # A unit of bf16, relative to the pair where two products may cancel.
    size = torch.maximum(
        want.abs(),
        want.unflatten(-1, (-1, 2)).abs().amax(-1, keepdim=True).expand(*want.shape[:-1], DIM // 2, 2).flatten(-2),
    )
    wrong = (out["q"].float() - want).abs() > 2.0**-7 * size
    assert not bool(wrong.any()), f"q: {int(wrong.sum())} of {wrong.numel()}"
    kv = rope_inputs.rotate(given["kv"].float()[:, None], rows)[:, 0]
    found, _ = kv_entry.gather(out["pages"], given["page_size"], given["indices"], torch.float32)
    amax = kv[:, : kv_entry.NOPE].unflatten(-1, (-1, kv_entry.GROUP)).abs().amax(-1, keepdim=True).clamp_min(1e-4)
    step = (2.0**-10 * 2.02 / 448.0) * amax.expand(*amax.shape[:-1], kv_entry.GROUP).flatten(-2)
    nope = (found - kv)[:, : kv_entry.NOPE].abs() > 2.0**-4 * kv[:, : kv_entry.NOPE].abs() + step
    assert not bool(nope.any()), f"pages, nope dims: {int(nope.sum())} of {nope.numel()}"
    tail = kv[:, kv_entry.NOPE :]
    size = tail.unflatten(-1, (-1, 2)).abs().amax(-1).repeat_interleave(2, -1)
    rope = (found[:, kv_entry.NOPE :] - tail).abs() > 2.0**-7 * size
    assert not bool(rope.any()), f"pages, rope dims: {int(rope.sum())} of {rope.numel()}"


def _ours(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    q, pages = torch.empty_like(given["q"]), given["pages"].clone()
    places = pages, given["page_size"], given["indices"]

    def call() -> None:
        options = {"eps": given["eps"], "out": q, "backend": "native"}
        qnorm_rope_kv(given["q"], given["kv"], given["positions"], given["cos_sin"], *places, **options)

    return call, {"q": q, "pages": pages}


def _compiled(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    """All of it in what torch can fuse; entries go through index_put into the two parts of the pages."""
    pages, page_size, indices = given["pages"].clone(), given["page_size"], given["indices"].long()
    data, scales = kv_entry.LAYOUT.views(pages, page_size)

    def plain(q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> dict:
        rows, wide, page, slot = cos_sin[positions], q.float(), indices // page_size, indices % page_size
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        turned = rope_inputs.rotate(kv.float()[:, None], rows)[:, 0]
        groups = turned[:, : kv_entry.NOPE].unflatten(-1, (kv_entry.GROUPS, kv_entry.GROUP))
        scale = rope_inputs.power_scale(groups.abs().amax(-1, keepdim=True), 448.0, 1e-4)
        codes = (groups / scale).flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)
        tail = turned[:, kv_entry.NOPE :].bfloat16().view(torch.uint8)
        data[page, slot] = torch.cat((codes, tail), -1)
        scales[page, slot, : kv_entry.GROUPS] = (torch.log2(scale[..., 0]) + 127).to(torch.uint8)
        return {"q": rope_inputs.rotate(normed, rows).bfloat16()}

    call, out = providers.compiled(plain, "q", "kv", "positions", "cos_sin").bind(given)
    return call, ChainMap(out, {"pages": pages})


def rows() -> list[Row]:
    """The cells of the issue's table, and decode."""
    return [
        Row(
            op="qnorm_rope_kv",
            shape=f"{model} T {tokens}",
            bytes=tokens * (heads * DIM * 4 + 2 * DIM + 584 + 268),
            flops=0,
            given=lambda generator, t=tokens, h=heads: _given(generator, t, h),
            check=_check,
            providers=(Provider("ours", _ours), Provider("torch.compile", _compiled), *peers.providers()),
            goal=GOAL if tokens == inputs.PREFILL else None,
        )
        for model, heads in MODELS.items()
        for tokens in TOKENS
    ]
