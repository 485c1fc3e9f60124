"""The experts of all ranks on the tokens of all ranks, rounded where the fused kernel rounds.

    h       = silu(min(W1 x, limit)) * clip(W3 x, -limit, limit) * weight      quantised to MXFP8 or NVFP4
    y[t, s] = W2 h                                                             rounded to bf16: what returns to the rank
    out[t]  = sum_s y[t, s]                                                    slots in order, in fp32

The weight may multiply y instead, before it is rounded (`Rounding.weighted`).
What rank a token or an expert is on is in no number: the ranks' results are those of one rank with all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e4m3, fp8_block, nvfp4, ue8m0
from dsv4lib.reference.moe_gemm import swiglu

GROUP = 32


class Rounding(NamedTuple):
    """Say how h is quantised.

    Attributes:
        h_scales: [E], global scales of NVFP4, by expert; None: MXFP8.
        weighted: "l1": h has the routing weight; "l2": y has it.
    """

    h_scales: torch.Tensor | None = None
    weighted: str = "l1"


class Routes(NamedTuple):
    """A rank's tokens.

    Attributes:
        x: fp64 [T, d]. experts: integers [T, k]; a number outside 0 .. E - 1 is no expert. weights: fp64 [T, k].
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def mega_moe(
    ranks: Sequence[Routes | tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    limit: float,
    rounding: Rounding | None = None,
) -> list[torch.Tensor]:
    """Compute the layer for every rank.

    Args:
        ranks: what each rank brings, perhaps no tokens.
        w1 (gate), w3 (up): fp64 [E, I, d], numbers of all experts in the order of ranks. w2 (down): [E, d, I].
        limit: of the SwiGLU clamp. rounding: of h; None: to MXFP8, with its weight.

    Returns:
        fp32 [T, d] of every rank, not rounded any more.

    Raises:
        ArgumentError: experts and weights of different shapes.
    """
    how = rounding or Rounding()
    return [_of_rank(Routes(*one), w1, w2, w3, limit, how) for one in ranks]


def _of_rank(
    routes: Routes, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, limit: float, rounding: Rounding
) -> torch.Tensor:
    x, experts, weights = routes
    if experts.shape != weights.shape or experts.dim() != 2 or len(experts) != len(x):
        allowed = f"[{len(x)}, k], as weights {tuple(weights.shape)}"
        raise ArgumentError("experts.shape", tuple(experts.shape), allowed)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(experts.shape[1]):  # slots in order: sums of fp32 depend on it
        for e in range(len(w1)):
            tokens = torch.where(experts[:, slot] == e)[0]
            if len(tokens):
                own = x[tokens]
                h, weight = swiglu(own @ w1[e].T, own @ w3[e].T, limit), weights[tokens, slot, None]
                before, after = (weight, 1.0) if rounding.weighted == "l1" else (1.0, weight)
                y = quantised(h * before, rounding, e) @ w2[e].T * after
                out[tokens] += y.bfloat16().float()
    return out


def quantised(h: torch.Tensor, rounding: Rounding, expert: int) -> torch.Tensor:
    """Round h of an expert to its format and back, fp64."""
    if rounding.h_scales is None:
        return mxfp8(h)
    return nvfp4.fake_quantize(h, rounding.h_scales[expert])


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Round to MXFP8 and back, fp64."""
    q = fp8_block.quantize_activation(x, GROUP)
    scales = ue8m0.decode(q.scales, torch.float64).repeat_interleave(GROUP, -1)
    return e4m3.decode(q.codes, torch.float64) * scales
