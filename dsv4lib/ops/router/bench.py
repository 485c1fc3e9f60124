"""Rows of `router`: gate GEMM and selection.

given: x bf16 [T, d], weight bf16 [E, d], bias fp32 [E], k int, factor float. Outputs: experts int [T, k] (best score
first, or in any order), weights fp32 [T, k] of the same order. Logits are sums in fp32, not rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.ops.router import op, peers
from dsv4lib.reference import router as oracle

CLOSE = 1e-4  # of a score: what sums of bf16 products in fp32, in any order, may differ by


def rows() -> list[Row]:
    """All tokens of both models; what was promised is for decode."""
    return [_row(model, tokens) for model in inputs.MODELS for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(model: str, tokens: int) -> Row:
    config = inputs.MODELS[model]
    d, experts, k = config.hidden, config.n_experts, config.experts_per_token

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        x = torch.randn(tokens, d, generator=generator, device=device).bfloat16()
        weight = (torch.randn(experts, d, generator=generator, device=device) * d**-0.5).bfloat16()
        bias = 0.3 * torch.randn(experts, generator=generator, device=device)
        return {"x": x, "weight": weight, "bias": bias, "k": k, "factor": config.routed_scaling}

    return Row(
        "router",
        f"{model} T {tokens}",
        bytes=2 * d * (experts + tokens) + 4 * experts + 8 * tokens * k,
        flops=2 * tokens * d * experts,
        given=given,
        check=_check,
        providers=(
            Provider("ours", _fused if tokens in inputs.DECODE else _after_a_gemm),
            providers.functional("cuBLAS + torch.topk", _plain),
            Provider("cuBLAS + torch.compile", _compiled),
            *((providers.in_cpp(_in_cpp),) if tokens in inputs.DECODE else ()),
            *peers.providers(),
        ),
        goal=0.6 if tokens in inputs.DECODE else None,
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    experts, weights, k = outputs["experts"].long(), outputs["weights"], given["k"]
    assert experts.shape == weights.shape == (len(given["x"]), k), f"experts {list(experts.shape)}"
    a = oracle.affinity(given["x"].double(), given["weight"].double())
    assert bool(((experts >= 0) & (experts < a.shape[1])).all()), "experts: numbers outside 0 .. E - 1"
    assert bool((experts.sort(-1).values.diff(dim=-1) > 0).all()), "experts: one is named twice"
    scores = a + given["bias"].double()
    least = scores.topk(k).values[:, -1]
    lost = least - scores.gather(1, experts).min(1).values
    assert float(lost.max()) <= CLOSE, f"experts: a score {float(lost.max()):.3g} below the k-th best was taken"
    inputs.close({"weights": weights}, {"weights": oracle.expert_weights(a, experts, given["factor"])})


def _new(given: Given) -> dict[str, Tensor]:
    shape, device = (len(given["x"]), given["k"]), given["x"].device
    dtypes = {"experts": torch.int32, "weights": torch.float32}
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype in dtypes.items()}


def _fused(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    out, x, weight = _new(given), given["x"], given["weight"]
    space = op.workspace(len(x), len(weight), x.device)
    options = {"k": given["k"], "factor": given["factor"], "bias": given["bias"]}
    both = out["experts"], out["weights"]
    return lambda: op.router(x, weight, **options, out=both, space=space), out


def _in_cpp(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    from dsv4lib.ops.router import cpp

    out, x, weight = _new(given), given["x"], given["weight"]
    options = {"k": given["k"], "factor": given["factor"], "bias": given["bias"]}
    both = out["experts"], out["weights"]
    return lambda: cpp.router(x, weight, **options, out=both), out


def _after_a_gemm(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    out, options = _new(given), {"k": given["k"], "factor": given["factor"], "bias": given["bias"]}
    both = out["experts"], out["weights"]
    return lambda: op.router(_logits(given), **options, out=both), out


def _logits(given: Given) -> Tensor:
    return torch.mm(given["x"], given["weight"].T, out_dtype=torch.float32)


def _select(logits: Tensor, bias: Tensor, k: int, factor: float) -> dict[str, Tensor]:
    a = softplus(logits).sqrt()
    experts = (a + bias).topk(k).indices
    return {"experts": experts, "weights": oracle.expert_weights(a, experts, factor)}


def _plain(given: Given) -> dict[str, Tensor]:
    return _select(_logits(given), given["bias"], given["k"], given["factor"])


def _compiled(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    logits = _logits(given)
    select, out = providers.compiled(_select, "logits", "bias", "k", "factor").bind({**given, "logits": logits})

    def call() -> None:
        torch.mm(given["x"], given["weight"].T, out_dtype=torch.float32, out=logits)
        select()

    return call, out
