"""Predict the MoE GEMMs of a Hopper from bytes and MMAs alone, with the rates of data/bench/rates.csv.

    time = launch + first byte + the longer of: all bytes from HBM, the busiest SM's MMAs

A tile's MMAs take its rows of weights, the columns that its tokens need in steps of 8, and K, at the tensor core's rate
for bf16, or at twice that for E4M3. SMs take tiles in turn. What expands 4-bit weights, promotes sums or ends a tile is
not in it: what a kernel takes beyond this is what such work costs, or latency that nothing hides.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4lib.ops.moe_gemm.sm90.config import TILES_N
from dsv4lib.ops.moe_gemm.sm90.layout import TILE_M
from dsv4lib.ops.moe_gemm.sm90.op import tile_of
from dsv4lib.predict.moe import MODELS, TOP, loads
from dsv4lib.predict.rates import Gpu, gpu

WIDE_ROWS = 4 * TILE_M  # of weights in a tile of the kernel for many tokens
COLUMNS = 8  # an MMA's columns are a multiple


class Product(NamedTuple):
    """One GEMM of a layer.

    Attributes:
        model: "Flash" or "Pro". first: gate and up, else down. mode: as `moe_gemm` takes it. tokens: of the layer.
        bf16: tokens are bf16. nbytes: that cross HBM.
    """

    model: str
    first: bool
    mode: str
    tokens: int
    bf16: bool
    nbytes: float

    @property
    def sizes(self) -> tuple[int, int]:
        """Return (N, K) of its weights."""
        one = MODELS[self.model]
        return (2 * one.width, one.hidden) if self.first else (one.hidden, one.width)


def mma_clocks(product: Product, card: Gpu) -> float:
    """Clocks of the busiest SM's MMAs."""
    n, k = product.sizes
    experts = MODELS[product.model].experts
    tile_n = tile_of(-(-product.tokens * TOP // experts), product.mode, product.bf16)
    few = product.bf16 == (product.mode == "w4a16") and tile_n in TILES_N[product.mode]
    rows = TILE_M if few else WIDE_ROWS
    rate = card["wgmma_flops"] * (1 if product.bf16 else 2)
    busy = [0.0] * int(card["sms"])
    number = 0
    for count in loads(experts, product.tokens):
        for start in range(0, count, tile_n):
            columns = tile_n if few else -(-min(tile_n, count - start) // COLUMNS) * COLUMNS
            for _ in range(-(-n // rows)):
                busy[number % len(busy)] += 2 * rows * columns * k / rate
                number += 1
    return max(busy)


def modelled_us(product: Product, card: Gpu | None = None) -> float:
    """Microseconds of the GEMM with caches cold, on an H200 unless another card is given."""
    card = card or gpu("H200")
    longest = max(product.nbytes / card.hbm_clk_bytes, mma_clocks(product, card))
    return card["launch_us"] + card.microseconds(card["first_byte_clk"] + longest)
