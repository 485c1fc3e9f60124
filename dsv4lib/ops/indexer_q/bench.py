"""Time `indexer_q`. RoPE, Hadamard and quantisation of the indexer's queries, and the scaling of head weights.

Given: q bf16 [T, 64, 128]; weights bf16 [T, 64]; positions int64 [T]; cos_sin fp32 [131072, 64];
variant "fp8" or "fp4"; hadamard bool: without it as some engines do (their keys must lack it, too).
Outputs, "fp8": codes E4M3 [T, 64, 128]; weights fp32 [T, 64] = weights * scale * 128^-0.5 * 64^-0.5.
"fp4": codes uint8 [T, 64, 64], E2M1, low nibble first; scales [T, 64, 4], UE8M0 bytes or fp32; weights fp32 [T, 64]
without the scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsv4lib.bench.ops import inputs, providers, rope_inputs
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row
from dsv4lib.formats import e2m1, hadamard
from dsv4lib.ops.indexer_q import peers
from dsv4lib.ops.indexer_q.op import indexer_q

HEADS, DIM, BLOCK = 64, 128, 32
FACTOR = (HEADS * DIM) ** -0.5
TOKENS = (*inputs.DECODE, inputs.PREFILL)
KINDS = (("fp8", False), ("fp8", True), ("fp4", False), ("fp4", True))
GOAL = 0.3  # at 4096 tokens


def _given(generator: torch.Generator, tokens: int, variant: str, rotated: bool) -> Given:
    return {
        "q": inputs.normals(generator, tokens, HEADS, DIM),
        "weights": inputs.normals(generator, tokens, HEADS),
        "positions": rope_inputs.positions(generator, tokens),
        "cos_sin": rope_inputs.table(generator.device),
        "variant": variant,
        "hadamard": rotated,
    }


def _queries(given: Given) -> torch.Tensor:
    """fp32 [T, 64, 128] before quantisation."""
    q = rope_inputs.rotate(given["q"].float(), given["cos_sin"][given["positions"]])
    return q @ hadamard.matrix(DIM, torch.float32).to(q.device) if given["hadamard"] else q


def _check(given: Given, out: Mapping[str, torch.Tensor]) -> None:
    want, weights = _queries(given), given["weights"].float() * FACTOR
    if given["variant"] == "fp8":
        scale = out["weights"] / weights
        amax, largest, spread = want.abs().amax(-1), 448.0, scale[..., None]
        found = rope_inputs.e4m3_values(out["codes"]) * spread
        allowed = 2.0**-4 * want.abs() + 2.0**-10 * spread
    else:
        ratio = out["weights"] / weights
        assert bool(((ratio - 1).abs() < 2.0**-20).all()), "weights"
        scale, largest = rope_inputs.scale_values(out["scales"]), 6.0
        amax, spread = want.unflatten(-1, (-1, BLOCK)).abs().amax(-1), scale.repeat_interleave(BLOCK, -1)
        found = e2m1.decode(e2m1.unpack(out["codes"])) * spread
        allowed = 2.0**-2 * want.abs() + 2.0**-2 * spread
    assert bool(((scale >= amax / largest * (1 - 2.0**-7)) & (scale <= amax / largest * 2.02)).all()), "scales"
    # 2^-7 of the largest: bf16 between the steps, as some have it.
    wrong = (found - want).abs() > allowed + 2.0**-7 * want.abs().amax(-1, keepdim=True)
    assert not bool(wrong.any()), f"codes: {int(wrong.sum())} of {wrong.numel()}"


def _ours(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    arguments = given["q"], given["weights"], given["positions"], given["cos_sin"]
    options = {"variant": given["variant"], "hadamard": given["hadamard"], "backend": "native"}
    out = indexer_q(*arguments, **options)

    def call() -> None:
        indexer_q(*arguments, **options, out=out)

    return call, {name: value for name, value in out._asdict().items() if value is not None}


def _compiled(given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
    if given["variant"] == "fp4":
        raise Absent("torch has no conversion to E2M1")
    matrix = hadamard.matrix(DIM, torch.float32).bfloat16().to(given["q"].device) if given["hadamard"] else None

    def plain(q: torch.Tensor, w: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> dict:
        x = rope_inputs.rotate(q.float(), cos_sin[positions])
        if matrix is not None:
            x = (x.bfloat16() @ matrix).float()
        scale = rope_inputs.power_scale(x.abs().amax(-1, keepdim=True), 448.0, 1e-4)
        return {"codes": (x / scale).to(torch.float8_e4m3fn), "weights": w.float() * scale[..., 0] * FACTOR}

    return providers.compiled(plain, "q", "weights", "positions", "cos_sin").bind(given)


def rows() -> list[Row]:
    """The cells of the issue's table, and decode; the same heads in Flash and Pro."""
    out_bytes = {"fp8": DIM, "fp4": DIM // 2 + DIM // BLOCK}
    return [
        Row(
            op="indexer_q",
            shape=f"{variant}{' Hadamard' if rotated else ''} T {tokens}",
            bytes=tokens * (HEADS * (2 * DIM + out_bytes[variant] + 6) + 264),
            flops=0,
            given=lambda generator, t=tokens, v=variant, r=rotated: _given(generator, t, v, r),
            check=_check,
            providers=(Provider("ours", _ours), Provider("torch.compile", _compiled), *peers.providers()),
            goal=GOAL if tokens == inputs.PREFILL else None,
        )
        for variant, rotated in KINDS
        for tokens in TOKENS
    ]
