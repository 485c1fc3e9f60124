"""Time mHC (`dsv4lib.ops.mhc`). Write-back of one site, coefficients, mixture and RMSNorm of the next.

Beside "ours" stands the variant of the kernel that the op does not choose, "ours, few_tokens" or "ours,
many_tokens" (`ops.mhc.variants`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.bench.ops.providers import Outputs, compiled, in_place
from dsv4lib.ops.mhc import peers
from dsv4lib.ops.mhc.variants import Variant, variant_of, variants
from dsv4lib.reference import mhc as oracle
from dsv4lib.reference.rmsnorm import rmsnorm

N, WIDTH, ITERS, EPS = 4, 24, 20, 1e-6
MODELS = (("Flash", 4096), ("Pro", 7168))
TOKENS = (1, 8, 32, 128, 4096)
PARTS = 256  # tokens that the check's fp64 sees at once
# The projection's products may be those of tf32 (DeepGEMM's are): 2^-11 of a logit of up to 5, a sigmoid's slope 1/4.
COEFFICIENT = 3e-3
ROUNDING = 2.0**-8  # bf16


def make(tokens: int, d: int, generator: torch.Generator) -> Given:
    """Make the operands of a row.

    streams [T, 4, d] and f [T, d] bf16, post [T, 4], comb [T, 4, 4], fn [24, 4 d], scale [3], base [24] fp32, and
    weight [d] fp32, whose values are those of bf16.
    """
    normal = partial(torch.randn, generator=generator, device=generator.device)
    sizes = torch.logspace(-1, 1, tokens, base=2.0, device=generator.device)[:, None]
    return {
        "streams": (normal(tokens, N, d) * sizes[:, None]).bfloat16(),
        "f": (normal(tokens, d) * sizes.flip(0)).bfloat16(),
        "post": 2 * torch.sigmoid(normal(tokens, N)),
        "comb": oracle.sinkhorn(normal(tokens, N, N), ITERS, EPS).contiguous(),
        "fn": normal(WIDTH, N * d) * (N * d) ** -0.5,
        "scale": 1 + 0.3 * normal(3),
        "base": normal(WIDTH),
        "weight": (1 + 0.3 * normal(d)).bfloat16().float(),
    }


def _expected(given: Given, tokens: slice) -> tuple[torch.Tensor, ...]:
    """fp64 (streams and y before rounding, post, comb), and the sums of magnitudes of the first two."""
    streams, f, post, comb = (given[name][tokens].double() for name in ("streams", "f", "post", "comb"))
    exact = oracle.post(f, streams, post, comb)
    size = oracle.post(f.abs(), streams.abs(), post, comb)
    z = exact.bfloat16().double()
    fn, scale, base = (given[name].double() for name in ("fn", "scale", "base"))
    pre, post, comb = oracle.coefficients(z, fn, scale, base, iters=ITERS, hc_eps=EPS, rms_eps=EPS)
    x, weight = oracle.pre(z, pre), given["weight"].double()
    y_size = oracle.pre(z.abs(), pre) * weight.abs() * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return exact, rmsnorm(x, weight, EPS), post, comb, size, y_size


def check(given: Given, outputs: Mapping[str, torch.Tensor]) -> None:
    """Compare streams, y, post and comb with the oracle.

    streams to their rounding; y to that of x and its own and the coefficients' error.
    """
    tokens = given["streams"].shape[0]
    for first in range(0, tokens, PARTS):
        part = slice(first, min(first + PARTS, tokens))
        exact, y, post, comb, size, y_size = _expected(given, part)
        bounds = {
            "streams": (exact, ROUNDING * exact.abs() + 2.0**-20 * size),
            "y": (y, 2 * ROUNDING * y.abs() + (COEFFICIENT + ROUNDING) * y_size),
            "post": (post, torch.full_like(post, 2 * COEFFICIENT)),
            "comb": (comb, torch.full_like(comb, COEFFICIENT)),
        }
        for name, (want, bound) in bounds.items():
            error = (outputs[name][part].double().view_as(want) - want).abs()
            worst = float((error / bound).nan_to_num(math.inf).max())
            assert worst <= 1, f"{name} of tokens {part.start} to {part.stop - 1}: {worst:.3g} times the bound"


def outputs(given: Given) -> Outputs:
    """Allocate streams, y, post, comb."""
    return {
        "streams": torch.empty_like(given["streams"]),
        "y": torch.empty_like(given["f"]),
        "post": torch.empty_like(given["post"]),
        "comb": torch.empty_like(given["comb"]),
    }


def _ours(given: Given) -> tuple[Call, Outputs]:
    from dsv4lib.ops.mhc.op import Site, mhc_post_pre

    out = outputs(given)
    site = Site(given["fn"], given["scale"], given["base"], given["weight"])
    inputs = (given[name] for name in ("streams", "f", "post", "comb"))
    after = out["streams"], out["y"], out["post"], out["comb"]
    return partial(mhc_post_pre, *inputs, site, out=after, backend="native"), out


def call_of(given: Given, out: Outputs, backend: str = "native") -> Any:
    """Make the op's call of a row, for a variant that it would not choose."""
    from dsv4lib.ops.mhc import op

    inputs = (given[name] for name in ("streams", "f", "post", "comb"))
    site = op.Site(*(given[name] for name in op.Site._fields))
    return op.Call(*inputs, site, op.Outputs(**out), None, None, ITERS, op.Eps(EPS, EPS), False, backend)


