"""Run `template_op` on rows that grow, with a fault if wanted. Compares with fp64; for notebook and stage."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.ops.template_op import op
from dsv4lib.ops.template_op.faults import FAULTS
from dsv4lib.ops.template_op.kernel import TemplateOp
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import template_op as oracle


class Result(NamedTuple):
    """Outputs and their errors.

    Attributes:
        found, want: [T, d]. over_torch: root mean square error over that of PyTorch in bf16. hazards: of the launch.
    """

    found: torch.Tensor
    want: torch.Tensor
    over_torch: float
    hazards: int


def run(rows: int, columns: int, seed: int, backend: str, fault: str = "none") -> Result:
    """Run the op; ``fault``: a name of `FAULTS`, or "none"."""
    generator, where, found = torch.Generator().manual_seed(seed), backends.device(backend), []
    size = torch.logspace(-2, 1, rows)[:, None]
    gate, up = ((torch.randn(rows, columns, generator=generator) * size).bfloat16() for _ in range(2))
    kernel = FAULTS.get(fault, TemplateOp)
    hazards = injected.run(
        backend,
        lambda: found.append(op.template_op(gate.to(where), up.to(where), backend=backend).cpu()),
        (op, "TemplateOp", kernel),
    )
    want = oracle.template_op(gate.double(), up.double())
    torchs = torch.nn.functional.silu(gate) * up
    ours, theirs = ((x.double() - want).square().mean().sqrt() for x in (found[0], torchs))
    return Result(found[0], want, float(ours / theirs), hazards)
