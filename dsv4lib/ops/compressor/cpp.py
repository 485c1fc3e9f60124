"""Compress a decode step by the kernel in CUDA C++ (`kernel.cu`). Arguments, results and errors are those of `op`.

A batch must be ``single``: of each request one row or none. All forms of entries, with a ring or a running softmax.
Rows are pooled one after the other, in another order than the DSL's. `FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Float32, Int32, Int64
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import indexer_key
from dsv4lib.ops.common import cpp, launching
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.compressor.arguments import launch_args
from dsv4lib.ops.compressor.config import CHANNELS, Sizes
from dsv4lib.ops.compressor.op import Batch, Call, Pages, Ring, Running, Weights

SOURCE = Path(__file__).with_name("kernel.cu")
FORMS = ("fp32", "bf16", "kv", "fp8", "fp4")  # as the source numbers them
FAULTS = {
    "no_barrier": Edit("  __syncthreads();\n", ""),
    "halves_swapped": Edit("OVERLAP && j >= RATE ? DIM : 0", "OVERLAP && j < RATE ? DIM : 0"),
    "window_before_the_first": Edit("if (old < 0) continue;", "if (old < -RATE) continue;"),
    "rotated_by_the_next_window": Edit("cosines[window * cos_stride", "cosines[(window + 1) * cos_stride"),
    "oldest_row_forgotten": Edit("for (int j = 0; j < kPooled - 1", "for (int j = 1; j < kPooled - 1"),
    "bias_not_stored": Edit("channel + half * DIM, new_z[half]);", "channel + half * DIM, new_k[half]);"),
    "padded_row_stored": Edit("request.count <= 0 || ", ""),
}
FAULTS_OF_RUNNING = {
    "maxima_mixed": Edit("keep = expf(most[c] - base)", "keep = 1.0f"),
    "old_window_kept": Edit("if (position % RATE != 0) softmax", "softmax"),
}


class Arguments(NamedTuple):
    """Parameters of the kernel; strides in elements, those of pages in bytes."""

    kv: Tensor
    gate: Tensor
    ape: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    requests: Tensor
    slots: Tensor
    k: Tensor
    z: Tensor | None
    out: Tensor
    kv_stride: Int64
    gate_stride: Int64
    ape_stride: Int64
    cos_stride: Int64
    sin_stride: Int64
    k_stride: Int64
    z_stride: Int64
    k_row: Int64
    z_row: Int64
    out_stride: Int64
    page_size: Int32
    entries: Int32
    eps: Float32


def kernel(sizes: Sizes, *edits: Edit) -> CppKernel:
    """Return the kernel for these sizes."""
    named = {"RATE": sizes.rate, "OVERLAP": sizes.overlap, "DIM": sizes.dim, "ROWS": sizes.rows}
    named |= {"ROTATE": sizes.rotate, "RUNNING": sizes.running, "FORM": FORMS.index(sizes.form)}
    defines = tuple((name, int(value)) for name, value in named.items())
    return CppKernel(SOURCE, "compress", Arguments, sizes.dim // CHANNELS, defines=defines, edits=edits)


@typed
def compressor(
    kv: Tensor,
    gate: Tensor,
    weights: Weights,
    batch: Batch,
    state: Ring | Running,
    out: Pages,
    *,
    eps: float = 1e-6,
    rotate: bool | None = None,
    backend: str = "auto",
) -> None:
    """Compress a decode step, as `op.compressor` says; ``backend`` is "auto", "native" or "emulator"."""
    if weights.norm.dim() != 1:
        raise ArgumentError("weights.norm.shape", tuple(weights.norm.shape), "[dim]")
    rotate = weights.norm.shape[0] == indexer_key.DIM if rotate is None else rotate
    launching.check_eps(eps=eps)
    call = Call(kv, gate, weights, batch, state, out, eps, rotate, backend)
    Call.op.checked(*call)
    if kv.device.type == "cpu":
        call.check_values()
    run(call)


def run(call: Call, *edits: Edit) -> None:
    """Launch the kernel, with faults perhaps.

    Raises:
        ArgumentError: a batch that is not single, or a tensor that the kernel cannot take.
    """
    if not call.batch.single:
        raise ArgumentError("batch.single", False, "True: the kernel in CUDA C++ is one for decode steps")
    backend = cpp.resolve(call.backend, "kv", call.kv)
    if 0 in (len(call.kv), len(call.out.data)):
        return
    call = call._in_fp32() if call.state[0].element_size() == 1 else call
    sizes = Sizes(**call.settings())
    rows, ends, out, *_ = launch_args(sizes, call)
    angles = rows.ape, ends.cos, ends.sin
    pages = out.words if out.bytes is None else out.bytes
    strides = [one.stride[0] for one in (rows.kv, rows.gate, *angles, rows.k)]
    strides += [0 if rows.z is None else rows.z.stride[0], rows.k.stride[1], 0 if rows.z is None else rows.z.stride[1]]
    memory = [rows.kv, rows.gate, rows.ape, ends.norm, ends.cos, ends.sin, ends.requests, ends.slots, rows.k]
    tensors = [one.source for one in memory] + [None if rows.z is None else rows.z.source, pages.source]
    entries = len(call.out.data) * (1 if sizes.layout is None else call.out.page_size)
    numbers = pages.stride[0] * pages.source.element_size(), call.out.page_size, entries, call.eps
    given = Arguments(*tensors, *strides, *numbers)
    cpp.launch(backend, kernel(sizes, *edits), cpp.Grid(len(call.kv)), given)
