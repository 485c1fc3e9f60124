"""The committed comparison of block-scaled GEMMs is what a run gives: every count, exactly.

With small K, because a step costs the same there, and one process a package. Of a kernel that takes several formats
one is run. Not of `FlashInfer mm_fp4`, which chooses its tile by K, nor of `FlashInfer masked`, whose steps cost
something else below K = 1024.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from dsv4lib.bench.peers import moe as moe_peers
from dsv4lib.bench.peers import moe_calls

STORED = {row["kernel"]: row for row in moe_peers.load()}
CHECKED = {
    "quack": ("quack, mxfp8 x mxfp4", "quack, 8 rows", "quack, groups", "quack, SwiGLU"),
    "flashinfer": ("FlashInfer low latency, 8 rows", "FlashInfer GEMM 2", "FlashInfer GEMM 1"),
    "cudnn": ("cuDNN grouped", "cuDNN groups", "cuDNN SwiGLU", "cuDNN GEMM + amax", "cuDNN groups, mxfp8 x mxfp4"),
    "cutlass": tuple(kernel.name for kernel in moe_calls.OURS),
}


@pytest.mark.full  # `./dsv4 test --corpus` runs all of tests/corpus
@pytest.mark.slow
@pytest.mark.parametrize("module", [module for module, names in CHECKED.items() if names])
def test_the_stored_figures_are_what_a_run_gives(module: str) -> None:
    for name in ("cutlass", module, *(("tvm_ffi", "triton") if module != "cutlass" else ())):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: ./dsv4 test --corpus installs and runs this")
    folder = os.environ.get("DSV4_CORPUS_SITE")
    rows = moe_peers.measure(list(CHECKED[module]), Path(folder) if folder else None, short=True)
    for row in rows:
        stored = STORED[row["kernel"]]
        advice = f"./dsv4 bench peers moe --record {moe_peers.TABLE.name} --only '{row['kernel']}' measures it anew"
        for keys in (("version", "reason", "said"), moe_peers.EXACT):
            assert {key: row[key] for key in keys} == {key: stored[key] for key in keys}, advice
        if not row["reason"]:
            assert row["rel_l2"] <= moe_peers.error_bound(row), row["kernel"]
