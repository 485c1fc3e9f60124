"""Run what stands around the experts' GEMMs: rows are laid out by expert, and each token's rows are added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.reference.moe_dispatch import Dispatch
from dsv4lib.reference.moe_dispatch import moe_dispatch as sorted_routes

ALIGN, WIDTH = 8, 64  # rows from which an expert may start here; 128 on a B200. Features of a token
ROUNDING = 2**-8  # of an output in bf16, relative to the largest one


@dataclass(frozen=True)
class Routes:
    """Routes of some tokens, and where dispatch put them.

    Attributes:
        experts: int32 [T, k], -1: masked.
        weights: fp32 [T, k].
        placed: what the op wrote.
        wrong: rows and tokens that are not those of the oracles.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    placed: Dispatch
    wrong: int


def run_routes(tokens: int = 9, count: int = 5, k: int = 3, seed: int = 0, exchanged: bool = False) -> Routes:
    """Dispatch random routes, multiply each row by its expert's number, and combine, in the emulator.

    Args:
        tokens: T. count: of experts. k: experts a token. seed: of routes, weights and values.
        exchanged: combine takes the rows of two tokens for each other's, as an index off by one would.
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack([torch.randperm(count - 1, generator=generator)[:k] for _ in range(tokens)])
    experts = (picks + (picks >= 1)).int()  # expert 1 stays empty
    experts[-1, -1] = -1
    weights = torch.rand(tokens, k, generator=generator)
    x = torch.randn(tokens, WIDTH, generator=generator)
    placed = moe_dispatch(experts, weights, count=count, align=ALIGN, backend="emulator")
    oracle = sorted_routes(experts, weights, count, len(placed.rows), ALIGN)
    wrong = sum(int((a != b).sum()) for a, b in zip(placed, oracle, strict=True))

    y = torch.full((len(placed.rows), WIDTH), torch.nan, dtype=torch.bfloat16)  # no route names the rest
    rows = (placed.rows >= 0).nonzero()[:, 0]
    owner = torch.searchsorted(placed.offsets[1:], rows, right=True)
    y[rows] = (x[placed.rows[rows].long()] * (owner[:, None] + 1)).bfloat16()
    row_of = placed.row_of.roll(1, 0) if exchanged else placed.row_of
    out = moe_combine(y, row_of, weights, backend="emulator").double()
    factor = torch.where(experts < 0, 0.0, weights.double() * (experts + 1))
    truth = x.double() * factor.sum(1, keepdim=True)
    off = (out - truth).abs().amax(1) / truth.abs().max()
    return Routes(experts, weights, placed, wrong + int((~(off <= 2 * ROUNDING)).sum()))


def route_map(routes: Routes) -> Figure:
    """Draw the row of the experts' operand that each route takes."""
    return viz.layout.grid(
        routes.placed.row_of.numpy(), "row of each route", ("token", "choice of the token"), what="row"
    )
