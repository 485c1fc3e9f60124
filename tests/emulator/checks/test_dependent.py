"""Programmatic dependent launches: what is touched ahead of griddepcontrol.wait and belongs to the launch before.

Every pair of kernels runs under several schedules; the broken one is reported with both instructions, its twin is not.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.ptx import parse
from tests.emulator.checks.test_race import FILL, INIT, SMEM, START, wait
from tests.emulator.launching import entry, pack

KIND = "dependent_launch_early"
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
# %rd2: the thread's word of `data`; %rd3: that of `other`.
OWN = """
ld.param.u64 %rd9, [other]; mul.wide.u32 %rd2, %r0, 4; add.s64 %rd3, %rd2, %rd9; add.s64 %rd2, %rd2, %rd1;
"""
STORE, LOAD = "st.global.b32 [%rd2], %r0;", "ld.global.b32 %r5, [%rd2];"
COPY, COPIED = INIT.format(1, 1) + "bar.sync 0;" + FILL, wait("%r8", 0, "W")
BULK = COPY + COPIED


@dataclass(frozen=True)
class Twin:
    """Two launches in a row: the first, and the broken and the repaired second; what is reported against what."""

    first: str
    broken: str
    repaired: str
    at: str
    owner: str


TWINS = {
    "a load": Twin(STORE, LOAD + WAIT, WAIT + LOAD, "ld.global", "st.global"),
    "no wait at all": Twin(STORE, LOAD, WAIT + LOAD, "ld.global", "st.global"),
    "a generic load": Twin(STORE, "ld.b32 %r5, [%rd2];" + WAIT, WAIT + "ld.b32 %r5, [%rd2];", "ld.b32", "st.global"),
    "a store over what is read": Twin(LOAD, STORE + WAIT, WAIT + STORE, "st.global", "ld.global"),
    "a store over what a bulk copy reads": Twin(BULK, STORE + WAIT, WAIT + STORE, "st.global", "cp.async.bulk"),
    "a store over a store": Twin(STORE, STORE + WAIT, WAIT + STORE, "st.global", "st.global"),
    "a bulk copy": Twin(STORE, BULK + WAIT, WAIT + "fence.proxy.async.global;" + BULK, "cp.async.bulk", "st.global"),
    "a bulk copy that is complete after the wait": Twin(
        STORE, COPY + WAIT + COPIED, WAIT + "fence.proxy.async.global;" + COPY + COPIED, "cp.async.bulk", "st.global"
    ),
    "another warp waits, too late": Twin(
        STORE, "@%p1 bra ON;" + WAIT + "ON:" + LOAD, "@%p1 bra ON;" + WAIT + "ON: bar.sync 0;" + LOAD, "ld", "st"
    ),
    "halves of a word": Twin(
        "add.s64 %rd2, %rd2, 2; cvt.u16.u32 %h1, %r0; st.global.b16 [%rd2], %h1;",
        "ld.global.b16 %h1, [%rd2+2];" + WAIT,
        "ld.global.b16 %h1, [%rd2];" + WAIT,
        "ld.global.b16",
        "st.global.b16",
    ),
    "an atomic": Twin(
        "red.global.add.u32 [%rd1], 1;",
        "red.global.add.u32 [%rd1], 1;" + WAIT,
        WAIT + "red.global.add.u32 [%rd1], 1;",
        "red.global",
        "red.global",
    ),
    "what no launch touched may be read early": Twin(
        STORE, LOAD + "ld.global.b32 %r6, [%rd3];" + WAIT, "ld.global.b32 %r6, [%rd3];" + WAIT + LOAD, "ld", "st"
    ),
    "what was only read may be read early": Twin(
        "ld.global.b32 %r6, [%rd3];" + STORE, LOAD + WAIT, "ld.global.b32 %r6, [%rd3];" + WAIT + LOAD, "ld", "st"
    ),
}


def launched(gpu, data, body, dependent=True, stream=0):
    """Run ``body`` on both arrays; what was reported."""
    text = entry("u64 data, u64 other", START + OWN + body, shared=SMEM)
    module = parse.parse(text)
    (kernel,) = module.kernels.values()
    params = pack(kernel, data)
    request = LaunchRequest("k", module, (1, 1, 1), (64, 1, 1), params=params, attributes={"programmatic": dependent})
    return gpu.launch(request, stream).hazards


def device(**options):
    """A device with two arrays."""
    gpu = make(checks="race", **options)
    return gpu, tuple(gpu.copy(np.zeros(1024, np.uint32), name) for name in ("data", "other"))


@pytest.mark.parametrize("name", TWINS)
def test_twins(name):
    twin = TWINS[name]
    for schedule in POLICIES:
        gpu, data = device(schedule=schedule)
        launched(gpu, data, twin.first, dependent=False)
        found = [h for h in launched(gpu, data, twin.broken) if h.kind == KIND]
        assert found, schedule
        assert any(part in found[0].place.ptx for part in twin.at.split("|")), found[0]
        assert any(part in found[0].owner.ptx for part in twin.owner.split("|")), found[0]
        assert found[0].severity == "lint" and found[0].place.lanes and found[0].owner.cta == (0, 0, 0)
        gpu, data = device(schedule=schedule)
        launched(gpu, data, twin.first, dependent=False)
        assert [h for h in launched(gpu, data, twin.repaired) if h.kind == KIND] == [], schedule


def test_an_ordinary_launch_waits_for_the_one_before():
    gpu, data = device()
    launched(gpu, data, STORE, dependent=False)
    assert launched(gpu, data, LOAD, dependent=False) == []


def test_a_synchronisation_or_another_stream_in_between():
    gpu, data = device()
    launched(gpu, data, STORE)
    gpu.synchronize()
    assert launched(gpu, data, LOAD + WAIT) == []
    launched(gpu, data, WAIT + STORE)
    assert launched(gpu, data, LOAD + WAIT, stream=7) == []


@pytest.mark.parametrize(
    ("middle", "reported"),
    [(TRIGGER + WAIT, True), (WAIT + TRIGGER, False), (WAIT, False), (TRIGGER + WAIT + TRIGGER, False)],
)
def test_the_launch_before_the_last(middle, reported):
    """It may still run if the last one let its dependents come before it had waited."""
    gpu, data = device()
    launched(gpu, data, STORE, dependent=False)
    assert launched(gpu, data, middle) == []
    found = launched(gpu, data, LOAD + WAIT)
    assert [h.kind for h in found] == ([KIND] if reported else [])


def test_memory_that_was_freed_is_not_mistaken_for_the_new_owners():
    gpu, (data, other) = device()
    launched(gpu, (data, other), STORE, dependent=False)
    gpu.free(data.ctypes.data)
    gpu.gmem.register_array(data, "another tensor")
    assert launched(gpu, (data, other), LOAD + WAIT) == []


def test_only_the_race_detector_looks():
    gpu = make(checks="default")
    data = tuple(gpu.copy(np.zeros(1024, np.uint32)) for _ in range(2))
    launched(gpu, data, STORE)
    assert launched(gpu, data, LOAD) == []


def test_old_shadows_are_not_kept():
    """A chain of dependent launches does not hold the shadows of all of them."""
    gpu, data = device()
    alive = []
    for _ in range(6):
        launched(gpu, data, TRIGGER + WAIT + STORE)
        alive.append(weakref.ref(gpu.before.far))
    gc.collect()
    assert sum(far() is not None for far in alive) == 3  # its own, and the two that the last one could overlap
