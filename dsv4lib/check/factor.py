"""Check `within_factor`. A kernel may be at most twice as wrong as PyTorch in its dtype, both against fp64.

The table of tolerances says what a format can do at all; this rule says what this computation can do in this format,
whatever its shape and data. FlashAttention's tests use the same idea.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsv4lib.check import tolerances
from dsv4lib.check.arrays import read_pair, row_length, row_rms
from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class FactorResult:
    """Errors in units of the RMS of the oracle's row.

    Attributes:
        passed: no NaN/Inf differs and both errors are within ``factor`` x the peer's.
        max_error: largest error of the kernel.
        peer_max_error: largest error of the peer, or half a step of the dtype if that is larger.
        rms_error: RMS error of the kernel.
        peer_rms_error: RMS error of the peer, or of one rounding (step / sqrt 12) if that is larger.
        factor: allowed ratio.
        nonfinite_mismatches: positions where NaN or Inf of kernel and oracle differ.
    """

    passed: bool
    max_error: float
    peer_max_error: float
    rms_error: float
    peer_rms_error: float
    factor: float
    nonfinite_mismatches: int

    def __str__(self) -> str:
        return (
            f"{'passed' if self.passed else 'FAILED'}: max {self.max_error:.3g} vs peer {self.peer_max_error:.3g}, "
            f"rms {self.rms_error:.3g} vs peer {self.peer_rms_error:.3g}, allowed factor {self.factor:g}, "
            f"{self.nonfinite_mismatches} NaN/Inf mismatches"
        )


def within_factor(
    actual: torch.Tensor, same_dtype_peer: torch.Tensor, oracle: torch.Tensor, factor: float = 2.0
) -> FactorResult:
    """Tell whether ``actual`` is within ``factor`` of ``same_dtype_peer``'s error.

    Args:
        actual: the kernel's result, a floating tensor of any shape.
        same_dtype_peer: PyTorch's result, same shape and dtype.
        oracle: the same computation in fp64, same shape.
        factor: allowed ratio, >= 1.

    A peer that happens to hit representable values exactly does not make the rule impossible: its error counts as at
    least that of one correct rounding.
    """
    if not isinstance(actual, torch.Tensor) or not actual.is_floating_point():
        raise ArgumentError("actual", getattr(actual, "dtype", type(actual).__name__), "a floating torch tensor")
    if not isinstance(same_dtype_peer, torch.Tensor) or same_dtype_peer.dtype != actual.dtype:
        shown = getattr(same_dtype_peer, "dtype", type(same_dtype_peer).__name__)
        raise ArgumentError("same_dtype_peer", shown, f"a torch tensor of {actual.dtype}, as actual")
    if not (isinstance(factor, (int, float)) and 1.0 <= factor < float("inf")):
        raise ArgumentError("factor", factor, "a finite number >= 1")
    if not isinstance(oracle, torch.Tensor) or oracle.dtype != torch.float64:
        raise ArgumentError("oracle", getattr(oracle, "dtype", type(oracle).__name__), "a torch.float64 tensor")
    a, o, fmt = read_pair(actual, oracle)
    p, _, _ = read_pair(same_dtype_peer, oracle)
    scale = row_rms(o).expand(-1, row_length(tuple(o.shape))).reshape(o.shape)
    step = tolerances.spacing(torch.where(torch.isfinite(o), o, 0.0).abs(), fmt)
    step = torch.where(scale > 0, step / scale, 0.0)
    bad = int((~((a == o) | (torch.isfinite(a) & torch.isfinite(o)) | (torch.isnan(a) & torch.isnan(o)))).sum())

    max_error, rms_error = _errors(a, o, scale)
    peer_max, peer_rms = _errors(p, o, scale)
    peer_max = max(peer_max, float(step.max()) / 2)
    peer_rms = max(peer_rms, float((step * step).mean().sqrt()) / math.sqrt(12))
    passed = bad == 0 and max_error <= factor * peer_max and rms_error <= factor * peer_rms
    return FactorResult(passed, max_error, peer_max, rms_error, peer_rms, float(factor), bad)


def _errors(x: torch.Tensor, oracle: torch.Tensor, scale: torch.Tensor) -> tuple[float, float]:
    """(max, RMS) of |x - oracle| / scale over finite positions; an error on an all-zero row is infinite."""
    finite = torch.isfinite(x) & torch.isfinite(oracle)
    error = torch.where(finite, x - oracle, 0.0).abs()
    unit = torch.where(error > 0, error / scale, 0.0)
    return float(unit.max()), float((unit * unit).mean().sqrt())
