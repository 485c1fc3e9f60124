"""Faults around a kernel, not in it: each made on purpose, and what finds it.

Every function takes ``inject``: with False it does the same thing right, and must find nothing.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dsv4lib.emulator.errors import LaunchError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.fmha import faults, op
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.inputs import Case
from dsv4lib.pages.fmha.run_op import native_path, op_arguments, replaced, run_fmha_op

Finding = tuple[str, str, str]


def stale_cache(case: Case, inject: bool = True) -> list[Finding]:
    """Return a cache whose key forgets the sources: the combine as it was before a repair is served from disk."""
    right, usual = compile_cache.key, compile_cache.default()

    def forgetful(kernel_type: type, settings: dict, arch: str) -> str | None:
        return right(Combine if issubclass(kernel_type, Combine) else kernel_type, settings, arch)

    class Fresh(compile_cache.CompileCache):
        """What a new process has: nothing in memory; only the combine matters here."""

        def get(self, kernel_type: type, *others: Any) -> tuple:
            return (
                super().get(kernel_type, *others)
                if issubclass(kernel_type, Combine)
                else usual.get(kernel_type, *others)
            )

    with tempfile.TemporaryDirectory() as folder, patch.object(compile_cache, "key", forgetful if inject else right):
        for kernel_type in (faults.FAULTS["FirstPartLeads"], Combine):  # yesterday, today
            cache = Fresh(Path(folder))
            with replaced(kernel_type), patch.object(compile_cache, "default", lambda cache=cache: cache):
                outcome = run_fmha_op(case, "index", True, rope=True, splits=8)
    return outcome.findings()


def hidden_write(case: Case, inject: bool = True) -> list[Finding]:
    """Return an op that writes into its output and does not say so: torch.compile may reorder or drop the call."""
    name = "dsv4_fault::" + ("silent" if inject else "honest")
    o = torch.zeros_like(case.q)
    try:
        torch.library.opcheck(_registered(name, () if inject else ("o",)), (case.q, o), test_utils="test_schema")
    except Exception as error:
        return [(type(error).__name__, "", str(error).strip().splitlines()[0])]
    return []


@functools.cache
def _registered(name: str, mutates: tuple[str, ...]) -> Any:
    def copy(q: torch.Tensor, o: torch.Tensor) -> None:
        o.copy_(q)

    return torch.library.custom_op(name, copy, mutates_args=mutates, schema=None)


def read_count(case: Case, inject: bool = True) -> list[Finding]:
    """Return a caller that reads the longest list from the GPU while a CUDA graph is captured."""
    op.warm_up([{"entries": "range", "window": True, "inverse_rope": True}], case.q.shape[1])
    o, lse = case.outputs()
    given = {**op_arguments(case, "range", True, rope=True), "o": o, "lse": lse, "splits": 1}
    with native_path():
        there = case.to("cuda")
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                most = int(there.count.max()) if inject else there.index.shape[1]
                op.fmha(**{**given, "entries": op.Rows(there.pool, there.first, there.count, most)})
        except LaunchError as error:
            return [(type(error).__name__, "", str(error).splitlines()[0])]
    return []


FAULTS = {
    "stale_cache": (stale_cache, "wrong numbers"),
    "hidden_write": (hidden_write, "OpCheckError"),
    "read_count": (read_count, "LaunchError"),
}
"""Name -> (function, kind of the finding that must be there)."""
