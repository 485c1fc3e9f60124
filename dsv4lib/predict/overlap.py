"""Predict which part of a fused MoE layer's communication is exposed, on ranks that are joined by NVLink.

A chain of a rank's experts, all with the same load. Nothing here is measured:

    pulled[e]   = pulled[e - 1] + rows * remote * dispatch bytes / link
    first[e]    = max(first[e - 1], pulled[e]) + L1          GEMM 1 of an expert waits for its rows
    second[e]   = second[e - 1] + L2                         GEMM 2 of all comes after GEMM 1 of all
    returned[e] = max(returned[e - 1], second[e]) + rows * remote * combine bytes / link

GEMM: the longer of FLOPs over the rate of the MMA and weights over HBM, without launch, latencies or tiles: the best
case for the GEMMs, hence the worst for what must hide under them. Exposed dispatch is what GEMM 1 waits for its rows;
exposed combine is what comes after the last GEMM.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.errors import ArgumentError
from dsv4lib.predict.moe import MODELS, TOP, Model
from dsv4lib.predict.rates import Gpu, gpu


class Products(NamedTuple):
    """How activations of a format are multiplied: rate of the MMA, as a multiple of bf16's, and bytes of a weight."""

    rate: int
    weight: float


SCALE_GROUP = 32  # elements of a UE8M0 scale
PRODUCTS = {  # weights with their scales: MXFP4, NVFP4, bf16
    "mxfp8": Products(2, 4.25 / 8),
    "nvfp4": Products(4, 4.5 / 8),
    "bf16": Products(1, 2.0),
}
PUBLISHED = {  # us, 8 B200, DeepGEMM #316, tokens a rank
    ("Flash", 1): 56.5,
    ("Flash", 512): 146.5,
    ("Flash", 8192): 1283.0,
    ("Flash", 32768): 4855.0,
    ("Pro", 1): 108.1,
    ("Pro", 512): 369.6,
    ("Pro", 8192): 2818.5,
    ("Pro", 32768): 10655.0,
}


def dispatch_bytes(hidden: int, activations: str = "mxfp8") -> int:
    """Count the bytes of a row that an owner pulls: codes, scales and its weight.

    Args:
        hidden: H, a multiple of 32.
        activations: ``mxfp8`` (E8M0 per 32), ``nvfp4`` (E4M3 per 16) or ``bf16``.
    """
    sizes = {"mxfp8": hidden + hidden // SCALE_GROUP, "nvfp4": hidden // 2 + hidden // 16, "bf16": 2 * hidden}
    if activations not in sizes:
        raise ArgumentError("activations", activations, ", ".join(sizes))
    return sizes[activations] + 4


def combine_bytes(hidden: int) -> int:
    """Count the bytes of a row that an owner returns: bf16."""
    return 2 * hidden


class Predicted(NamedTuple):
    """Times of a layer on one rank, all predicted, us.

    Attributes:
        compute: both GEMMs of all experts.
        dispatch, combine: on the link, whether hidden or not.
        exposed_dispatch, exposed_combine: what of them nothing hides.
    """

    compute: float
    dispatch: float
    combine: float
    exposed_dispatch: float
    exposed_combine: float

    @property
    def total(self) -> float:
        """Compute the time of the layer."""
        return self.compute + self.exposed_dispatch + self.exposed_combine

    @property
    def one_after_the_other(self) -> float:
        """Compute the time with nothing hidden."""
        return self.dispatch + self.compute + self.combine

    @property
    def hidden(self) -> float:
        """Compute the share of communication that is hidden, 1 where there is none."""
        moved = self.dispatch + self.combine
        return 1 - (self.exposed_dispatch + self.exposed_combine) / moved if moved else 1.0


def predict(
    model: str | Model,
    tokens: int,
    ranks: int = 8,
    topk: int = TOP,
    card: Gpu | None = None,
    activations: str = "mxfp8",
) -> Predicted:
    """Predict one MoE layer of ``tokens`` tokens a rank, experts chosen evenly.

    Args:
        model: a name in `moe.MODELS`, or sizes.
        tokens: of each rank. ranks: of the group; they divide the experts. topk: experts a token.
        card: None: a B200. activations: of `dispatch_bytes`; weights are those of `PRODUCTS`.

    Raises:
        ArgumentError: a size that is not positive, or experts that the ranks do not divide.
    """
    one = MODELS[model] if isinstance(model, str) else model
    for name, value in {"tokens": tokens, "ranks": ranks, "topk": topk}.items():
        if value < 1:
            raise ArgumentError(name, value, "at least 1")
    if one.experts % ranks:
        raise ArgumentError("ranks", ranks, f"a divisor of the {one.experts} experts")
    card = card or gpu("B200")
    active = min(one.experts // ranks, tokens * topk)  # experts of a rank that have rows
    rows = tokens * topk / active
    far = rows * (ranks - 1) / ranks
    link = card["nvlink_bytes_s"] / 1e6  # B a us
    pull, back = far * dispatch_bytes(one.hidden, activations) / link, far * combine_bytes(one.hidden) / link
    first, second = (_gemm(card, rows, outputs, k, PRODUCTS[activations]) for outputs, k in _layers(one))
    return _chain(active, pull, back, first, second)


def _layers(one: Model) -> tuple[tuple[int, int], tuple[int, int]]:
    """(outputs, K) of both GEMMs."""
    return (2 * one.width, one.hidden), (one.hidden, one.width)


def _gemm(card: Gpu, rows: float, outputs: int, k: int, products: Products) -> float:
    """One expert's GEMM, us: at the rate of its MMA, or its weights from HBM."""
    flops = products.rate * card["mma_flops"] * card["sms"] * card["clock"] * 1e3  # a us
    return max(2 * rows * outputs * k / flops, outputs * k * products.weight / (card["hbm_bytes_s"] / 1e6))


def _chain(experts: int, pull: float, back: float, first: float, second: float) -> Predicted:
    pulled = done = 0.0
    for _ in range(experts):
        pulled += pull
        done = max(done, pulled) + first
    waited = max(done - experts * first, 0.0)  # rounding
    returned = 0.0
    for _ in range(experts):
        done += second
        returned = max(returned, done) + back
    exposed = returned - done if back else 0.0
    return Predicted(experts * (first + second), experts * pull, experts * back, waited, exposed)
