"""Compute scores by the kernel in CUDA C++ (`kernel.cu`): stage A of `ladder`, tile by tile, on Blackwell.

`FAULTS` are texts to inject, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.dsl.cpp import CppKernel, Edit, Float32, Int32, Int64
from dsv4lib.dsl.tensors import starts_on, strides_of
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import cpp, launching
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.fmha.ladder import CHUNK_BYTES, HEAD_DIMS, TILE_M, TILE_N

SOURCE = Path(__file__).with_name("kernel.cu")
ARCHS = ("sm_100a", "sm_103a")
CONTROL = 16  # bytes: an mbarrier, the address in tensor memory
FAULTS = {
    "unswizzled": Edit("(piece ^ row % 8) * 16", "piece * 16"),
    "proxy_unfenced": Edit('  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "  "),
    "first_accumulates": Edit("k > 0);", "true);"),
    "product_unawaited": Edit("  wait(barrier, 0);\n", ""),
    "half_of_the_product": Edit("k < D / kInstruction", "k < D / kInstruction / 2"),
    "rows_past_the_end": Edit("row < m && ", ""),
    "freed_while_read": Edit("  __syncthreads();  // all have read\n", ""),
}


class Arguments(NamedTuple):
    """Parameters of the kernel; strides in elements."""

    q: Tensor
    kv: Tensor
    s: Tensor
    q_stride: Int64
    kv_stride: Int64
    s_stride: Int64
    m: Int32
    n: Int32
    scale: Float32


def kernel(head_dim: int, dtype: torch.dtype, *edits: Edit) -> CppKernel:
    """Return the kernel for a head dimension and an element type."""
    smem = 2 * head_dim // 64 * CHUNK_BYTES + CONTROL
    defines = (("D", head_dim), ("BF16", int(dtype == torch.bfloat16)))
    return CppKernel(SOURCE, "qk_tile", Arguments, TILE_M, smem_bytes=smem, defines=defines, edits=edits)


@typed
def qk_tile(q: Tensor, kv: Tensor, scale: float = 1.0, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Multiply queries and keys.

    Args:
        q: bf16 or fp16 [M, D], D 64, 128, 192 or 256, rows on 16 bytes. kv: [N, D], likewise.
        scale: of the products.
        out: fp32 [M, N], other memory than the operands; None: a new tensor.
        backend: "native", "emulator", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or memory, or that wants a gradient.
        BackendUnavailable: the back end cannot run here.
    """
    return run(q, kv, scale, out, backend)


def run(q: Tensor, kv: Tensor, scale: float, out: Tensor | None, backend: str, *edits: Edit) -> Tensor:
    """Launch the kernel, with faults perhaps; see `qk_tile`."""
    if q.dim() != 2 or q.shape[1] not in HEAD_DIMS or q.dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError("q", f"{q.dtype}{list(q.shape)}", f"bf16 or fp16 [M, D] with D one of {HEAD_DIMS}")
    (m, d), n = q.shape, kv.shape[0] if kv.dim() else 0
    out = q.new_empty(m, n, dtype=torch.float32) if out is None else out
    launching.check({"q": (q, q.dtype, (m, d)), "kv": (kv, q.dtype, (n, d)), "out": (out, torch.float32, (m, n))})
    for name, one, align in (("q", q, 16), ("kv", kv, 16), ("out", out, 4)):
        if (one.stride(1) != 1 and one.shape[1] > 1) or not starts_on(one, align):
            raise ArgumentError(f"{name}.stride()", one.stride(), f"stride 1, then rows on {align} bytes")
    cpp.check_memory(["out"], q=q, kv=kv, out=out)
    found = cpp.resolve(backend, "q", q, ARCHS)
    if m and n:
        grid = cpp.Grid(-(-n // TILE_N), -(-m // TILE_M))
        strides = (strides_of(one)[0] for one in (q, kv, out))
        cpp.launch(found, kernel(d, q.dtype, *edits), grid, Arguments(q, kv, out, *strides, m, n, scale), ARCHS)
    return out
