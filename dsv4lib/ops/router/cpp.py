"""Route tokens by the kernel in CUDA C++ (`kernel.cu`). Arguments, results and errors are those of `op`.

One kernel from x or from logits, and no workspace: a CTA a token reads the whole gate, which suits few tokens. The
sums of a logit run in another order than the DSL's. `FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Float32, Int64
from dsv4lib.dsl.tensors import wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import cpp
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.router.arguments import BF16, FP32, I32, I64
from dsv4lib.ops.router.kernel import MAX_K
from dsv4lib.ops.router.op import Call, Hashed

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = {False: 32, True: 256}  # of a CTA: from logits, with a gate
FAULTS = {
    "no_barrier": Edit("  __syncthreads();\n", ""),
    "bias_forgotten": Edit(" + bias[expert]", ""),
    "bias_in_weights": Edit("affinity(logits[HASHED ? lane_id() : pick])", "affinity(logits[pick]) + bias[pick]"),
    "ties_high": Edit(
        "__reduce_min_sync(kAllLanes, key == top ? expert : EXPERTS)",
        "__reduce_max_sync(kAllLanes, key == top ? expert : -1)",
    ),
    "nan_unseen": Edit("bad |= isnan(score);", ""),
    "softplus_underflows": Edit("h * sqrtf(r)", "sqrtf(e * r)"),
}
FAULTS_OF_TABLES = {
    "uniform": Edit("factor * a / total", "factor / K"),
    "padded_row_routed": Edit("if (id >= vocabulary) return -1;", "if (id >= vocabulary) return 0;"),
}


class Arguments(NamedTuple):
    """Parameters of the kernel; strides in elements."""

    x: Tensor
    gate: Tensor | None
    bias: Tensor | None
    table: Tensor | None
    tokens: Tensor | None
    experts: Tensor
    weights: Tensor
    x_stride: Int64
    gate_stride: Int64
    table_stride: Int64
    experts_stride: Int64
    weights_stride: Int64
    vocabulary: Int64
    factor: Float32


def kernel(experts: int, k: int, d: int = 0, hashed: bool = False, edits: tuple[Edit, ...] = ()) -> CppKernel:
    """Return the kernel for so many experts, k of them a token. d: columns of x; 0: x holds the logits."""
    defines = (("EXPERTS", experts), ("K", k), ("D", d), ("HASHED", int(hashed)))
    return CppKernel(SOURCE, "router", Arguments, THREADS[d > 0], defines=defines, edits=edits)


@typed
def router(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    k: int = 6,
    factor: float = 1.0,
    bias: Tensor | None = None,
    hashed: Hashed | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose experts and weights, as `op.router` says; ``backend`` is "auto", "native" or "emulator"."""
    if x.dim() != 2:
        raise ArgumentError("x.shape", tuple(x.shape), "[T, d], or logits [T, E]")
    if not 1 <= k <= MAX_K:
        raise ArgumentError("k", k, f"1 to {MAX_K}")
    if out is None:
        experts = torch.empty(x.shape[0], k, dtype=torch.int32, device=x.device)
        out = experts, torch.empty(x.shape[0], k, dtype=torch.float32, device=x.device)
    call = Call(x, weight, bias, hashed, out, None, factor, backend)
    Call.op.checked(*call)
    if not math.isfinite(factor):
        raise ArgumentError("factor", factor, "a finite number")
    if x.device.type == "cpu":
        call.check_values()
    run(call)
    return out


def run(call: Call, *edits: Edit) -> None:
    """Launch the kernel, with faults perhaps.

    Raises:
        ArgumentError: a tensor that the kernel cannot take.
    """
    backend = cpp.resolve(call.backend, "x", call.x)
    rows, k = call.out[0].shape
    if not rows:
        return
    d = 0 if call.weight is None else call.x.shape[1]
    x = wrap("x", call.x, BF16, (rows, d), 16) if d else wrap("x", call.x, FP32, (rows, call.size))
    gate = wrap("weight", call.weight, BF16, (call.size, d), 16) if d else None
    table, tokens = call.hashed or (None, None)
    if call.hashed is None:
        wrap("bias", call.bias, FP32, (call.size,))
    else:
        wrap("hashed.tokens", tokens, I64, (rows,))
    by_token = None if table is None else wrap("hashed.table", table, I64, (None, k))
    ends = wrap("out[0]", call.out[0], I32, (rows, k)), wrap("out[1]", call.out[1], FP32, (rows, k))
    strides = [0 if one is None else one.stride[0] for one in (x, gate, by_token, *ends)]
    memory = call.x, call.weight, call.bias, table, tokens, *call.out
    given = Arguments(*memory, *strides, 0 if table is None else len(table), call.factor)
    cpp.launch(backend, kernel(call.size, k, d, table is not None, edits), cpp.Grid(rows), given)
