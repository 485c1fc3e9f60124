"""Launch the SM100 kernel: one launch, or the splits and their combination."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.fmha.arguments import combine_args
from dsv4lib.ops.fmha.arguments import fake_args as combine_fake_args
from dsv4lib.ops.fmha.combine import Combine, loads_at_once
from dsv4lib.ops.mla_decode import arguments
from dsv4lib.ops.mla_decode.config import DTYPES, LATENT
from dsv4lib.ops.mla_decode.sm100 import MlaDecode
from dsv4lib.ops.mla_decode.splits import ctas_of

ARCHS = ("sm_100a", "sm_103a")


def launch(backend: str, call: Any) -> None:
    """Launch a call of `op.mla_decode` that has requests and pages."""
    q = call.q_nope
    sms = call.sm_count(backend)
    splits, stream = call.splits_on(sms), launching.stream(backend, q)
    out_dtype = DTYPES[call.out.dtype]
    settings = {"dtype": DTYPES[call.kv_cache.dtype], "out_dtype": out_dtype, "page_size": call.page_size}
    settings |= {"cluster": ctas_of(q.shape[1]), "q_dtype": DTYPES[q.dtype]}

    def attend(partial: bool, out: Tensor, lse: Tensor) -> None:
        kernel, code = _code(backend, MlaDecode, {**settings, "partial": partial}, arguments.fake_args)
        launching.enqueue(backend, code, arguments.launch_args(kernel, call, out, lse, splits, sms, stream))

    if splits == 1:
        attend(False, call.out, call.lse)
        return
    partial = call.partial(splits)
    attend(True, *partial)
    rows = call.lse.numel()
    ends = {"head_dim": LATENT, "dtype": out_dtype, "sink": False, "at_once": loads_at_once(splits, rows)}
    kernel, code = _code(backend, Combine, ends, combine_fake_args)
    launching.enqueue(backend, code, combine_args(kernel, *partial, None, None, call.out, call.lse, stream=stream))


def _code(backend: str, kernel_type: type, settings: dict[str, Any], fake_args: Any) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, fake_args, launching.arch(backend, ARCHS))
