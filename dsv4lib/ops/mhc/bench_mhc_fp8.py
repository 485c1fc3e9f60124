"""Time mHC whose y leaves as FP8, too, beside a cast of its own.

1x128, as the projections after it read it.

given: as in `bench`. Outputs: streams, y, post, comb as there; codes uint8 [T, d], scales uint8 [T, d/128].
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from dsv4lib.bench.ops import inputs
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.bench.ops.providers import Outputs, in_place
from dsv4lib.formats import fp8_block
from dsv4lib.ops.mhc import bench

BLOCK = 128


def rows() -> list[Row]:
    """Flash and Pro, decode and 4096 tokens."""
    return [
        Row(
            op="mhc_fp8",
            shape=f"{model} T {tokens}",
            bytes=bench.moved(tokens, d) + tokens * (d + d // BLOCK),
            flops=0,
            given=partial(bench.make, tokens, d),
            check=_check,
            providers=(in_place("ours", _outputs, _ours), in_place("ours, two launches", _outputs, _two_launches)),
        )
        for model, d in bench.MODELS
        for tokens in bench.TOKENS
    ]


def _outputs(given: Given) -> Outputs:
    t, d = given["f"].shape
    u8 = {"dtype": torch.uint8, "device": given["f"].device}
    return bench.outputs(given) | {"codes": torch.empty(t, d, **u8), "scales": torch.empty(t, d // BLOCK, **u8)}


def _ours(given: Given, out: Outputs) -> None:
    from dsv4lib.ops.mhc.op import Fp8, Site, mhc_post_pre

    fp8 = Fp8(out["codes"], out["scales"], "fp8", False)
    after = out["streams"], out["y"], out["post"], out["comb"]
    site = Site(given["fn"], given["scale"], given["base"], given["weight"])
    before = (given[name] for name in ("streams", "f", "post", "comb"))
    mhc_post_pre(*before, site, fp8=fp8, out=after, backend="native")


def _two_launches(given: Given, out: Outputs) -> None:
    from dsv4lib.ops.mhc.op import Site, mhc_post_pre
    from dsv4lib.ops.quantize.op import quantize

    after = out["streams"], out["y"], out["post"], out["comb"]
    site = Site(given["fn"], given["scale"], given["base"], given["weight"])
    before = (given[name] for name in ("streams", "f", "post", "comb"))
    mhc_post_pre(*before, site, out=after, backend="native")
    quantize(out["y"], "fp8", out=(out["codes"], out["scales"], None), backend="native")


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    """What `bench` checks, and codes and scales of the y that came with them, byte by byte."""
    bench.check(given, out)
    want = fp8_block.quantize_activation(out["y"].float())
    inputs.same_bytes(out, {"codes": want.codes.view(torch.uint8), "scales": want.scales.view(torch.uint8)})
