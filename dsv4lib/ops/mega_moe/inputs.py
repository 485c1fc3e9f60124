"""Tokens, routes and experts of several ranks that make a wrong fused MoE visible.

Tokens and features differ in scale, so none stands in for another; a third of an expert's results reach the clamp. Some
routes are -1. The memory of tokens that a rank does not have is NaN: who reads it, shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.formats import e4m3, fp8_block, mxfp4, scale_swizzle, ue8m0
from dsv4lib.ops.mega_moe.layout import GROUP, Layout
from dsv4lib.ops.moe_gemm.operands import Operand

CLAMP = 10.0
MASKED = 0.15  # share of routes that are -1
SPREAD = 6.0  # of gate and up


class Tokens(NamedTuple):
    """What a rank brings: arguments of `mega_moe`, and its tokens as numbers, fp64 [T, H]."""

    x: Tensor
    x_scale: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    numbers: Tensor


@dataclass
class Case:
    """All ranks' arguments.

    Attributes:
        layout: of the group. ranks: by rank. l1, l2: weights by rank.
        w1, w2, w3: gate, down and up of all experts as numbers, fp64.
    """

    layout: Layout
    ranks: list[Tokens]
    l1: list[Operand]
    l2: list[Operand]
    w1: Tensor
    w2: Tensor
    w3: Tensor

    def as_one_rank(self) -> Case:
        """All tokens on one rank that owns all experts."""
        one = self.layout
        layout = Layout(1, one.experts, one.world * one.max_tokens, one.topk, one.hidden, one.intermediate)
        tokens = Tokens(*(torch.cat(parts) for parts in zip(*self.ranks, strict=True)))
        joined = [
            Operand(torch.cat([x.codes for x in layer]), torch.cat([x.scales for x in layer]))
            for layer in (self.l1, self.l2)
        ]
        return Case(layout, [tokens], [joined[0]], [joined[1]], self.w1, self.w2, self.w3)


def rerouted(made: Case) -> Case:
    """Make the same ranks' next call: as many routes to each expert, but of other tokens, and other weights."""
    ranks = [
        one._replace(topk_idx=one.topk_idx.roll(1, 0), topk_weights=one.topk_weights.flip(0) * 0.75)
        for one in made.ranks
    ]
    return replace(made, ranks=ranks)


def case(layout: Layout, tokens: list[int], seed: int = 0, masked: float = MASKED, busy: int | None = None) -> Case:
    """Make a case.

    Args:
        tokens: of each rank, 0 to layout.max_tokens.
        masked: share of routes that are -1.
        busy: an expert that every token's first slot goes to.
    """
    generator = torch.Generator().manual_seed(seed)
    one = layout
    ranks = [_tokens(one, n, generator, masked, busy) for n in tokens]
    w13 = _matrix(generator, one.experts, 2 * one.intermediate, one.hidden) * (SPREAD * one.hidden**-0.5)
    w2 = _matrix(generator, one.experts, one.hidden, one.intermediate) * one.intermediate**-0.5
    first, second = (mxfp4.quantize(w) for w in (w13, w2))
    l1, l2 = (_shared(q.packed, scale_swizzle.swizzle(q.scales), one.world) for q in (first, second))
    gate_up = mxfp4.dequantize(first, torch.float64).unflatten(1, (-1, 2, 8))
    w1, w3 = (gate_up[:, :, i].flatten(1, 2) for i in (0, 1))
    return Case(one, ranks, l1, l2, w1, mxfp4.dequantize(second, torch.float64), w3)


def _tokens(one: Layout, count: int, generator: torch.Generator, masked: float, busy: int | None) -> Tokens:
    size = torch.exp2(torch.rand(count, 1, generator=generator) * 4 - 2)
    q = fp8_block.quantize_activation(torch.randn(count, one.hidden, generator=generator) * size, GROUP)
    chosen = torch.rand(count, one.experts, generator=generator).topk(one.topk).indices
    if busy is not None:
        elsewhere = (chosen != busy).all(1)
        chosen[elsewhere, 0] = busy
    chosen[torch.rand(chosen.shape, generator=generator) < masked] = -1
    weights = torch.rand(chosen.shape, generator=generator) + 0.1
    scales = ue8m0.decode(q.scales, torch.float64).repeat_interleave(GROUP, -1)
    numbers = e4m3.decode(q.codes, torch.float64) * scales
    return Tokens(q.codes.view(torch.uint8), q.scales.view(torch.uint8), chosen, weights, numbers)


def _matrix(generator: torch.Generator, experts: int, rows: int, columns: int) -> Tensor:
    """Normals whose rows and matrices differ in scale."""
    w = torch.randn(experts, rows, columns, generator=generator)
    size = torch.logspace(-1, 1, rows, base=2.0)[torch.randperm(rows, generator=generator), None]
    return w * size * torch.logspace(-0.5, 0.5, experts, base=2.0)[:, None, None]


def _shared(codes: Tensor, scales: Tensor, world: int) -> list[Operand]:
    return [
        Operand(c.contiguous(), s.contiguous()) for c, s in zip(codes.chunk(world), scales.chunk(world), strict=True)
    ]
