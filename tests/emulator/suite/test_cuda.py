"""The suite's kernels in CUDA C++ (faults.cu), compiled by NVRTC if it is installed, with lines of the source."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from dsv4lib import nvrtc
from dsv4lib.emulator import gpu
from dsv4lib.emulator.errors import Deadlock
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.errors import BackendUnavailable
from tests.cases import cases

SOURCE = Path(__file__).with_name("faults.cu")
KERNELS = {name: kind for kind, name in re.findall(r"// kind: (\w+)\n__global__ void (\w+)", SOURCE.read_text())}
ARCHES = cases("sm_90a", full=["sm_100a"])


@functools.cache
def compiled(arch, repaired):
    try:
        return nvrtc.compile_file(SOURCE, arch, ["-DREPAIRED"] if repaired else [])
    except BackendUnavailable as error:
        return str(error)


def run(name, arch, repaired, schedule="round_robin"):
    text = compiled(arch, repaired)
    if ".version" not in text:
        pytest.skip(text)
    module = gpu.load(text, checks="sanitize", schedule=schedule)
    data, out = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    data[100] = 0
    kernel = module.kernel(name)
    return kernel.launch(1, 64, [data, out]).hazards


def marked(name):
    """Lines of the kernel that a report must name."""
    text = SOURCE.read_text()
    start = text.index(f"void {name}(")
    first = text[:start].count("\n") + 1
    body = text[start : text.index("\n}\n", start)]
    return {first + i for i, line in enumerate(body.splitlines()) if "//!" in line}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_fault_is_reported_with_its_line(name, arch):
    try:
        found = run(name, arch, False)
    except Deadlock as error:
        assert KERNELS[name] == "Deadlock"
        assert {int(line) for line in re.findall(r"faults\.cu:(\d+)", str(error))} & marked(name), error
        return
    lines = {int(h.place.python.rpartition(":")[2]) for h in found if h.kind == KERNELS[name]}
    assert lines & marked(name), found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_repaired_twin_is_silent(name, arch):
    for schedule in POLICIES:
        assert run(name, arch, True, schedule) == [], schedule


def test_every_kernel_has_a_kind_and_marks():
    assert len(KERNELS) == SOURCE.read_text().count("__global__") >= 13
    assert all(marked(name) for name in KERNELS)
