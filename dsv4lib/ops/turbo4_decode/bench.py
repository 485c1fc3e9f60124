"""Rows of `turbo4_decode`: one query token a request over a paged 4-bit cache, requests of equal length.

given: q bf16 [B, H, D]; pages uint8 [P, 2 K, bytes], heads of keys and then of values, of a latent [P, 1, bytes] for
both; table int32 [B, W], pages in any order; lengths int32 [B]; k, v bf16 [B, K, S, D], what the cache holds, for the
peer: torch's attention over bf16. Vectors differ in scale by 4 and q by none: with large logits the bf16 keys of the
peer would not be near enough. Output: o bf16 [B, H, D].

Bytes: codes and norms once, q and O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_decode.op import Attention, turbo4_decode
from dsv4lib.reference import turbo4_decode as oracle
from dsv4lib.reference.turbo4_encode import append

PAGE, SEED = 64, 1
CLOSE = 0.01  # of the RMS of a row of O, as RMS: bf16 keys of the peer cost 0.003
GOAL = 1.0  # never slower than bf16


class Shape(NamedTuple):
    """Heads of queries and of keys, dims; whether one latent is key and value."""

    heads: int
    kv_heads: int
    dim: int
    latent: bool = False


GQA, SMALL, LATENT = Shape(32, 8, 128), Shape(16, 2, 64), Shape(128, 1, 512, True)
SIZES = {  # (batch, tokens of each)
    "GQA 32/8 d128": (GQA, ((1, 8192), (1, 65536), (8, 8192), (32, 1024), (32, 8192), (128, 2048))),
    "GQA 16/2 d64": (SMALL, ((32, 8192),)),
    "latent 128 d512": (LATENT, ((1, 8192), (32, 4096))),
}


def rows() -> list[Row]:
    """Long and short caches, few and many requests."""
    return [_row(name, shape, *size) for name, (shape, sizes) in SIZES.items() for size in sizes]


def _row(name: str, shape: Shape, batch: int, length: int) -> Row:
    copies = 1 if shape.latent else 2
    vector = turbo4.record_bytes(shape.dim)
    size = batch * (copies * shape.kv_heads * length * vector + 4 * shape.heads * shape.dim)

    def given(generator: torch.Generator) -> Given:
        return _given(generator, shape, batch, length)

    peers = (
        Provider("ours", _ours("registers")),
        Provider("ours, table in SMEM", _ours("shared")),
        Provider("torch SDPA bf16", _torch),
    )
    flops = 4 * batch * shape.heads * length * shape.dim
    return Row("turbo4_decode", f"{name} S {length} T {batch}", size, flops, given, _check, peers, goal=GOAL)


def _given(generator: torch.Generator, shape: Shape, batch: int, length: int) -> Given:
    device, (_, kv_heads, dim, latent) = generator.device, shape
    heads, width = kv_heads * (1 if latent else 2), -(-length // PAGE)
    pages = torch.zeros(batch * width, heads, turbo4.layout(dim).page_bytes(PAGE), dtype=torch.uint8, device=device)
    order = torch.randperm(batch * width, generator=generator, device=device).view(batch, width)
    dense = torch.empty(batch, heads, length, dim, dtype=torch.bfloat16, device=device)
    place = torch.arange(length, device=device)
    for b in range(batch):  # one request at a time: fp32 of all of them is large
        scales = torch.rand(length, heads, 1, generator=generator, device=device) * 2 - 1
        x = (torch.randn(length, heads, dim, generator=generator, device=device) * scales.exp2()).bfloat16()
        append(pages, PAGE, order[b, place // PAGE] * PAGE + place % PAGE, x, SEED)
        dense[b] = turbo4.decode(oracle.entries(pages, dim, PAGE, order[b], length), SEED, torch.bfloat16)
    k, v = (dense, dense) if latent else dense.chunk(2, 1)
    return {
        "q": torch.randn(batch, shape.heads, dim, generator=generator, device=device).bfloat16(),
        "pages": pages,
        "table": order.int(),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device=device),
        "k": k,
        "v": v,
    }


def _caches(given: Given) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values."""
    pages = given["pages"]
    return (pages, pages) if given["k"] is given["v"] else pages.chunk(2, 1)


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    q = given["q"]
    cache = *_caches(given), given["table"], given["lengths"]
    want = oracle.turbo4_decode(q, *cache, PAGE, q.shape[2] ** -0.5, SEED).o
    error = (outputs["o"].double() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
    worst = float(error.nan_to_num(float("inf")).max())
    assert worst <= CLOSE, f"o: error of {worst:.4f} of a row's RMS"


def _ours(lookup: str) -> Callable[[Given], tuple[Call, Mapping[str, Tensor]]]:
    """Bind our op with a table of this kind."""

    def bind(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
        q = given["q"]
        out = Attention(torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        cache = *_caches(given), PAGE, given["table"], given["lengths"]

        def call() -> None:
            turbo4_decode(q, *cache, seed=SEED, lookup=lookup, out=out)

        return call, {"o": out.o}

    return bind


def _torch(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    q, k, v = given["q"][:, :, None], given["k"], given["v"]
    attention, out = torch.nn.functional.scaled_dot_product_attention, {}
    return lambda: out.update(o=attention(q, k, v, enable_gqa=True)[:, :, 0]), out
