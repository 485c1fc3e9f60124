"""The committed comparison of attention kernels is what a run gives: every count, exactly.

Ours, and one row of each package: other rows of a package change with its pins or with the emulator, not with our
kernels. DSV4_EVERY_PEER=1 asks for them too, as does `./dsv4 bench peers`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from dsv4lib.bench.peers import fmha as peers
from dsv4lib.bench.peers import fmha_calls

STORED = {row["kernel"]: row for row in peers.load()}


ONE_OF_EACH = ("FA4 MLA pair", "cuDNN DSA, 64 heads", "FlashInfer HCA fp8")


def rows() -> list:
    """The kernels; those that another row of their package stands for are skipped and say so."""
    stands = {fmha_calls.BY_NAME[name].package: name for name in ONE_OF_EACH}
    marks = {"": []}
    for package, name in stands.items():
        reason = f"{name} stands for {package}; DSV4_EVERY_PEER=1 runs every row"
        marks[package] = [pytest.mark.skipif(not os.environ.get("DSV4_EVERY_PEER"), reason=reason)]
    return [
        pytest.param(kernel, id=kernel.name, marks=[] if kernel.name in ONE_OF_EACH else marks[kernel.package])
        for kernel in fmha_calls.KERNELS
    ]


@pytest.mark.full  # `./dsv4 test --corpus` runs all of tests/corpus
@pytest.mark.slow
@pytest.mark.parametrize("kernel", rows())
def test_the_stored_figures_are_what_a_run_gives(kernel: fmha_calls.Kernel) -> None:
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
