"""Time `linear` on a Hopper. DSV4's FP8 linears of few tokens, mode "fp8_block", bf16 out.

given: x uint8 [T, K] and x_scales uint8 [T, K / 128] (of wo_a x [G, T, K], a view of [T, G K], and its scales alike);
w uint8 [N, K] or [G, N, K], E4M3 codes of random bits without NaN, w_scales uint8 of 128 x 128 of them. Output: y bf16
[T, N], or [G, T, N] as a view of [T, G N].

Bytes: weights, tokens and scales once, results once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.config import ModelConfig
from dsv4lib.formats import fp8_block
from dsv4lib.ops.linear import peers, peers_torch
from dsv4lib.ops.linear.op import linear
from dsv4lib.reference.linear import linear_fp8

ARCHS = ("sm_90a",)  # of the rows
EXPONENTS = 118, 124  # E8M0 bytes of weights: 2^-9 to 2^-4
BLOCK = 128
BOUND = 2.0**-8  # of a token's size: bf16, and 13 bits of the tensor core's sums


class Shape(NamedTuple):
    """A linear of the model."""

    name: str
    groups: int
    n: int
    k: int


def shapes(config: ModelConfig) -> list[Shape]:
    """Return the FP8 linears of a layer, those that read the same tokens as one."""
    d, heads = config.hidden, config.n_heads * config.head_dim
    groups = config.o_groups
    return [
        Shape("wq_a+wkv", 1, config.q_lora_rank + config.head_dim, d),
        Shape("wq_b", 1, heads, config.q_lora_rank),
        Shape("indexer wq_b", 1, config.index_heads * config.index_dim, config.q_lora_rank),
        Shape("wo_a", groups, config.o_lora_rank, heads // groups),
        Shape("wo_b", 1, d, groups * config.o_lora_rank),
        Shape("shared w1+w3", 1, 2 * config.expert_width, d),
        Shape("shared w2", 1, d, config.expert_width),
    ]


def rows() -> list[Row]:
    """Decode of both models."""
    return [
        _row(model, shape, tokens)
        for model, config in inputs.MODELS.items()
        for shape in shapes(config)
        for tokens in inputs.DECODE
    ]


def _row(model: str, shape: Shape, tokens: int) -> Row:
    groups, n, k = shape.groups, shape.n, shape.k
    tiles = -(-n // BLOCK) * (k // BLOCK)
    return Row(
        "linear",
        f"{model} {shape.name} T {tokens}",
        bytes=groups * (n * k + tiles + tokens * (k + k // BLOCK + 2 * n)),
        flops=2 * groups * tokens * n * k,
        given=lambda generator: given_of(shape, tokens, generator),
        check=check,
        providers=(providers.in_place("ours", new, _ours), *peers.providers(), *peers_torch.providers()),
    )


def given_of(shape: Shape, tokens: int, generator: torch.Generator) -> Given:
    """Make operands: tokens of normals, weights of random bits."""
    groups, n, k = shape.groups, shape.n, shape.k
    device = generator.device
    q = fp8_block.quantize_activation(inputs.normals(generator, tokens, groups * k))
    w = torch.randint(0, 256, (groups, n, k), generator=generator, device=device, dtype=torch.uint8)
    w.masked_fill_(w & 0x7F == 0x7F, 0x38)  # no NaN
    size = groups, -(-n // BLOCK), k // BLOCK
    w_scales = torch.randint(*EXPONENTS, size, generator=generator, device=device, dtype=torch.uint8)
    if groups == 1:
        return {"x": q.codes, "x_scales": q.scales, "w": w[0], "w_scales": w_scales[0]}
    x, x_scales = (t.unflatten(1, (groups, -1)).transpose(0, 1) for t in (q.codes, q.scales))
    return {"x": x, "x_scales": x_scales, "w": w, "w_scales": w_scales}


def new(given: Given) -> dict[str, Tensor]:
    """Allocate the output."""
    *groups, tokens, _ = given["x"].shape
    n = given["w"].shape[-2]
    y = given["w"].new_empty(tokens, *groups, n, dtype=torch.bfloat16)
    return {"y": y.transpose(0, 1) if groups else y}


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    x, w = (given["x"], given["x_scales"]), (given["w"], given["w_scales"])
    linear(x, w, mode="fp8_block", out=(out["y"], None), backend="native")


def check(given: Given, out: Mapping[str, Tensor]) -> None:
    """Every token against fp64 of the operands: its error beside its size.

    Raises:
        AssertionError: a token is off by more than rounding.
    """
    x = fp8_block.FP8Tensor(given["x"], given["x_scales"], (1, BLOCK))
    w = fp8_block.FP8Tensor(given["w"], given["w_scales"], (BLOCK, BLOCK))
    truth = linear_fp8(x, w)
    size = truth.square().mean(-1).sqrt()
    error = ((out["y"].double() - truth).square().mean(-1).sqrt() / size).nan_to_num(float("inf"))
    assert float(error.max()) <= BOUND, f"y: a token is off by {float(error.max()):.3g} of its size"
