"""Try the attention op as its callers see it. Run it on a case, compare with fp64, collect what speaks against it.

For notebooks, exercises and tests; `run_fmha` does the same for the kernel alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dsv4lib import backends, emulator
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.ops.fmha import op
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.inputs import Case, guards_written
from dsv4lib.pages.fmha.run_case import Native, Outcome, judge, oracle, score_size

KINDS = ("none", "index", "range")


def op_arguments(case: Case, kind: str, windowed: bool, sink: bool = True, rope: bool = False) -> dict[str, Any]:
    """Return a case in the op's terms, its FP8 pages if it has them. ``kind`` of entries is one of `KINDS`."""
    entries = None
    pool = case.pool if case.pool_pages is None else op.Fp8Pages(*case.pool_pages)
    span = case.span if case.span_pages is None else op.Fp8Pages(*case.span_pages)
    if kind == "index":
        entries = op.Selected(pool, case.index, case.count)
    if kind == "range":
        entries = op.Rows(pool, case.first, case.count, int(case.count.max()))
    return {
        "q": case.q,
        "entries": entries,
        "window": op.Rows(span, case.window_first, case.window_count) if windowed else None,
        "sink": case.sink if sink else None,
        "rope": (case.cos, case.sin) if rope else None,
        "scale": case.scale,
    }


def run_fmha_op(
    case: Case,
    kind: str,
    windowed: bool,
    sink: bool = True,
    rope: bool = False,
    backend: str = "emulator",
    device: dict[str, Any] | None = None,
    **changed: Any,
) -> Outcome:
    """Run the op on a case and judge it by the case's oracle.

    Args:
        case: from `ops.fmha.inputs`.
        kind, windowed, sink, rope: what of it is used, as in `op_arguments`.
        backend: "emulator" or "native".
        device: options of `emulator.device`; the race detector is on.
        changed: arguments of `op.fmha` instead of the case's own.
    """
    there = case.to(backends.device(backend))
    o, lse = there.outputs()
    arguments = {**op_arguments(there, kind, windowed, sink, rope), "o": o, "lse": lse, **changed}
    gpu, error = Native(), None
    if backend == "native":
        op.fmha(**arguments, backend=backend)
    else:
        with emulator.device("sm_100a", shims=False, **{"checks": "race", **(device or {})}) as gpu:
            try:
                op.fmha(**arguments, backend=backend)
            except EmulatorError as caught:
                error = caught
    peer, _ = oracle(case, kind, windowed, sink, rope, dtype=case.q.dtype)
    truth = oracle(case, kind, windowed, sink, rope)
    outcome = judge((None, None), gpu, error, (o, lse), peer, truth, (case,), score_size(case))
    outcome.guards_written = guards_written(o, lse)
    return outcome


@contextmanager
def replaced(kernel_type: type) -> Iterator[None]:
    """Let the op launch a variant of one of its kernels, a faulty one for example."""
    with patch.object(op, "Combine" if issubclass(kernel_type, Combine) else "Fmha", kernel_type):
        yield


@contextmanager
def native_path(custom: Any = op.Call.op, **device: Any) -> Iterator[Any]:
    """Run a custom op as on a GPU, on an emulated one. Torch reports CUDA, its streams and its graphs.

    The op is called without torch's dispatcher, so that a graph that is being captured sees every torch call inside it
    and refuses those that it would not repeat. Kernels must be warm, as on a GPU.
    """
    with (
        patch.object(backends, "resolve", lambda *others: "native"),
        patch.object(torch.ops.dsv4, custom._name, custom._init_fn),
        emulator.device("sm_100a", **{"checks": "race", **device}) as gpu,
    ):
        yield gpu
