"""Time `mla_decode`. One query token a request over a paged cache of latents, requests of equal length.

given: q bf16 [B, H, 576], of which q_nope and q_pe are views; cache [P, 64, 576] bf16, or E4M3 with kv_scale; table
int32 [B, N], pages in any order; lengths int32 [B]. Output: o bf16 [B, H, 512].

Rows: 1K to 64K tokens of 32 requests, 1 to 128 requests of 4K, few requests of 32K; 128 heads (one GPU has all) and 16
(eight GPUs share them). The largest cache of a row is 2.4 GB. FlashMLA has no dense FP8 cache on a Hopper.

Bytes: the tokens' entries once, Q and O.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.mla_decode import peers, peers_torch
from dsv4lib.ops.mla_decode.op import mla_decode
from dsv4lib.ops.mla_decode.peers import SM_SCALE
from dsv4lib.reference import mla_decode as oracle

LATENT, ENTRY, E4M3 = oracle.LATENT, oracle.LATENT + oracle.ROPE, torch.float8_e4m3fn
PAGE = 64
HEADS = (128, 16)
SIZES = (  # (tokens, requests)
    *((tokens, 32) for tokens in (1024, 4096, 16384, 65536)),
    *((4096, batch) for batch in (1, 2, 4, 8, 16, 64, 128)),
    *((32768, batch) for batch in (1, 8)),
    (8192, 32),
)
FP8_SIZES = ((4096, 32), (4096, 128), (32768, 1))
KV_SCALE = 0.5  # of FP8
CLOSE = 0.01  # of the RMS of a row of O, as RMS: P in bf16 costs 0.002, O in bf16 0.0017
CHECKED = 8  # requests that are compared, spread over the batch
GOAL = 1.0  # never slower than FlashMLA


def rows() -> list[Row]:
    """Requests and lengths, with all heads and with an eighth of them."""
    found = [_row(heads, *size) for heads in HEADS for size in SIZES]
    return found + [_row(heads, *size, fp8=True) for heads in HEADS for size in FP8_SIZES]


def _row(heads: int, tokens: int, batch: int, fp8: bool = False) -> Row:
    return Row(
        "mla_decode",
        f"h{heads}{' FP8 cache' * fp8} S {tokens} T {batch}",
        bytes=batch * ((1 if fp8 else 2) * tokens * ENTRY + 2 * heads * (ENTRY + LATENT)),
        flops=2 * batch * heads * tokens * (ENTRY + LATENT),
        given=lambda generator: given_of(heads, tokens, batch, generator, fp8),
        check=check,
        providers=(
            providers.in_place("ours", new, _ours),
            *(() if fp8 else (*peers.providers(), *peers_torch.providers())),
        ),
        goal=None if fp8 else GOAL,
    )


def given_of(heads: int, tokens: int, batch: int, generator: torch.Generator, fp8: bool = False) -> Given:
    """Make a step: every request has pages of its own, in any order."""
    device, width = generator.device, -(-tokens // (2 * PAGE)) * 2
    count = batch * width
    cache = torch.empty(count, PAGE, ENTRY, dtype=E4M3 if fp8 else torch.bfloat16, device=device)
    for first in range(0, count, 4096):  # fp32 of all of them is large
        part = cache[first : first + 4096]
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    order = torch.randperm(count, generator=generator, device=device)
    return {
        "q": torch.randn(batch, heads, ENTRY, generator=generator, device=device).bfloat16(),
        "cache": cache,
        "table": order.view(batch, width).int(),
        "lengths": torch.full((batch,), tokens, dtype=torch.int32, device=device),
        "kv_scale": KV_SCALE if fp8 else 1.0,
    }


def new(given: Given) -> dict[str, Tensor]:
    """Allocate the outputs."""
    q = given["q"]
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return {"o": torch.empty_like(q[..., :LATENT], memory_format=torch.contiguous_format), "lse": lse}


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    q = given["q"]
    cache = given["cache"], given["lengths"], given["table"]
    mla_decode(q[..., :LATENT], q[..., LATENT:], *cache, kv_scale=given["kv_scale"], out=out["o"], lse=out["lse"])


def check(given: Given, out: Mapping[str, Tensor]) -> None:
    """Compare some requests with fp64.

    Raises:
        AssertionError: a head is off by more than rounding.
    """
    batch = len(given["q"])
    for b in range(0, batch, -(-batch // CHECKED)):
        one = slice(b, b + 1)
        q = given["q"][one]
        cache = given["cache"], given["lengths"][one], given["table"][one]
        want = oracle.mla_decode(q[..., :LATENT], q[..., LATENT:], *cache, SM_SCALE, kv_scale=given["kv_scale"]).out
        error = (out["o"][one].double() - want).square().mean(-1).sqrt() / want.square().mean(-1).sqrt()
        worst = float(error.nan_to_num(float("inf")).max())
        assert worst <= CLOSE, f"o: request {b} is off by {worst:.4f} of a row's RMS"
