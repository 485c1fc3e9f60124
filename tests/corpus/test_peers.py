"""The committed comparison of attention kernels is what a run gives: every count, exactly."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from dsv4lib.bench import peer_calls, peers

STORED = {row["kernel"]: row for row in peers.load()}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", peer_calls.KERNELS, ids=lambda kernel: kernel.name)
def test_the_stored_figures_are_what_a_run_gives(kernel: peer_calls.Kernel) -> None:
    needed = ("cutlass", kernel.module.partition(".")[0], *(("tvm_ffi", "triton") if kernel.package else ()))
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: ./dsv4 test --corpus installs and runs this")
    folder = os.environ.get("DSV4_CORPUS_SITE")
    row, stored = peers.measure(kernel.name, Path(folder) if folder else None), STORED[kernel.name]
    advice = f"./dsv4 bench peers --record {peers.TABLE.name} --only '{kernel.name}' after a change of the kernel"
    assert {key: row[key] for key in peers.EXACT} == {key: stored[key] for key in peers.EXACT}, advice
    assert row["version"] == stored["version"]
    for name in ("rel_l2", "rel_l2_worst", "max_abs_err"):
        assert f"{row[name]:.4g}" == f"{stored[name]:.4g}", name
