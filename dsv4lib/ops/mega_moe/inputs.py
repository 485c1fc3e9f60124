"""Tokens, routes and experts of several ranks that make a wrong fused MoE visible.

Tokens and features differ in scale, so none stands in for another; a third of an expert's results reach the clamp. Of
NVFP4 all global scales differ, and some blocks of tokens and of h are above their calibrated range. Some routes are -1.
The memory of tokens that a rank does not have is NaN: who reads it, shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4lib.formats import e4m3, fp8_block, mxfp4, nvfp4, scale_swizzle, ue8m0
from dsv4lib.ops.mega_moe.layout import FORMATS, Layout

if TYPE_CHECKING:
    from dsv4lib.ops.moe_gemm.operands import Operand

CLAMP = 10.0
MASKED = 0.15  # share of routes that are -1
SPREAD = 6.0  # of gate and up
X_SIZE = 8.0  # what the largest tokens exceed
CALIBRATED = 0.75  # of the largest possible values: of the ranges of h the smallest, the largest half as much more


class Tokens(NamedTuple):
    """What a rank brings: arguments of `mega_moe`, and its tokens as numbers, fp64 [T, H], and raw, fp32."""

    x: Tensor
    x_scale: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    numbers: Tensor
    raw: Tensor


class Factors(NamedTuple):
    """A rank's factors of `mega_moe`; of MXFP4 None."""

    l1_alphas: Tensor | None = None
    l2_alphas: Tensor | None = None
    l2_act_scales: Tensor | None = None


class Matrices(NamedTuple):
    """Gate, down and up of all experts, [E, I, H], [E, H, I], [E, I, H]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor


class Weights(NamedTuple):
    """Matrices in four bits.

    Attributes:
        codes: uint8 [E, N, K / 2]. scales: uint8 [E, N, K / group]. alphas: fp32 [E], global scales, or None.
        numbers: fp64 [E, N, K].
    """

    codes: Tensor
    scales: Tensor
    alphas: Tensor | None
    numbers: Tensor


@dataclass
class Case:
    """All ranks' arguments.

    Attributes:
        layout: of the group. ranks: by rank. l1, l2, factors: weights by rank.
        w1, w2, w3: gate, down and up of all experts as numbers, fp64. raw: before they were quantised, fp32.
    """

    layout: Layout
    ranks: list[Tokens]
    l1: list[Operand]
    l2: list[Operand]
    factors: list[Factors]
    w1: Tensor
    w2: Tensor
    w3: Tensor
    raw: Matrices

    @property
    def h_scales(self) -> Tensor | None:
        """Return the global scales of h of all experts, or None."""
        parts = [one.l2_act_scales for one in self.factors]
        return None if parts[0] is None else torch.cat(parts)

    def as_one_rank(self) -> Case:
        """All tokens on one rank that owns all experts."""
        from dsv4lib.ops.moe_gemm.operands import Operand  # needs the DSL

        one = self.layout
        layout = replace(one, world=1, max_tokens=one.world * one.max_tokens)
        tokens = Tokens(*(torch.cat(parts) for parts in zip(*self.ranks, strict=True)))
        joined = [
            Operand(torch.cat([x.codes for x in layer]), torch.cat([x.scales for x in layer]))
            for layer in (self.l1, self.l2)
        ]
        factors = self.factors[0]
        if one.mode == "nvfp4":
            factors = Factors(*(torch.cat(parts) for parts in zip(*self.factors, strict=True)))
        return Case(layout, [tokens], [joined[0]], [joined[1]], [factors], self.w1, self.w2, self.w3, self.raw)


def rerouted(made: Case) -> Case:
    """Make the same ranks' next call: as many routes to each expert, but of other tokens, and other weights."""
    ranks = [
        one._replace(topk_idx=one.topk_idx.roll(1, 0), topk_weights=one.topk_weights.flip(0) * 0.75)
        for one in made.ranks
    ]
    return replace(made, ranks=ranks)


