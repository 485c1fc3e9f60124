"""Run `swiglu_quant` on rows that grow, with a fault if wanted. Compares with fp64; for notebook and stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.formats.fp8_block import FP8Tensor, dequantize
from dsv4lib.ops.swiglu_quant import op
from dsv4lib.ops.swiglu_quant.faults import FAULTS
from dsv4lib.ops.swiglu_quant.kernel import SwigluQuant
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import swiglu_quant as oracle

LIMIT = 1.5  # of the clamp: many elements reach it
ALLOWED = {"over_oracle": 1.0001}  # the stage's bound: up to it a check has found nothing


class Result(NamedTuple):
    """Outputs and their errors.

    Attributes:
        found, want: h in fp64 [T, I], of the codes and exact.
        over_oracle: root mean square error of codes and scales over that of the oracle's own.
        differing: share of codes that are not the oracle's. hazards: of the launch.
    """

    found: torch.Tensor
    want: torch.Tensor
    over_oracle: float
    differing: float
    hazards: int


def rows_of(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gate and up [T, 2 I]: normals, from small rows to large ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 2 * width, generator=generator) * torch.logspace(-2, 1, rows)[:, None]).to(dtype)


def run(
    rows: int, width: int, seed: int, backend: str, fault: str = "none", dtype: torch.dtype = torch.float32
) -> Result:
    """Run the op; ``fault``: a name of `FAULTS`, or "none"."""
    x, where, outputs = rows_of(rows, width, seed, dtype), backends.device(backend), []
    hazards = injected.run(
        backend,
        lambda: outputs.append(op.swiglu_quant(x.to(where), limit=LIMIT, backend=backend)),
        (op, "SwigluQuant", FAULTS.get(fault, SwigluQuant)),
    )
    ours, theirs = [t.cpu() for t in outputs[0]], oracle.swiglu_quant(x, LIMIT)
    want = oracle.gated(x, LIMIT)
    found, exact = (dequantize(FP8Tensor(*pair, (1, op.BLOCK)), torch.float64) for pair in (ours, theirs))
    errors = [float((h - want).square().mean().sqrt()) for h in (found, exact)]
    differing = float((ours[0] != theirs[0]).double().mean())
    return Result(found, want, errors[0] / errors[1], differing, hazards)


def show_faults(kernels: Mapping[str, type], rows: int, width: int, seed: int, backend: str) -> int:
    """Show what sees each faulty kernel, by its name in `FAULTS`. Returns how many nothing sees."""

    def judged(kernel: type) -> dict[str, float]:
        result = run(rows, width, seed, backend, kernel.__name__)
        return {"over_oracle": result.over_oracle, "hazards": result.hazards}

    return injected.seen_by(kernels, lambda kernel: kernel.__doc__.split("\n")[0], judged, ALLOWED)
