"""Normalise rows by the kernel in CUDA C++ (`kernel.cu`). Arguments, results and errors are those of `op`.

Its sums run in the order of the DSL's kernel. `FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Float32, Int64
from dsv4lib.ops.common import cpp, launching
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.rmsnorm import arguments
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import AddNorm, Norm

SOURCE = Path(__file__).with_name("kernel.cu")
FAULTS = {
    "no_barrier": Edit("  __syncthreads();\n", ""),
    "warps_forgotten": Edit("w < kWarps", "w < 1"),
    "tail_counted": Edit("if (column >= D) continue;\n    h[i] = load", "h[i] = load"),
    "eps_forgotten": Edit("* (1.0f / D) + eps", "* (1.0f / D)"),
    "read_early": Edit("  wait_for_predecessor();\n", ""),
}


class Arguments(NamedTuple):
    """Parameters of the kernel; strides in elements."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    sum: Tensor | None
    y: Tensor
    x_stride: Int64
    residual_stride: Int64
    sum_stride: Int64
    y_stride: Int64
    eps: Float32


def kernel(like: RmsNorm, *edits: Edit) -> CppKernel:
    """Return the kernel that does what one of the DSL does."""
    sizes = {"D": like.d, "PIECES": like.pieces, "ADD": int(like.add), "WEIGHTED": int(like.weighted)}
    return CppKernel(SOURCE, "rmsnorm", Arguments, like.threads, defines=tuple(sizes.items()), edits=edits)


@typed
def rmsnorm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Normalise rows, as `op.rmsnorm` says; ``backend`` is "auto", "native" or "emulator"."""
    out = torch.empty_like(x) if out is None else out
    launching.check_eps(eps=eps)
    call = Norm(x, weight, out, eps, backend)
    Norm.op.checked(*call)
    run(call)
    return out


@typed
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add rows to the residual stream and normalise the sum, as `op.add_rmsnorm` says."""
    out = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
    launching.check_eps(eps=eps)
    call = AddNorm(x, residual, weight, out, eps, backend)
    AddNorm.op.checked(*call)
    run(call)
    return out


def run(call: Norm | AddNorm, *edits: Edit) -> None:
    """Launch the kernel, with faults perhaps.

    Raises:
        ArgumentError: a tensor that the kernel cannot take.
    """
    backend = cpp.resolve(call.backend, "x", call.x)
    rows, d = call.x.shape
    if not rows:
        return
    like = RmsNorm(d, isinstance(call, AddNorm), call.weight is not None)
    x, residual, weight, total, y, _, _ = arguments.launch_args(like, call)
    strides = [0 if one is None else one.stride[0] for one in (x, residual, total, y)]
    memory = [None if one is None else one.source for one in (x, residual, weight, total, y)]
    cpp.launch(backend, kernel(like, *edits), cpp.Grid(rows), Arguments(*memory, *strides, call.eps))
