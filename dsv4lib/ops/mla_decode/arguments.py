"""Make arguments of the SM100 kernel.

They are fake tensors to compile with; torch tensors, checked and wrapped, to launch with.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32

from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.ops.mla_decode.work import Outputs, Requests

ROWS = 16  # bytes on which rows start
ANY_NUMBER = (1 << 31) - 1  # of CTAs


def fake_args(kernel: MlaDecode) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    fake, lead = Fakes(), "S" if kernel.partial else ""
    queries = fake(kernel.q_element, "BHD", ROWS), fake(kernel.q_element, "BHR", ROWS)
    requests = Requests(fake(Int32, "B"), fake(Int32, "BN"))
    outputs = Outputs(fake(kernel.out_element, f"{lead}BHD", ROWS), fake(Float32, f"{lead}BH"), Float32(1.0))
    numbers = Float32(1.0), Int32(1), Int32(1)
    return *queries, fake(kernel.element, "PTE", ROWS), requests, outputs, *numbers, cuda.CUstream(0)


def launch_args(
    kernel: MlaDecode, call: Any, out: Any, lse: Any, num_splits: int, ctas: int = ANY_NUMBER, stream: int = 0
) -> tuple:
    """Wrap a call's tensors for the compiled kernel.

    Args:
        kernel: what was compiled. call: its tensors and numbers by name, as `op.Call` has them.
        out, lse: what is written, of a partial kernel [splits, ..]. num_splits: of the tokens.
        ctas: at most so many; fewer than items: each takes several. stream: CUDA stream.

    Raises:
        ArgumentError: a tensor of a wrong type, shape, stride or address.
    """
    batch, heads, latent = call.q_nope.shape
    lead = (num_splits,) if kernel.partial else ()
    return (
        wrap("q_nope", call.q_nope, kernel.q_element, (batch, heads, latent), ROWS),
        wrap("q_pe", call.q_pe, kernel.q_element, (batch, heads, None), ROWS),
        wrap("kv_cache", call.kv_cache, kernel.element, (None, kernel.page_size, None), ROWS),
        Requests(
            wrap("seq_lens", call.seq_lens, Int32, (batch,)), wrap("page_table", call.page_table, Int32, (batch, None))
        ),
        Outputs(
            wrap("out", out, kernel.out_element, (*lead, batch, heads, latent), ROWS),
            wrap("lse", lse, Float32, (*lead, batch, heads)),
            Float32(call.kv_scale),
        ),
        Float32(call.logit_scale),
        Int32(num_splits),
        Int32(ctas),
        cuda.CUstream(stream),
    )
