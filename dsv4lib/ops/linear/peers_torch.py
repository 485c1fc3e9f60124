"""Time cuBLAS beside `linear` on a Hopper, by torch. FP8 with fp32 scales of 128 of K and of 128 x 128."""

from __future__ import annotations

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider
from dsv4lib.formats import ue8m0

ROWS = 8  # cuBLAS takes no single token


def providers() -> tuple[Provider, ...]:
    """One call of ``torch._scaled_mm``."""
    return (Provider("cuBLAS", _cublas),)


def operands(given: Given, rows: int) -> tuple[torch.Tensor, ...]:
    """Make codes and fp32 scales of x and w.

    Tokens are padded to a multiple of ``rows``, scales of x go column by column.

    Raises:
        Absent: a grouped linear.
    """
    if given["x"].dim() == 3:
        raise Absent("no grouped linear in one launch")
    tokens = len(given["x"])
    x, x_scales = (torch.nn.functional.pad(given[name], (0, 0, 0, -tokens % rows)) for name in ("x", "x_scales"))
    columns = ue8m0.decode(x_scales).T.contiguous().T
    return x.view(torch.float8_e4m3fn), columns, given["w"].view(torch.float8_e4m3fn), ue8m0.decode(given["w_scales"])


def _cublas(given: Given) -> peers.Bound:
    x, x_scales, w, w_scales = operands(given, ROWS)

    def run() -> torch.Tensor:
        return torch._scaled_mm(x, w.T, x_scales, w_scales.T, out_dtype=torch.bfloat16)

    return peers.bound(run, y=lambda out: out[: len(given["x"])])
