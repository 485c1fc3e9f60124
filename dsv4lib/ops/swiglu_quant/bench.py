"""Rows of `swiglu_quant`. given: x fp32 [T, 2 I], gate then up. Outputs: codes uint8 [T, I], scales uint8 [T, I / 128].

Bytes: x once, codes and scales once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Given, Row
from dsv4lib.ops.quantize.bench import CLOSE, blocks_of
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.swiglu_quant import op
from dsv4lib.reference import swiglu_quant as oracle

LIMIT, BLOCK = 10.0, RECIPES["fp8"].block


def rows() -> list[Row]:
    """Decode and prefill of both models' shared expert."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    width = inputs.MODELS[model].expert_width

    def given(generator: torch.Generator) -> Given:
        return {"x": 4 * inputs.normals(generator, tokens, 2 * width).float()}

    return Row(
        "swiglu_quant",
        f"{model} T {tokens}",
        bytes=tokens * (9 * width + width // BLOCK),
        flops=0,
        given=given,
        check=_check,
        providers=(providers.in_place("ours", _new, _ours), providers.compiled(_plain, "x")),
    )


def _new(given: Given) -> dict[str, Tensor]:
    tokens, columns = given["x"].shape
    empty = given["x"].new_empty
    sizes = {"codes": (tokens, columns // 2), "scales": (tokens, columns // (2 * BLOCK))}
    return {name: empty(size, dtype=torch.uint8) for name, size in sizes.items()}


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    codes, scales = oracle.swiglu_quant(given["x"], LIMIT)
    inputs.same_bytes(outputs, {"codes": codes, "scales": scales}, CLOSE)


def _ours(given: Given, out: Mapping[str, Tensor]) -> None:
    op.swiglu_quant(given["x"], limit=LIMIT, out=(out["codes"], out["scales"]))


def _plain(x: Tensor) -> dict[str, Tensor]:
    gate, up = x.chunk(2, 1)
    h = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    return dict(zip(("codes", "scales"), blocks_of(h, "fp8"), strict=True))
