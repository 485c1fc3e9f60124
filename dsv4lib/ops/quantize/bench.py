"""Rows of `quantize`: bf16 rows to a block format.

given: x bf16 [T, K], recipe ("fp8": blocks of 128, "mxfp8", "mxfp4", "nvfp4"), global_scale fp32 scalar tensor (of
nvfp4, calibrated: amax / 2688), else None. Outputs: codes uint8 [T, K] or [T, K/2], scales uint8 [T, K/block] (UE8M0;
nvfp4: E4M3), row-major.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.formats import nvfp4
from dsv4lib.ops.quantize import op, peers
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES
from dsv4lib.reference import quantize as oracle

CLOSE = 1e-4  # part of the bytes: a division in fp32 rounds a few ties to the other neighbour


def rows() -> list[Row]:
    """List prefill of both models in every recipe, and decode in one.

    Decode in the recipe that Hopper's linears read.
    """
    sizes = [(recipe, inputs.PREFILL) for recipe in ROW_RECIPES] + [("fp8", 8), ("fp8", 128)]
    return [_row(model, recipe, tokens) for model in inputs.MODELS for recipe, tokens in sizes]


def _row(model: str, recipe: str, tokens: int) -> Row:
    width = inputs.MODELS[model].hidden
    size, form = tokens * width, RECIPES[recipe]

    def given(generator: torch.Generator) -> Given:
        x = inputs.normals(generator, tokens, width)
        scale = nvfp4.shared_global_scale(x) if recipe == "nvfp4" else None
        return {"x": x, "recipe": recipe, "global_scale": scale}

    return Row(
        "quantize",
        f"{recipe} {model} T {tokens}",
        bytes=2 * size + size * form.bits // 8 + size // form.block,
        flops=0,
        given=given,
        check=_check,
        providers=(
            Provider("ours", _ours),
            providers.compiled(_plain, "x", "recipe", "global_scale"),
            *peers.providers(),
        ),
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    codes, scales, _ = oracle.quantize(given["x"], given["recipe"], global_scale=given["global_scale"])
    inputs.same_bytes(outputs, {"codes": codes[0], "scales": scales[0]}, CLOSE)


def _ours(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    x, recipe, scale = given["x"], given["recipe"], given["global_scale"]
    new = [torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in op.output_shapes(recipe, *x.shape)]
    out = op.Quantized(*new, None)
    return lambda: op.quantize(x, recipe, global_scale=scale, out=out), {"codes": out.codes, "scales": out.scales}


def _plain(x: Tensor, recipe: str, global_scale: Tensor | None) -> dict[str, Tensor]:
    codes, scales = blocks_of(x, recipe, global_scale)
    return {"codes": codes, "scales": scales}


def blocks_of(x: Tensor, recipe: str, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows in a few lines of torch.

    The same bits, but for ties of nvfp4.
    """
    form = RECIPES[recipe]
    blocks = x.float().unflatten(-1, (-1, form.block))
    amax = blocks.abs().amax(-1)
    if recipe == "nvfp4":
        scales = (amax / (6 * global_scale)).to(torch.float8_e4m3fn)
        values = blocks / (scales.float() * global_scale)[..., None]
        scales = scales.view(torch.uint8)
    else:
        field, exponent = form.divisor
        bits = amax.view(torch.int32)
        scales = ((bits >> 23) - exponent + ((bits & 0x7FFFFF) > field)).clamp(min=form.floor)
        values = blocks * ((254 - scales) << 23).view(torch.float32)[..., None]
        scales = scales.to(torch.uint8)
    if form.bits == 8:
        return values.to(torch.float8_e4m3fn).view(torch.uint8).view(x.shape), scales
    size = values.abs()
    codes = sum((size > bound).int() for bound in (0.25, 1.25, 2.5, 5.0))
    codes = codes + sum((size >= bound).int() for bound in (0.75, 1.75, 3.5))
    codes = (codes + 8 * values.signbit().int()).view(len(x), -1, 2)
    return (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8), scales