def after_mhc(given: Given, streams: torch.Tensor, backend: str = "native") -> Outputs:
    """What few_tokens makes of streams that are written back already."""
    from dsv4lib.ops.mhc.op import run

    out = {name: tensor for name, tensor in outputs(given).items() if name != "streams"}
    call = call_of(given, {"streams": None, **out}, backend)
    run(call._replace(streams=streams, f=None, post=None, comb=None), Variant.FEW_TOKENS)
    return out


def _as_variant(variant: Variant) -> Callable[[Given, Outputs], None]:
    def write(given: Given, out: Outputs) -> None:
        from dsv4lib.ops.mhc.op import run

        run(call_of(given, out), variant)

    return write


def _forms(tokens: int, d: int) -> tuple[Provider, ...]:
    """Ours in the variants that fit and that the op does not choose for this many tokens."""
    others = [variant for variant in variants(d) if variant != variant_of(tokens, d)]
    return tuple(in_place(f"ours, {variant.value}", outputs, _as_variant(variant)) for variant in others)


def _plain(streams, f, post, comb, fn, scale, base, weight) -> Outputs:
    """The reference's lines in fp32, with the model's roundings."""
    new = oracle.post(f.float(), streams.float(), post, comb).bfloat16()
    z = new.float()
    pre, post, comb = oracle.coefficients(z, fn, scale, base, iters=ITERS, hc_eps=EPS, rms_eps=EPS)
    y = rmsnorm(oracle.pre(z, pre).bfloat16().float(), weight, EPS).bfloat16()
    return {"streams": new, "y": y, "post": post, "comb": comb}


def _goal(tokens: int) -> float | None:
    return {1: 0.6, 32: 0.6, 128: 0.6, 4096: 0.65}.get(tokens)


def moved(tokens: int, d: int) -> int:
    """Return the bytes that a call must read and write."""
    return tokens * (10 * d * 2 + 2 * 20 * 4) + WIDTH * N * d * 4 + d * 4


def rows() -> list[Row]:
    """Flash and Pro, decode and 4096 tokens."""
    names = ("streams", "f", "post", "comb", "fn", "scale", "base", "weight")
    ours, others = Provider("ours", _ours), (compiled(_plain, *names), *peers.providers())
    return [
        Row(
            op="mhc",
            shape=f"{model} T {tokens}",
            bytes=moved(tokens, d),
            flops=tokens * 2 * d * (N * WIDTH + N * (N + 1) + N),
            given=partial(make, tokens, d),
            check=check,
            providers=(ours, *_forms(tokens, d), *others),
            goal=_goal(tokens) if model == "Flash" or tokens == 4096 else None,
        )
        for model, d in MODELS
        for tokens in TOKENS
    ]
