"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import torch
from cutlass import Float8E4M3FN, Float32, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.ops.mla_decode.sm90.config import HEAD_DIM, ROPE_DIM, V_DIM
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode

WIDE = 16  # bytes on which rows of TMA and bulk copies start


def types(kernel: MlaDecode) -> tuple[Any, Any]:
    """Return the types of Q and of the cache."""
    return tuple(Float8E4M3FN if fp8 else kernel.element for fp8 in (kernel.fp8_queries, kernel.fp8_cache))


def fake_args(kernel: MlaDecode) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, (query, cache) = Fakes(), types(kernel)
    o, lse = ("SBHD", "SBH") if kernel.partial else ("BHD", "BH")
    return (
        fake(query, "BHD", WIDE),
        fake(query, "BHR", WIDE),
        fake(cache, "PTE", WIDE),
        fake(Int32, "B"),
        fake(Int32, "BN"),
        fake(kernel.out_element, o, WIDE),
        fake(Float32, lse),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        cuda.CUstream(0),
    )


def launch_args(
    kernel: MlaDecode, call: Any, o: torch.Tensor, lse: torch.Tensor, splits: int = 1, stream: int = 0
) -> tuple:
    """Wrap a call's tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them.
        o, lse: what is written, of a split kernel [splits, ..]. splits: of the tokens. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape, stride or address.
    """
    batch, heads, _ = call.q_nope.shape
    lead, (query, cache) = (splits,) if kernel.partial else (), types(kernel)
    return (
        wrap("q_nope", call.q_nope, query, (batch, heads, V_DIM), WIDE),
        wrap("q_pe", call.q_pe, query, (batch, heads, ROPE_DIM), WIDE),
        wrap("kv_cache", call.kv_cache, cache, (None, kernel.page, HEAD_DIM), WIDE),
        wrap("seq_lens", call.seq_lens, Int32, (batch,)),
        wrap("page_table", call.page_table, Int32, (batch, None)),
        wrap("out", o, kernel.out_element, (*lead, batch, heads, V_DIM), WIDE),
        wrap("lse", lse, Float32, (*lead, batch, heads)),
        Float32(call.sm_scale * call.q_scale * call.kv_scale),
        Float32(call.kv_scale),
        Int32(splits),
        cuda.CUstream(stream),
    )
