"""Run rmsnorm on rows that grow, with a fault if wanted. Compares with fp64, for `template_op`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Float32

from dsv4lib import backends
from dsv4lib.ops.rmsnorm import op
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.pages.common import faults as injected
from dsv4lib.reference import rmsnorm as oracle


class CountsTwice(RmsNorm):
    """Counts every square twice: rows come out smaller by the root of two."""

    def sum_of_squares(self, rX: cute.Tensor, sSums: cute.Tensor) -> Float32:
        """Double the sum."""
        return super().sum_of_squares(rX, sSums) * 2.0


FAULTS = {"CountsTwice": CountsTwice}


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
    x = (torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]).bfloat16()
    kernel = FAULTS.get(fault, RmsNorm)
    hazards = injected.run(
        backend,
        lambda: found.append(op.rmsnorm(x.to(where), backend=backend).cpu()),
        (op, "RmsNorm", kernel),
    )
    want = oracle.rmsnorm(x.double(), None, 1e-6)
    torchs = torch.nn.functional.rms_norm(x, (columns,), eps=1e-6)
    ours, theirs = ((y.double() - want).square().mean().sqrt() for y in (found[0], torchs))
    return Result(found[0], want, float(ours / theirs), hazards)
