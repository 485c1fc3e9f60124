"""Put modelled times beside rows of the bench of ops."""

from __future__ import annotations

from dsv4lib.ops.moe_gemm import bench
from dsv4lib.predict.moe_hopper import Product, modelled_us
from dsv4lib.predict.rates import Gpu


def gemms(card: Gpu) -> dict[tuple[str, str], float]:
    """Microseconds of the experts' GEMMs on a Hopper, by op and shape."""
    found = {}
    for row in bench.rows():
        model, gemm, mode, _, tokens = row.shape.split()
        bf16 = bench.tokens_in_bf16(mode, int(tokens))
        product = Product(model, gemm == "gate/up", mode, int(tokens), bf16, row.bytes)
        found[row.op, row.shape] = modelled_us(product, card)
    return found