def case(
    layout: Layout,
    tokens: list[int],
    seed: int = 0,
    masked: float = MASKED,
    busy: int | None = None,
    headroom: float = 1.0,
) -> Case:
    """Make a case.

    Args:
        tokens: of each rank, 0 to layout.max_tokens.
        masked: share of routes that are -1.
        busy: an expert that every token's first slot goes to.
        headroom: of NVFP4, multiplies the calibrated ranges of tokens and h; 2 is more than they take.
    """
    generator = torch.Generator().manual_seed(seed)
    one = layout
    ranks = [_tokens(one, n, generator, masked, busy, headroom) for n in tokens]
    w13 = _matrix(generator, one.experts, 2 * one.intermediate, one.hidden) * (SPREAD * one.hidden**-0.5)
    w2 = _matrix(generator, one.experts, one.hidden, one.intermediate) * one.intermediate**-0.5
    gate_up = w13.unflatten(1, (-1, 2, 8))
    raw = Matrices(gate_up[:, :, 0].flatten(1, 2), w2, gate_up[:, :, 1].flatten(1, 2))
    gate, down, up = (quantised(w, one.mode) for w in raw)
    codes, scales = (
        torch.stack([_eights(a), _eights(b)], 2).flatten(1, 3) for a, b in zip(gate[:2], up[:2], strict=True)
    )
    l1, l2 = (_shared(c, scale_swizzle.swizzle(s), one.world) for c, s in ((codes, scales), (down.codes, down.scales)))
    factors = [Factors()] * one.world
    if one.mode == "nvfp4":
        h_scales = headroom * CLAMP**2 / nvfp4.RANGE * CALIBRATED * torch.logspace(0, 0.5, one.experts, base=2.0)
        alphas = torch.stack([gate.alphas, up.alphas], 1) * x_scale_of_all(headroom)
        parts = zip(*(x.chunk(one.world) for x in (alphas, down.alphas * h_scales, h_scales)), strict=True)
        factors = [Factors(*(x.contiguous() for x in part)) for part in parts]
    return Case(one, ranks, l1, l2, factors, gate.numbers, down.numbers, up.numbers, raw)


def _eights(rows: Tensor) -> Tensor:
    return rows.unflatten(1, (-1, 8))


def x_scale_of_all(headroom: float = 1.0) -> Tensor:
    """Return the calibrated global scale of tokens, one for all ranks."""
    return torch.tensor(headroom * X_SIZE / nvfp4.RANGE)


def quantised(w: Tensor, mode: str) -> Weights:
    """Quantise matrices [E, N, K] to MXFP4, or to NVFP4 with a global scale each."""
    if mode == "w4a8":
        q = mxfp4.quantize(w)
        return Weights(q.packed, q.scales, None, mxfp4.dequantize(q, torch.float64))
    found = [nvfp4.quantize(one) for one in w]
    numbers = torch.stack([nvfp4.dequantize(q, torch.float64) for q in found])
    codes, scales, alphas = (
        torch.stack([getattr(q, name) for q in found]) for name in ("packed", "scales", "global_scale")
    )
    return Weights(codes, scales, alphas, numbers)


def _tokens(
    one: Layout, count: int, generator: torch.Generator, masked: float, busy: int | None, headroom: float
) -> Tokens:
    size = torch.exp2(torch.rand(count, 1, generator=generator) * 4 - 2)
    raw = torch.randn(count, one.hidden, generator=generator) * size
    codes, x_scales, numbers = rows_of(raw, one.mode, headroom)
    chosen = torch.rand(count, one.experts, generator=generator).topk(one.topk).indices
    if busy is not None:
        elsewhere = (chosen != busy).all(1)
        chosen[elsewhere, 0] = busy
    chosen[torch.rand(chosen.shape, generator=generator) < masked] = -1
    weights = torch.rand(chosen.shape, generator=generator) + 0.1
    return Tokens(codes, x_scales, chosen, weights, numbers, raw)


def rows_of(x: Tensor, mode: str, headroom: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens [T, H] to a mode's format; returns codes, scales and what they stand for, fp64."""
    u8 = torch.uint8
    if mode == "nvfp4":
        q = nvfp4.quantize(x, x_scale_of_all(headroom))
        return q.packed.view(u8), q.scales.view(u8), nvfp4.dequantize(q, torch.float64)
    q = fp8_block.quantize_activation(x, FORMATS[mode].group)
    scales = ue8m0.decode(q.scales, torch.float64).repeat_interleave(FORMATS[mode].group, -1)
    return q.codes.view(u8), q.scales.view(u8), e4m3.decode(q.codes, torch.float64) * scales


def _matrix(generator: torch.Generator, experts: int, rows: int, columns: int) -> Tensor:
    """Normals whose rows and matrices differ in scale."""
    w = torch.randn(experts, rows, columns, generator=generator)
    size = torch.logspace(-1, 1, rows, base=2.0)[torch.randperm(rows, generator=generator), None]
    return w * size * torch.logspace(-0.5, 0.5, experts, base=2.0)[:, None, None]


def _shared(codes: Tensor, scales: Tensor, world: int) -> list[Operand]:
    from dsv4lib.ops.moe_gemm.operands import Operand  # needs the DSL

    return [
        Operand(c.contiguous(), s.contiguous()) for c, s in zip(codes.chunk(world), scales.chunk(world), strict=True)
    ]
